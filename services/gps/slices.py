"""Boxes of tensors in regions of this node: copied, checksummed, put on the wire."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.gps.packing import Packing
from services.gps.versions import in_threads
from shared.contracts.gps_cluster import SliceBox
from shared.layout.sliced_storage import relative
from shared.layout.tensor_layout import Box
from shared.weights.checksum import checksum_bytes, checksum_region
from shared.weights.stored_parts import paired_views

Slices = Sequence[tuple[str, Box]]
"""Tensor and a box of it."""


def slice_box(item: tuple[str, Box]) -> SliceBox:
    return SliceBox(tensor=item[0], start=item[1].start, shape=item[1].shape)


def slices_key(slices: Slices) -> str:
    """Equal for equal slices: what prepared descriptor lists are found by."""
    return checksum_bytes(repr(slices).encode())


def hash_slices(packing: Packing, memory: NDArray[np.uint8], slices: Slices) -> list[str]:
    """xxh3_64 of each box in `memory`, of its values in row-major order. Blocking."""

    def one(item: tuple[str, Box]) -> str:
        tensor, box = item
        held, itemsize = packing.held(tensor), packing.specs[tensor].itemsize
        raw, near = packing.raw(memory, tensor), relative(box, held.box)
        return checksum_region(raw, held.box.shape, itemsize, near, held.storage)

    return in_threads(one, slices)


def copy_slices(
    source: Packing, memory: NDArray[np.uint8], target: Packing, into: NDArray[np.uint8], slices: Slices
) -> None:
    """Copy boxes between two regions of this node. Blocking."""
    for tensor, box in slices:
        element = f"u{source.specs[tensor].itemsize}"
        theirs, ours = source.raw(memory, tensor).view(element), target.raw(into, tensor).view(element)
        for part, place in paired_views(source.held(tensor), theirs, target.held(tensor), ours, box):
            np.copyto(place, part)
