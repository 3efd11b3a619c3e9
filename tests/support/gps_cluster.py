"""A cluster of real GPS processes, each in its own network namespace, with a broker between them."""

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np

from shared.bus.embedded_nats import server_binary, write_server_config
from shared.contracts.gps import (
    ModelStatus,
    NodesStatus,
    ReadRequest,
    TensorBox,
    WriteCommit,
    WriteGrant,
    WriteRequest,
)
from shared.errors import PivotError
from shared.layout.tensor_layout import Box, FlatRange, Region, zero_range
from shared.runtime.config import RunConfig
from shared.runtime.run_folder import Endpoints, RunFolder
from shared.weights.checksum import checksum_bytes
from shared.weights.gps_client import GpsClient
from shared.weights.host_pool import SHM_FOLDER, map_view
from shared.weights.mapped_pool import MappedPool
from tests.support.network import Network, network

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (2039, 192),
    "layers.0.down_proj.weight": (768, 192),
    "norm": (192,),
}
MODEL_BYTES = sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
TOKEN, PORT, NATS_PORT = "http-token", 8602, 4222


def replicas_of(devices: int) -> dict[str, Any]:
    """The `cluster` section of a run whose replicas of so many devices read both models by columns, and whose
    four ranks write the policy."""
    split = dict.fromkeys(("rollout", "reward", "training"), devices)
    return {"kind": "cuda", "devices": 4, "rollout_tp": devices, "reward_tp": devices, "split": split}


HALVES = replicas_of(2)


@functools.lru_cache(maxsize=64)
def values(name: str, version: int) -> np.ndarray:
    """Bytes of a tensor of a version, shape (*shape, 2): different at every element and in every version."""
    count = 2 * int(np.prod(SHAPES[name]))
    start = sorted(SHAPES).index(name) * 7919 + version * 104729
    raw = (np.arange(start, start + count, dtype=np.uint64) * 2654435761 >> np.uint64(7)).astype(np.uint8)
    return raw.reshape((*SHAPES[name], 2))


def write_checkpoint(folder: Path, version: int = 0) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, shape in SHAPES.items():
        raw = values(name, version).tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def box(name: str, region: Region) -> TensorBox:
    if isinstance(region, FlatRange):
        return TensorBox(tensor=name, flat_start=region.start, flat_count=region.count)
    return TensorBox(tensor=name, start=region.start, shape=region.shape)


def columns(part: int, parts: int) -> tuple[TensorBox, ...]:
    """Tensor parallel by columns: a part of every row."""
    found = []
    for name, shape in SHAPES.items():
        size = shape[-1] // parts
        start = (*(0 for _ in shape[:-1]), part * size)
        found.append(box(name, Box(start, (*shape[:-1], size))))
    return tuple(found)


def flat(rank: int, world: int) -> tuple[TensorBox, ...]:
    """A ZeRO shard."""
    return tuple(box(n, zero_range(int(np.prod(s)), rank, world)) for n, s in SHAPES.items())


def region_of(part: TensorBox) -> Region:
    if part.flat_start is not None:
        return FlatRange(part.flat_start, part.flat_count)
    return Box(part.start, part.shape)


def cut_out(raw: np.ndarray, part: TensorBox) -> bytes:
    """The bytes of `part` in a tensor of shape (*shape, 2)."""
    region = region_of(part)
    if isinstance(region, FlatRange):
        return raw.reshape(-1, 2)[region.start : region.start + region.count].tobytes()
    return raw[tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))].tobytes()


def copied_out(pool: MappedPool, part: TensorBox) -> bytes:
    """The bytes of `part` as a reader gets them, however they are stored."""
    region = region_of(part)
    dense = np.empty((region.numel, 2), np.uint8)
    pool.copy_out(part.tensor, region, dense)
    return dense.tobytes()


