"""GPS over HTTP with real shared memory: the client on one side, the app on the other, no network."""

import asyncio
import contextlib
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
from services.gps.manifest import Manifest
from services.gps.plans import Plans
from services.gps.service import GENRM, POLICY, GpsService, Seed
from services.gps.store import Store
from shared.contracts.gps import PolicyVersion, ReadRequest, TensorBox, WriteCommit, WriteRequest, WriteStatus
from shared.errors import BusError, Conflict, InvalidRequest, NotFound, PivotError, TransportError
from shared.layout.tensor_layout import FlatRange, zero_range
from shared.layout.transfer_plan import Link
from shared.runtime.http import make_app
from shared.runtime.run_folder import RunFolder
from shared.weights.checksum import checksum_bytes
from shared.weights.gps_client import GpsClient
from shared.weights.host_pool import SHM_FOLDER, HostPool, map_view

SHAPES = {"embed": (64, 32), "w": (32, 32), "norm": (32,)}
TOKEN = "secret"


def write_checkpoint(folder: Path) -> None:
    header, data = {}, b""
    for index, (name, shape) in enumerate(SHAPES.items()):
        raw = bytes([index + 1]) * (2 * int(np.prod(shape)))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


class House:
    """A GPS with both models seeded, and what it published."""

    def __init__(self, tmp_path: Path, run: str, nodes: tuple[str, ...] = ("node-0",)) -> None:
        self.run, self.tmp_path = run, tmp_path
        self.pool = HostPool(run=run, node=0, budget_bytes=1 << 24)
        ids = itertools.count()
        self.published: list[PolicyVersion] = []
        self.was_published = asyncio.Event()
        self.bus_is_up = True
        self.service = GpsService(
            Store(self.pool, new_id=lambda: f"id{next(ids)}"),
            Plans(nodes, 1 << 24, lambda _s, _r: Link(5e10, 5e-6)),
            self.publish,
            lambda: asyncio.get_running_loop().time(),
            Manifest(tmp_path / "gps.json"),
        )
        app = make_app(
            "gps",
            token=TOKEN,
            routers=[gps_router(self.service, RunFolder(tmp_path))],
            ready=self.service.waits_for,
        )
        self.transport = httpx.ASGITransport(app)
        self.client = GpsClient("http://gps", token=TOKEN, transport=self.transport, deadline_s=20)

    async def publish(self, version: PolicyVersion) -> None:
        if not self.bus_is_up:
            raise BusError("the broker is gone")
        self.published.append(version)
        self.was_published.set()

    async def seed(self) -> None:
        write_checkpoint(self.tmp_path / "model")
        folder = self.tmp_path / "model"
        await self.service.seed_all(
            [
                Seed(POLICY, folder, "bfloat16", is_frozen=False),
                Seed(GENRM, folder, "bfloat16", is_frozen=True),
            ]
        )

    async def write(
        self, version: int, value: int, world: int = 2, wait_s: float = 1.0, attempt: str = ""
    ) -> WriteStatus:
        """A whole Write by `world` ranks that hold ZeRO shards."""
        writers = tuple(f"rank-{r}" for r in range(world))

        async def one(rank: int) -> WriteStatus:
            parts = [(name, zero_range(int(np.prod(s)), rank, world)) for name, s in SHAPES.items()]
            boxes = tuple(TensorBox(tensor=n, flat_start=p.start, flat_count=p.count) for n, p in parts)
            grant = await self.client.begin_write(
                WriteRequest(
                    model=POLICY,
                    version=version,
                    writer=writers[rank],
                    writers=writers,
                    boxes=boxes,
                    wait_s=wait_s,
                    attempt=attempt,
                )
            )
            pool = map_view(grant.view, writable=True)
            checksums = []
            for name, part in parts:
                assert isinstance(part, FlatRange)
                target = pool.raw(name)[2 * part.start : 2 * (part.start + part.count)]
                target[:] = value % 256
                checksums.append(checksum_bytes(target.data))
            return await self.client.commit_write(
                grant.write_id, WriteCommit(writer=writers[rank], checksums=tuple(checksums))
            )

        return max(await asyncio.gather(*(one(r) for r in range(world))), key=lambda status: status.committed)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, f"api{uuid4().hex[:8]}")
    try:
        await made.seed()
        yield made
    finally:
        await made.client.close()
        made.pool.close()


