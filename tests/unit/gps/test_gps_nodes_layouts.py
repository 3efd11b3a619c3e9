"""Several nodes with shards in slices: what a reader of columns pulls, and nodes that disagree."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from services.gps.manifest import Manifest
from shared.contracts.gps import ReadRequest, WriteCommit, WriteRequest
from shared.errors import Conflict
from shared.weights.mapped_pool import map_view
from tests.support.gps_cluster import (
    HALVES,
    MODEL_BYTES,
    SHAPES,
    columns,
    copied_out,
    copy_version,
    cut_out,
    flat,
    replicas_of,
    values,
)
from tests.support.memory_cluster import MemoryCluster, memory_cluster

WHOLE, HALF = 4 * MODEL_BYTES, 2 * MODEL_BYTES
(DOWN,) = (name for name in SHAPES if "down_proj" in name)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[MemoryCluster]:
    """One group of two."""
    async with memory_cluster(tmp_path, 2, node_bytes=HALF) as cluster:
        yield cluster


async def write(cluster: MemoryCluster, version: int, nodes: tuple[int, ...] = (0, 1)) -> None:
    """By one rank at each of `nodes`, each with its ZeRO shard."""
    writers = tuple(f"rank-{rank}" for rank in range(len(nodes)))

    async def one(rank: int, node: int) -> None:
        boxes, client = flat(rank, len(nodes)), cluster.clients[node]
        request = WriteRequest(
            model="policy", version=version, writer=writers[rank], writers=writers, boxes=boxes, attempt="a"
        )
        grant = await client.begin_write(request)
        checksums = copy_version(grant, version, boxes)
        await client.commit_write(grant.write_id, WriteCommit(writer=writers[rank], checksums=checksums))

    await asyncio.gather(*(one(rank, node) for rank, node in enumerate(nodes)))


async def read(cluster: MemoryCluster, node: int, rank: int, ranks: int, version: int, model: str) -> None:
    """As rank `rank` of a tensor parallel engine; every byte is compared."""
    boxes = columns(rank, ranks)
    request = ReadRequest(
        model=model, receiver=f"{model}-tp{ranks}", boxes=boxes, min_version=version, wait_s=5
    )
    async with cluster.clients[node].read(request) as grant:
        assert grant.version == version
        pool = map_view(grant.view)
        for part in boxes:
            assert copied_out(pool, part) == cut_out(values(part.tensor, version), part)


def pulled(cluster: MemoryCluster, node: int) -> tuple[float, float]:
    """Bytes and ranges that Reads of `node` took from others."""
    gauges = cluster.services[node].gauges()
    return gauges["pulled_bytes_total"], gauges["pulled_ranges_total"]


async def test_a_reader_of_columns_pulls_one_range_of_each_weight(two: MemoryCluster) -> None:
    await write(two, 1)
    for node, rank in ((0, 0), (1, 1)):
        (box,) = (part for part in columns(rank, 2) if part.tensor == DOWN)
        bytes_before, ranges_before = pulled(two, node)
        request = ReadRequest(model="policy", receiver="r", boxes=(box,), min_version=1, wait_s=5)
        async with two.clients[node].read(request) as grant:
            pool = map_view(grant.view)
            dense = np.frombuffer(cut_out(values(DOWN, 1), box), np.uint16)
            stored = pool.raw(DOWN).view(np.uint16)
            half = stored[rank * dense.size :][: dense.size]
            assert np.array_equal(half, dense), "dense in the landing buffer too"
        bytes_after, ranges_after = pulled(two, node)
        assert bytes_after - bytes_before == dense.nbytes // 2, "the other node's rows"
        assert ranges_after - ranges_before == 1


@pytest.mark.parametrize("model", ["policy", "genrm"])
async def test_readers_of_any_layout_get_the_values(two: MemoryCluster, model: str) -> None:
    version = 0
    if model == "policy":
        await write(two, 1, nodes=(0, 1, 1))
        version = 1
    for node in (0, 1):
        for ranks in (1, 2, 4):
            for rank in range(ranks):
                await read(two, node, rank, ranks, version, model)


async def test_groups_of_other_sizes_forward_and_refill_each_other(tmp_path: Path) -> None:
    async with memory_cluster(tmp_path, 5, node_bytes=HALF) as cluster:
        groups = cluster.services[0].holder.cluster.view.groups
        assert groups == ((0, 1, 2), (3, 4))
        await write(cluster, 1, nodes=(1, 3, 4))
        for node in range(5):
            await read(cluster, node, 1, 2, 1, "policy")
        for node in (1, 4):
            await cluster.stop(node)
            await cluster.start(node, 5)
            await cluster.until_serving()
            assert cluster.services[node].model("policy").version == 1
            await read(cluster, node, 0, 2, 1, "policy")
        await write(cluster, 2, nodes=(4, 0))
        for node in range(5):
            await read(cluster, node, 0, 1, 2, "policy")


async def test_the_manifest_says_how_a_shard_is_stored(two: MemoryCluster) -> None:
    await write(two, 1)
    for node, service in two.services.items():
        model = service.holder.store.model("policy")
        async with asyncio.timeout(5):
            while True:  # a node that is not the leader flips when it is told, and records it then
                entry = Manifest(two.folder.path / f"gps-n{node}.json").entry("policy")
                if entry is not None and entry.version == 1:
                    break
                await asyncio.sleep(0.01)
        assert entry.sliced == service.holder.packing("policy").sliced != ()
        assert entry.tensors == model.tensors
        (cut,) = entry.sliced
        assert cut.tensors == (DOWN,)
        assert {shape[1] for shape in cut.shapes} == {SHAPES[DOWN][1] // 2}, "halves of columns"


async def test_nodes_that_store_for_other_layouts_exchange_nothing_and_say_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory_cluster(tmp_path, 2, node_bytes=WHOLE) as cluster:
        await write(cluster, 1)
        await cluster.stop(1)
        cluster.cut = replicas_of(4)
        with caplog.at_level(logging.WARNING, "pivotrl.gps"):
            await cluster.start(1, 2)
            async with asyncio.timeout(10):
                while "Give every node the same model folders" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert "gps-1 has other tensors than gps-0, or stores them for other layouts" in caplog.text
        assert cluster.services[1].waits_for() == "policy to be filled"
        with pytest.raises(Conflict, match="still being seeded"):
            await read(cluster, 1, 0, 2, 0, "policy")
        await read(cluster, 0, 0, 2, 1, "policy")
        await cluster.stop(1)
        cluster.cut = HALVES
        await cluster.start(1, 2)
        await cluster.until_serving()
        await read(cluster, 1, 1, 2, 1, "policy")
