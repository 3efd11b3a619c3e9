"""n, tokens, KV room and throughput of every replica of a role, as one matrix for the compiled loops."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import fsum, inf
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shared.ids import ReplicaId
from shared.scheduling.rows import (
    BASE,
    MOST_ATTENTION,
    NUM_ROWS,
    OFFER,
    OPEN_T,
    OVERHEAD,
    ROOM,
    THRESHOLD,
    TOK,
    N,
    T,
)
from shared.scheduling.throughput import ThroughputModel

Integers = npt.NDArray[np.int64]
_SHORTEST_TABLE = 1024


@cache
def kernels() -> ModuleType:
    """The compiled loops; imported when first needed, because that takes a third of a second."""
    from shared.scheduling import kernels as module

    return module


@cache
def _placement() -> ModuleType:
    from shared.scheduling import placement as module

    return module


@lru_cache(maxsize=32)
def _steps(model: ThroughputModel, min_gain_share: float, length: int) -> npt.NDArray[np.float64]:
    """The table of steps of 0, 1, … sequences. Overheads not with vectors: those round powers differently.

    One sequence more, as long as the mean of n, changes T by at least `min_gain_share` · T / n as long as

        A·tok ≤ ((n + 1)·overhead(n) − (n + share)·overhead(n + 1)) · n / (share · (n + 1))
    """
    overheads = np.array([model.overhead_s(n) for n in range(length + 1)])
    table = np.full((2, length), inf)
    table[OVERHEAD] = overheads[:-1]
    if min_gain_share > 0.0:
        n = np.arange(1, length, dtype=np.float64)
        gained = (n + 1) * overheads[1:-1] - (n + min_gain_share) * overheads[2:]
        table[MOST_ATTENTION, 1:] = gained * n / (min_gain_share * (n + 1))
    return table


@lru_cache(maxsize=1 << 16)
def tie_order(replica: ReplicaId) -> tuple[str, int, str]:
    """Sort key of replicas: `rollout-2` before `rollout-10`."""
    role, _, slot = replica.rpartition("-")
    return (role, int(slot), "") if slot.isdecimal() else (replica, -1, replica)


class ReplicaLoads:
    """Replicas are indexes in `ids`. A new one is empty and open.

    With `min_gain_share` a replica takes a further sequence only while that raises its throughput by at
    least this share of what its sequences have on average. An empty one always takes one.
    """

    __slots__ = ("_attention", "_kernels", "_matrix", "_share", "_steps", "ids", "index", "model")

    def __init__(
        self,
        model: ThroughputModel,
        kv_capacity_tokens: Mapping[ReplicaId, int],
        *,
        min_gain_share: float = 0.0,
    ) -> None:
        self.model = model
        self.ids = tuple(sorted(kv_capacity_tokens, key=tie_order))
        self.index = {replica: i for i, replica in enumerate(self.ids)}
        self._kernels = kernels()
        self._attention = float(model.attention_s_per_token)
        self._share = min_gain_share
        self._steps = _steps(model, min_gain_share, _SHORTEST_TABLE)
        self._matrix = np.zeros((NUM_ROWS, len(self.ids)))
        self._matrix[ROOM] = self._matrix[OFFER] = [kv_capacity_tokens[replica] for replica in self.ids]
        self._matrix[BASE] = self._steps[OVERHEAD, 1]

    def copy(self) -> Self:
        """An independent copy, to try decisions on."""
        return self._with(self._matrix.copy())

    def _with(self, matrix: npt.NDArray[np.float64]) -> Self:
        twin = type(self).__new__(type(self))
        twin.model, twin.ids, twin.index = self.model, self.ids, self.index
        twin._kernels, twin._attention = self._kernels, self._attention
        twin._share, twin._steps = self._share, self._steps
        twin._matrix = matrix
        return twin

    # Which replicas take sequences

    def set_open(self, replicas: int | Sequence[int] | Integers, is_open: bool) -> None:
        """A closed replica keeps its load and takes no sequence."""
        matrix = self._matrix
        matrix[THRESHOLD, replicas] = matrix[T, replicas] if is_open else inf
        matrix[OPEN_T, replicas] = matrix[T, replicas] if is_open else -1.0

    def is_open(self, replica: int) -> bool:
        return bool(self._matrix[OPEN_T, replica] >= 0)

    def open_replicas(self) -> Integers:
        """Indexes of the open ones, ascending."""
        return np.flatnonzero(self._matrix[OPEN_T] >= 0)

    # One sequence, or some of one replica

    def change(self, replica: int, num_sequences: int, tokens: int, need: int) -> None:
        """Add (or with negative numbers take away) sequences with their tokens and KV need."""
        if num_sequences > 0:
            self._reserve(int(self._matrix[N, replica]) + num_sequences)
        self._kernels.change(self._matrix, self._steps, self._attention, replica, num_sequences, tokens, need)

    def best(self, length: int, need: int) -> int | None:
        """The open replica with room for `need` that gains most from a sequence of `length`, if any."""
        found: int = self._kernels.best(self._matrix, self._attention * length, need)
        return None if found < 0 else found

    def place(self, length: int, need: int) -> int | None:
        """Put a sequence on the `best` replica."""
        found: int = self._kernels.place(self._matrix, self._steps, self._attention, length, need)
        if found < 0:
            return None
        self._reserve(int(self._matrix[N, found]))
        return found

    def _reserve(self, num_sequences: int) -> None:
        """Make ready for a replica of `num_sequences`, and for one more on it."""
        length = self._steps.shape[1]
        if num_sequences + 2 >= length:
            while num_sequences + 2 >= length:
                length *= 2
            self._steps = _steps(self.model, self._share, length)

    # Many sequences, by number: `lengths` and `needs` are vectors over all of them

    def add_all(self, lengths: Integers, needs: Integers, homes: Integers) -> None:
        """Add every sequence to its home; a negative home is none. Copies are ready to place all of them."""
        self._reserve(int(self._matrix[N].max(initial=0)) + len(homes))
        self._kernels.add_all(self._matrix, self._steps, self._attention, lengths, needs, homes)

    def take_off(self, lengths: Integers, needs: Integers, homes: Integers, gone: Integers) -> None:
        """Take the sequences `gone` off their homes."""
        self._kernels.take_off(self._matrix, self._steps, self._attention, lengths, needs, homes, gone)

    def place_all(self, lengths: Integers, needs: Integers, waiting: Integers, among: Integers) -> Integers:
        """Place `waiting` in order on replicas `among` (ascending) until one fits nowhere: chosen ones."""
        targets = np.empty(len(waiting), np.int64)
        columns = np.ascontiguousarray(self._matrix[:, among])
        self._reserve(int(columns[N].max(initial=0)) + len(waiting))
        num = _placement().place_all(columns, self._steps, self._attention, lengths, needs, waiting, targets)
        self._matrix[:, among] = columns
        return among[targets[:num]]

    def settle(self, lengths: Integers, needs: Integers, heaps: Any, *, from_slowest: bool) -> Integers:
        """Make the moves that pay among open replicas: rows (sequence, source, target)."""
        among = self.open_replicas()
        columns = np.ascontiguousarray(self._matrix[:, among])
        roots, children, siblings = heaps
        roots_among = roots[among]
        self._reserve(int(columns[N].max(initial=0)) + len(lengths))
        made: Integers = _placement().moves(
            columns,
            self._steps,
            self._attention,
            lengths,
            needs,
            roots_among,
            children,
            siblings,
            from_slowest,
        )
        self._matrix[:, among] = columns
        roots[among] = roots_among
        made[:, 1:] = among[made[:, 1:]]
        return made

    # What is there

    def num_sequences(self, replica: int) -> int:
        return int(self._matrix[N, replica])

    def num_tokens(self, replica: int) -> int:
        return int(self._matrix[TOK, replica])

    def room_tokens(self, replica: int) -> int:
        """KV tokens not set aside; negative once sequences outgrew what was."""
        return int(self._matrix[ROOM, replica])

    def tokens_per_s(self, replica: int) -> float:
        return float(self._matrix[T, replica])

    @property
    def total_tokens_per_s(self) -> float:
        """Aggregate throughput of the role, exactly rounded, so that it does not depend on replica order."""
        return fsum(self._matrix[T].tolist())