async def test_seeded_models_are_listed_and_the_policy_is_published(house: House) -> None:
    genrm, policy = await house.client.models()
    assert (policy.model, policy.version, policy.is_frozen, policy.dtype) == (POLICY, 0, False, "bfloat16")
    assert (genrm.model, genrm.is_frozen, genrm.num_tensors) == (GENRM, True, 3)
    assert policy.checksum == genrm.checksum
    assert [v.version for v in house.published] == [0]
    assert await house.client.model(GENRM) == genrm


async def test_read_gives_the_version_and_its_bytes_and_the_lease_ends_with_the_block(house: House) -> None:
    async with house.client.read(ReadRequest(model=POLICY, receiver="rollout-0")) as grant:
        pool = map_view(grant.view)
        assert (pool.raw("w") == 2).all()
        assert (grant.version, grant.nbytes) == (0, 2 * (64 * 32 + 32 * 32 + 32))
        assert (await house.client.model(POLICY)).leases == ("rollout-0: version 0",)
    assert (await house.client.model(POLICY)).leases == ()


async def test_lease_is_released_when_the_block_fails_and_its_error_is_kept(house: House) -> None:
    with pytest.raises(ZeroDivisionError):
        async with house.client.read(ReadRequest(model=POLICY, receiver="rollout-0")):
            raise ZeroDivisionError
    assert (await house.client.model(POLICY)).leases == ()


async def test_lease_that_runs_out_inside_the_block_is_a_conflict(house: House) -> None:
    with pytest.raises(Conflict, match="may be torn"):
        async with house.client.read(ReadRequest(model=POLICY, receiver="slow", lease_s=0.01)):
            await asyncio.sleep(0.03)


async def test_write_of_two_ranks_becomes_the_readable_version(house: House) -> None:
    status = await house.write(1, 9)
    assert status.committed
    async with house.client.read(ReadRequest(model=POLICY, receiver="rollout-0", min_version=1)) as grant:
        assert (map_view(grant.view).raw("embed") == 9).all()
    assert [v.version for v in house.published] == [0, 1]
    assert (await house.client.write_status(status.write_id)).committed


async def test_read_of_a_coming_version_waits_for_its_commit(house: House) -> None:
    async def read() -> int:
        request = ReadRequest(model=POLICY, receiver="rollout-0", min_version=1, wait_s=10)
        async with house.client.read(request) as grant:
            return grant.version

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    assert not reading.done()
    await house.write(1, 1)
    assert await reading == 1
    with pytest.raises(Conflict, match="version 2 was asked for"):
        async with house.client.read(ReadRequest(model=POLICY, receiver="r", min_version=2, wait_s=0.02)):
            pass


async def test_write_waits_for_readers_of_the_spare_and_names_them_if_they_stay(house: House) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(house.client.read(ReadRequest(model=POLICY, receiver="rollout-7")))
        await house.write(1, 1)
        with pytest.raises(Conflict, match="rollout-7") as caught:
            await house.write(2, 2, wait_s=0.05)
        assert caught.value.data["holders"] == ["rollout-7"]
        writing = asyncio.create_task(house.write(2, 2, wait_s=10))
        await asyncio.sleep(0.02)
        assert not writing.done()
    assert (await writing).committed


async def test_write_goes_on_when_a_forgotten_lease_runs_out(house: House) -> None:
    grant_of = house.client.read(ReadRequest(model=POLICY, receiver="dead", lease_s=0.1))
    await grant_of.__aenter__()
    await house.write(1, 1)
    assert (await house.write(2, 2, wait_s=5)).committed


async def test_what_the_bus_did_not_take_is_published_later(house: House) -> None:
    house.bus_is_up = False
    assert (await house.write(1, 1)).committed
    assert (await house.write(2, 2)).committed
    house.bus_is_up = True
    retrying = asyncio.create_task(house.service.publish_for_ever())
    try:
        house.was_published.clear()
        await asyncio.wait_for(house.was_published.wait(), 5)
    finally:
        retrying.cancel()
    assert [v.version for v in house.published] == [0, 2]


