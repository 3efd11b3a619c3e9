"""What a replica's Read costs as nodes are added: 2 to 4 real GPS processes, each in a network namespace.

Groups are of two nodes, each with half of every tensor in slices for replicas of two devices; a third node
without a partner has nothing of its own. One replica a node Reads the whole model for both its ranks, one
after another, because all nodes share this machine's cores: what is shown is the cost of a Read, not what
many at once would reach on a network.
"""

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

from gps_bench.service import Engine, boxes_of, checkpoint, nodes_of_halves
from shared.layout.parallel import engine_layout
from shared.layout.tensor_layout import Box, TensorSpec
from shared.weights.mapped_pool import MappedPool
from tests.support.gps_cluster import replicas_of
from tests.support.network import why_not

NUMBERS = (2, 3, 4)
DEVICES = 2


def measure(gb: float, repeats: int) -> dict[str, Any]:
    """Seconds and bytes over links of a replica's Read, by number of nodes."""
    if reason := why_not():
        return {"more_nodes": f"not measured: {reason}"}
    rows = []
    with checkpoint(gb) as (folder, specs, truth):
        for number in NUMBERS:
            place = folder / f"nodes-{number}"
            place.mkdir()
            (place / "policy").symlink_to(folder / "policy")
            rows.append(asyncio.run(_row(place, specs, truth, number, repeats)))
    first = rows[0]["read_s"]
    return {
        "more_nodes": [{**row, "over_two_nodes": round(row["read_s"] / first, 3)} for row in rows],
    }


async def _row(
    folder: Path, specs: list[TensorSpec], truth: MappedPool, number: int, repeats: int
) -> dict[str, Any]:
    layout = engine_layout(specs, [[f"g{rank}" for rank in range(DEVICES)]])
    boxes = boxes_of([(p.tensor, p.region) for p in layout.placements if isinstance(p.region, Box)])
    async with nodes_of_halves(folder, specs, number) as cluster:
        cluster.configure(replicas_of(DEVICES))
        nodes = range(number)
        for node in nodes:
            cluster.start(node)
        await cluster.until_serving(*nodes, within_s=300)
        replicas = [Engine(cluster, f"replica-{node}", node) for node in nodes]
        for replica in replicas:
            await replica.read(boxes, truth)
        before = [(await cluster.metrics(node))["pulled_bytes_total"] for node in nodes]
        seconds = [[await replica.read(boxes) for replica in replicas] for _ in range(repeats)]
        after = [(await cluster.metrics(node))["pulled_bytes_total"] for node in nodes]
    pulled = (sum(after) - sum(before)) / number / repeats
    return {
        "nodes": number,
        "gb": round(sum(spec.nbytes for spec in specs) / 1e9, 3),
        "read_s": round(median(s for turn in seconds for s in turn), 4),
        "read_s_by_node": [round(median(turn[node] for turn in seconds), 4) for node in nodes],
        "pulled_gb": round(pulled / 1e9, 3),
    }
