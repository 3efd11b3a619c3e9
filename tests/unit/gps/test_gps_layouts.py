"""Storage in slices, from a run's layouts to what a client sees over HTTP: values and checksums are those of
row-major storage, only the places differ."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import numpy as np
import pytest

from services.gps.api import gps_router
from services.gps.layouts import UNCUT, Usage, genrm_usage, policy_usage
from services.gps.manifest import Manifest
from services.gps.plans import Plans
from services.gps.service import GENRM, POLICY, GpsService, Seed
from services.gps.store import Store
from services.gps.versions import Seal, Verification, version_checksum
from shared.contracts.gps import PoolView, ReadRequest, TensorBox, WriteCommit, WriteRequest
from shared.errors import InvalidRequest, LayoutError
from shared.layout.held_parts import region_spans
from shared.layout.parallel import engine_layout
from shared.layout.tensor_layout import Box, FlatRange, TensorSpec, zero_range
from shared.layout.transfer_plan import Link
from shared.runtime.config import RunConfig
from shared.runtime.http import make_app
from shared.runtime.run_folder import RunFolder
from shared.weights.checksum import checksum_bytes, combine
from shared.weights.gps_client import GpsClient
from shared.weights.host_pool import SHM_FOLDER, HostPool, lay_out, map_view
from shared.weights.mapped_pool import MappedPool

DOWN, OUT = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (14, 12),
    "model.layers.0.mlp.up_proj.weight": (20, 12),
    DOWN: (12, 20),
    OUT: (9, 14),  # two ranks' halves of it meet in the middle of a row
    "model.layers.0.self_attn.o_proj.bias": (9,),
    "model.norm.weight": (12,),
}
SPECS = [TensorSpec(name, "bfloat16", 2, shape) for name, shape in SHAPES.items()]
HALVES, QUARTERS = Usage(num_readers=2, num_writers=2), Usage(num_readers=4, num_writers=3)


def values(version: int) -> dict[str, np.ndarray]:
    """Of every tensor, as 16 bits that are all different inside a tensor."""
    return {
        name: (np.arange(np.prod(shape)) + 1000 * version + 7 * index).astype(np.uint16).reshape(shape)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def canonical_checksum(truth: dict[str, np.ndarray]) -> str:
    return combine((name, checksum_bytes(array.tobytes())) for name, array in truth.items())


def write_checkpoint(folder: Path, truth: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in truth.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": array.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def found_in(pool: MappedPool) -> dict[str, np.ndarray]:
    """Every tensor of a pool, copied out whole."""
    found = {}
    for name, shape in SHAPES.items():
        found[name] = np.zeros(shape, np.uint16)
        pool.copy_out(name, Box((0,) * len(shape), shape), found[name])
    return found


def assert_holds(pool: MappedPool, version: int) -> None:
    for name, array in values(version).items():
        assert np.array_equal(found_in(pool)[name], array), name


class House:
    """A GPS whose policy is read and written as `usage` says, over HTTP without a network."""

    def __init__(self, folder: Path, run: str, usage: Usage) -> None:
        self.folder, self.run, self.usage = folder, run, usage
        self.pool = HostPool(run=run, node=0, budget_bytes=1 << 22)
        ids = itertools.count()
        self.service = GpsService(
            Store(self.pool, new_id=lambda: f"id{next(ids)}"),
            Plans(("node-0",), 1 << 22, lambda _s, _r: Link(5e10, 5e-6)),
            self._publish,
            lambda: asyncio.get_running_loop().time(),
            Manifest(folder / "gps.json"),
        )
        router = gps_router(self.service, RunFolder(folder))
        app = make_app("gps", token="t", routers=[router], ready=self.service.waits_for)
        self.transport = httpx.ASGITransport(app)
        self.client = GpsClient("http://gps", token="t", transport=self.transport, deadline_s=20)

    async def _publish(self, _: object) -> None:
        return None

    async def seed(self) -> None:
        write_checkpoint(self.folder / "model", values(0))
        folder = self.folder / "model"
        await self.service.seed_all(
            [
                Seed(POLICY, folder, "bfloat16", is_frozen=False, usage=self.usage),
                Seed(GENRM, folder, "bfloat16", is_frozen=True),
            ]
        )

    async def write(self, version: int, world: int = 2) -> None:
        """As `world` training ranks do, each its flat shard of every tensor."""
        truth, writers = values(version), tuple(f"rank-{rank}" for rank in range(world))
        for rank, writer in enumerate(writers):
            parts = [(name, zero_range(array.size, rank, world)) for name, array in truth.items()]
            boxes = tuple(TensorBox(tensor=n, flat_start=p.start, flat_count=p.count) for n, p in parts)
            grant = await self.client.begin_write(
                WriteRequest(model=POLICY, version=version, writer=writer, writers=writers, boxes=boxes)
            )
            pool, checksums = map_view(grant.view, writable=True), []
            for name, part in parts:
                shard = truth[name].reshape(-1)[part.start : part.start + part.count].copy()
                pool.copy_in(name, part, shard)
                checksums.append(checksum_bytes(shard.tobytes()))
            commit = WriteCommit(writer=writer, checksums=tuple(checksums))
            status = await self.client.commit_write(grant.write_id, commit)
        assert status.committed

    def die(self) -> None:
        """What a killed process leaves: its files, unlocked, and its manifest."""
        for region in self.pool._regions.values():
            os.close(region.lock_fd)
            region.memory = np.empty(0, np.uint8)
        self.pool._regions.clear()

    async def view(self) -> PoolView:
        async with self.client.read(ReadRequest(model=POLICY, receiver="r")) as grant:
            return grant.view


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, f"cut{uuid4().hex[:8]}", HALVES)
    try:
        await made.seed()
        yield made
    finally:
        await made.client.close()
        made.pool.close()
        for path in SHM_FOLDER.glob(f"pivotrl-{made.run}-*"):
            path.unlink()


async def restarted(house: House, usage: Usage) -> House:
    house.die()
    again = House(house.folder, house.run, usage)
    await again.seed()
    return again


def test_only_what_some_reader_takes_by_columns_is_stored_in_slices() -> None:
    assert set(HALVES.storages(SPECS)) == {DOWN, OUT}
    assert set(QUARTERS.storages(SPECS)) == {DOWN}, "14 columns are no four equal parts"
    assert set(Usage(num_readers=2).storages(SPECS)) == {DOWN, OUT}
    for uncut in (UNCUT, Usage(num_writers=3)):
        assert uncut.storages(SPECS) == {}


def test_a_reader_of_columns_takes_one_range() -> None:
    storages = HALVES.storages(SPECS)
    target = engine_layout(SPECS, [["a", "b"]])
    for name in (DOWN, OUT):
        for region, _ in target.by_tensor[name]:
            near, _ = region_spans(SHAPES[name], storages[name], region, 2)
            ends = near[:, 0] + near[:, 1]
            assert np.array_equal(np.sort(near[:, 0])[1:], np.sort(ends)[:-1]), name
            assert near[:, 1].sum() == 2 * region.numel


def test_a_run_says_who_reads_and_writes() -> None:
    cluster: dict[str, object] = {"kind": "cuda", "devices": 8, "rollout_tp": 2, "reward_tp": 4}
    cluster["split"] = {"rollout": 2, "reward": 4, "training": 2}
    models = {"policy": "p", "genrm": "g"}
    run = RunConfig.model_validate({"models": models, "cluster": cluster})
    assert (policy_usage(run), genrm_usage(run)) == (Usage(2, 2), Usage(4, 0))
    cluster["split"] = {"rollout": 2, "reward": 4}
    whole = RunConfig.model_validate({"models": models, "cluster": cluster})
    assert policy_usage(whole) == Usage(2, 8)
    demo = RunConfig.model_validate({"models": models})
    assert policy_usage(demo).storages(SPECS) == genrm_usage(demo).storages(SPECS) == {}


def test_the_store_checks_and_seals_what_is_stored_in_slices() -> None:
    pool = HostPool(run=f"cut{uuid4().hex[:8]}", node=0, budget_bytes=1 << 22)
    try:
        store, storages = Store(pool, new_id=lambda: "id"), HALVES.storages(SPECS)
        tensors, nbytes = lay_out([(spec.name, spec.dtype, spec.shape) for spec in SPECS])
        region = store.add_model(POLICY, tensors, nbytes, is_frozen=False, storages=storages)
        store.publish_seed(POLICY, 0, version_checksum(tensors, region.memory, storages))
        truth = values(1)
        # one box has a tensor as a whole, by rows; the others are cut by columns
        boxes = [(name, Box((0,) * a.ndim, a.shape)) for name, a in truth.items() if name != DOWN]
        boxes += [(DOWN, Box((0, 0), (12, 7))), (DOWN, Box((0, 7), (12, 13)))]
        wire = tuple(TensorBox(tensor=name, start=box.start, shape=box.shape) for name, box in boxes)
        request = WriteRequest(model=POLICY, version=1, writer="a", writers=("a",), boxes=wire)
        grant = store.begin_write(request, 0.0)
        mapped, checksums = map_view(grant.view, writable=True), []
        for name, box in boxes:
            at = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            part = np.ascontiguousarray(truth[name][at])
            mapped.copy_in(name, box, part)
            checksums.append(checksum_bytes(part.tobytes()))
        commit = WriteCommit(writer="a", checksums=tuple(checksums))
        done = store.start_commit(grant.write_id, commit)
        assert isinstance(done, Verification)
        assert done.problem() is None
        mapped.raw(DOWN)[0] ^= 1
        problem = done.problem()
        assert problem is not None
        assert problem[0] == len(boxes) - 2, "element 0 is in the first box of columns"
        mapped.raw(DOWN)[0] ^= 1
        seal = store.finish_commit(done, None)
        assert isinstance(seal, Seal)
        assert (OUT in seal.known, DOWN in seal.known) == (True, False)
        store.finish_seal(seal, seal.checksum())
        assert store.status(POLICY, 0.0).checksum == canonical_checksum(truth)
    finally:
        pool.close()


async def test_a_seed_in_slices_is_the_same_version(house: House) -> None:
    policy, genrm = await house.client.model(POLICY), await house.client.model(GENRM)
    assert policy.checksum == genrm.checksum == canonical_checksum(values(0))
    view = await house.view()
    assert {name for entry in view.sliced for name in entry.tensors} == {DOWN, OUT}
    async with house.client.read(ReadRequest(model=GENRM, receiver="r")) as grant:
        assert grant.view.sliced == ()
    pool = map_view(view)
    assert_holds(pool, 0)
    with pytest.raises(LayoutError, match="slices"):
        pool.array(DOWN)


async def test_what_ranks_wrote_by_flat_shards_is_read_by_columns(house: House) -> None:
    for version, world in ((1, 2), (2, 3)):  # as registered; and by ranks that nobody registered
        await house.write(version, world)
        truth = values(version)
        assert (await house.client.model(POLICY)).checksum == canonical_checksum(truth)
        for name, pattern in engine_layout(SPECS, [["g0", "g1"]]).by_tensor.items():
            for region, receiver in pattern:
                assert isinstance(region, Box)
                boxes = (TensorBox(tensor=name, start=region.start, shape=region.shape),)
                request = ReadRequest(model=POLICY, receiver=receiver, min_version=version, boxes=boxes)
                async with house.client.read(request) as grant:
                    assert grant.nbytes == 2 * region.numel
                    got = np.zeros(region.shape, np.uint16)
                    map_view(grant.view).copy_out(name, region, got)
                at = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
                assert np.array_equal(got, truth[name][at]), (name, receiver)


async def test_a_shard_that_was_not_copied_is_refused(house: House) -> None:
    boxes = tuple(
        TensorBox(tensor=n, flat_start=0, flat_count=int(np.prod(shape))) for n, shape in SHAPES.items()
    )
    request = WriteRequest(model=POLICY, version=1, writer="a", writers=("a",), boxes=boxes)
    grant = await house.client.begin_write(request)
    pool, truth = map_view(grant.view, writable=True), values(1)
    for name, array in truth.items():
        if name != DOWN:
            pool.copy_in(name, FlatRange(0, array.size), array)
    commit = WriteCommit(writer="a", checksums=tuple(checksum_bytes(a.tobytes()) for a in truth.values()))
    with pytest.raises(InvalidRequest, match=r"checksums\[2\]: .*down_proj"):
        await house.client.commit_write(grant.write_id, commit)
    assert_holds(map_view(await house.view()), 0)


async def test_a_version_is_loaded_from_a_folder_into_slices(house: House) -> None:
    write_checkpoint(house.folder / "export", values(4))
    headers = {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(transport=house.transport, base_url="http://gps", headers=headers) as http:
        reply = await http.post(f"/v1/models/{POLICY}/load", json={"path": "export"})
    assert reply.json()["committed"], reply.text
    assert (await house.client.model(POLICY)).checksum == canonical_checksum(values(4))
    assert_holds(map_view(await house.view()), 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [(HALVES, HALVES), (HALVES, QUARTERS), (QUARTERS, HALVES), (HALVES, UNCUT), (UNCUT, HALVES)],
)
async def test_a_restarted_gps_keeps_its_version_whatever_the_layouts_now_are(
    tmp_path: Path, before: Usage, after: Usage
) -> None:
    run = f"cut{uuid4().hex[:8]}"
    house = again = House(tmp_path, run, before)
    try:
        await house.seed()
        await house.write(5)
        entry = Manifest(tmp_path / "gps.json").entry(POLICY)
        assert entry is not None
        assert entry.sliced == (await house.view()).sliced
        again = await restarted(house, after)
        policy = await again.client.model(POLICY)
        assert (policy.version, policy.checksum) == (5, canonical_checksum(values(5)))
        view = await again.view()
        assert view.path == entry.path
        assert {n for e in view.sliced for n in e.tensors} == set(after.storages(SPECS))
        assert_holds(map_view(view), 5)
        kept = Manifest(tmp_path / "gps.json").entry(POLICY)
        assert kept is not None
        assert kept.sliced == view.sliced
        for version in (6, 7):  # both buffers are written once
            await again.write(version)
            assert_holds(map_view(await again.view()), version)
    finally:
        await house.client.close()
        await again.client.close()
        again.pool.close()
        for path in SHM_FOLDER.glob(f"pivotrl-{run}-*"):
            path.unlink()


async def test_a_manifest_from_before_slices_is_of_a_row_major_region(tmp_path: Path) -> None:
    run = f"cut{uuid4().hex[:8]}"
    house = again = House(tmp_path, run, UNCUT)
    try:
        await house.seed()
        await house.write(3)
        path = tmp_path / "gps.json"
        file = json.loads(path.read_text())
        for entry in file["entries"]:
            del entry["sliced"]
        path.write_text(json.dumps(file))
        again = await restarted(house, HALVES)
        assert (await again.client.model(POLICY)).version == 3
        assert_holds(map_view(await again.view()), 3)
    finally:
        await house.client.close()
        await again.client.close()
        again.pool.close()
        for file in SHM_FOLDER.glob(f"pivotrl-{run}-*"):
            file.unlink()


@pytest.mark.parametrize("damage", ["a byte", "slices that are not the tensors"])
async def test_a_damaged_region_in_slices_is_seeded_again(house: House, damage: str) -> None:
    await house.write(5)
    if damage == "a byte":
        entry = next(t for t in house.service.store.model(POLICY).tensors if t.name == DOWN)
        house.service.store.model(POLICY).readable.region.memory[entry.offset_bytes + 3] ^= 1
    else:
        path = house.folder / "gps.json"
        file = json.loads(path.read_text())
        for found in file["entries"]:
            for cut in found["sliced"]:
                cut["starts"], cut["shapes"] = cut["starts"][:1], cut["shapes"][:1]
        path.write_text(json.dumps(file))
    again = await restarted(house, HALVES)
    try:
        policy = await again.client.model(POLICY)
        assert (policy.version, policy.checksum) == (0, canonical_checksum(values(0)))
        assert_holds(map_view(await again.view()), 0)
    finally:
        await again.client.close()
        again.pool.close()
