"""Stored slice by slice: every element has one place, every slice one range, and spans find them again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.layout.held_parts import region_spans
from shared.layout.refine import refine
from shared.layout.sliced_storage import (
    SlicedStorage,
    dense_blocks,
    slice_layouts,
    slice_storage,
)
from shared.layout.spans import Spans
from shared.layout.tensor_layout import Box, FlatRange, Region, TensorSpec, narrow, whole, zero_range
from tests.support.layouts import models, regions, sides

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
BY_COLUMNS = [[Box((0, 0), (4, 3)), Box((0, 3), (4, 3))], [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]]


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def stored(storage: SlicedStorage | None, truth: np.ndarray) -> np.ndarray:
    """The elements in storage order, by the definition: slice after slice, each row-major."""
    if storage is None:
        return truth.reshape(-1)
    return np.concatenate([truth[slices_of(box)].reshape(-1) for box in storage.boxes])


def dense(shape: tuple[int, ...], region: Region, truth: np.ndarray) -> np.ndarray:
    if isinstance(region, FlatRange):
        return truth.reshape(-1)[region.start : region.start + region.count]
    return truth[slices_of(region)].reshape(-1)


def copied(spans: tuple[Spans, Spans], source: np.ndarray, num_elements: int) -> np.ndarray:
    """`source` bytes copied by spans into a buffer that began as 255s."""
    target = np.full(num_elements * 4, 255, np.uint8)
    raw = source.view(np.uint8)
    for (near, length), (far, _) in zip(spans[0].tolist(), spans[1].tolist(), strict=True):
        target[far : far + length] = raw[near : near + length]
    return target.view(np.int32)


def test_the_example_of_the_module() -> None:
    storage = slice_storage((4, 6), BY_COLUMNS)
    assert storage is not None
    places = np.empty((4, 6), int)
    places[:] = -1
    for index, element in enumerate(stored(storage, np.arange(24).reshape(4, 6)).tolist()):
        places.reshape(-1)[element] = index
    assert places.tolist() == [
        [0, 1, 2, 12, 13, 14],
        [3, 4, 5, 15, 16, 17],
        [6, 7, 8, 18, 19, 20],
        [9, 10, 11, 21, 22, 23],
    ]
    for rank, box in enumerate(BY_COLUMNS[0]):
        near, far = region_spans((4, 6), storage, box, 2)
        assert near.tolist() == [[24 * rank, 24]]
        assert far.tolist() == [[0, 24]]
    near, far = region_spans((4, 6), None, BY_COLUMNS[0][1], 2)
    assert near.tolist() == [[6, 6], [18, 6], [30, 6], [42, 6]]


def test_rows_and_flat_ranges_need_no_slices() -> None:
    rows = [[narrow(TensorSpec("w", "float32", 4, (8, 3)), 0, r, 2) for r in range(0, 8, 2)]]
    assert slice_storage((8, 3), rows) is None
    assert slice_storage((8, 3), [[zero_range(24, r, 3) for r in range(3)]]) is None
    assert slice_storage((9,), [[FlatRange(0, 4), FlatRange(4, 5)]]) is None
    assert slice_storage((), [[Box((), ())]]) is None
    assert slice_storage((4, 6), []) is None


@given(st.data(), shapes)
@settings(max_examples=200, deadline=None)
def test_spans_of_any_region_find_its_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    chosen = [data.draw(st.lists(regions(shape), max_size=3)) for _ in range(data.draw(st.integers(0, 3)))]
    storage = slice_storage(shape, chosen)
    truth = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int32).reshape(shape)
    region = data.draw(regions(shape))
    spans = region_spans(shape, storage, region, 4)
    got = copied(spans, stored(storage, truth), region.numel)
    assert np.array_equal(got, dense(shape, region, truth))
    shifted = region_spans(shape, storage, region, 4, base_bytes=96)
    assert (shifted[0] - spans[0] == [96, 0]).all()
    assert int(spans[1][:, 1].sum()) == region.numel * 4
    blocks = list(dense_blocks(shape, region))
    assert [at for at, _ in blocks] == np.cumsum([0, *(box.numel for _, box in blocks)]).tolist()[
        : len(blocks)
    ]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_atomic_slice_of_registered_layouts_is_one_range(data: st.DataObject) -> None:
    specs = data.draw(models())
    source, target = data.draw(sides(specs, "s")), data.draw(sides(specs, "t"))
    storages = slice_layouts([source, target])
    for piece in refine(source, target):
        item = target.tensors[piece.tensor]
        near, far = region_spans(item.shape, storages.get(piece.tensor), piece.box, item.itemsize)
        assert len(near) == len(far) == 1, piece
        assert near[0, 1] == piece.nbytes
    for name, storage in storages.items():
        boxes = storage.boxes
        assert sum(box.numel for box in boxes) == source.tensors[name].numel
        pieces = storage.pieces_of(whole(source.tensors[name]))
        assert len(pieces) <= len(boxes)
        assert sum(piece.stored.numel for piece in pieces) == source.tensors[name].numel
