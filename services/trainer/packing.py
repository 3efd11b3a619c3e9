"""Samples shared out over ranks, and a rank's share cut into micro-batches. Pure.

`share_out` balances tokens: longest sample first, each to the rank with the fewest tokens so far (LPT
scheduling; the fullest rank has at most 4/3 - 1/(3W) of the tokens it would have in the best sharing). A
micro-batch is padded on the right to its longest sample, so it costs `rows * longest` tokens; samples of like
length go together. Under ZeRO-3 every forward and backward pass gathers parameters from all ranks, so all
ranks must run equally many: a rank with fewer micro-batches than `num_micro_batches` runs empty ones
(`pad_with_empty`).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from shared.contracts.rank import TrainSample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shares:
    """`samples[r]` is what rank r trains; `num_micro_batches` is the largest number that any rank needs."""

    samples: tuple[tuple[TrainSample, ...], ...]
    num_micro_batches: int


def num_tokens(sample: TrainSample) -> int:
    return len(sample.prompt_token_ids) + len(sample.response_token_ids)


def share_out(samples: Sequence[TrainSample], world_size: int, micro_batch_tokens: int) -> Shares:
    """Every sample to one rank. Ties: equally long samples by id, equally loaded ranks by number.

    At least one micro-batch, so that a step is a step on every rank even where nothing is to be trained.
    """
    assert world_size >= 1
    shares: list[list[TrainSample]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for sample in sorted(samples, key=lambda s: (-num_tokens(s), s.sample_id)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(sample)
        heapq.heappush(loads, (load + num_tokens(sample), rank))
    most = max(len(split(share, micro_batch_tokens)) for share in shares)
    return Shares(tuple(tuple(share) for share in shares), max(1, most))


def split(samples: Sequence[TrainSample], micro_batch_tokens: int) -> list[tuple[TrainSample, ...]]:
    """Micro-batches of at most `micro_batch_tokens` padded tokens, longest first; a sample that is longer
    than that is alone.

    >>> # lengths 5, 4, 3 and a budget of 10 -> (5, 4) = 2 rows of 5, then (3)
    """
    batches: list[tuple[TrainSample, ...]] = []
    rows: list[TrainSample] = []
    for sample in sorted(samples, key=lambda s: (-num_tokens(s), s.sample_id)):
        if rows and (len(rows) + 1) * num_tokens(rows[0]) > micro_batch_tokens:
            batches.append(tuple(rows))
            rows = []
        rows.append(sample)
    return [*batches, tuple(rows)] if rows else batches


def pad_with_empty(batches: Sequence[tuple[T, ...]], num_micro_batches: int) -> list[tuple[T, ...]]:
    """`batches`, then empty ones up to `num_micro_batches`."""
    assert len(batches) <= num_micro_batches
    return [*batches, *[()] * (num_micro_batches - len(batches))]
