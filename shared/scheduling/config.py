"""What can be set about scheduling a role."""

from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.scheduling.sequence import SequenceState
from shared.scheduling.throughput import ThroughputModel

Priority = Callable[[SequenceState], float]


def first_come(state: SequenceState) -> float:
    """The default: all alike, so that the sequence id decides."""
    return 0.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How a role places its sequences."""

    throughput_model: ThroughputModel | None = None
    """None is the ablation without one: every busy replica counts the same."""
    migration: bool = True
    """Off is the ablation where a new replica only gets what waits."""
    growth_margin_tokens: int = 512
    """KV room set aside per sequence beyond its present length, at most what it may still generate."""
    min_gain_share: float = 0.0
    """A replica takes a further sequence only while that raises its throughput by at least this share of the
    mean throughput of its sequences; the others wait in order. Where a replica is nearly saturated, more
    sequences make all of them slower and add little; the paper fills the KV cache (0)."""
    priority: Priority = first_come
    """Smaller goes first; equal goes by sequence id."""

    def __post_init__(self) -> None:
        if self.growth_margin_tokens < 0:
            raise ConfigError(
                "growth_margin_tokens",
                self.growth_margin_tokens,
                "must not be negative",
                "512 is a good start",
            )
        if not 0 <= self.min_gain_share < 1:
            raise ConfigError(
                "min_gain_share", self.min_gain_share, "must be in [0, 1)", "0.25 is a good start"
            )
