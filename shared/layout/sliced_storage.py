"""How GPS stores a tensor whose layouts are known: one atomic slice, one contiguous range (paper §5.1).

Row-major storage scatters what a row-parallel rank reads of a weight (a range of *columns*) over all rows.
So the slices into which the registered layouts cut a tensor are stored one after another, each row-major
inside. They are ordered by their start, the last dimension first: then all slices of one range of columns are
neighbours, in row order, and a rank that reads them reads one range.

A 4×6 weight, Read by columns on 2 ranks and written by rows by 2 others; numbers are places in storage::

     0  1  2 | 12 13 14      slices in order:  rows 0-1 × columns 0-2   places  0-5
     3  4  5 | 15 16 17                        rows 2-3 × columns 0-2   places  6-11
    ---------+---------                        rows 0-1 × columns 3-5   places 12-17
     6  7  8 | 18 19 20                        rows 2-3 × columns 3-5   places 18-23
     9 10 11 | 21 22 23
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shared.layout.regions import disjoint_cells, intersect, region_boxes
from shared.layout.tensor_layout import Box, Layout, Region


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """The part `common` of what is `stored` row-major from element `offset` on: a slice, or several that
    stack."""

    offset: int
    stored: Box
    common: Box

    @property
    def inside(self) -> Box:
        """`common` as seen from the slice's own start."""
        return relative(self.common, self.stored)

    def inside_of(self, box: Box) -> Box:
        """`common` as seen from the start of `box`."""
        return relative(self.common, box)


@dataclass(frozen=True, eq=False)
class SlicedStorage:
    """The slices of a tensor of `shape` in storage order. Together they are every element once."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        if sum(box.numel for box in self.boxes) != Box((0,) * len(self.shape), self.shape).numel:
            raise ValueError(f"slices of a tensor of shape {self.shape} have not all of its elements")

    def part(self, box: Box) -> "SlicedStorage | None":
        """Storage of `box` alone, counted from its start: the same slices in the same order, cut to it.

        Equal parts are stored alike, wherever they are kept. None where row-major storage is as good; this
        very object for the whole.
        """
        if box.shape == self.shape:
            return self
        cut = [common for slice_ in self.boxes if (common := intersect(slice_, box)) is not None]
        return _stored(box.shape, [relative(common, box) for common in cut])

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        starts = np.array([box.start for box in self.boxes], np.int64).reshape(len(self.boxes), -1)
        stops = np.array([box.stop for box in self.boxes], np.int64).reshape(len(self.boxes), -1)
        return starts, stops, np.cumsum([0, *(box.numel for box in self.boxes)], dtype=np.int64)

    @cached_property
    def _known(self) -> dict[Box, tuple[StoredPiece, ...]]:
        return {}

    def pieces_of(self, box: Box) -> tuple[StoredPiece, ...]:
        """What of each slice lies in `box`, in storage order.

        Neighbours that continue each other in rows are one piece: together they are row-major as well.
        """
        if box not in self._known:
            starts, stops, offsets = self._bounds
            low = np.maximum(starts, np.array(box.start, np.int64))
            high = np.minimum(stops, np.array(box.stop, np.int64))
            meets = np.flatnonzero((high > low).all(axis=1)).tolist()
            pieces: list[StoredPiece] = []
            for i in meets:
                common = Box(tuple(low[i].tolist()), tuple((high - low)[i].tolist()))
                piece = StoredPiece(int(offsets[i]), self.boxes[i], common)
                joined = _joined(pieces[-1], piece) if pieces else None
                pieces[-1:] = [joined] if joined else [*pieces[-1:], piece]
            self._known[box] = tuple(pieces)
        return self._known[box]


def _joined(left: StoredPiece, right: StoredPiece) -> StoredPiece | None:
    """Both as one, if `right` has the next rows in storage, in the tensor and in the box."""
    if not left.stored.start or right.offset != left.offset + left.stored.numel:
        return None
    stored, common = _stacked(left.stored, right.stored), _stacked(left.common, right.common)
    return StoredPiece(left.offset, stored, common) if stored and common else None


def _stacked(upper: Box, lower: Box) -> Box | None:
    if upper.start[1:] != lower.start[1:] or upper.shape[1:] != lower.shape[1:]:
        return None
    if lower.start[0] != upper.start[0] + upper.shape[0]:
        return None
    return Box(upper.start, (upper.shape[0] + lower.shape[0], *upper.shape[1:]))


def relative(box: Box, to: Box) -> Box:
    """`box` as seen from the start of `to`."""
    return Box(tuple(a - b for a, b in zip(box.start, to.start, strict=True)), box.shape)


def dense_blocks(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, Box]]:
    """A region as boxes, each with the element at which it begins in a row-major copy of the region.

    Inside a flat range each of its boxes is dense; a box is itself.
    """
    at = 0
    for box in region_boxes(shape, region):
        yield at, box
        at += box.numel


def slice_storage(shape: tuple[int, ...], sides: Sequence[Sequence[Region]]) -> SlicedStorage | None:
    """Storage for a tensor that each of `sides` cuts into regions; None where row-major storage is as good:
    every slice is one range there."""
    whole = Box((0,) * len(shape), shape)
    regions = dict.fromkeys([whole, *(region for side in sides for region in side if region.numel)])
    boxes = [box for box, _ in disjoint_cells(shape, list(regions))]
    boxes.sort(key=lambda box: box.start[::-1])
    return _stored(shape, boxes)


def _stored(shape: tuple[int, ...], boxes: Sequence[Box]) -> SlicedStorage | None:
    return None if all(_is_range(shape, box) for box in boxes) else SlicedStorage(shape, tuple(boxes))


def _is_range(shape: tuple[int, ...], box: Box) -> bool:
    """Whether a box is contiguous in row-major storage."""
    dim = 0
    while dim < len(shape) and box.shape[dim] == 1:
        dim += 1
    return box.shape[dim + 1 :] == shape[dim + 1 :]


def slice_layouts(layouts: Sequence[Layout]) -> dict[str, SlicedStorage]:
    """Storage of every tensor of a model registered with `layouts` for which slices pay; tensors that are cut
    alike share one object."""
    known: dict[tuple[object, ...], SlicedStorage | None] = {}
    found: dict[str, SlicedStorage] = {}
    for name, spec in {n: s for layout in layouts for n, s in layout.tensors.items()}.items():
        patterns = [layout.by_tensor.get(name, ()) for layout in layouts]
        key = (spec.shape, *(id(pattern) for pattern in patterns))
        if key not in known:
            known[key] = slice_storage(spec.shape, [[region for region, _ in p] for p in patterns])
        if (storage := known[key]) is not None:
            found[name] = storage
    return found
