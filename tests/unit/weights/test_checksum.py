"""Checksums of regions equal those of contiguous copies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.layout.tensor_layout import Box, FlatRange
from shared.weights import checksum as module
from shared.weights.checksum import checksum_bytes, checksum_region, combine


@given(st.data())
def test_region_has_the_checksum_of_its_contiguous_copy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    numel = int(np.prod(shape, dtype=int))
    array = np.arange(numel, dtype=np.uint16).reshape(shape)
    raw = array.reshape(-1).view(np.uint8)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(start, tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))
    at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    assert checksum_region(raw, shape, 2, box) == checksum_bytes(array[at].tobytes())
    first = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - first))
    part = array.reshape(-1)[first : first + count]
    assert checksum_region(raw, shape, 2, FlatRange(first, count)) == checksum_bytes(part.tobytes())


def test_big_column_shard_is_read_in_pieces() -> None:
    array = np.random.default_rng(0).integers(0, 1 << 16, (3, 700, 500), dtype=np.uint16)
    raw = array.reshape(-1).view(np.uint8)
    original = module._CHUNK_BYTES
    try:
        for chunk in (1, 1000, 100_000, original):
            module._CHUNK_BYTES = chunk
            found = checksum_region(raw, array.shape, 2, Box((1, 10, 7), (2, 600, 333)))
            assert found == checksum_bytes(array[1:3, 10:610, 7:340].tobytes())
    finally:
        module._CHUNK_BYTES = original


def test_version_checksum_does_not_depend_on_the_order() -> None:
    assert combine([("a", "1"), ("b", "2")]) == combine([("b", "2"), ("a", "1")])
    assert combine([("a", "1"), ("b", "2")]) != combine([("a", "2"), ("b", "1")])
