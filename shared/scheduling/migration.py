"""Dispatch, and migration when replicas shift, on plain numbers (paper §6.1, §6.2, Appendix C).

The scheduler decides with these functions what to do; the planner replays them to see what a shift would
bring. Both see the same outcome because there is only this one implementation.

Invariants
- A sequence is dispatched to the open replica with room for its KV need that gains the most throughput;
  ties go to the lowest slot.
- Dispatch goes in queue order and stops at the first sequence that fits nowhere.
- Every accepted move of a shift-up strictly raises the aggregate throughput, so moving ends.

Cost: O(I) vector work for each placed sequence. Queue and move order are given by `Movable.rank`.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from typing import NamedTuple, Self

import numpy as np

from shared.ids import ReplicaId
from shared.scheduling.throughput import ThroughputModel


class Movable(NamedTuple):
    """A sequence as migration sees it. Compares by length first: the least of a replica is its shortest."""

    length: int
    """Resident tokens."""
    rank: int
    """Position in dispatch order, unique within a role."""
    need: int
    """KV tokens to set aside, growth included."""


class Move(NamedTuple):
    """An accepted migration: `movable` from replica index `source` to `target`."""

    movable: Movable
    source: int
    target: int


def tie_order(replica: ReplicaId) -> tuple[str, int, str]:
    """Sort key of replicas: `rollout-2` before `rollout-10`."""
    role, _, slot = replica.rpartition("-")
    return (role, int(slot), "") if slot.isdecimal() else (replica, -1, replica)


class ReplicaLoads:
    """n, tokens, KV room and throughput of every replica of a role; replicas are indexes in `ids`.

    Each quantity is a list; what `best` needs of all replicas at once is mirrored in vectors.
    """

    __slots__ = (
        "_attention",
        "_gain",
        "_n",
        "_next_n",
        "_next_overhead",
        "_open",
        "_overheads",
        "_room",
        "_room_vector",
        "_threshold",
        "_tok",
        "_tok_vector",
        "_tokens_per_s",
        "ids",
        "index",
        "model",
    )

    def __init__(self, model: ThroughputModel, kv_capacity_tokens: Mapping[ReplicaId, int]) -> None:
        self.model = model
        self.ids = tuple(sorted(kv_capacity_tokens, key=tie_order))
        self.index = {replica: i for i, replica in enumerate(self.ids)}
        size = len(self.ids)
        self._attention = model.attention_s_per_token
        self._overheads = [0.0, model.overhead_s(1)]
        self._n, self._tok, self._tokens_per_s = [0] * size, [0] * size, [0.0] * size
        self._room = [kv_capacity_tokens[replica] for replica in self.ids]
        self._open = [True] * size
        self._tok_vector, self._next_n = np.zeros(size), np.ones(size)
        self._next_overhead = np.full(size, self._overheads[1])
        self._threshold = np.zeros(size)  # T of an open replica; a closed one can never exceed it
        self._room_vector = np.array(self._room, dtype=np.float64)
        self._gain = np.empty(size)

    def copy(self) -> Self:
        """An independent copy, to try decisions on."""
        twin = type(self).__new__(type(self))
        twin.model, twin.ids, twin.index = self.model, self.ids, self.index
        twin._attention, twin._overheads = self._attention, self._overheads
        twin._n, twin._tok, twin._tokens_per_s = self._n.copy(), self._tok.copy(), self._tokens_per_s.copy()
        twin._room, twin._open = self._room.copy(), self._open.copy()
        twin._tok_vector, twin._next_n = self._tok_vector.copy(), self._next_n.copy()
        twin._next_overhead, twin._threshold = self._next_overhead.copy(), self._threshold.copy()
        twin._room_vector, twin._gain = self._room_vector.copy(), np.empty(len(self.ids))
        return twin

    def set_open(self, replica: int, is_open: bool) -> None:
        """A closed replica keeps its load and takes no sequence."""
        self._open[replica] = is_open
        self._threshold[replica] = self._tokens_per_s[replica] if is_open else np.inf

    def is_open(self, replica: int) -> bool:
        return self._open[replica]

    def change(self, replica: int, num_sequences: int, tokens: int, need: int) -> None:
        """Add (or with negative numbers take away) sequences with their tokens and KV need."""
        n = self._n[replica] + num_sequences
        overheads = self._overheads
        while n + 1 >= len(overheads):
            overheads.append(self.model.overhead_s(len(overheads)))
        tok = self._tok[replica] + tokens
        tokens_per_s = n / (self._attention * tok + overheads[n]) if n else 0.0
        self._n[replica], self._tok[replica], self._tokens_per_s[replica] = n, tok, tokens_per_s
        self._room[replica] = self._room_vector[replica] = self._room[replica] - need
        self._tok_vector[replica] = tok
        self._next_n[replica] = n + 1
        self._next_overhead[replica] = overheads[n + 1]
        if self._open[replica]:
            self._threshold[replica] = tokens_per_s

    def best(self, length: int, need: int) -> int | None:
        """The open replica with room for `need` that gains most from a sequence of `length`, if any."""
        if not self.ids:
            return None
        gain = self._gain
        np.add(self._tok_vector, length, out=gain)
        np.multiply(gain, self._attention, out=gain)
        np.add(gain, self._next_overhead, out=gain)
        np.divide(self._next_n, gain, out=gain)
        np.subtract(gain, self._threshold, out=gain)
        winner = int(gain.argmax())
        if self._room[winner] < need:
            gain[self._room_vector < need] = -np.inf
            winner = int(gain.argmax())
        return None if gain[winner] == -np.inf else winner

    def fastest(self) -> int:
        """The open replica with the highest throughput; the lowest slot of several."""
        return int(np.where(self._threshold < np.inf, self._threshold, -1.0).argmax())

    def num_sequences(self, replica: int) -> int:
        return self._n[replica]

    def num_tokens(self, replica: int) -> int:
        return self._tok[replica]

    def room_tokens(self, replica: int) -> int:
        """KV tokens not set aside; negative once sequences outgrew what was."""
        return self._room[replica]

    def tokens_per_s(self, replica: int) -> float:
        return self._tokens_per_s[replica]

    @property
    def total_tokens_per_s(self) -> float:
        """Aggregate throughput of the role, exactly rounded, so that it does not depend on replica order."""
        return fsum(self._tokens_per_s)


def dispatch(loads: ReplicaLoads, waiting: Iterable[Movable]) -> list[int]:
    """Place `waiting` in order until one fits nowhere: the chosen replica of each placed sequence.

    `waiting` is consumed lazily: nothing after the sequence that fits nowhere is looked at.
    """
    placed = []
    for movable in waiting:
        target = loads.best(movable.length, movable.need)
        if target is None:
            break
        loads.change(target, 1, movable.length, movable.need)
        placed.append(target)
    return placed


def moves_worth_making(loads: ReplicaLoads, running: list[list[Movable]]) -> list[Move]:
    """The second half of a shift-up: shortest sequences leave the fastest replica while T strictly rises.

    `running[i]` are the sequences of replica i that may move, as a heap (an ascending list is one). `loads`
    and `running` end as if the moves were made. The first move that does not pay is undone, and ends it.
    """
    moves: list[Move] = []
    owned = [False] * len(running)
    while True:
        source = loads.fastest()
        if not running[source]:
            return moves
        shortest = running[source][0]
        before = loads.tokens_per_s(source)
        loads.change(source, -1, -shortest.length, -shortest.need)
        target = loads.best(shortest.length, shortest.need)
        if target is None or target == source:
            loads.change(source, 1, shortest.length, shortest.need)
            return moves
        target_before = loads.tokens_per_s(target)
        loads.change(target, 1, shortest.length, shortest.need)
        if fsum((loads.tokens_per_s(source), loads.tokens_per_s(target), -before, -target_before)) <= 0:
            loads.change(target, -1, -shortest.length, -shortest.need)
            loads.change(source, 1, shortest.length, shortest.need)
            return moves
        for replica in (source, target):
            if not owned[replica]:  # lists may be shared with the caller's other replays
                running[replica] = running[replica].copy()
                owned[replica] = True
        heapq.heappop(running[source])
        heapq.heappush(running[target], shortest)
        moves.append(Move(shortest, source, target))


def shift_up(
    loads: ReplicaLoads,
    running: list[list[Movable]],
    queue: Sequence[Movable],
    new: Sequence[int],
    *,
    migrate: bool = True,
) -> list[Move]:
    """Replay a shift-up (Algorithm 4) on `loads`: the queue goes to the `new` replicas, then moves are made.

    Replicas `new` must be closed and empty; they are opened. As long as something waits, no replica has
    room to gain from moves, so there are none.
    """
    open_before = [i for i in range(len(loads.ids)) if loads.is_open(i)]
    for replica in open_before:
        loads.set_open(replica, False)
    for replica in new:
        loads.set_open(replica, True)
        running[replica] = []
    placed = dispatch(loads, queue)
    for movable, target in zip(queue, placed, strict=False):
        heapq.heappush(running[target], movable)
    for replica in open_before:
        loads.set_open(replica, True)
    if not migrate or len(placed) < len(queue):
        return []
    return moves_worth_making(loads, running)


def shift_down(
    loads: ReplicaLoads, running: list[list[Movable]], queue: Sequence[Movable], leaving: Sequence[int]
) -> list[Movable]:
    """Replay a shift-down (Algorithm 3) on `loads`: the work of `leaving` joins the queue for the rest.

    Returns what is still waiting, in order.
    """
    waiting = list(queue)
    for replica in leaving:
        loads.set_open(replica, False)
        gone = running[replica]
        loads.change(replica, -len(gone), -sum(m.length for m in gone), -sum(m.need for m in gone))
        waiting += gone
        running[replica] = []
    waiting.sort(key=lambda movable: movable.rank)
    return waiting[len(dispatch(loads, waiting)) :]
