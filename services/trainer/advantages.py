"""Group-relative advantages (GRPO): A = (R - mean) / (std + eps) over the scored samples of a prompt. Pure.

An unscored sample is masked: it takes no part in mean, std or loss. A group with fewer than two scored
samples tells nothing about which answer is better and is masked whole. A group whose rewards are all equal
has advantage 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from services.trainer.batches import Batch
from shared.contracts.reward import ScoredSample

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Weighted:
    """A sample that is trained, and how strongly."""

    sample: ScoredSample
    advantage: float


@dataclass(frozen=True, slots=True)
class Masked:
    """A sample that is not trained, and why."""

    sample: ScoredSample
    reason: str


def weigh(batch: Batch) -> tuple[list[Weighted], list[Masked]]:
    """Every sample of the batch, exactly once, on one of the two lists.

    >>> # rewards 1, 0 -> advantages +1, -1 (population std 0.5)
    """
    weighted: list[Weighted] = []
    masked: list[Masked] = []
    for group in batch.groups.values():
        scored = [s for s in group if s.reward is not None and s.trajectory.response_token_ids]
        masked += [Masked(s, s.unscored_reason or "empty response") for s in group if s not in scored]
        if len(scored) < 2:
            masked += [Masked(s, "alone in its group") for s in scored]
            continue
        advantages = group_advantages([s.reward for s in scored if s.reward is not None])
        weighted += [Weighted(s, a) for s, a in zip(scored, advantages, strict=True)]
    return weighted, masked


def group_advantages(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + EPSILON) for r in rewards]