async def test_plans_are_cached_and_explained(house: House) -> None:
    boxes = (
        TensorBox(tensor="w", start=(0, 0), shape=(16, 32)),
        TensorBox(tensor="norm", start=(0,), shape=(32,)),
    )
    ids = []
    for _ in range(2):
        async with house.client.read(ReadRequest(model=POLICY, receiver="rollout-0", boxes=boxes)) as grant:
            ids.append(grant.plan_id)
            assert grant.nbytes == 2 * (16 * 32 + 32)
    assert ids[0] == ids[1]
    async with httpx.AsyncClient(base_url="http://gps", transport=house.transport) as plain:
        (summary,) = (await plain.get("/v1/transfer-plans")).json()
        plan = (await plain.get(f"/v1/transfer-plans/{ids[0]}")).json()
        missing = await plain.get("/v1/transfer-plans/nope")
    assert summary["total_bytes"] == 2 * (16 * 32 + 32)
    assert plan["links"] == [{"sender": "node-0", "receiver": "rollout-0", "nbytes": summary["total_bytes"]}]
    assert missing.status_code == 404
    assert house.service.plans.cache.num_hits == 1


async def status_of(
    house: House, method: str, path: str, body: object = None
) -> tuple[int, dict[str, object]]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url="http://gps", transport=house.transport, headers=headers) as plain:
        response = await plain.request(method, path, json=body)
        return response.status_code, response.json()


READ = {"model": POLICY, "receiver": "r"}
WRITE = {"model": POLICY, "version": 1, "writer": "a", "writers": ["a"], "boxes": []}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "part"),
    [
        ("GET", "/v1/models/nope", None, 404, "no model 'nope'"),
        ("POST", "/v1/read", {**READ, "model": "nope"}, 404, "no model 'nope'"),
        ("POST", "/v1/read", {**READ, "min_version": 4}, 409, "version 0, version 4"),
        ("POST", "/v1/read", {**READ, "lease_s": -1}, 400, "lease_s"),
        ("POST", "/v1/read", {**READ, "boxes": [{"tensor": "x"}]}, 400, "boxes[0].tensor"),
        (
            "POST",
            "/v1/read",
            {**READ, "boxes": [{"tensor": "norm", "start": [30], "shape": [3]}]},
            400,
            "boxes[0]",
        ),
        ("POST", "/v1/read", {"model": POLICY}, 422, "receiver"),
        ("DELETE", "/v1/read/nope", None, 404, "no lease nope"),
        ("POST", "/v1/writes", {**WRITE, "version": 0}, 409, "not newer than version 0"),
        ("POST", "/v1/writes", {**WRITE, "model": GENRM}, 409, "frozen"),
        ("POST", "/v1/writes", {**WRITE, "writer": "b"}, 400, "writer"),
        ("POST", "/v1/writes", WRITE, 400, "are not the model"),
        ("GET", "/v1/writes/nope", None, 404, "no Write nope"),
        ("POST", "/v1/writes/nope/commit", {"writer": "a", "checksums": []}, 404, "no Write nope"),
        ("DELETE", "/v1/writes/nope", None, 404, "no Write nope"),
    ],
)
async def test_bad_call_gets_its_status_and_names_what_was_wrong(
    house: House, method: str, path: str, body: object, status: int, part: str
) -> None:
    found, answer = await status_of(house, method, path, body)
    assert found == status
    assert part in str(answer["message"])


async def test_mutating_calls_need_the_token(house: House) -> None:
    stranger = GpsClient("http://gps", token="wrong", transport=house.transport)
    assert len(await stranger.models()) == 2
    with pytest.raises(PivotError, match="bearer token"):
        async with stranger.read(ReadRequest(model=POLICY, receiver="r")):
            pass
    await stranger.close()