def copy_version(grant: WriteGrant, version: int, boxes: tuple[TensorBox, ...]) -> tuple[str, ...]:
    """What a writer does between grant and commit: its `boxes` of `version` in place; their checksums."""
    pool, checksums = map_view(grant.view, writable=True), []
    for part in boxes:
        dense = cut_out(values(part.tensor, version), part)
        pool.copy_in(part.tensor, region_of(part), np.frombuffer(dense, np.uint8))
        checksums.append(checksum_bytes(dense))
    pool.close()
    return tuple(checksums)


@dataclass
class GpsCluster:
    """Nodes by number; a node that is down has no process."""

    run: str
    folder: RunFolder
    net: Network
    broker: "subprocess.Popen[bytes]"
    processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    clients: dict[int, GpsClient] = field(default_factory=dict)

    def start(self, node: int, **environment: str) -> None:
        argv = [sys.executable, "-m", "services.gps", "--run", str(self.folder.path), "--node", str(node)]
        log = (self.folder.logs / f"gps-{node}.log").open("ab")
        env = {**os.environ, **environment}
        self.processes[node] = self.net.start(self.net.space(node), argv, stdout=log, stderr=log, env=env)
        log.close()

    def configure(self, cluster: dict[str, Any]) -> None:
        """The run's `cluster` section, for nodes that start from now on."""
        config, endpoints = self.folder.read()
        changed = config.model_dump(mode="json") | {"cluster": cluster}
        self.folder.write(RunConfig.model_validate(changed), endpoints)

    def kill(self, node: int) -> None:
        process = self.processes.pop(node)
        process.kill()
        process.wait()

    def lose_memory(self, node: int) -> None:
        """What a machine that restarts has forgotten."""
        for path in SHM_FOLDER.glob(f"pivotrl-{self.run}-n{node}-*"):
            path.unlink()
        (self.folder.path / f"gps-n{node}.json").unlink(missing_ok=True)

    def client(self, node: int) -> GpsClient:
        if node not in self.clients:
            url = f"http://{self.net.address(node)}:{PORT}"
            self.clients[node] = GpsClient(url, token=TOKEN, name=f"test-{node}", deadline_s=6)
        return self.clients[node]

    async def nodes(self, node: int) -> NodesStatus:
        async with httpx.AsyncClient(timeout=5) as http:
            answer = await http.get(f"http://{self.net.address(node)}:{PORT}/v1/nodes")
            return NodesStatus.model_validate(answer.json())

    async def metrics(self, node: int) -> dict[str, float]:
        """Of `/metrics`, by their names in `gauges`."""
        async with httpx.AsyncClient(timeout=5) as http:
            text = (await http.get(f"http://{self.net.address(node)}:{PORT}/metrics")).text
        lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("pivotrl_gps_"): float(value) for name, value in lines}

    async def until_serving(self, *nodes: int, within_s: float = 40.0) -> None:
        """Every one of `nodes` serves, and says so of all of them."""
        async with asyncio.timeout(within_s):
            for node in nodes:
                while True:
                    process = self.processes[node]
                    assert process.poll() is None, f"node {node} died: {self.log(node)}"
                    with contextlib.suppress(httpx.HTTPError, ValueError):
                        status = await self.nodes(node)
                        up = {n.node for n in status.nodes if n.state == "serving"}
                        if status.waits_for is None and up.issuperset(nodes):
                            break
                    await asyncio.sleep(0.05)

    async def until(self, node: int, *, gone: int, within_s: float = 20.0) -> None:
        """`node` sees that `gone` is gone."""
        async with asyncio.timeout(within_s):
            while True:
                if any(n.node == gone and n.state == "gone" for n in (await self.nodes(node)).nodes):
                    return
                await asyncio.sleep(0.05)

    async def model(self, node: int) -> ModelStatus:
        return await self.client(node).model("policy")

    def log(self, node: int, lines: int = 40) -> str:
        return "\n".join((self.folder.logs / f"gps-{node}.log").read_text().splitlines()[-lines:])

    async def read(self, node: int, receiver: str, boxes: tuple[TensorBox, ...] = (), **more: Any) -> int:
        """Read at `node` and compare every byte with the version that the grant names; returns it."""
        request = ReadRequest(model="policy", receiver=receiver, boxes=boxes, **more)
        async with self.client(node).read(request) as grant:
            pool = map_view(grant.view)
            for part in boxes or columns(0, 1):
                expected = cut_out(values(part.tensor, grant.version), part)
                assert copied_out(pool, part) == expected, f"{part} of version {grant.version} at node {node}"
            return grant.version

    async def write(
        self,
        version: int,
        writers: dict[str, tuple[int, tuple[TensorBox, ...]]],
        attempt: str = "",
        before_commit: Any = None,
    ) -> None:
        """Write by `writers` (name → node, boxes) at the same time; raises the first error."""
        names = tuple(writers)

        async def one(name: str) -> None:
            node, boxes = writers[name]
            client = self.client(node)
            request = WriteRequest(
                model="policy", version=version, writer=name, writers=names, boxes=boxes,
                attempt=attempt, wait_s=5,
            )  # fmt: skip
            grant = await client.begin_write(request)
            checksums = copy_version(grant, version, boxes)
            if before_commit is not None:
                await before_commit(name)
            commit = WriteCommit(writer=name, checksums=checksums)
            await client.commit_write(grant.write_id, commit)

        results = await asyncio.gather(*(one(name) for name in names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def write_all(self, version: int, node: int = 0) -> None:
        """One writer of the whole model at `node`."""
        await self.write(version, {"rank-0": (node, columns(0, 1))}, attempt=uuid4().hex)

    async def write_when_possible(self, version: int, node: int, within_s: float = 30.0) -> None:
        """Writers try again, as ranks that are restarted do."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    await self.write_all(version, node)
                    return
                except PivotError:
                    if (await self.model(node)).version >= version:
                        return
                    await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def gps_cluster(
    folder: Path, nodes: int, *, node_bytes: int, policy: Path | None = None, **gps: Any
) -> AsyncIterator[GpsCluster]:
    """`nodes` machines with a broker; no node is started. `policy` is the folder of another policy than that
    of `write_checkpoint`; `gps` are keys of the gps section."""
    run = f"gps{uuid4().hex[:8]}"
    write_checkpoint(folder / "model")
    run_folder = RunFolder(folder / "run")
    run_folder.create()
    with network(nodes) as net:
        settings = {
            "nodes": [net.address(node) for node in range(nodes)],
            "transport": "tcp",
            "node_bytes": node_bytes,
            "heartbeat_s": 0.25,
            "dead_after_s": 2.0,
            "control_deadline_s": 3.0,
            "copy_deadline_s": 5.0,
            "reseed_after_s": 3.0,
            **gps,
        }
        config = RunConfig.model_validate(
            {
                "run": {"name": run, "folder": str(run_folder.path)},
                "models": {"policy": str(policy or folder / "model"), "genrm": str(folder / "model")},
                "cluster": HALVES,
                "gps": settings,
            }
        )
        url = f"nats://{net.hub_address}:{NATS_PORT}"
        endpoints = Endpoints(url, "nats-token", "127.0.0.1", {"gps": PORT}, TOKEN)
        run_folder.write(config, endpoints)
        conf = write_server_config(run_folder.nats, host=net.hub_address, port=NATS_PORT, token="nats-token")
        broker = net.start(net.hub, [server_binary(), "-c", str(conf)], stderr=subprocess.DEVNULL)
        cluster = GpsCluster(run, run_folder, net, broker)
        try:
            yield cluster
        finally:
            for client in cluster.clients.values():
                await client.close()
            for process in cluster.processes.values():
                process.terminate()
            for process in cluster.processes.values():
                try:
                    await asyncio.to_thread(process.wait, 5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            broker.terminate()
            broker.wait()
            for path in SHM_FOLDER.glob(f"pivotrl-{run}-*"):
                path.unlink()


def checksum_of(version: int, name: str) -> str:
    return checksum_bytes(values(name, version).tobytes())
