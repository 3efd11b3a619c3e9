"""Reads by NIXL between two processes, beside raw NIXL of as many bytes in one descriptor on the same link.

What is read lands as parameter storage lets it land: in a buffer that is stored like the sender's region, for
the engine whose layout it is and its ZeRO writers. Two figures stand apart: a ZeRO rank that Reads what is
stored for an engine, and anyone who reads that straight into dense parts, which the service never does.

Two links: what UCX chooses on one machine (shared memory), and TCP, which is what two machines without RDMA
would use. Nothing leaves the machine: these are ratios, not the speed of a network. The whole path of the
service, between two nodes, is measured in `service`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gps_bench.model import BenchModel, Bytes, Part
from gps_bench.nixl_peer import NixlLink, nixl_link
from gps_bench.timing import interleaved
from shared.errors import PivotError
from shared.layout.held_parts import Held, joined, paired_spans, region_spans
from shared.layout.regions import region_boxes
from shared.layout.spans import Spans
from shared.layout.tensor_layout import Box
from shared.weights.mapped_pool import MappedPool

ATTEMPTS = 3
LINKS = {"shared memory": "", "tcp": "tcp"}
ENGINES, ZERO = ("TP1", "TP2", "TP4"), "ZeRO-4"
Ends = tuple[Spans, Spans]
"""Spans in the target and in the pool."""


def measure(model: BenchModel, target: Bytes, repeats: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for link, tls in LINKS.items():
        for layout in (*ENGINES, ZERO):
            model.slice_for(layout)
            for _ in range(ATTEMPTS):
                try:
                    row = _on_new_links(model, layout, target, repeats, tls)
                except PivotError as error:  # counted, not hidden: a link that broke is begun anew
                    failures.append(f"{link}, {layout}: {error}")
                    continue
                rows.append({"link": link, **row})
                break
    ranks = [row for row in rows if row["layout"] == ZERO]
    return {
        "cross_node_ratio": min(row["ratio"] for row in rows if row["layout"] in ENGINES),
        "cross_node_zero_ratio": min(row["ratio"] for row in ranks),
        "cross_node_zero_into_dense_ratio": min(row["into_dense_ratio"] for row in ranks),
        "cross_node_row_major_ratio": min(row["row_major_ratio"] for row in rows),
        "cross_node": rows,
        "cross_node_broken_links": "; ".join(failures) or "none",
    }


def _on_new_links(model: BenchModel, layout: str, target: Bytes, repeats: int, tls: str) -> dict[str, Any]:
    with (
        nixl_link(model.plain.view, target, tls) as plain,
        nixl_link(model.sliced.view, target, tls) as cut,
    ):
        return _layout(model, layout, target, repeats, plain, cut)


def _layout(
    model: BenchModel, layout: str, target: Bytes, repeats: int, plain: NixlLink, cut: NixlLink
) -> dict[str, Any]:
    """The first rank's Read."""
    first = model.layouts[layout].holders[0]
    parts = [(p.tensor, p.region) for p in model.layouts[layout].placements if p.holder == first]
    nbytes = model.nbytes_of(parts)
    one = np.array([[0, nbytes]], np.int64)
    ways: dict[str, tuple[NixlLink, Ends, Callable[[], None]]] = {
        "row_major": (
            plain,
            alike(model.plain, parts),
            partial(_check_alike, model.plain, model, parts, target),
        ),
        "sliced": (
            cut,
            alike(model.sliced, parts),
            partial(_check_alike, model.sliced, model, parts, target),
        ),
        "dense": (cut, dense(model.sliced, parts), partial(_check_dense, model, parts, target)),
    }
    ready = {way: (link, link.prepare(*ends)) for way, (link, ends, _) in ways.items()}
    for way, (link, ends) in ready.items():
        target[: len(model.sliced.memory)] = 0
        link.read(ends)
        ways[way][2]()
    raw = plain.prepare(one, one)
    work = {"raw": partial(plain.read, raw)}
    times = interleaved(
        work | {way: partial(link.read, ends) for way, (link, ends) in ready.items()}, repeats
    )
    return {
        "layout": layout,
        "gb": round(nbytes / 1e9, 3),
        "raw_gb_per_s": times.gb_per_s(nbytes, "raw"),
        "descriptors_row_major": len(ways["row_major"][1][0]),
        "row_major_ratio": times.ratio("raw", "row_major"),
        "descriptors": len(ways["sliced"][1][0]),
        "ratio": times.ratio("raw", "sliced"),
        "descriptors_into_dense": len(ways["dense"][1][0]),
        "into_dense_ratio": times.ratio("raw", "dense"),
    }


def alike(pool: MappedPool, parts: list[Part]) -> Ends:
    """Into a buffer that is stored like the pool."""

    def ends(name: str, box: Box) -> Ends:
        tensor = pool.tensor(name)
        held = Held(Box((0,) * len(tensor.shape), tensor.shape), pool.storage(name))
        return paired_spans(held, held, box, 2, (tensor.offset_bytes, tensor.offset_bytes))

    return joined(
        ends(name, box) for name, part in parts for box in region_boxes(pool.tensor(name).shape, part)
    )


def dense(pool: MappedPool, parts: list[Part]) -> Ends:
    """Into a buffer where `parts` lie one after another, each row-major."""
    found, at = [], 0
    for name, region in parts:
        tensor = pool.tensor(name)
        near, far = region_spans(tensor.shape, pool.storage(name), region, 2, tensor.offset_bytes)
        found.append((far + np.array([at, 0]), near))
        at += region.numel * 2
    return joined(found)


def _check_alike(stored: MappedPool, model: BenchModel, parts: list[Part], target: Bytes) -> None:
    landed = MappedPool(stored.view, target[: len(stored.memory)], writable=False)
    for name, region in parts:
        wanted, got = (np.empty(region.numel * 2, np.uint8) for _ in range(2))
        model.plain.copy_out(name, region, wanted)
        landed.copy_out(name, region, got)
        assert np.array_equal(got, wanted), name


def _check_dense(model: BenchModel, parts: list[Part], target: Bytes) -> None:
    at = 0
    for name, region in parts:
        size = region.numel * 2
        wanted = np.empty(size, np.uint8)
        model.plain.copy_out(name, region, wanted)
        assert np.array_equal(target[at : at + size], wanted), name
        at += size
