"""Dispatch, and migration when replicas shift, on plain numbers (paper §6.1, §6.2, Appendix C).

The scheduler decides with these functions what to do; the planner replays them to see what a shift would
bring. Both see the same outcome because there is only this one implementation.

Invariants
- A sequence is dispatched to the open replica with room for its KV need that gains the most throughput;
  ties go to the lowest slot.
- Dispatch goes in queue order and stops at the first sequence that fits nowhere.
- Every accepted move of a shift-up strictly raises the aggregate throughput, so moving ends.

Cost: O(I) for each placed sequence. Queue and move order are given by `Movable.rank`.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, inf
from typing import Any, NamedTuple, Self

import numpy as np

from shared.ids import ReplicaId
from shared.scheduling.throughput import ThroughputModel

_SMALL = 12
"""Replicas up to which a loop beats vectors."""


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

    What `best` and `fastest` need of all replicas at once is kept ready: the denominator of T one sequence
    further, without its length. Few replicas are compared in a loop over lists, many with vectors; the
    arithmetic is the same.
    """

    __slots__ = (
        "_attention",
        "_base",
        "_gain",
        "_is_small",
        "_n",
        "_next_n",
        "_open",
        "_overheads",
        "_room",
        "_room_vector",
        "_speed",
        "_threshold",
        "_tok",
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
        self._is_small = size <= _SMALL
        self._attention = model.attention_s_per_token
        self._overheads = [0.0, model.overhead_s(1)]
        self._n, self._tok, self._tokens_per_s = [0] * size, [0] * size, [0.0] * size
        self._room = [kv_capacity_tokens[replica] for replica in self.ids]
        self._open = [True] * size
        self._base: Any = [self._overheads[1]] * size  # A·tok + overhead(n + 1)
        self._next_n: Any = [1.0] * size
        self._threshold: Any = [0.0] * size  # T of an open replica; a closed one can never exceed it
        self._speed: Any = [0.0] * size  # T of an open replica, -1 of a closed one
        self._room_vector: Any = self._room
        self._gain: Any = None
        if not self._is_small:
            for name in ("_base", "_next_n", "_threshold", "_speed", "_room_vector"):
                setattr(self, name, np.array(getattr(self, name), dtype=np.float64))
            self._gain = np.empty(size)

    def copy(self) -> Self:
        """An independent copy, to try decisions on."""
        twin = type(self).__new__(type(self))
        twin.model, twin.ids, twin.index = self.model, self.ids, self.index
        twin._attention, twin._overheads, twin._is_small = self._attention, self._overheads, self._is_small
        twin._n, twin._tok, twin._tokens_per_s = self._n.copy(), self._tok.copy(), self._tokens_per_s.copy()
        twin._room, twin._open = self._room.copy(), self._open.copy()
        twin._base, twin._next_n = self._base.copy(), self._next_n.copy()
        twin._threshold, twin._speed = self._threshold.copy(), self._speed.copy()
        twin._room_vector = twin._room if self._is_small else self._room_vector.copy()
        twin._gain = None if self._is_small else np.empty(len(self.ids))
        return twin

    def set_open(self, replica: int, is_open: bool) -> None:
        """A closed replica keeps its load and takes no sequence."""
        self._open[replica] = is_open
        self._threshold[replica] = self._tokens_per_s[replica] if is_open else inf
        self._speed[replica] = self._tokens_per_s[replica] if is_open else -1.0

    def is_open(self, replica: int) -> bool:
        return self._open[replica]

    def change(self, replica: int, num_sequences: int, tokens: int, need: int) -> None:
        """Add (or with negative numbers take away) sequences with their tokens and KV need."""
        n = self._n[replica] = self._n[replica] + num_sequences
        tok = self._tok[replica] = self._tok[replica] + tokens
        overheads = self._overheads
        while n + 1 >= len(overheads):
            overheads.append(self.model.overhead_s(len(overheads)))
        attention_s = self._attention * tok
        tokens_per_s = self._tokens_per_s[replica] = n / (attention_s + overheads[n]) if n else 0.0
        room = self._room[replica] - need
        self._room[replica] = room
        self._base[replica] = attention_s + overheads[n + 1]
        self._next_n[replica] = n + 1
        if not self._is_small:
            self._room_vector[replica] = room
        if self._open[replica]:
            self._threshold[replica] = self._speed[replica] = tokens_per_s

    def best(self, length: int, need: int) -> int | None:
        """The open replica with room for `need` that gains most from a sequence of `length`, if any."""
        attention_s = self._attention * length
        if self._is_small:
            winner, most = None, -inf
            rows = zip(self._next_n, self._base, self._threshold, self._room, strict=True)
            for i, (next_n, base, threshold, room) in enumerate(rows):
                gain = next_n / (base + attention_s) - threshold
                if gain > most and room >= need:
                    winner, most = i, gain
            return winner
        gains = self._gain
        np.add(self._base, attention_s, out=gains)
        np.divide(self._next_n, gains, out=gains)
        np.subtract(gains, self._threshold, out=gains)
        winner = int(gains.argmax())
        if self._room[winner] < need:
            gains[self._room_vector < need] = -inf
            winner = int(gains.argmax())
        return None if gains[winner] == -inf else winner

    def fastest(self) -> int:
        """The open replica with the highest throughput; the lowest slot of several."""
        speed = self._speed
        return speed.index(max(speed)) if self._is_small else int(speed.argmax())

    def slowest(self) -> int:
        """The open replica whose sequences advance most slowly; the lowest slot of several."""
        step_s = [
            n / t if n and o else 0.0 for n, t, o in zip(self._n, self._tokens_per_s, self._open, strict=True)
        ]
        return step_s.index(max(step_s))

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


def moves_worth_making(
    loads: ReplicaLoads, running: list[list[Movable]], *, from_slowest: bool = False
) -> list[Move]:
    """The second half of a shift-up: shortest sequences leave the fastest replica while T strictly rises.

    With `from_slowest` they leave the replica whose sequences advance most slowly. The fastest need not be
    the overloaded one: many long sequences make a replica slow, and the paper's loop never looks at it.

    `running[i]` are the sequences of replica i that may move, as a heap (an ascending list is one). `loads`
    and `running` end as if the moves were made. The first move that does not pay is undone, and ends it.
    """
    moves: list[Move] = []
    owned = [False] * len(running)
    while True:
        source = loads.slowest() if from_slowest else loads.fastest()
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
