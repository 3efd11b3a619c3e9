"""Dispatch, and migration when replicas shift, on plain numbers (paper §6.1, §6.2, Appendix C).

The scheduler decides with these functions what to do; the planner replays them to see what a shift would
bring. Both see the same outcome because there is only this one implementation.

Invariants
- A sequence is dispatched to the open replica with room for its KV need that gains the most throughput;
  ties go to the lowest slot.
- Dispatch goes in queue order and stops at the first sequence that fits nowhere.
- Every accepted move of a shift-up strictly raises the aggregate throughput, so moving ends.

Cost: O(I) for each placed sequence, about a nanosecond for each of I replicas (`shared.scheduling.kernels`).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from shared.ids import ReplicaId
from shared.scheduling.loads import Integers, ReplicaLoads, kernels, tie_order
from shared.scheduling.throughput import UNIT

__all__ = [
    "ELSEWHERE",
    "WAITING",
    "Heaps",
    "Movable",
    "ReplicaLoads",
    "Sequences",
    "dispatch",
    "moves_worth_making",
    "shift_down",
    "shift_up",
    "tie_order",
    "warm_up",
]

WAITING = -1
"""Home of a sequence that is in the queue."""
ELSEWHERE = -2
"""Home of a sequence that takes no part: it neither waits nor may be moved."""


class Movable(NamedTuple):
    """A sequence as dispatch sees it."""

    length: int
    """Resident tokens."""
    need: int
    """KV tokens to set aside, growth included."""


class Sequences(NamedTuple):
    """Sequences of a role, numbered in dispatch order; vectors of int64.

    Who is shortest on a replica is decided by length, then by number.
    """

    lengths: Integers
    """Resident tokens."""
    needs: Integers
    """KV tokens to set aside, growth included."""
    homes: Integers
    """Index of the replica, or WAITING, or ELSEWHERE."""


class Heaps(NamedTuple):
    """Movable sequences of each replica, the shortest on top; -1 for none."""

    roots: Integers
    """By replica."""
    children: Integers
    """By sequence."""
    siblings: Integers
    """By sequence."""

    @classmethod
    def of(cls, sequences: Sequences, num_replicas: int) -> Self:
        """The sequences at home on each of the replicas."""
        roots = np.full(num_replicas, -1, np.int64)
        children, siblings = (np.full(len(sequences.homes), -1, np.int64) for _ in range(2))
        kernels().build_heaps(sequences.lengths, sequences.homes, roots, children, siblings)
        return cls(roots, children, siblings)

    def copy(self) -> Self:
        return type(self)(self.roots.copy(), self.children.copy(), self.siblings.copy())


def dispatch(loads: ReplicaLoads, waiting: Iterable[Movable]) -> list[int]:
    """Place `waiting` in order until one fits nowhere: the chosen replica of each placed sequence.

    `waiting` is consumed lazily: nothing after the sequence that fits nowhere is looked at.
    """
    placed = []
    for length, need in waiting:
        target = loads.place(length, need)
        if target is None:
            break
        placed.append(target)
    return placed


def moves_worth_making(
    loads: ReplicaLoads, sequences: Sequences, heaps: Heaps, *, from_slowest: bool = False
) -> Integers:
    """The second half of a shift-up: shortest sequences leave the fastest replica while T strictly rises.

    With `from_slowest` they leave the replica whose sequences advance most slowly. The fastest need not be
    the overloaded one: many long sequences make a replica slow, and the paper's loop never looks at it.

    Returns rows (sequence, source, target) in order. `loads` and `heaps` end as if the moves were made; the
    first that does not pay is undone, and ends it.
    """
    return loads.settle(sequences.lengths, sequences.needs, heaps, from_slowest=from_slowest)


def shift_up(
    loads: ReplicaLoads, sequences: Sequences, heaps: Heaps, new: Sequence[int], *, migrate: bool = True
) -> Integers:
    """Replay a shift-up (Algorithm 4) on `loads`: the queue goes to the `new` replicas, then moves are made.

    Replicas `new` must be closed and empty; they are opened. As long as something waits, no replica has
    room to gain from moves, so there are none. Returns rows as `moves_worth_making`.
    """
    queue = np.flatnonzero(sequences.homes == WAITING)
    loads.set_open(new, True)
    targets = loads.place_all(sequences.lengths, sequences.needs, queue, np.sort(np.array(new, np.int64)))
    if not migrate or len(targets) < len(queue):
        return np.empty((0, 3), np.int64)
    kernels().push_all(sequences.lengths, *heaps, queue, targets)
    return moves_worth_making(loads, sequences, heaps)


def shift_down(loads: ReplicaLoads, sequences: Sequences, leaving: Sequence[int]) -> Integers:
    """Replay a shift-down (Algorithm 3) on `loads`: the work of `leaving` joins the queue for the rest.

    Returns what is still waiting, in order.
    """
    is_leaving = np.zeros(len(loads.ids) + 2, np.bool_)  # the last two entries are ELSEWHERE and WAITING
    is_leaving[np.array(leaving, np.int64)] = True
    loads.set_open(leaving, False)
    lengths, needs, homes = sequences
    loads.take_off(lengths, needs, homes, np.flatnonzero(is_leaving[homes]))
    is_leaving[WAITING] = True
    waiting = np.flatnonzero(is_leaving[homes])
    return waiting[len(loads.place_all(lengths, needs, waiting, loads.open_replicas())) :]


def warm_up() -> None:
    """Compile everything, or load what was compiled before, so that no decision waits for it."""
    loads = ReplicaLoads(UNIT, {ReplicaId("warm-0"): 99, ReplicaId("warm-1"): 99})
    loads.change(0, 1, 1, 1)
    loads.best(1, 1)
    loads.place(1, 1)
    loads.set_open(1, False)
    numbers = np.arange(4)
    sequences = Sequences(numbers + 1, numbers + 1, np.array([0, 0, 0, WAITING]))
    loads.add_all(*sequences)
    shift_up(loads, sequences, Heaps.of(sequences, 2), [1])
    shift_down(loads, sequences, [0])