async def test_abandoned_write_leaves_the_version(house: House) -> None:
    request = WriteRequest(model=POLICY, version=1, writer="a", writers=("a", "b"), boxes=())
    grant = await house.client.begin_write(request)
    open_write = (await house.client.model(POLICY)).open_write
    assert open_write is not None
    assert open_write.pending_writers == ("a", "b")
    await house.client.abandon_write(grant.write_id)
    assert (await house.client.model(POLICY)).open_write is None
    with pytest.raises(NotFound):
        await house.client.commit_write(grant.write_id, WriteCommit(writer="a", checksums=()))
    assert (await house.write(1, 1)).committed


async def test_wrong_checksum_is_refused_by_name(house: House) -> None:
    boxes = tuple(TensorBox(tensor=n, start=(0,) * len(s), shape=s) for n, s in SHAPES.items())
    request = WriteRequest(model=POLICY, version=1, writer="a", writers=("a",), boxes=boxes)
    grant = await house.client.begin_write(request)
    with pytest.raises(InvalidRequest, match=r"checksums\[0\]: embed"):
        await house.client.commit_write(grant.write_id, WriteCommit(writer="a", checksums=("0", "0", "0")))
    assert (await house.client.model(POLICY)).version == 0


async def test_restarted_gps_finds_its_version_in_the_pool(house: House) -> None:
    await house.write(5, 42)
    # what a killed process leaves: its files, unlocked; its manifest
    regions = list(house.pool._regions.values())
    for region in regions:
        os.close(region.lock_fd)
        region.memory = np.empty(0, np.uint8)
    house.pool._regions.clear()
    again = House(house.tmp_path, house.run)
    try:
        await again.seed()
        policy = await again.client.model(POLICY)
        assert (policy.version, policy.checksum) == (5, house.published[-1].checksum)
        async with again.client.read(ReadRequest(model=POLICY, receiver="r")) as grant:
            assert (map_view(grant.view).raw("w") == 42).all()
        assert (await again.write(6, 1)).committed
        assert [v.version for v in again.published] == [5, 6]
    finally:
        await again.client.close()
        again.pool.close()
        for region in regions:
            region.path.unlink(missing_ok=True)


async def test_damaged_pool_is_seeded_again(house: House) -> None:
    await house.write(5, 42)
    for region in house.pool._regions.values():
        region.memory[100] ^= 1
        os.close(region.lock_fd)
        region.memory = np.empty(0, np.uint8)
    house.pool._regions.clear()
    again = House(house.tmp_path, house.run)
    try:
        await again.seed()
        assert (await again.client.model(POLICY)).version == 0
    finally:
        await again.client.close()
        again.pool.close()
        for path in SHM_FOLDER.glob(f"pivotrl-{house.run}-*"):
            path.unlink()


async def test_unreachable_gps_is_a_transport_error() -> None:
    async with GpsClient("http://127.0.0.1:9", name="rollout-0") as client:
        with pytest.raises(TransportError, match="cannot be reached"):
            await client.models()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_two_hundred_cycles_grow_neither_shared_memory_nor_the_process(house: House) -> None:
    def files() -> list[str]:
        return sorted(p.name for p in SHM_FOLDER.glob(f"pivotrl-{house.run}-*"))

    async def cycle(version: int) -> None:
        await house.write(version, version)
        async with house.client.read(ReadRequest(model=POLICY, receiver="r", min_version=version)) as grant:
            assert (map_view(grant.view).memory[:64] == version % 256).all()

    for version in range(1, 41):
        await cycle(version)
    shm, rss, descriptors = files(), resident_bytes(), len(os.listdir("/proc/self/fd"))
    for version in range(41, 241):
        await cycle(version)
    assert files() == shm
    assert house.pool.used_bytes == 3 * house.service.store.model(POLICY).nbytes
    assert resident_bytes() - rss < 8 << 20
    assert abs(len(os.listdir("/proc/self/fd")) - descriptors) <= 4


async def test_gauges_tell_what_happened(house: House) -> None:
    await house.write(1, 1)
    gauges = house.service.gauges()
    assert gauges["policy_version"] == 1
    assert gauges["commits_total"] == 1
    assert gauges["open_writes"] == 0
