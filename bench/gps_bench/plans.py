"""How long plans take to make, how near their makespan is to the bound, and what more nodes cost."""

import time
from collections.abc import Callable
from typing import Any

from gps_bench.checkpoints import moe_122b, qwen_72b
from gps_bench.timing import interleaved
from shared.layout.demands import demands_of
from shared.layout.parallel import engine_layout
from shared.layout.refine import refine
from shared.layout.replication import grouped_layout
from shared.layout.tensor_layout import Layout, TensorSpec, zero_layout
from shared.layout.transfer_plan import Link, NodeLinks, PlanCache, PlanKey, TransferPlan, plan_transfers

LOCAL, REMOTE = Link(55e9, 10e-6), Link(25e9, 20e-6)
"""Assumed links: a pinned copy over PCIe 5 x16, and one 200 Gb/s NIC."""
PER_NODE, KV_HEADS = 8, {"72b": 8, "122b-moe": 4}


def cluster(num_nodes: int) -> tuple[list[str], list[str], NodeLinks]:
    nodes = [f"n{i:02}" for i in range(num_nodes)]
    devices = [f"{node}g{i}" for node in nodes for i in range(PER_NODE)]
    return nodes, devices, NodeLinks(LOCAL, REMOTE, {d: d.split("g")[0] for d in devices})


def plan(source: Layout, target: Layout, links: NodeLinks) -> TransferPlan:
    return plan_transfers(demands_of(refine(source, target)), links)


def replicas(specs: list[TensorSpec], model: str, devices: list[str]) -> Layout:
    """One TP8 (or EP8) replica on each node."""
    groups = [devices[i : i + PER_NODE] for i in range(0, len(devices), PER_NODE)]
    return engine_layout(specs, groups, num_kv_heads=KV_HEADS[model], is_expert_parallel=model == "122b-moe")


def at_scale() -> list[dict[str, Any]]:
    """Plans on 16 nodes of 8 devices. `cold_s` is refinement, demands, greedy walk and explanation;
    `layouts_s` is what building both layouts took before."""
    nodes, devices, links = cluster(16)
    plan_transfers(demands_of(refine(*_warm())), links)  # loads the compiled walk
    rows = []
    for model, specs in (("72b", qwen_72b()), ("122b-moe", moe_122b())):
        total = sum(spec.nbytes for spec in specs)
        for group_size in (1, 4):
            begin = time.perf_counter()
            store = grouped_layout(specs, nodes, int(total / group_size * 1.05)).layout
            engines = replicas(specs, model, devices)
            ranks = {world: zero_layout(specs, devices[:world]) for world in (64, 128)}
            layouts_s = time.perf_counter() - begin
            cases = [("read into 16 replicas", store, engines)]
            cases += [(f"write of ZeRO-{world}", found, store) for world, found in ranks.items()]
            for name, source, target in cases:
                cold = []
                for _ in range(3):
                    begin = time.perf_counter()
                    made = plan(source, target, links)
                    summary = made.explain()
                    cold.append(time.perf_counter() - begin)
                rows.append(
                    {
                        "model": model,
                        "tensors": len(specs),
                        "group_size": group_size,
                        "case": name,
                        "transfers": summary.num_transfers,
                        "layouts_s": round(layouts_s, 3),
                        "cold_s": round(sorted(cold)[1], 3),
                        "makespan_over_bound": round(summary.makespan_s / summary.lower_bound_s, 4),
                        "balance": round(summary.balance, 4),
                    }
                )
    return rows


def _warm() -> tuple[Layout, Layout]:
    specs = qwen_72b()
    nodes, devices, _ = cluster(4)
    return zero_layout(specs, devices), grouped_layout(specs, nodes, 1 << 60).layout


def cached_ms() -> float:
    """Milliseconds of finding the 72B plan of 128 receivers again."""
    nodes, devices, links = cluster(16)
    specs = qwen_72b()
    store, target = grouped_layout(specs, nodes, 1 << 60).layout, replicas(specs, "72b", devices)
    cache = PlanCache()

    def find() -> TransferPlan:
        key = PlanKey("read", "policy", 0, target.holders, target.digest)
        return cache.get_or_plan(key, store, target, links)

    find()
    many: Callable[[], object] = lambda: [find() for _ in range(100)]  # noqa: E731
    return round(interleaved({"find": many}, 5).median_s("find") / 100 * 1e3, 4)


def growing_cluster() -> list[dict[str, Any]]:
    """Simulated transfers of the 72B model on 2, 4 and 8 nodes: what a replica's Read costs does not grow.

    Groups of 2 nodes; one TP8 replica on every node, all Read at once. A Write reaches every group, so its
    senders' work does grow with the number of groups.
    """
    specs = qwen_72b()
    total = sum(spec.nbytes for spec in specs)
    rows = []
    for num_nodes in (2, 4, 8):
        nodes, devices, links = cluster(num_nodes)
        store = grouped_layout(specs, nodes, int(total / 2 * 1.05)).layout
        read = plan(store, replicas(specs, "72b", devices), links).explain()
        write = plan(zero_layout(specs, devices), store, links).explain()
        rows.append(
            {
                "nodes": num_nodes,
                "replicas": num_nodes,
                "read_makespan_s": round(read.makespan_s, 4),
                "read_gb_per_replica": round(read.total_bytes / num_nodes / 1e9, 2),
                "read_over_bound": round(read.makespan_s / read.lower_bound_s, 4),
                "write_makespan_s": round(write.makespan_s, 4),
                "write_over_bound": round(write.makespan_s / write.lower_bound_s, 4),
            }
        )
    return rows


def measure() -> dict[str, Any]:
    rows = at_scale()
    return {
        "plan_cold_s_72b": max(row["cold_s"] for row in rows if row["model"] == "72b"),
        "plan_cold_s_122b": max(row["cold_s"] for row in rows if row["model"] == "122b-moe"),
        "plan_cached_ms": cached_ms(),
        "makespan_over_bound": max(row["makespan_over_bound"] for row in rows),
        "plans": rows,
        "simulated_nodes": growing_cluster(),
    }
