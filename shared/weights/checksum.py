"""xxh3_64 checksums of parts of tensors, over the bytes of a box in row-major order.

Nothing is copied where the box is contiguous (a flat shard, whole rows); else a few rows at a time are.
"""

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.layout.sliced_storage import SlicedStorage, dense_blocks
from shared.layout.tensor_layout import Box, FlatRange, Region
from shared.weights.stored_parts import paired_parts

_CHUNK_BYTES = 4 << 20


def checksum_bytes(data: memoryview | bytes) -> str:
    """xxh3_64 of contiguous bytes, 16 hex digits. Runs without the interpreter lock."""
    return str(xxhash.xxh3_64_hexdigest(data))


def checksum_region(
    raw: NDArray[np.uint8],
    shape: tuple[int, ...],
    itemsize: int,
    region: Region,
    storage: SlicedStorage | None = None,
) -> str:
    """xxh3_64 of `region` of the tensor whose bytes are `raw`, as `checksum_bytes` of a contiguous copy
    gives; the same for the same values, whether they are stored row-major or in slices."""
    if storage is not None:
        return _checksum_sliced(raw.view(f"V{itemsize}"), shape, region, storage)
    if isinstance(region, FlatRange):
        start, stop = region.start * itemsize, (region.start + region.count) * itemsize
        return checksum_bytes(raw[start:stop].data)
    if not region.numel:
        return checksum_bytes(b"")
    # numpy only has to know the width, so the innermost dimension is counted in bytes
    at = tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
    part = raw.reshape((*shape, itemsize))[(*at, slice(None))]
    if part.flags.c_contiguous:
        return checksum_bytes(part.reshape(-1).data)
    state = xxhash.xxh3_64()
    for piece in _pieces(part):
        state.update(np.ascontiguousarray(piece).reshape(-1).data)
    return str(state.hexdigest())


def _checksum_sliced(
    elements: NDArray[np.void], shape: tuple[int, ...], region: Region, storage: SlicedStorage
) -> str:
    state = xxhash.xxh3_64()
    for _, box in dense_blocks(shape, region):
        row = box.numel // box.shape[0]
        rows = max(_CHUNK_BYTES // (row * elements.itemsize), 1)
        for first in range(0, box.shape[0], rows):
            count = min(rows, box.shape[0] - first)
            part = Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))
            dense = np.empty(part.numel, elements.dtype)
            for stored, place in paired_parts(shape, storage, part, elements, dense):
                np.copyto(place, stored)
            state.update(dense.view(np.uint8).data)
    return str(state.hexdigest())


def _pieces(part: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
    """`part` in row-major order as views of about `_CHUNK_BYTES`."""
    row_bytes = part.nbytes // part.shape[0]
    if row_bytes > _CHUNK_BYTES and part.ndim > 2:
        for row in part:
            yield from _pieces(row)
        return
    rows = max(_CHUNK_BYTES // row_bytes, 1)
    for first in range(0, part.shape[0], rows):
        yield part[first : first + rows]


def combine(named: Iterable[tuple[str, str]]) -> str:
    """Checksum of a version: over (tensor name, its checksum), whatever the order given. 16 hex digits."""
    text = "".join(f"{name}={checksum}\n" for name, checksum in sorted(named))
    return checksum_bytes(text.encode())
