"""Common refinement of two layouts into atomic slices (paper Appendix B.2, "aligning slicing granularity").

Invariants
    - The slices of a tensor are disjoint boxes and their union is every element that some target region asks
    for.
    - A slice is indivisible: each source and each target region has all of it or nothing of it.
    - A target element with no source is an error, never a hole.

How: flat ranges become boxes (a partial row, whole rows, a partial row), overlapping boxes of one side are
cut into disjoint cells that know all their holders, and a slice is a source cell cut with a target cell, all
pairs of a tensor at once. Layers look alike, so this is done once per (shape, source pattern, target
pattern): a `SliceClass`. A mixture of experts with ZeRO shards has millions of slices in a hundred classes;
slices become objects only when somebody looks at them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from shared.errors import LayoutError
from shared.layout.regions import disjoint_cells, region_boxes
from shared.layout.tensor_layout import Box, FlatRange, Layout, Pattern, Region

Ints = NDArray[np.int64]
_MAX_COMPARED = 1 << 22
"""Pairs of boxes compared at once: bounds the memory of a refinement."""


@dataclass(frozen=True, slots=True)
class AtomicSlice:
    """A box of `tensor` that `senders` have and `receivers` need; both sorted. `nbytes` in bytes."""

    tensor: str
    box: Box
    nbytes: int
    senders: tuple[str, ...]
    receivers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SliceClass:
    """The slices of every tensor of one shape under one pair of patterns, row-major.

    `starts` and `shapes` are (slices, dimensions) in elements, `nbytes` is (slices,).
    """

    starts: Ints
    shapes: Ints
    nbytes: Ints
    senders: tuple[tuple[str, ...], ...]
    receivers: tuple[tuple[str, ...], ...]

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        pairs = zip(self.starts.tolist(), self.shapes.tolist(), strict=True)
        return tuple(Box(tuple(start), tuple(shape)) for start, shape in pairs)


class Refinement(Sequence[AtomicSlice]):
    """Atomic slices in the order of `names`; tensor i has those of `classes[class_of[i]]`."""

    def __init__(self, names: Sequence[str], class_of: Sequence[int], classes: Sequence[SliceClass]) -> None:
        self.names, self.classes = tuple(names), tuple(classes)
        self.class_of = np.array(class_of, np.int64)
        sizes = np.array([len(c.nbytes) for c in classes], np.int64)
        self._ends = np.cumsum(sizes[self.class_of]) if len(classes) else np.zeros(0, np.int64)

    def piece(self, tensor: int, index: int) -> AtomicSlice:
        """Slice `index` of tensor number `tensor`."""
        found = self.classes[self.class_of[tensor]]
        return AtomicSlice(
            self.names[tensor],
            found.boxes[index],
            int(found.nbytes[index]),
            found.senders[index],
            found.receivers[index],
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[AtomicSlice]:
        for tensor, number in enumerate(self.class_of.tolist()):
            for index in range(len(self.classes[number].nbytes)):
                yield self.piece(tensor, index)

    @overload
    def __getitem__(self, index: int) -> AtomicSlice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[AtomicSlice, ...]: ...
    def __getitem__(self, index: int | slice) -> AtomicSlice | tuple[AtomicSlice, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        at = range(len(self))[index]
        tensor = int(np.searchsorted(self._ends, at, side="right"))
        size = len(self.classes[self.class_of[tensor]].nbytes)
        return self.piece(tensor, at - int(self._ends[tensor]) + size)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Disjoint boxes of one side, and who has each."""

    starts: Ints
    stops: Ints
    holders: tuple[tuple[str, ...], ...]


