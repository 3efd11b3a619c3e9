"""Nothing grows: a thousand Writes and Reads of one node, some hundred over NIXL between two."""

import gc
import os
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from shared.contracts.gps import ReadRequest, TensorBox, WriteCommit, WriteRequest
from shared.weights.checksum import checksum_bytes
from shared.weights.gps_client import GpsClient
from shared.weights.mapped_pool import map_view
from shared.weights.pool_reader import PoolReader
from shared.weights.transports import open_transport
from tests.integration.test_gps_service import SHAPES, Running, running
from tests.support.gps_cluster import MODEL_BYTES, columns
from tests.support.memory_cluster import memory_cluster

__all__ = ["running"]
CYCLES, WARM_UP = 1000, 100
EXECUTOR_THREADS = 8
"""asyncio's own threads appear as they are needed."""
GROWTH_BYTES = 8 << 20
"""What allocators may keep; a leak of one small object per cycle stays below, one of a buffer does not."""


async def cycle(client: GpsClient, pool: PoolReader, version: int) -> None:
    """Write a version, Read it, compare."""
    boxes = tuple(TensorBox(tensor=n, start=(0, 0), shape=s) for n, s in SHAPES.items())
    request = WriteRequest(model="policy", version=version, writer="rank-0", writers=("rank-0",), boxes=boxes)
    grant = await client.begin_write(request)
    mapped = pool.map(grant.view, writable=True)
    mapped.memory[:] = version % 251
    checksums = tuple(checksum_bytes(mapped.raw(name).data) for name in SHAPES)
    await client.commit_write(grant.write_id, WriteCommit(writer="rank-0", checksums=checksums))
    async with client.read(ReadRequest(model="policy", receiver="test")) as read:
        assert read.version == version
        assert (pool.map(read.view).memory == version % 251).all()


async def test_a_thousand_cycles_of_one_node_leave_nothing_behind(running: Running) -> None:
    process = running.start()
    pool = PoolReader()
    try:
        await running.until_ready(process)
        watched = psutil.Process(process.pid)
        async with running.client() as client:
            for version in range(1, WARM_UP + 1):
                await cycle(client, pool, version)
            before = (watched.num_fds(), watched.num_threads(), watched.memory_info().rss, running.regions())
            for version in range(WARM_UP + 1, CYCLES + 1):
                await cycle(client, pool, version)
            after = (watched.num_fds(), watched.num_threads(), watched.memory_info().rss, running.regions())
        assert after[0] == before[0], "file descriptors"
        assert after[1] <= before[1] + EXECUTOR_THREADS, "threads"
        assert after[2] - before[2] < GROWTH_BYTES, f"memory grew by {after[2] - before[2]} bytes"
        assert after[3] == before[3], "regions"
        assert pool.num_mapped <= 4
    finally:
        pool.close()
        process.terminate()
        process.wait()


async def test_cycles_over_nixl_keep_registrations_lists_and_files(tmp_path: Path) -> None:
    me = psutil.Process(os.getpid())
    async with memory_cluster(
        tmp_path, 2, node_bytes=2 * MODEL_BYTES, make=partial(open_transport, "nixl")
    ) as cluster:

        async def one(version: int) -> None:
            client = cluster.clients[version % 2]
            request = WriteRequest(
                model="policy", version=version, writer="a", writers=("a",), boxes=columns(0, 1)
            )
            grant = await client.begin_write(request)
            pool = map_view(grant.view, writable=True)
            checksums = []
            for name in pool.names:
                pool.raw(name)[:] = version % 251
                checksums.append(checksum_bytes(pool.raw(name).data))
            pool.close()
            await client.commit_write(grant.write_id, WriteCommit(writer="a", checksums=tuple(checksums)))
            for reader in cluster.clients.values():
                async with reader.read(ReadRequest(model="policy", receiver="r")) as read:
                    pool = map_view(read.view)
                    assert read.version == version
                    assert all(np.unique(pool.raw(name)).tolist() == [version % 251] for name in pool.names)
                    pool.close()

        def held() -> list[int]:
            links = [service.holder.cluster.links for service in cluster.services.values()]
            caches = [len(service.plans.cache.plans()) for service in cluster.services.values()]
            return [me.num_fds(), *(link.num_lists for link in links), *caches]

        for version in range(1, 21):
            await one(version)
        gc.collect()
        before, before_bytes = held(), me.memory_info().rss
        for version in range(21, 121):
            await one(version)
        gc.collect()
        assert held() == before
        assert me.memory_info().rss - before_bytes < GROWTH_BYTES
