"""Reads of the service between two nodes, beside raw NIXL of as many bytes in one descriptor on that link.

Two GPS processes and a broker, each in a network namespace of its own, NIXL over TCP between them, as the
integration tests start them. The nodes are one group: each holds half of every tensor, stored for replicas
and four ZeRO ranks. An engine's rank at node 1 Reads

    service     of its part what lies on node 0, so that every byte takes the link     the figure that counts
    whole part  all of its part, half of which its own node copies

From the request over HTTP to the grant: plan (cached, as for every Read but the first), lease, copy,
release. Between two Reads the receiver Reads something small, so that nothing of the first is kept. Raw NIXL
runs in two more processes in the same two namespaces. Nothing leaves the machine: these are ratios.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gps_bench import nixl_peer
from gps_bench.checkpoints import dense_of_size
from gps_bench.timing import Times
from services.gps.packing import pack_member
from shared.contracts.gps import PoolView, ReadRequest, TensorBox
from shared.layout.parallel import engine_layout
from shared.layout.tensor_layout import Box, TensorSpec
from shared.weights.export import write_safetensors
from shared.weights.host_pool import HostPool, lay_out
from shared.weights.mapped_pool import MappedPool, map_view
from tests.support.gps_cluster import GpsCluster, gps_cluster, replicas_of
from tests.support.network import why_not

HOLDER, READER, GROUP = 0, 1, (0, 1)
ROUNDS_PER_REPEAT = 5
"""Copies take a fifth of a second here, which other work on the machine easily doubles."""
CASES = {1: (1, 2, 4), 2: (2,), 4: (4,)}
"""Devices of the replicas that the storage is for, and of those that Read. What is stored for one device is
row-major: then others show what slices are for."""
Boxes = tuple[TensorBox, ...]


@contextlib.contextmanager
def checkpoint(gb: float) -> Iterator[tuple[Path, list[TensorSpec], MappedPool]]:
    """A folder with a policy of `gb` GB of random bytes in `policy/`, its tensors, and what they hold."""
    host = HostPool(run=f"benchservice{os.getpid()}", node=0, budget_bytes=1 << 40)
    try:
        specs = dense_of_size(int(gb * 1e9))
        tensors, size = lay_out([(s.name, s.dtype, s.shape) for s in specs])
        view = PoolView(path=str(host.create("policy", "truth", size).path), nbytes=size, tensors=tensors)
        truth = map_view(view, writable=True)
        rng = np.random.default_rng(2)
        for tensor in tensors:
            raw = truth.raw(tensor.name)
            raw[:] = rng.integers(0, 256, len(raw), np.uint8)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "policy").mkdir()
            write_safetensors(view, Path(folder) / "policy" / "model.safetensors")
            yield Path(folder), specs, truth
    finally:
        host.close()


@contextlib.asynccontextmanager
async def nodes_of_halves(
    folder: Path, specs: Sequence[TensorSpec], num_nodes: int
) -> AsyncIterator[GpsCluster]:
    """Nodes that each have room for half of the policy in two buffers, so that two make a group. None is
    started."""
    deadlines = {
        "heartbeat_s": 1.0,
        "dead_after_s": 20.0,
        "control_deadline_s": 30.0,
        "copy_deadline_s": 120.0,
    }
    room = int(1.25 * sum(spec.nbytes for spec in specs))
    async with gps_cluster(
        folder, num_nodes, node_bytes=room, policy=folder / "policy", **deadlines
    ) as cluster:
        yield cluster


def measure(gb: float, repeats: int) -> dict[str, Any]:
    """Figures of TP1, TP2 and TP4; why there are none, where namespaces cannot be made."""
    if reason := why_not():
        return {"service_cross_node": f"not measured: {reason}"}
    with checkpoint(gb) as (folder, specs, truth):
        rows = asyncio.run(_rows(folder, specs, truth, repeats))
    registered = [row["ratio"] for row in rows if row["stored_for"] == row["layout"]]
    return {
        "service_cross_node_ratio": min(registered),
        "service_row_major_ratio": min(row["ratio"] for row in rows if row["stored_for"] != row["layout"]),
        "service_cross_node_gb": round(sum(spec.nbytes for spec in specs) / 1e9, 3),
        "service_cross_node": rows,
    }


async def _rows(
    folder: Path, specs: list[TensorSpec], truth: MappedPool, repeats: int
) -> list[dict[str, Any]]:
    rows = []
    async with nodes_of_halves(folder, specs, len(GROUP)) as cluster:
        for stored_for, readers in CASES.items():
            for node in [node for node in GROUP if node in cluster.processes]:
                cluster.kill(node)
            cluster.configure(replicas_of(stored_for))
            for node in GROUP:
                cluster.start(node)
            await cluster.until_serving(*GROUP, within_s=300)
            async with _raw_link(cluster, truth.view) as raw:
                for devices in readers:
                    row = await _row(cluster, specs, truth, devices, raw, repeats)
                    rows.append({"stored_for": f"TP{stored_for}", **row})
    return rows


async def _row(
    cluster: GpsCluster, specs: list[TensorSpec], truth: MappedPool, devices: int, raw: "_Raw", repeats: int
) -> dict[str, Any]:
    layout = engine_layout(specs, [[f"g{rank}" for rank in range(devices)]])
    part = [(p.tensor, p.region) for p in layout.placements if p.holder == "g0" and isinstance(p.region, Box)]
    shard = pack_member(layout.tensors, {}, GROUP, HOLDER)
    away = [(name, common) for name, box in part if (common := shard.common(name, box)) is not None]
    engine = Engine(cluster, f"tp{devices}")
    works = {"service": boxes_of(away), "whole part": boxes_of(part)}
    sizes = {way: 2 * sum(int(np.prod(box.shape)) for box in boxes) for way, boxes in works.items()}
    for boxes in works.values():
        await engine.read(boxes, truth)
    before = await cluster.metrics(READER)
    await engine.read(works["service"])
    after = await cluster.metrics(READER)
    pulled = after["pulled_bytes_total"] - before["pulled_bytes_total"]
    assert sizes["service"] <= pulled <= 1.01 * sizes["service"], "every byte takes the link"
    rounds: dict[str, list[float]] = {name: [] for way in works for name in (way, f"raw {way}")}
    for turn in range(ROUNDS_PER_REPEAT * repeats + 1):
        for way, boxes in works.items():
            seconds = {f"raw {way}": raw.read(sizes[way]), way: await engine.read(boxes)}
            for name, took_s in seconds.items():
                if turn:
                    rounds[name].append(took_s)
    times = Times(rounds)
    return {
        "layout": f"TP{devices}",
        "gb": round(sizes["service"] / 1e9, 3),
        "descriptors": int(after["pulled_ranges_total"] - before["pulled_ranges_total"]),
        "raw_gb_per_s": times.gb_per_s(sizes["service"], "raw service"),
        "service_gb_per_s": times.gb_per_s(sizes["service"], "service"),
        "ratio": times.ratio("raw service", "service"),
        "whole_part_gb": round(sizes["whole part"] / 1e9, 3),
        "whole_part_ratio": times.ratio("raw whole part", "whole part"),
    }


def boxes_of(parts: Sequence[tuple[str, Box]]) -> Boxes:
    """As a Read asks for them."""
    return tuple(TensorBox(tensor=name, start=box.start, shape=box.shape) for name, box in parts)


@dataclass
class Engine:
    """A receiver at a node."""

    cluster: GpsCluster
    name: str
    node: int = READER

    async def read(self, boxes: Boxes, truth: MappedPool | None = None) -> float:
        """Seconds from the request to the grant; every byte compared with `truth`."""
        client = self.cluster.client(self.node)
        smallest = min(boxes, key=lambda box: int(np.prod(box.shape)))
        other = ReadRequest(model="policy", receiver=self.name, boxes=(smallest,))
        async with client.read(other, deadline_s=120):
            pass
        request = ReadRequest(model="policy", receiver=self.name, boxes=boxes)
        begin = time.perf_counter()
        async with client.read(request, deadline_s=120) as grant:
            took_s = time.perf_counter() - begin
            if truth is not None:
                _check(map_view(grant.view), boxes, truth)
        return took_s


def _check(pool: MappedPool, boxes: Boxes, truth: MappedPool) -> None:
    for part in boxes:
        box = Box(part.start, part.shape)
        got, wanted = (np.empty(2 * box.numel, np.uint8) for _ in range(2))
        pool.copy_out(part.tensor, box, got)
        truth.copy_out(part.tensor, box, wanted)
        assert np.array_equal(got, wanted), part


@dataclass
class _Raw:
    """The process that reads."""

    process: "subprocess.Popen[bytes]"

    def read(self, nbytes: int) -> float:
        """Seconds of one descriptor of `nbytes`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{nbytes}\n".encode())
        self.process.stdin.flush()
        return float(_line(self.process))


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    """The next line of JSON; NIXL may print others."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        with contextlib.suppress(ValueError):
            json.loads(line)
            return line
    raise AssertionError("the raw process ended")


@contextlib.asynccontextmanager
async def _raw_link(cluster: GpsCluster, view: PoolView) -> AsyncIterator[_Raw]:
    """Two processes in the nodes' namespaces that read as much as they are told from `view`'s region."""
    processes = []
    for node, words in ((HOLDER, ("offer", view.model_dump_json())), (READER, ("take",))):
        argv = [
            sys.executable,
            nixl_peer.__file__,
            *words,
            cluster.net.address(node),
            str(cluster.folder.logs),
        ]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(cluster.net.start(cluster.net.space(node), argv, **options))
    offering, taking = processes
    try:
        assert taking.stdin is not None
        taking.stdin.write(_line(offering))
        yield _Raw(taking)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
