"""Parameter storage over several machines: real processes in network namespaces, NIXL over TCP between them.

`PIVOTRL_CHAOS_ROUNDS=50` repeats the chaos test; its seed is printed, `PIVOTRL_CHAOS_SEED` sets it.
"""

import asyncio
from pathlib import Path

import pytest

from tests.support.gps_cluster import MODEL_BYTES, columns, flat, gps_cluster, write_checkpoint
from tests.support.network import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")
WHOLE, HALF = 4 * MODEL_BYTES, 2 * MODEL_BYTES
"""Memory of a node: for both models and the spare buffer, or for half of them."""


async def test_read_of_any_layout_at_any_node_is_bit_exact(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 2, node_bytes=HALF) as cluster:
        for node in (0, 1):
            cluster.start(node)
        await cluster.until_serving(0, 1)
        status = await cluster.nodes(0)
        assert status.group_size == 2
        for node in (0, 1):
            assert await cluster.read(node, "whole") == 0
            assert await cluster.read(node, "tp-1", columns(1, 2)) == 0
            for rank in range(3):
                assert await cluster.read(node, f"rank-{rank}", flat(rank, 3)) == 0
        status = await cluster.nodes(0)
        assert status.transport is not None
        assert status.transport.lanes == ("tcp on eth0",)


async def test_write_at_two_nodes_reaches_both_groups_and_flips_once(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 4, node_bytes=HALF) as cluster:
        for node in range(4):
            cluster.start(node)
        await cluster.until_serving(0, 1, 2, 3)
        writers = {"rank-0": (0, flat(0, 3)), "rank-1": (3, flat(1, 3)), "rank-2": (3, flat(2, 3))}
        for version in (1, 2, 3):
            await cluster.write(version, writers, attempt="a")
            for node in range(4):
                assert await cluster.read(node, "whole") == version
        assert len({(await cluster.model(node)).checksum for node in range(4)}) == 1
        # a writer that does not come back: the version stays, and the next attempt replaces the Write
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await cluster.write(4, {**writers, "rank-9": (1, ())}, before_commit=never, attempt="a")
        assert await cluster.read(1, "whole") == 3
        await cluster.write(4, writers, attempt="b")
        assert {await cluster.read(node, "tp", columns(1, 2)) for node in range(4)} == {4}


async def never(_writer: str) -> None:
    await asyncio.Event().wait()


async def test_killed_node_is_routed_around_and_refills(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 3, node_bytes=WHOLE) as cluster:
        for node in range(3):
            cluster.start(node)
        await cluster.until_serving(0, 1, 2)
        assert (await cluster.nodes(0)).group_size == 1
        await cluster.write_all(1, node=1)
        epoch = (await cluster.nodes(1)).epoch
        cluster.kill(0)
        cluster.lose_memory(0)
        await cluster.until(1, gone=0)
        assert (await cluster.nodes(1)).epoch > epoch
        assert (await cluster.nodes(1)).leader == 1
        await cluster.write_all(2, node=2)
        cluster.start(0)
        await cluster.until_serving(0, 1, 2)
        assert await cluster.read(0, "whole") == 2
        assert "refilled from peers" in cluster.log(0)
        assert (await cluster.model(0)).checksum == (await cluster.model(2)).checksum


async def test_last_copy_gone_begins_again_from_the_newest_folder(tmp_path: Path) -> None:
    async with gps_cluster(tmp_path, 2, node_bytes=HALF) as cluster:
        for node in (0, 1):
            cluster.start(node)
        await cluster.until_serving(0, 1)
        await cluster.write_all(1)
        write_checkpoint(cluster.folder.checkpoints / "step-000001", version=0)
        cluster.kill(1)
        cluster.lose_memory(1)
        cluster.start(1)
        await cluster.until_serving(0, 1)
        status = await cluster.nodes(1)
        assert len(status.reseeded) == 1
        assert "no copy of version 1 was left: began again from" in status.reseeded[0]
        assert "step-000001" in status.reseeded[0]
        assert "no copy of version 1 was left" in cluster.log(1)
        assert await cluster.read(0, "whole") == 0
        await cluster.write_all(1)
        assert await cluster.read(1, "whole") == 1


async def test_restarted_node_finds_its_shard_in_its_own_memory(tmp_path: Path) -> None:
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
