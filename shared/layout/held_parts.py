"""What two sides hold of a tensor, and the copies between them: few and large wherever both allow it.

A node has some rows of a weight, a landing buffer has room for all of it, a process wants a dense part. Each
stores its part row-major or slice by slice. A box that both have is walked in the left side's storage order;
what continues on both sides is one copy.

A 4×6 weight in slices (rows 0-1 and 2-3, columns 0-2 and 3-5); the left side holds rows 1-3 of it, the right
side everything. Columns 3-5 of rows 1-3 are places 9-17 of the left part and 15-23 of the right: one copy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shared.layout.sliced_storage import SlicedStorage, StoredPiece, dense_blocks, relative
from shared.layout.spans import Spans, merge_spans, pair_spans
from shared.layout.tensor_layout import Box, FlatRange, Region


@dataclass(frozen=True, slots=True)
class Held:
    """The part `box` of a tensor as somebody stores it: row-major, or slice by slice as `storage` says, which
    counts from the start of `box`."""

    box: Box
    storage: SlicedStorage | None = None

    def pieces_of(self, box: Box) -> tuple[StoredPiece, ...]:
        """Where `box`, which lies in this part, is stored; all boxes as seen from the part's start."""
        near = relative(box, self.box)
        if self.storage is not None:
            return self.storage.pieces_of(near)
        return (StoredPiece(0, Box((0,) * len(near.shape), self.box.shape), near),)


def paired_pieces(left: Held, right: Held, box: Box) -> Iterator[tuple[StoredPiece, StoredPiece]]:
    """`box`, which both sides hold, as pieces of equal shapes, in the left side's storage order."""
    for piece in left.pieces_of(box):
        for other in right.pieces_of(_moved(piece.common, left.box)):
            mine = relative(_moved(other.common, right.box), left.box)
            yield StoredPiece(piece.offset, piece.stored, mine), other


def _moved(near: Box, by: Box) -> Box:
    return Box(tuple(a + b for a, b in zip(near.start, by.start, strict=True)), near.shape)


def paired_spans(
    left: Held, right: Held, box: Box, itemsize: int, bases_bytes: tuple[int, int] = (0, 0)
) -> tuple[Spans, Spans]:
    """Byte spans of `box` in both sides, whose storage begins at `bases_bytes`.

    Row i of both are the two ends of one copy; neighbours are joined.
    """
    return joined(
        pair_spans(
            (piece.stored.shape, piece.inside),
            (other.stored.shape, other.inside),
            itemsize,
            (bases_bytes[0] + piece.offset * itemsize, bases_bytes[1] + other.offset * itemsize),
        )
        for piece, other in paired_pieces(left, right, box)
    )


def joined(ends: Iterable[tuple[Spans, Spans]]) -> tuple[Spans, Spans]:
    """Both ends of many copies, one after another; what continues on both sides is one."""
    near, far = [np.zeros((0, 2), np.int64)], [np.zeros((0, 2), np.int64)]
    for left, right in ends:
        near.append(left)
        far.append(right)
    return merge_spans(np.concatenate(near), np.concatenate(far))


def region_spans(
    shape: tuple[int, ...], storage: SlicedStorage | None, region: Region, itemsize: int, base_bytes: int = 0
) -> tuple[Spans, Spans]:
    """Byte spans of `region` of a whole tensor whose storage begins at `base_bytes`, and in a row-major copy
    of the region, as `paired_spans` gives them."""
    if storage is None and isinstance(region, FlatRange):
        nbytes = region.count * itemsize
        ends = [[base_bytes + region.start * itemsize, nbytes]], [[0, nbytes]]
        near, far = (np.array(end, np.int64)[: int(nbytes > 0)] for end in ends)
        return near, far
    held = Held(Box((0,) * len(shape), shape), storage)
    blocks = [(0, region)] if isinstance(region, Box) else dense_blocks(shape, region)
    return joined(
        paired_spans(held, Held(box), box, itemsize, (base_bytes, at * itemsize))
        for at, box in blocks
        if box.numel
    )
