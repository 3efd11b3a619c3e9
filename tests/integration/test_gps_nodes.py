"""Parameter storage over several machines: real processes in network namespaces, NIXL over TCP between them.

`PIVOTRL_CHAOS_ROUNDS=50` repeats the chaos test; its seed is printed, `PIVOTRL_CHAOS_SEED` sets it.
"""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from shared.contracts.gps import ReadRequest, ReceiverRequest
from shared.errors import PivotError
from shared.weights.loader_map import LoaderMap
from shared.weights.mapped_pool import map_view
from shared.weights.nixl_transport import rdma_devices
from tests.support.gps_cluster import (
    MODEL_BYTES,
    SHAPES,
    GpsCluster,
    columns,
    copied_out,
    cut_out,
    flat,
    gps_cluster,
    replicas_of,
    values,
    write_checkpoint,
)
from tests.support.network import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")
WHOLE, HALF = 4 * MODEL_BYTES, 2 * MODEL_BYTES
"""Memory of a node: for both models and the spare buffer, or for half of them."""
(DOWN,) = (name for name in SHAPES if "down_proj" in name)
ROUNDS = int(os.environ.get("PIVOTRL_CHAOS_ROUNDS", "2"))
SEED = int(os.environ.get("PIVOTRL_CHAOS_SEED", "1"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def four(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GpsCluster]:
    """Two groups of two, all serving. Every test that uses it leaves it whole."""
    async with gps_cluster(
        tmp_path_factory.mktemp("four"), 4, node_bytes=HALF, reseed_after_s=60.0
    ) as cluster:
        for node in range(4):
            cluster.start(node)
        await cluster.until_serving(0, 1, 2, 3)
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
async def test_reads_of_any_layout_are_bit_exact_and_writes_flip_once(four: GpsCluster) -> None:
    assert (await four.nodes(0)).group_size == 2
    for node in (0, 3):
        assert await four.read(node, "whole") == 0
        for rank in range(2):
            assert await four.read(node, f"tp-{rank}", columns(rank, 2)) == 0
        for rank in range(3):
            assert await four.read(node, f"rank-{rank}", flat(rank, 3)) == 0
    transport = (await four.nodes(0)).transport
    assert transport is not None
    assert transport.lanes == ("tcp on eth0",)

    writers = {"rank-0": (0, flat(0, 3)), "rank-1": (3, flat(1, 3)), "rank-2": (3, flat(2, 3))}
    for version in (1, 2, 3):
        await four.write(version, writers, attempt="a")
        assert {await four.read(node, "whole") for node in range(4)} == {version}
    assert len({(await four.model(node)).checksum for node in range(4)}) == 1
    # a writer that does not come back: the version stays, and the next attempt replaces the Write
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await four.write(4, {**writers, "rank-9": (1, ())}, before_commit=never, attempt="a")
    assert await four.read(1, "whole") == 3
    await four.write(4, writers, attempt="b")
    assert {await four.read(node, "tp-1", columns(1, 2)) for node in range(4)} == {4}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rank_of_columns_takes_one_range_from_each_node_that_has_rows(four: GpsCluster) -> None:
    node, rank = 1, 1
    version = (await four.model(node)).version
    part = next(box for box in columns(rank, 2) if box.tensor == DOWN)
    before = await four.metrics(node)
    request = ReadRequest(model="policy", receiver="tp-one", boxes=(part,))
    async with four.client(node).read(request) as grant:
        assert DOWN in {name for cut in grant.view.sliced for name in cut.tensors}
        pool = map_view(grant.view)
        dense = cut_out(values(DOWN, version), part)
        assert copied_out(pool, part) == dense
        stored = pool.raw(DOWN)
        assert stored[rank * len(dense) :][: len(dense)].tobytes() == dense, "where the engine copies from"
    after = await four.metrics(node)
    assert after["pulled_bytes_total"] - before["pulled_bytes_total"] == len(dense) // 2
    assert after["pulled_ranges_total"] - before["pulled_ranges_total"] == 1


class DownProjection(torch.nn.Module):
    """What an engine keeps of the weight on rank `rank` of 2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        rows, columns = SHAPES[DOWN]
        self.columns = slice(rank * columns // 2, (rank + 1) * columns // 2)
        shape = (rows, columns // 2)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == DOWN:
                self.weight.data.copy_(tensor[:, self.columns])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_loader_map_copies_its_values_out_of_the_landing_buffer(four: GpsCluster) -> None:
    version = (await four.model(2)).version
    status = await four.client(2).register("map", ReceiverRequest(model="policy"))
    assert status.view is not None
    for rank in range(2):
        loader_map = LoaderMap.record(DownProjection(rank), status.view.tensors)
        request = ReadRequest(model="policy", receiver="map", boxes=loader_map.boxes())
        live = torch.zeros(loader_map.parameters["weight"].shape, dtype=torch.bfloat16)
        async with four.client(2).read(request) as grant:
            read_bytes = loader_map.apply(map_view(grant.view).tensors, {"weight": live})
        (part,) = (box for box in columns(rank, 2) if box.tensor == DOWN)
        assert read_bytes == live.nbytes
        assert live.view(torch.uint8).numpy().tobytes() == cut_out(values(DOWN, version), part)


async def never(_writer: str) -> None:
    await asyncio.Event().wait()


async def test_killed_node_is_routed_around_and_refills(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 2, node_bytes=WHOLE) as cluster:
        for node in range(2):
            cluster.start(node)
        await cluster.until_serving(0, 1)
        before = await cluster.nodes(1)
        assert (before.group_size, before.leader) == (1, 0)
        await cluster.write_all(1, node=1)
        cluster.kill(0)
        cluster.lose_memory(0)
        await cluster.until(1, gone=0)
        without = await cluster.nodes(1)
        assert without.epoch > before.epoch
        assert without.leader == 1
        await cluster.write_all(2, node=1)
        cluster.start(0)
        await cluster.until_serving(0, 1)
        assert await cluster.read(0, "whole") == 2
        assert "policy version 2 refilled from peers" in cluster.log(0)
        assert (await cluster.model(0)).checksum == (await cluster.model(1)).checksum


async def test_restart_finds_its_shard_and_a_lost_last_copy_begins_again(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 2, node_bytes=HALF) as cluster:
        for node in (0, 1):
            cluster.start(node)
        await cluster.until_serving(0, 1)
        await cluster.write_all(1)
        await cluster.write_all(2)
        for node in (0, 1):
            cluster.kill(node)
        for node in (0, 1):
            cluster.start(node)
        await cluster.until_serving(0, 1)
        assert "policy version 2 found in the pool" in cluster.log(1)
        assert {await cluster.read(node, "whole") for node in (0, 1)} == {2}

        write_checkpoint(cluster.folder.checkpoints / "step-000001", version=0)
        cluster.kill(1)
        cluster.lose_memory(1)
        cluster.start(1)
        await cluster.until_serving(0, 1)
        (reseeded,) = (await cluster.nodes(1)).reseeded
        assert "no copy of version 2 was left: began again from" in reseeded
        assert "step-000001" in reseeded
        assert "no copy of version 2 was left" in cluster.log(1)
        async with asyncio.timeout(20):  # node 0 sees the new lineage at its next beat
            while await cluster.read(0, "whole") != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await cluster.write_when_possible(1, node=0)
        assert await cluster.read(1, "whole") == 1


async def test_restart_with_other_layouts_keeps_the_version_and_stores_it_anew(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 2, node_bytes=HALF) as cluster:
        cluster.configure(replicas_of(1))
        await start_both(cluster)
        await cluster.write_all(1)
        await cluster.write_all(2)
        checksum = (await cluster.model(0)).checksum
        for node in (0, 1):  # as from before there were slices
            path = cluster.folder.path / f"gps-n{node}.json"
            file = json.loads(path.read_text())
            for entry in file["entries"]:
                assert entry.pop("sliced") == []
            path.write_text(json.dumps(file))
        for number, devices in enumerate((2, 4, 1, 2, 2), 1):
            for node in (0, 1):
                cluster.kill(node)
            cluster.configure(replicas_of(devices))
            await start_both(cluster)
            for node in (0, 1):
                for found in ("policy version 2 found in the pool", "genrm version 0 found in the pool"):
                    assert cluster.log(node, 1000).count(found) == number
                for rank in range(devices):
                    assert await cluster.read(node, f"tp-{rank}", columns(rank, devices)) == 2
            assert (await cluster.model(1)).checksum == checksum
        await cluster.write(3, {"rank-0": (0, flat(0, 2)), "rank-1": (1, flat(1, 2))})
        assert await cluster.read(0, "tp-0", columns(0, 2)) == 3


async def start_both(cluster: GpsCluster) -> None:
    for node in (0, 1):
        cluster.start(node)
    await cluster.until_serving(0, 1)


async def test_transport_that_is_not_the_configured_one_stops_the_node(tmp_path: Path) -> None:
    if rdma_devices():
        pytest.skip("this machine has RDMA")
    async with gps_cluster(tmp_path, 2, node_bytes=HALF, transport="rdma") as cluster:
        cluster.start(0)
        assert await asyncio.to_thread(cluster.processes[0].wait, 30) == 1
        assert "no RDMA device: UCX would use TCP" in cluster.log(0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(60 + 60 * ROUNDS)
async def test_no_fault_shows_a_torn_version_or_loses_a_committed_one(four: GpsCluster) -> None:
    """A node is cut off, killed, or loses its memory while two ranks Write and others Read."""
    for number in range(ROUNDS):
        fault = ("kill", "cut", "lose")[number % 3]
        chaos = Chaos(four, random.Random(SEED * 1000 + number), fault)
        print(f"round {number}, PIVOTRL_CHAOS_SEED={SEED}:", end=" ", flush=True)
        await chaos.round()
        print(chaos.told, flush=True)


@dataclass
class Chaos:
    """One fault on a cluster that is whole, and what must hold during and after it."""

    cluster: GpsCluster
    rng: random.Random
    fault: str
    told: str = ""

    async def round(self) -> None:
        cluster, rng = self.cluster, self.rng
        before = (await cluster.model(0)).version
        victim, nodes = rng.randrange(4), [rng.randrange(4), rng.randrange(4)]
        delay_s = rng.random() * 0.8
        self.told = f"{self.fault} node {victim} after {delay_s:.3f} s, writers at {nodes}:"
        others = [node for node in range(4) if node != victim]
        async with asyncio.TaskGroup() as tasks:  # a reader that saw something wrong ends the round
            stop = asyncio.Event()
            readers = [tasks.create_task(self.read_on(node, before, stop)) for node in others]
            after = await self.strike(victim, delay_s, nodes)
            stop.set()
        self.told += f" versions {before} to {after}, {sum(reader.result() for reader in readers)} reads"

    async def strike(self, victim: int, delay_s: float, nodes: list[int]) -> int:
        """The fault amid a Write, what must hold after it, and the healing; the version then."""
        cluster, before = self.cluster, (await self.cluster.model(victim)).version
        others = [node for node in range(4) if node != victim]
        writing = asyncio.create_task(self.write(before + 1, nodes))
        await asyncio.sleep(delay_s)
        if self.fault == "cut":
            cluster.net.cut(victim)
        else:
            cluster.kill(victim)
            if self.fault == "lose":
                cluster.lose_memory(victim)
        self.told += f" {await writing};"
        await cluster.until(others[0], gone=victim)
        after = await self.agreed(others)
        assert after in (before, before + 1)
        assert after == before + 1 or "committed" not in self.told, self.told
        await cluster.write_when_possible(after + 1, self.rng.choice(others))
        if self.fault == "cut":
            cluster.net.heal(victim)
        else:
            cluster.start(victim)
        await cluster.until_serving(0, 1, 2, 3)
        assert await self.agreed(range(4)) == after + 1
        return after + 1

    async def write(self, version: int, nodes: list[int]) -> str:
        writers = {f"rank-{rank}": (node, flat(rank, 2)) for rank, node in enumerate(nodes)}
        try:
            await self.cluster.write(version, writers, attempt=f"v{version}")
        except PivotError as error:
            return f"failed ({error.code})"
        return "committed"

    async def agreed(self, nodes: Iterable[int]) -> int:
        """The version that all of `nodes` come to, read whole at each."""
        async with asyncio.timeout(15):
            while True:
                found = {await self.read(node, "agreed", 10.0) for node in nodes}
                if len(found) == 1 and None not in found:
                    return int(found.pop() or 0)
                await asyncio.sleep(0.1)

    async def read_on(self, node: int, at_least: int, stop: asyncio.Event) -> int:
        """Reads of `node`, each bit-exact, of versions that only grow; how many."""
        count = 0
        while not stop.is_set():
            version = await self.read(node, "reader", 10.0)
            if version is not None:
                assert version >= at_least, f"node {node} went back from {at_least} to {version}"
                at_least, count = version, count + 1
            await asyncio.sleep(0.02)
        return count

    async def read(self, node: int, receiver: str, lease_s: float) -> int | None:
        """The version read, or None for an error that says so."""
        try:
            return await self.cluster.read(node, receiver, columns(1, 2), lease_s=lease_s)
        except PivotError:
            return None