def _cells(shape: tuple[int, ...], pattern: Pattern) -> _Cells:
    grouped: dict[Region, list[str]] = {}
    for region, holder in pattern:
        grouped.setdefault(region, []).append(holder)
    regions = tuple(grouped)
    names = [tuple(sorted(set(found))) for found in grouped.values()]
    boxes = [(box, index) for index, region in enumerate(regions) for box in region_boxes(shape, region)]
    starts = np.array([box.start for box, _ in boxes], np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([box.shape for box, _ in boxes], np.int64).reshape(len(boxes), len(shape))
    if _are_disjoint(regions, starts, starts + sizes):
        return _Cells(starts, starts + sizes, tuple(names[index] for _, index in boxes))
    cells = disjoint_cells(shape, regions)
    starts = np.array([box.start for box, _ in cells], np.int64).reshape(len(cells), len(shape))
    stops = np.array([box.stop for box, _ in cells], np.int64).reshape(len(cells), len(shape))
    return _Cells(starts, stops, tuple(_union([names[i] for i in owners]) for _, owners in cells))


def _union(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return names[0] if len(names) == 1 else tuple(sorted({name for found in names for name in found}))


def _are_disjoint(regions: Sequence[Region], starts: Ints, stops: Ints) -> bool:
    if all(isinstance(region, FlatRange) for region in regions):
        spans = sorted((r.start, r.start + r.count) for r in regions if isinstance(r, FlatRange))
        return all(left[1] <= right[0] for left, right in pairwise(spans))
    return len(_common(starts, stops, starts, stops)[0]) == len(starts)


def _common(starts: Ints, stops: Ints, other_starts: Ints, other_stops: Ints) -> tuple[Ints, Ints]:
    """Indices (of these, of the others) of all pairs of boxes that have elements in common."""
    step = max(_MAX_COMPARED // max(len(other_starts), 1), 1)
    mine, theirs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(starts), step):
        meets = np.ones((len(starts[first : first + step]), len(other_starts)), bool)
        for dim in range(starts.shape[1]):
            meets &= starts[first : first + step, None, dim] < other_stops[None, :, dim]
            meets &= other_starts[None, :, dim] < stops[first : first + step, None, dim]
        found = np.nonzero(meets)
        mine.append(found[0] + first)
        theirs.append(found[1])
    return np.concatenate(mine), np.concatenate(theirs)


def _slice_class(shape: tuple[int, ...], itemsize: int, source: _Cells, target: _Cells) -> SliceClass:
    wants, has = _common(target.starts, target.stops, source.starts, source.stops)
    starts = np.maximum(target.starts[wants], source.starts[has])
    shapes = np.minimum(target.stops[wants], source.stops[has]) - starts
    numel = shapes.prod(axis=1, dtype=np.int64)
    missing = (target.stops - target.starts).prod(axis=1, dtype=np.int64)
    np.subtract.at(missing, wants, numel)
    if len(holes := np.flatnonzero(missing)):
        start, stop = target.starts[holes[0]].tolist(), target.stops[holes[0]].tolist()
        box = Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))
        raise LayoutError(f"{missing[holes[0]]} elements of the box {box.start}+{box.shape} have no source")
    order = np.lexsort(starts.T[::-1]) if shape else np.arange(len(numel))
    return SliceClass(
        starts[order],
        shapes[order],
        numel[order] * itemsize,
        tuple(source.holders[i] for i in has[order].tolist()),
        tuple(target.holders[i] for i in wants[order].tolist()),
    )


def refine(source: Layout, target: Layout) -> Refinement:
    """Atomic slices of everything `target` needs, in tensor order of `target`, row-major within a tensor.

    Raises LayoutError if a tensor differs between the two, or a part of `target` is nowhere in `source`.
    """
    known: dict[tuple[object, ...], int] = {}
    cells: dict[tuple[object, ...], _Cells] = {}
    classes: list[SliceClass] = []
    class_of: list[int] = []
    for name, wanted in target.by_tensor.items():
        spec = target.tensors[name]
        if source.tensors.get(name) != spec:
            raise LayoutError(
                f"tensor {name} is {spec} at the target, {source.tensors.get(name)} at the source"
            )
        had = source.by_tensor.get(name, ())
        key = (spec.shape, spec.itemsize, id(had), id(wanted))
        if key not in known:
            for pattern in (had, wanted):
                if (spec.shape, id(pattern)) not in cells:
                    cells[spec.shape, id(pattern)] = _cells(spec.shape, pattern)
            try:
                made = _slice_class(
                    spec.shape, spec.itemsize, cells[spec.shape, id(had)], cells[spec.shape, id(wanted)]
                )
            except LayoutError as error:
                raise LayoutError(f"{name}: {error.message}", tensor=name) from None
            known[key] = len(classes)
            classes.append(made)
        class_of.append(known[key])
    return Refinement(tuple(target.by_tensor), class_of, classes)
