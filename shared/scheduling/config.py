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
