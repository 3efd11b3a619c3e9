"""GPS as its own process, with a real broker: seeds, serves, publishes, outlives a kill, cleans up after
SIGTERM."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from shared.bus.embedded_nats import server_binary, write_server_config
from shared.bus.nats_bus import NatsBus, connect
from shared.contracts.gps import PolicyVersion, ReadRequest, TensorBox, WriteCommit, WriteRequest
from shared.contracts.subjects import POLICY_VERSION_KEY, Subjects
from shared.errors import PivotError
from shared.layout.tensor_layout import Box, zero_range
from shared.runtime.config import RunConfig
from shared.runtime.run_folder import Endpoints, RunFolder
from shared.weights.checksum import checksum_bytes, combine
from shared.weights.gps_client import GpsClient
from shared.weights.host_pool import SHM_FOLDER, map_view

DOWN = "model.layers.0.mlp.down_proj.weight"
SHAPES = {"embed": (512, 64), "w": (64, 64), DOWN: (64, 48)}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_checkpoint(folder: Path) -> None:
    header, data = {}, b""
    for index, (name, shape) in enumerate(SHAPES.items()):
        raw = bytes([index + 1]) * (2 * int(np.prod(shape)))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def start_broker(conf: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([server_binary(), "-c", str(conf)], stderr=subprocess.DEVNULL)


@dataclass
class Running:
    """A run folder, its broker, and what is needed to start GPS in it."""

    name: str
    folder: RunFolder
    endpoints: Endpoints
    bus: NatsBus

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "services.gps", "--run", str(self.folder.path)])

    def client(self) -> GpsClient:
        return GpsClient(self.endpoints.http_url("gps"), token=self.endpoints.token, deadline_s=20)

    async def until_ready(self, process: subprocess.Popen[bytes]) -> None:
        ready_file = self.folder.processes / "gps.json"
        async with asyncio.timeout(120):
            for _ in range(12000):
                with contextlib.suppress(OSError, ValueError):
                    if json.loads(ready_file.read_text())["pid"] == process.pid:
                        return
                assert process.poll() is None, "GPS died at start"
                await asyncio.sleep(0.01)

    async def published(self) -> PolicyVersion:
        found = await self.bus.kv_get(Subjects(self.name).policy_bucket, POLICY_VERSION_KEY, PolicyVersion)
        assert found is not None
        return found[0]

    def regions(self) -> list[str]:
        return sorted(path.name for path in SHM_FOLDER.glob(f"pivotrl-{self.name}-*"))


@pytest.fixture
async def running(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    name = f"gps{uuid4().hex[:8]}"
    write_checkpoint(tmp_path / "model")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    port = free_port()
    config = RunConfig.model_validate(
        {
            "run": {"name": name, "folder": str(folder.path)},
            "models": {"policy": str(tmp_path / "model"), "genrm": str(tmp_path / "model")},
            "cluster": getattr(request, "param", {}),
        }
    )
    ports = {"gps": free_port()}
    endpoints = Endpoints(f"nats://127.0.0.1:{port}", "nats-token", "127.0.0.1", ports, "http-token")
    folder.write(config, endpoints)
    conf = write_server_config(folder.nats, host="127.0.0.1", port=port, token="nats-token")
    broker = start_broker(conf)
    bus = await connect(endpoints.nats_url, token="nats-token")
    try:
        yield Running(name, folder, endpoints, bus)
    finally:
        await bus.close()
        broker.terminate()
        broker.wait()
        for path in SHM_FOLDER.glob(f"pivotrl-{name}-*"):
            path.unlink()


async def write(client: GpsClient, version: int, value: int) -> None:
    boxes = tuple(TensorBox(tensor=n, start=(0, 0), shape=s) for n, s in SHAPES.items())
    request = WriteRequest(model="policy", version=version, writer="rank-0", writers=("rank-0",), boxes=boxes)
    grant = await client.begin_write(request)
    pool = map_view(grant.view, writable=True)
    pool.memory[:] = value
    checksums = tuple(checksum_bytes(pool.raw(name).data) for name in SHAPES)
    status = await client.commit_write(grant.write_id, WriteCommit(writer="rank-0", checksums=checksums))
    assert status.committed


async def test_process_seeds_serves_publishes_and_cleans_up(running: Running) -> None:
    process = running.start()
    try:
        await running.until_ready(process)
        assert (await running.published()).version == 0
        async with running.client() as client:
            await write(client, 1, 7)
            version = await running.published()
            assert (version.model, version.version) == ("policy", 1)
            async with client.read(ReadRequest(model="policy", receiver="test")) as grant:
                assert (map_view(grant.view).raw("w") == 7).all()
        assert len(running.regions()) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert running.regions() == []
    finally:
        process.kill()
        process.wait()


async def test_killed_process_comes_back_with_its_version(running: Running) -> None:
    process = running.start()
    try:
        await running.until_ready(process)
        async with running.client() as client:
            await write(client, 1, 1)
            await write(client, 2, 9)
            torn = WriteRequest(model="policy", version=3, writer="a", writers=("a",), boxes=())
            with pytest.raises(PivotError, match="not the model"):
                await client.begin_write(torn)
            checksum = (await client.model("policy")).checksum
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert len(running.regions()) == 3
        process = running.start()
        await running.until_ready(process)
        async with running.client() as client:
            policy = await client.model("policy")
            assert (policy.version, policy.checksum) == (2, checksum)
            async with client.read(ReadRequest(model="policy", receiver="test")) as grant:
                assert (map_view(grant.view).raw("embed") == 9).all()
            await write(client, 3, 4)
        assert (await running.published()).version == 3
        assert len(running.regions()) == 3
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    "running",
    [
        {
            "kind": "cuda",
            "devices": 2,
            "rollout_tp": 2,
            "split": {"rollout": 2, "reward": 1, "training": 1},
        }
    ],
    indirect=True,
)
async def test_layouts_of_the_run_decide_how_the_policy_is_stored(running: Running) -> None:
    process = running.start()
    try:
        await running.until_ready(process)
        truth = {name: np.arange(np.prod(shape)).astype(np.uint16) for name, shape in SHAPES.items()}
        async with running.client() as client:
            writers = ("rank-0", "rank-1")
            for rank, writer in enumerate(writers):
                parts = {name: zero_range(array.size, rank, 2) for name, array in truth.items()}
                boxes = tuple(
                    TensorBox(tensor=n, flat_start=p.start, flat_count=p.count) for n, p in parts.items()
                )
                request = WriteRequest(model="policy", version=1, writer=writer, writers=writers, boxes=boxes)
                grant = await client.begin_write(request)
                pool, checksums = map_view(grant.view, writable=True), []
                for name, part in parts.items():
                    shard = truth[name][part.start : part.start + part.count]
                    pool.copy_in(name, part, shard)
                    checksums.append(checksum_bytes(shard.tobytes()))
                commit = WriteCommit(writer=writer, checksums=tuple(checksums))
                await client.commit_write(grant.write_id, commit)
        canonical = combine((name, checksum_bytes(array.tobytes())) for name, array in truth.items())
        for is_restarted in (False, True):
            if is_restarted:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                process = running.start()
                await running.until_ready(process)
            async with running.client() as client:
                assert (await client.model("policy")).checksum == canonical
                for start in (0, 24):
                    boxes = (TensorBox(tensor=DOWN, start=(0, start), shape=(64, 24)),)
                    read = ReadRequest(model="policy", receiver=f"g{start}", min_version=1, boxes=boxes)
                    async with client.read(read) as found:
                        assert [entry.tensors for entry in found.view.sliced] == [(DOWN,)]
                        got = np.zeros((64, 24), np.uint16)
                        map_view(found.view).copy_out(DOWN, Box((0, start), (64, 24)), got)
                    assert np.array_equal(got, truth[DOWN].reshape(64, 48)[:, start : start + 24])
                async with client.read(ReadRequest(model="genrm", receiver="r")) as found:
                    assert found.view.sliced == ()
    finally:
        process.terminate()
        process.wait()


async def test_model_that_does_not_fit_stops_the_process_before_anything_is_made(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIVOTRL_GPS_BYTES", "100000")
    process = running.start()
    assert await asyncio.to_thread(process.wait, 120) == 1
    assert running.regions() == []
