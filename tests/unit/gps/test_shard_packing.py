"""Shards stored in slices over several nodes: whatever layouts were registered, wrote and read, every value
arrives, and what is cut alike is equal bytes."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gps.forwarding import forward
from services.gps.layouts import Usage
from services.gps.membership import first_view
from services.gps.packing import (
    Packing,
    Storages,
    group_size_for,
    models_digest,
    pack_member,
    pack_whole,
    spans_between,
)
from services.gps.refill import shard_plan
from services.gps.slices import copy_slices, hash_slices
from services.gps.versions import version_checksum
from services.gps.view_plans import split_by_place, without_repeats
from shared.layout.parallel import engine_layout
from shared.layout.regions import intersect
from shared.layout.sliced_storage import slice_layouts
from shared.layout.tensor_layout import Box, FlatRange, Region, TensorSpec, narrow, whole
from shared.weights.checksum import checksum_bytes, combine
from shared.weights.mapped_pool import MappedPool
from shared.weights.seed import SeedPlan, StoredTensor, load_seed
from tests.support.layouts import models, regions, sides

Specs = Mapping[str, TensorSpec]
DOWN, UP, NORM = "layers.0.down_proj.weight", "layers.0.up_proj.weight", "norm"
SHAPES = {DOWN: (24, 16), UP: (20, 12), NORM: (7,), "scale": ()}
SPECS = {name: TensorSpec(name, "bfloat16", 2, shape) for name, shape in SHAPES.items()}
HALVES = Usage(num_readers=2, num_writers=2).storages(list(SPECS.values()))


def truth_of(spec: TensorSpec) -> np.ndarray:
    """Bytes of the whole tensor, shape (*shape, itemsize), all rows different."""
    count = spec.nbytes
    start = sum(spec.name.encode()) * 31
    return (
        (np.arange(start, start + count, dtype=np.uint64) * 2654435761 >> np.uint64(9))
        .astype(np.uint8)
        .reshape((*spec.shape, spec.itemsize))
    )


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def row_major(spec: TensorSpec, region: Region) -> bytes:
    truth = truth_of(spec)
    if isinstance(region, FlatRange):
        return truth.reshape(-1, spec.itemsize)[region.start : region.start + region.count].tobytes()
    return truth[at(region)].tobytes()


def filled(packing: Packing, storages: Storages) -> np.ndarray:
    """What a node has, by the definition: of each slice of the whole tensor that part which it holds."""
    memory = np.zeros(packing.nbytes, np.uint8)
    for name, held in packing.boxes.items():
        boxes = storages[name].boxes if name in packing.storages else (held,)
        parts = [common for box in boxes if (common := intersect(box, held)) is not None]
        stored = b"".join(truth_of(packing.specs[name])[at(part)].tobytes() for part in parts)
        packing.raw(memory, name)[:] = np.frombuffer(stored, np.uint8)
    return memory


def moved(
    left: Packing, source: np.ndarray, right: Packing, target: np.ndarray, slices: list[tuple[str, Box]]
) -> int:
    """What a transport does; the number of its descriptors."""
    near, far = spans_between(left, right, slices)
    for (a, length), (b, same) in zip(near.tolist(), far.tolist(), strict=True):
        assert length == same
        target[b : b + length] = source[a : a + length]
    return len(near)


@st.composite
def covers(draw: st.DrawFn, specs: Specs, nodes: list[int]) -> list[tuple[int, str, Region]]:
    """Every tensor once, in parts along any dimension or flat, each with the node where its writer is."""
    found: list[tuple[int, str, Region]] = []
    for name, spec in specs.items():
        dim = draw(st.integers(-1, len(spec.shape) - 1))
        size = spec.numel if dim < 0 else spec.shape[dim]
        cuts = [0, *sorted(draw(st.sets(st.integers(1, size), max_size=3)) - {size}), size]
        for first, last in pairwise(cuts):
            part: Region = FlatRange(first, last - first)
            if dim >= 0:
                part = narrow(spec, dim, first, last - first)
            found.append((draw(st.sampled_from(nodes)), name, part))
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_writers_and_readers_meet_bit_exact_over_shards_in_slices(data: st.DataObject) -> None:
    specs = {spec.name: spec for spec in data.draw(models())}
    storages = slice_layouts([data.draw(sides(list(specs.values()), side)) for side in ("r", "w")])
    num_nodes = data.draw(st.integers(1, 5))
    groups = first_view(range(num_nodes), data.draw(st.integers(1, num_nodes))).groups
    shards = {node: pack_member(specs, storages, group, node) for group in groups for node in group}
    canonical = pack_whole(specs, storages)

    # Write: every writer's part on its own node, then hop by hop to all holders
    written = data.draw(covers(specs, sorted(shards)))
    staged = {node: np.zeros(canonical.nbytes, np.uint8) for node in shards}
    for node, name, region in written:
        mapped = MappedPool(canonical.view(""), staged[node], writable=True)
        mapped.copy_in(name, region, np.frombuffer(row_major(specs[name], region), np.uint8))
    memory = {node: np.zeros(packing.nbytes, np.uint8) for node, packing in shards.items()}
    for hop in forward(shards, groups, written):
        piece = [(hop.tensor, hop.box)]
        left, source = shards[hop.sender], memory[hop.sender]
        if hop.stage == 0:
            left, source = canonical, staged[hop.sender]
        if hop.sender == hop.receiver:
            copy_slices(left, source, shards[hop.receiver], memory[hop.receiver], piece)
        else:
            moved(left, source, shards[hop.receiver], memory[hop.receiver], piece)
        assert hash_slices(left, source, piece) == hash_slices(
            shards[hop.receiver], memory[hop.receiver], piece
        )
    for node, packing in shards.items():
        assert np.array_equal(memory[node], filled(packing, storages)), node
        checksums = ((n, checksum_bytes(row_major(specs[n], b))) for n, b in packing.boxes.items())
        assert version_checksum(packing.tensors, memory[node], packing.storages) == combine(checksums)

    # Read: what is here copied, the rest from each other member of any one group
    node = data.draw(st.sampled_from(sorted(shards)))
    target = data.draw(sides(list(specs.values()), "t"))
    parts = [(p.tensor, p.region) for p in target.placements]
    landing = np.zeros(canonical.nbytes, np.uint8)
    here, away = split_by_place(shards[node], parts)
    copy_slices(shards[node], memory[node], canonical, landing, list(without_repeats(here)))
    for sender in data.draw(st.sampled_from(groups)):
        wanted = [(name, common) for name, box in away if (common := shards[sender].common(name, box))]
        moved(shards[sender], memory[sender], canonical, landing, wanted)
    mapped = MappedPool(canonical.view(""), landing, writable=False)
    for name, region in parts:
        got = np.zeros(region.numel * specs[name].itemsize, np.uint8)
        mapped.copy_out(name, region, got)
        assert got.tobytes() == row_major(specs[name], region), (name, region)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_box_is_found_in_any_two_shards_that_have_it(data: st.DataObject) -> None:
    specs = {spec.name: spec for spec in data.draw(models())}
    storages = slice_layouts([data.draw(sides(list(specs.values()), side)) for side in ("r", "w")])
    sides_ = []
    for _ in range(2):  # as in two groups of other sizes, or a landing buffer
        group = tuple(range(data.draw(st.integers(1, 4))))
        sides_.append(pack_member(specs, storages, group, data.draw(st.sampled_from(group))))
    left, right = sides_
    name = data.draw(st.sampled_from(sorted(specs)))
    for box in [r for r in [data.draw(regions(specs[name].shape))] if isinstance(r, Box) and r.numel]:
        common = left.common(name, box)
        common = right.common(name, common) if common is not None else None
        if common is None:
            return
        got = np.zeros(right.nbytes, np.uint8)
        moved(left, filled(left, storages), right, got, [(name, common)])
        wanted = np.zeros(right.nbytes, np.uint8)
        copy_slices(left, filled(left, storages), right, wanted, [(name, common)])
        assert np.array_equal(got, wanted)
        assert hash_slices(right, got, [(name, common)]) == [checksum_bytes(row_major(specs[name], common))]


def test_columns_of_a_shard_are_one_range_there_and_in_the_landing_buffer() -> None:
    canonical = pack_whole(SPECS, HALVES)
    for node in (0, 1, 2):
        shard = pack_member(SPECS, HALVES, (0, 1, 2), node)
        for region, _ in engine_layout(list(SPECS.values()), [["a", "b"]]).by_tensor[DOWN]:
            assert isinstance(region, Box)
            common = shard.common(DOWN, region)
            assert common is not None
            near, far = spans_between(shard, canonical, [(DOWN, common)])
            assert near[:, 1].tolist() == far[:, 1].tolist() == [2 * common.numel]
        plain = pack_member(SPECS, {}, (0, 1, 2), node)
        near, _ = spans_between(plain, pack_whole(SPECS, {}), [(DOWN, common)])
        assert len(near) == common.shape[0], "row-major: a run per row"


def test_equal_shards_are_one_range_between_groups() -> None:
    left, right = (pack_member(SPECS, HALVES, group, group[1]) for group in ((0, 1), (2, 3)))
    assert left.sliced == right.sliced != ()
    near, far = spans_between(left, right, list(left.boxes.items()))
    assert near.tolist() == far.tolist()
    assert len(near) <= len(left.tensors)


def test_tensors_that_are_cut_and_placed_alike_share_a_storage() -> None:
    names = [f"layers.{layer}.down_proj.weight" for layer in range(6)]
    specs = {name: TensorSpec(name, "bfloat16", 2, (24, 16)) for name in names}
    storages = Usage(num_readers=2, num_writers=2).storages(list(specs.values()))
    shard = pack_member(specs, storages, (0, 1), 0)
    assert {entry.tensors for entry in shard.sliced} == {tuple(names[::2]), tuple(names[1::2])}, "turns"


@pytest.mark.parametrize("storages", [{}, HALVES])
def test_shard_of_a_checkpoint_is_read_into_its_slices(tmp_path, storages: Storages) -> None:  # type: ignore[no-untyped-def]
    path, data, sources = tmp_path / "x", b"", []
    for name, spec in SPECS.items():
        sources.append(StoredTensor(name, "bfloat16", spec.shape, path, len(data), spec.nbytes))
        data += truth_of(spec).tobytes()
    path.write_bytes(data)
    for node in (0, 1):
        packing = pack_member(SPECS, storages, (0, 1), node)
        plan = shard_plan(SeedPlan(tuple(sources), pack_whole(SPECS, storages).tensors, 0), packing)
        memory = np.zeros(packing.nbytes, np.uint8)
        load_seed(plan, memory, packing.storages)
        assert np.array_equal(memory, filled(packing, storages))


@pytest.mark.parametrize("group", [(0,), (0, 1), (0, 1, 2), tuple(range(9))])
def test_members_of_a_group_hold_the_model_once(group: tuple[int, ...]) -> None:
    for name, spec in SPECS.items():
        count = np.zeros(spec.shape, int)
        for node in group:
            packing = pack_member(SPECS, HALVES, group, node)
            if name in packing.boxes:
                count[at(packing.boxes[name])] += 1
        assert (count == 1).all(), name
    assert pack_member(SPECS, HALVES, (0,), 0) == pack_whole(SPECS, HALVES)


def test_group_size_is_the_smallest_that_fits() -> None:
    large = {"w": TensorSpec("w", "bfloat16", 2, (600, 64))}
    whole_bytes = pack_whole(large, {}).nbytes
    sizes = [(large, 2), (large, 1)]
    assert group_size_for(sizes, 4, 3 * whole_bytes) == 1
    assert group_size_for(sizes, 4, 3 * whole_bytes - 1) == 2
    with pytest.raises(ValueError, match="on each of 4 nodes exceeds 100 bytes"):
        group_size_for(sizes, 4, 100)


def test_digest_tells_models_and_storages_apart() -> None:
    other = {**SPECS, UP: TensorSpec(UP, "float32", 4, (20, 12))}
    mine = models_digest({"policy": SPECS}, {"policy": HALVES})
    assert mine == models_digest({"policy": dict(SPECS)}, {"policy": dict(HALVES)})
    assert mine != models_digest({"policy": other}, {"policy": HALVES})
    quarters = Usage(num_readers=4, num_writers=2).storages(list(SPECS.values()))
    for storages in ({}, quarters):
        assert mine != models_digest({"policy": SPECS}, {"policy": storages})


def test_everything_is_one_part_of_itself() -> None:
    for name, storage in HALVES.items():
        assert storage.part(whole(SPECS[name])) is storage
