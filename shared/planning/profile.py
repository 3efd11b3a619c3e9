"""A profile: how fast replicas of one model on one kind of device are, measured (paper §6.1, Appendix A).

A sweep crosses the number of sequences with their context, each on its own, in decode-only steps. Some of its
points are held out: their error says how far the fit may be trusted where nothing was measured.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shared.errors import ConfigError
from shared.planning.throughput import StepTime, fit, relative_errors
from shared.scheduling.throughput import ThroughputModel

_HELD_OUT = 4
"""Every so-manieth point is held out."""
_NUM_CONTEXTS = 3
_MIDDLES_FROM = 16
_SHORTEST_CONTEXT = 32


class SweepPoint(NamedTuple):
    """`num_sequences` that each began with `context` tokens."""

    num_sequences: int
    context: int


def sweep(max_sequences: int, max_context: int, kv_capacity_tokens: int, growth: int) -> list[SweepPoint]:
    """For each context the numbers of sequences, from as many as the KV cache holds (each with `growth`
    tokens more) down to one: so that a context is prefilled once, and sequences then leave.

    >>> [tuple(point) for point in sweep(8, 256, 2_000, 96)]
    [(8, 32), (4, 32), (2, 32), (1, 32), (8, 91), (4, 91), (2, 91), (1, 91), (4, 256), (2, 256), (1, 256)]
    """
    counts = {max_sequences, max_sequences * 3 // 4, max_sequences * 3 // 8} - {0}
    counts = counts if max_sequences >= _MIDDLES_FROM else {max_sequences}
    power = 1
    while power < max_sequences:
        counts.add(power)
        power *= 2
    shortest = min(_SHORTEST_CONTEXT, max_context)
    ratio = (max_context / shortest) ** (1 / (_NUM_CONTEXTS - 1))
    contexts = sorted({round(shortest * ratio**k) for k in range(_NUM_CONTEXTS)})
    return [
        SweepPoint(n, context)
        for context in contexts
        for n in sorted(counts, reverse=True)
        if n == 1 or n * (context + growth) <= kv_capacity_tokens
    ]


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of one (model, parallelism, device kind), and how well they predict."""

    model: ThroughputModel
    prefill_s_per_token: float
    """Seconds a replica stands still for each token of a prompt."""
    held_out_median: float
    """Relative error of decode steps that the fit had not seen: median, and worst."""
    held_out_worst: float
    num_points: int
    device: str = ""
    """What it was measured on, for people."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, path: str) -> "Profile":
        """Raises ConfigError naming the file, and the field where one is wrong."""
        remedy = "Run `pivotrl profile` again, or delete the file"
        try:
            values: dict[str, Any] = json.loads(text)
            return cls(**{**values, "model": ThroughputModel(**values["model"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(path, None, f"is no profile ({error})", remedy) from error
        except ConfigError as error:
            raise ConfigError(
                path, None, f"holds constants that cannot be: {error.message}", remedy
            ) from error


def profile_of(
    points: Sequence[StepTime],
    prefill_s_per_token: float,
    *,
    num_experts: int = 0,
    experts_per_token: int = 0,
    device: str = "",
) -> Profile:
    """Fitted to all `points`; errors are those of a fit that every fourth one was held out from.

    Raises InvalidRequest with too few points, or one that took no time.
    """
    experts = {"num_experts": num_experts, "experts_per_token": experts_per_token}
    held_out = points[_HELD_OUT // 2 :: _HELD_OUT]
    seen = [point for i, point in enumerate(points) if i % _HELD_OUT != _HELD_OUT // 2]
    median, worst = relative_errors(fit(seen, **experts).model, held_out or points)
    model = fit(points, **experts).model
    return Profile(model, prefill_s_per_token, median, worst, len(points), device)
