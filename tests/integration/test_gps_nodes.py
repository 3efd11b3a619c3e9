"""Parameter storage over several machines: real processes in network namespaces, NIXL over TCP between them.

`PIVOTRL_CHAOS_ROUNDS=50` repeats the chaos test; its seed is printed, `PIVOTRL_CHAOS_SEED` sets it.
"""

from pathlib import Path

import pytest

from tests.support.gps_cluster import MODEL_BYTES, columns, flat, gps_cluster
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
