"""Demands of a refinement: (slice, receiver), as objects for a person and as arrays for the planner.

Tensors of one class have the same slices, so the arrays hold one *row* per demand of a class, not of a
tensor; a plan walks tensor after tensor over the rows of its class.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from shared.layout.refine import AtomicSlice, Refinement, SliceClass

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Demand:
    """`receiver` needs `piece`; any of `piece.senders` can send it."""

    piece: AtomicSlice
    receiver: str


@dataclass(frozen=True, eq=False)
class DemandTable:
    """Demands as arrays. Row r: `nbytes[r]` to receiver `receiver[r]` from any of set `senders_of[r]`.

    Rows of class c are `[row_ends[c - 1], row_ends[c])`; `piece[r]` is the slice's number in its class.
    Members of sender set k are `members[set_ends[k - 1]:set_ends[k]]`, lowest sender first.
    """

    class_of: Ints
    row_ends: Ints
    nbytes: Ints
    receiver: Ints
    senders_of: Ints
    piece: Ints
    set_ends: Ints
    members: Ints
    senders: tuple[str, ...]
    receivers: tuple[str, ...]

    @property
    def sets(self) -> list[Ints]:
        return np.split(self.members, self.set_ends[:-1])

    @cached_property
    def row_starts(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), self.row_ends[:-1]])

    @cached_property
    def row_uses(self) -> Ints:
        """How many tensors have each row."""
        uses = np.bincount(self.class_of, minlength=len(self.row_ends))
        return np.repeat(uses, self.row_ends - self.row_starts)

    @property
    def num_demands(self) -> int:
        return int((self.row_ends - self.row_starts)[self.class_of].sum())


class Demands(Sequence[Demand]):
    """The demands of a refinement, or a plain list of them, in order."""

    def __init__(self, slices: Refinement | None = None, listed: Sequence[Demand] = ()) -> None:
        self._slices, self._listed = slices, listed

    @cached_property
    def table(self) -> DemandTable:
        return _table_of_list(self._listed) if self._slices is None else _table(self._slices)

    def at(self, tensor: int, row: int) -> Demand:
        """The demand of table row `row` of tensor number `tensor`."""
        if self._slices is None:
            return self._listed[row]
        piece = self._slices.piece(tensor, int(self.table.piece[row]))
        return Demand(piece, self.table.receivers[self.table.receiver[row]])

    def __len__(self) -> int:
        return self.table.num_demands

    def __iter__(self) -> Iterator[Demand]:
        starts, ends = self.table.row_starts.tolist(), self.table.row_ends.tolist()
        for tensor, number in enumerate(self.table.class_of.tolist()):
            for row in range(starts[number], ends[number]):
                yield self.at(tensor, row)

    @overload
    def __getitem__(self, index: int) -> Demand: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Demand, ...]: ...
    def __getitem__(self, index: int | slice) -> Demand | tuple[Demand, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        at = range(len(self))[index]
        sizes = (self.table.row_ends - self.table.row_starts)[self.table.class_of]
        ends = np.cumsum(sizes)
        tensor = int(np.searchsorted(ends, at, side="right"))
        start = int(self.table.row_starts[self.table.class_of[tensor]])
        return self.at(tensor, start + at - int(ends[tensor] - sizes[tensor]))


def demands_of(slices: Iterable[AtomicSlice]) -> Demands:
    """One demand per slice and receiver. For a Write the receivers are the holders of the slice, one per
    group."""
    if isinstance(slices, Refinement):
        return Demands(slices)
    return Demands(listed=[Demand(piece, receiver) for piece in slices for receiver in piece.receivers])


class _Names:
    """Names and sets of names as numbers, in order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.sets: dict[tuple[str, ...], int] = {}
        self.members: list[Ints] = []

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def set_number(self, names: tuple[str, ...]) -> int:
        if names not in self.sets:
            self.sets[names] = len(self.sets)
            self.members.append(np.array([self.number(name) for name in names], np.int64))
        return self.sets[names]


def _table(slices: Refinement) -> DemandTable:
    senders, receivers = _Names(), _Names()
    rows = [_rows_of(found, senders, receivers) for found in slices.classes]
    return _assemble(slices.class_of, rows, senders, receivers)


def rows_by_set(table: DemandTable) -> list[Ints]:
    """Rows of each sender set."""
    order = np.argsort(table.senders_of, kind="stable")
    bounds = np.searchsorted(table.senders_of[order], np.arange(1, len(table.set_ends)))
    return np.split(order, bounds) if len(table.set_ends) else []


_Rows = tuple[Ints, Ints, Ints, Ints]
"""nbytes, receiver, sender set and slice number of each demand of a class."""


def _rows_of(found: SliceClass, senders: _Names, receivers: _Names) -> _Rows:
    sets = np.array([senders.set_number(names) for names in found.senders], np.int64)
    wanted = [receivers.members[receivers.set_number(names)] for names in found.receivers]
    counts = np.array([len(names) for names in wanted], np.int64)
    receiver = np.concatenate(wanted) if wanted else np.zeros(0, np.int64)
    piece = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return found.nbytes[piece], receiver, sets[piece], piece


def _table_of_list(listed: Sequence[Demand]) -> DemandTable:
    senders, receivers = _Names(), _Names()
    rows = (
        np.array([demand.piece.nbytes for demand in listed], np.int64),
        np.array([receivers.number(demand.receiver) for demand in listed], np.int64),
        np.array([senders.set_number(demand.piece.senders) for demand in listed], np.int64),
        np.arange(len(listed), dtype=np.int64),
    )
    return _assemble(np.zeros(1, np.int64), [rows], senders, receivers)


def _assemble(class_of: Ints, rows: Sequence[_Rows], senders: _Names, receivers: _Names) -> DemandTable:
    empty = np.zeros(0, np.int64)
    nbytes, receiver, senders_of, piece = (
        np.concatenate([empty, *(row[i] for row in rows)]) for i in range(4)
    )
    return DemandTable(
        class_of,
        np.cumsum([len(row[0]) for row in rows], dtype=np.int64),
        nbytes,
        receiver,
        senders_of,
        piece,
        np.cumsum([len(found) for found in senders.members], dtype=np.int64),
        np.concatenate([empty, *senders.members]),
        tuple(senders.numbers),
        tuple(receivers.numbers),
    )
