"""A pool that stores tensors slice by slice gives and takes the same values as a row-major one."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.gps import PoolView, SlicedTensors
from shared.errors import InvalidRequest, LayoutError
from shared.layout.sliced_storage import SlicedStorage, slice_storage
from shared.layout.tensor_layout import Box, FlatRange, Region
from shared.weights import checksum
from shared.weights.checksum import checksum_bytes, checksum_region
from shared.weights.export import write_safetensors
from shared.weights.host_pool import HostPool, lay_out
from shared.weights.mapped_pool import MappedPool, map_view
from shared.weights.seed import load_seed, plan_seed
from shared.weights.stored_parts import paired_parts, sliced_tensors, storages_of
from tests.support.layouts import regions

SHAPE = (6, 8)
COLUMNS: list[list[Region]] = [[Box((0, c), (6, 4)) for c in (0, 4)], [FlatRange(0, 19), FlatRange(19, 29)]]


def pool_of(storage: SlicedStorage | None, shape: tuple[int, ...] = SHAPE) -> MappedPool:
    tensors, nbytes = lay_out([("a", "bfloat16", (3,)), ("w", "bfloat16", shape)])
    storages = {} if storage is None else {"w": storage}
    view = PoolView(path="", nbytes=nbytes, tensors=tensors, sliced=sliced_tensors(storages))
    return MappedPool(
        PoolView.model_validate_json(view.model_dump_json()), np.zeros(nbytes, np.uint8), writable=True
    )


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape, dtype=int)), dtype=np.uint16).reshape(shape)


@given(st.data(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_was_copied_in_by_regions_comes_out_by_other_regions(
    data: st.DataObject, is_sliced: bool
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    chosen = [data.draw(st.lists(regions(shape), max_size=3)) for _ in range(2)]
    pool = pool_of(slice_storage(shape, chosen) if is_sliced else None, shape)
    truth = numbers(shape)
    half = truth.size // 2
    for region in (FlatRange(0, half), FlatRange(half, truth.size - half)):
        pool.copy_in("w", region, truth.reshape(-1)[region.start : region.start + region.count].copy())
    region = data.draw(regions(shape))
    got = np.zeros(region.numel, np.uint16)
    pool.copy_out("w", region, got.view(np.uint8))
    if isinstance(region, FlatRange):
        expected = truth.reshape(-1)[region.start : region.start + region.count]
    else:
        expected = truth[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]
    assert np.array_equal(got, expected.reshape(-1))
    assert pool.raw("a").sum() == 0


def test_a_sliced_tensor_has_no_array_and_says_so() -> None:
    pool = pool_of(slice_storage(SHAPE, COLUMNS))
    assert pool.storage("a") is None
    assert pool.array("a").shape == (3,)
    for ask in (pool.array, pool.torch):
        with pytest.raises(LayoutError, match="w is stored in 7 slices"):
            ask("w")


def test_slices_that_are_not_the_tensor_are_refused() -> None:
    tensors, nbytes = lay_out([("w", "bfloat16", SHAPE)])
    for entry in (
        SlicedTensors(tensors=("w",), starts=((0, 0),), shapes=((6, 4),)),
        SlicedTensors(tensors=("x",), starts=((0, 0),), shapes=((6, 8),)),
    ):
        with pytest.raises(InvalidRequest, match=r"view\.sliced"):
            storages_of(PoolView(path="", nbytes=nbytes, tensors=tensors, sliced=(entry,)))


@pytest.fixture
def host() -> Iterator[HostPool]:
    pool = HostPool(run=f"sliced{uuid4().hex[:8]}", node=0, budget_bytes=1 << 20)
    yield pool
    pool.close()


def test_a_loader_map_reads_slices_as_it_reads_rows(host: HostPool) -> None:
    torch = pytest.importorskip("torch")
    from shared.weights.loader_map import LoaderMap

    class Halves(torch.nn.Module):
        """Columns of w, a row and a column of it, and its transpose: what a loader may view."""

        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("left", (6, 4)), ("right", (6, 4)), ("row", (8,)), ("turned", (8, 6))):
                self.register_parameter(
                    name, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), False)
                )

        def load_weights(self, weights):
            for _, w in weights:
                self.left.data.copy_(w[:, :4])
                self.right.data.copy_(w.narrow(1, 4, 4))
                self.row.data.copy_(w[3])
                self.turned.data.copy_(w.t())

    tensors, nbytes = lay_out([("w", "bfloat16", SHAPE)])
    region = host.create("policy", "b0", nbytes)
    storage = slice_storage(SHAPE, COLUMNS)
    assert storage is not None
    sliced = PoolView(
        path=str(region.path), nbytes=nbytes, tensors=tensors, sliced=sliced_tensors({"w": storage})
    )
    truth = torch.randn(SHAPE).to(torch.bfloat16)
    map_view(sliced, writable=True).copy_in("w", FlatRange(0, 48), truth.view(torch.int16).numpy())
    with torch.device("meta"):
        recorded = LoaderMap.record(Halves(), tensors)
    for stage in (None, lambda part: part.clone()):
        expected, got = Halves(), Halves()
        expected.load_weights([("w", truth)])
        nread = recorded.apply(map_view(sliced).tensors, dict(got.named_parameters()), stage=stage)
        assert nread == 2 * (48 + 8 + 48)
        for name, parameter in expected.named_parameters():
            assert torch.equal(parameter, dict(got.named_parameters())[name]), name


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_checksums_do_not_depend_on_how_a_tensor_is_stored(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    storage = slice_storage(shape, [data.draw(st.lists(regions(shape), max_size=3)) for _ in range(2)])
    pools = pool_of(None, shape), pool_of(storage, shape)
    for pool in pools:
        pool.copy_in("w", FlatRange(0, numbers(shape).size), numbers(shape))
    region = data.draw(regions(shape))
    found = {checksum_region(pool.raw("w"), shape, 2, region, pool.storage("w")) for pool in pools}
    assert len(found) == 1


def test_large_checksums_go_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = slice_storage(SHAPE, COLUMNS)
    pool = pool_of(storage)
    pool.copy_in("w", FlatRange(0, 48), numbers(SHAPE))
    expected = checksum_bytes(numbers(SHAPE).data)
    for chunk in (1, 20, 40, 1 << 20):
        monkeypatch.setattr(checksum, "_CHUNK_BYTES", chunk)
        assert checksum_region(pool.raw("w"), SHAPE, 2, Box((0, 0), SHAPE), storage) == expected


def test_seed_and_export_pass_through_slices(host: HostPool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    truth = {"w": torch.randn(SHAPE).to(torch.bfloat16), "a": torch.randn(3).to(torch.bfloat16)}
    save_file(truth, tmp_path / "model.safetensors")
    plan = plan_seed(tmp_path, "bfloat16")
    storage = slice_storage(SHAPE, COLUMNS)
    assert storage is not None
    region = host.create("policy", "b0", plan.nbytes)
    load_seed(plan, region.memory, {"w": storage})
    view = PoolView(
        path=str(region.path),
        nbytes=plan.nbytes,
        tensors=plan.tensors,
        sliced=sliced_tensors({"w": storage}),
    )
    assert torch.equal(map_view(view).stored("w")[:8].view(2, 4), truth["w"][:2, :4])
    write_safetensors(view, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())


def test_a_rank_writes_and_reads_flat_ranges_of_either_storage() -> None:
    torch = pytest.importorskip("torch")
    truth = torch.randn(48).to(torch.bfloat16)
    for storage in (None, slice_storage(SHAPE, COLUMNS)):
        pool = pool_of(storage)
        for start, count in ((0, 19), (19, 29)):
            pool.write_flat("w", start, truth[start : start + count])
        assert torch.equal(pool.flat("w", 0, 48), truth)
        assert torch.equal(pool.flat("w", 5, 30), truth[5:35])
        region = FlatRange(5, 30)
        found = checksum_region(pool.raw("w"), SHAPE, 2, region, pool.storage("w"))
        assert found == checksum_bytes(truth[5:35].view(torch.uint8).numpy().data)


def drawn_pool(data: st.DataObject) -> tuple[MappedPool, int]:
    """A pool whose `w` is stored for some regions, or row-major; with the number of its elements."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    storage = slice_storage(shape, [data.draw(st.lists(regions(shape), max_size=3)) for _ in range(2)])
    return pool_of(data.draw(st.sampled_from([None, storage])), shape), int(np.prod(shape))


