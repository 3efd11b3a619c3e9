"""Regions of one tensor: as disjoint boxes, cut with each other, complete or not."""

from collections.abc import Sequence

from shared.layout.tensor_layout import Box, FlatRange, Region, TensorSpec


def flat_to_boxes(shape: tuple[int, ...], start: int, count: int) -> list[Box]:
    """Row-major range as boxes, in row-major order; at most 2·ndim - 1 of them.

    >>> flat_to_boxes((4, 3), 2, 6)
    [Box(start=(0, 2), shape=(1, 1)), Box(start=(1, 0), shape=(1, 3)), Box(start=(2, 0), shape=(1, 2))]
    """
    if count <= 0:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (count,))]
    inner_shape = shape[1:]
    inner = 1
    for size in inner_shape:
        inner *= size
    row, offset = divmod(start, inner)
    boxes: list[Box] = []
    if offset:
        take = min(inner - offset, count)
        boxes += [_under(row, b) for b in flat_to_boxes(inner_shape, offset, take)]
        row, count = row + 1, count - take
    if rows := count // inner:
        boxes.append(Box((row,) + (0,) * len(inner_shape), (rows, *inner_shape)))
        row, count = row + rows, count - rows * inner
    boxes += [_under(row, b) for b in flat_to_boxes(inner_shape, 0, count)]
    return boxes


def _under(row: int, box: Box) -> Box:
    return Box((row, *box.start), (1, *box.shape))


def region_boxes(shape: tuple[int, ...], region: Region) -> list[Box]:
    """A region of a tensor of `shape` as disjoint boxes, in row-major order; none if it is empty."""
    if isinstance(region, FlatRange):
        return flat_to_boxes(shape, region.start, region.count)
    return [region] if region.numel else []


def intersect(a: Box, b: Box) -> Box | None:
    """Common elements of two boxes, or None."""
    start, shape = [], []
    for a0, an, b0, bn in zip(a.start, a.shape, b.start, b.shape, strict=True):
        lo = a0 if a0 > b0 else b0
        hi = min(a0 + an, b0 + bn)
        if hi <= lo:
            return None
        start.append(lo)
        shape.append(hi - lo)
    return Box(tuple(start), tuple(shape))


def subtract(a: Box, inside: Box) -> list[Box]:
    """`a` without `inside` (which lies in `a`) as at most 2·ndim disjoint boxes."""
    pieces: list[Box] = []
    start, shape = list(a.start), list(a.shape)
    for dim in range(len(start)):
        before = inside.start[dim] - start[dim]
        after = start[dim] + shape[dim] - inside.start[dim] - inside.shape[dim]
        if before:
            pieces.append(Box(tuple(start), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            at = inside.start[dim] + inside.shape[dim]
            pieces.append(
                Box((*start[:dim], at, *start[dim + 1 :]), (*shape[:dim], after, *shape[dim + 1 :]))
            )
        start[dim], shape[dim] = inside.start[dim], inside.shape[dim]
    return pieces


def _without(a: Box, b: Box) -> list[Box]:
    common = intersect(a, b)
    return [a] if common is None else subtract(a, common)


Cell = tuple[Box, frozenset[int]]


def disjoint_cells(shape: tuple[int, ...], regions: Sequence[Region]) -> list[Cell]:
    """Disjoint boxes that cover `regions`, each with the indices of all regions that contain it."""
    cells: list[Cell] = []
    for index, region in enumerate(regions):
        mine = frozenset((index,))
        rest = region_boxes(shape, region)
        merged: list[Cell] = []
        for box, owners in cells:
            outside = [box]
            for new in rest:
                cut: list[Box] = []
                for piece in outside:
                    common = intersect(piece, new)
                    if common is None:
                        cut.append(piece)
                    else:
                        merged.append((common, owners | mine))
                        cut += subtract(piece, common)
                outside = cut
            merged += [(piece, owners) for piece in outside]
        for box, _ in cells:
            rest = [piece for new in rest for piece in _without(new, box)]
        cells = merged + [(box, mine) for box in rest]
    return cells


def cover_problem(spec: TensorSpec, regions: Sequence[Region]) -> str | None:
    """None if `regions` have every element of `spec` exactly once, else which part is missing or doubled."""
    total = sum(region.numel for region in regions)
    if all(isinstance(region, FlatRange) for region in regions):
        at = 0
        for start, count in sorted(
            (r.start, r.count) for r in regions if isinstance(r, FlatRange) and r.count
        ):
            if start != at:
                kind = "is in two parts" if start < at else "is in no part"
                return f"{spec.name}: element {min(start, at)} {kind}"
            at = start + count
    else:
        boxes = [box for region in regions for box in region_boxes(spec.shape, region)]
        boxes.sort(key=lambda box: box.start)
        for index, a in enumerate(boxes):
            for b in boxes[index + 1 :]:
                if spec.shape and b.start[0] >= a.start[0] + a.shape[0]:
                    break
                if (common := intersect(a, b)) is not None:
                    return f"{spec.name}: the box at {common.start} of shape {common.shape} is in two parts"
    if total != spec.numel:
        return f"{spec.name}: {total} of {spec.numel} elements are in a part"
    return None
