"""Reads by NIXL between two processes, beside raw NIXL of as many bytes in one descriptor on the same link.

Two links: what UCX chooses on one machine (shared memory), and TCP, which is what two machines without RDMA
would use. Nothing leaves the machine: these are ratios, not the speed of a network.
"""

from functools import partial
from typing import Any

import numpy as np

from gps_bench.model import BenchModel, Bytes, Part
from gps_bench.nixl_peer import NixlLink, nixl_link
from gps_bench.timing import interleaved
from shared.errors import PivotError
from shared.layout.held_parts import region_spans
from shared.layout.spans import Spans
from shared.weights.mapped_pool import MappedPool

ATTEMPTS = 3
LINKS = {"shared memory": "", "tcp": "tcp"}


def measure(model: BenchModel, target: Bytes, repeats: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for link, tls in LINKS.items():
        for layout in ("TP1", "TP2", "TP4", "ZeRO-4"):
            model.slice_for(layout)
            for _ in range(ATTEMPTS):
                try:
                    row = _on_new_links(model, layout, target, repeats, tls)
                except PivotError as error:  # counted, not hidden: a link that broke is begun anew
                    failures.append(f"{link}, {layout}: {error}")
                    continue
                rows.append({"link": link, **row})
                break
    return {
        "cross_node_ratio": min(row["ratio"] for row in rows),
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
    """The first rank's Read: its parts land one after another in `target`."""
    first = model.layouts[layout].holders[0]
    parts = [(p.tensor, p.region) for p in model.layouts[layout].placements if p.holder == first]
    nbytes = model.nbytes_of(parts)
    rows, slices = descriptors(model.plain, parts), descriptors(model.sliced, parts)
    one = np.array([[0, nbytes]], np.int64)
    ends = {"raw": plain.prepare(one, one), "row_major": plain.prepare(*rows), "sliced": cut.prepare(*slices)}
    for name, link in (("row_major", plain), ("sliced", cut)):
        target[:nbytes] = 0
        link.read(ends[name])
        _check(model, parts, target)
    work = {
        "raw": partial(plain.read, ends["raw"]),
        "row_major": partial(plain.read, ends["row_major"]),
        "sliced": partial(cut.read, ends["sliced"]),
    }
    times = interleaved(work, repeats)
    return {
        "layout": layout,
        "gb": round(nbytes / 1e9, 3),
        "raw_gb_per_s": times.gb_per_s(nbytes, "raw"),
        "descriptors_row_major": len(rows[0]),
        "row_major_ratio": times.ratio("raw", "row_major"),
        "descriptors": len(slices[0]),
        "ratio": times.ratio("raw", "sliced"),
    }


def descriptors(pool: MappedPool, parts: list[Part]) -> tuple[Spans, Spans]:
    """Spans in the target, where `parts` lie one after another, and in the pool."""
    here, there, at = [], [], 0
    for name, region in parts:
        tensor = pool.tensor(name)
        near, far = region_spans(tensor.shape, pool.storage(name), region, 2, tensor.offset_bytes)
        there.append(near)
        here.append(far + np.array([at, 0]))
        at += region.numel * 2
    return np.concatenate(here), np.concatenate(there)


def _check(model: BenchModel, parts: list[Part], target: Bytes) -> None:
    at = 0
    for name, region in parts:
        size = region.numel * 2
        wanted = np.empty(size, np.uint8)
        model.plain.copy_out(name, region, wanted)
        assert np.array_equal(target[at : at + size], wanted), name
        at += size