def drawn_range(data: st.DataObject, numel: int) -> FlatRange:
    start = data.draw(st.integers(0, numel))
    return FlatRange(start, data.draw(st.integers(0, numel - start)))


@given(st.data(), st.sampled_from(["bfloat16", "float32"]))
@settings(max_examples=100, deadline=None)
def test_flat_ranges_of_a_tensor_are_what_they_are_of_its_rows(data: st.DataObject, dtype: str) -> None:
    """In the pool's dtype, and converted: then the copies are torch's, as they are to and from a device."""
    torch = pytest.importorskip("torch")
    pool, numel = drawn_pool(data)
    expected = torch.zeros(numel, dtype=torch.bfloat16)
    for value in (1, 2):
        part = drawn_range(data, numel)
        written = (value * 100 + torch.arange(part.count)).to(torch.bfloat16)
        expected[part.start : part.start + part.count] = written
        pool.write_flat("w", part.start, written.to(getattr(torch, dtype)))
    part = drawn_range(data, numel)
    guarded = torch.full((part.count + 2,), -1, dtype=getattr(torch, dtype))
    pool.read_flat("w", part.start, guarded[1:-1])
    assert torch.equal(guarded[1:-1].to(torch.bfloat16), expected[part.start : part.start + part.count])
    assert guarded[0] == guarded[-1] == -1
    assert torch.equal(pool.flat("w", part.start, part.count), guarded[1:-1].to(torch.bfloat16))
    assert pool.raw("a").sum() == 0


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_flat_range_takes_of_every_slice_contiguous_memory(data: st.DataObject) -> None:
    """So that a device needs one transfer for it."""
    pool, numel = drawn_pool(data)
    part, storage = drawn_range(data, numel), pool.storage("w")
    elements, dense = pool.raw("w").view(np.uint16), np.empty(part.count, np.uint16)
    pairs = list(paired_parts(pool.tensor("w").shape, storage, part, elements, dense))
    assert all(stored.flags.c_contiguous for stored, _ in pairs)
    assert sum(stored.size for stored, _ in pairs) == part.count


def test_a_target_that_is_not_contiguous_is_refused() -> None:
    torch = pytest.importorskip("torch")
    pool = pool_of(slice_storage(SHAPE, COLUMNS))
    with pytest.raises(RuntimeError):
        pool.read_flat("w", 0, torch.empty(SHAPE, dtype=torch.bfloat16).t())


def test_a_rank_that_reads_can_still_give_its_memory_back() -> None:
    torch = pytest.importorskip("torch")
    pool, shard = pool_of(slice_storage(SHAPE, COLUMNS)), torch.empty(48, dtype=torch.bfloat16)
    pool.read_flat("w", 0, shard)
    pool.write_flat("w", 0, shard)
    shard.untyped_storage().resize_(0)
