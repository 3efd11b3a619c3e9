"""Parts of stored tensors as views, whether a tensor is stored row-major or slice by slice.

The arrays are numpy's, or torch tensors of any device, where the two sides may be on different ones: of a
flat range every part is contiguous as it is stored, so that it crosses in one transfer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shared.contracts.gps import PoolView, SlicedTensors
from shared.errors import InvalidRequest
from shared.layout.held_parts import Held, paired_pieces
from shared.layout.sliced_storage import SlicedStorage, StoredPiece, dense_blocks
from shared.layout.tensor_layout import Box, FlatRange, Region


def at(box: Box) -> tuple[slice, ...]:
    """`box` as an index."""
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))


def paired_parts(
    shape: tuple[int, ...],
    storage: SlicedStorage | None,
    region: Region,
    elements: Any,
    dense: Any,
) -> Iterator[tuple[Any, Any]]:
    """Views of equal shapes: a part of `elements` (a tensor as stored) and its place in `dense`, a row-major
    copy of `region`. Both arrays are flat."""
    if storage is None and isinstance(region, FlatRange):
        yield elements[region.start : region.start + region.count], dense
        return
    held = Held(Box((0,) * len(shape), shape), storage)
    blocks = [(0, region)] if isinstance(region, Box) else dense_blocks(shape, region)
    for first, box in blocks:
        yield from paired_views(held, elements, Held(box), dense[first : first + box.numel], box)


def paired_views(left: Held, elements: Any, right: Held, others: Any, box: Box) -> Iterator[tuple[Any, Any]]:
    """Views of equal shapes, together `box` of a tensor, which both sides hold. Both arrays are flat: the
    elements of a side's part as it stores them."""
    for piece, other in paired_pieces(left, right, box):
        yield _view(piece, elements), _view(other, others)


def _view(piece: StoredPiece, elements: Any) -> Any:
    stored = elements[piece.offset : piece.offset + piece.stored.numel].reshape(piece.stored.shape)
    return stored[(*at(piece.inside), ...)]  # also of a scalar an array, not its value


def storages_of(view: PoolView) -> dict[str, SlicedStorage]:
    """Storage of the tensors of `view` that are not row-major. Raises InvalidRequest."""
    if not view.sliced:
        return {}
    shapes = {tensor.name: tensor.shape for tensor in view.tensors}
    found = {}
    for entry in view.sliced:
        boxes = tuple(Box(a, n) for a, n in zip(entry.starts, entry.shapes, strict=True))
        try:
            storages = {shape: SlicedStorage(shape, boxes) for shape in {shapes[n] for n in entry.tensors}}
        except (KeyError, ValueError) as error:
            raise InvalidRequest("view.sliced", f"does not fit the tensors: {error}") from error
        found.update({name: storages[shapes[name]] for name in entry.tensors})
    return found


def sliced_tensors(storages: Mapping[str, SlicedStorage]) -> tuple[SlicedTensors, ...]:
    """What `storages_of` reads, for a view. Tensors with one storage object share an entry."""
    names: dict[int, list[str]] = {}
    by_id = {id(storage): storage for storage in storages.values()}
    for name, storage in storages.items():
        names.setdefault(id(storage), []).append(name)
    return tuple(
        SlicedTensors(
            tensors=tuple(found),
            starts=tuple(box.start for box in by_id[key].boxes),
            shapes=tuple(box.shape for box in by_id[key].boxes),
        )
        for key, found in names.items()
    )
