"""Read and Write between the pool and a process of the same node, beside plain memcpy and raw NIXL.

memcpy is one `numpy.copyto` of the same number of bytes in one thread, from the same pool to the same target;
raw NIXL is one descriptor of as many bytes, from a second process over whatever UCX chooses.
"""

import contextlib
from functools import partial
from typing import Any

import numpy as np

from gps_bench.model import BenchModel, Bytes
from gps_bench.nixl_peer import nixl_link
from gps_bench.timing import interleaved
from shared.weights.checksum import checksum_bytes


def _one(first: int, length: int) -> np.ndarray:
    return np.array([[first, length]], np.int64)


def measure(model: BenchModel, target: Bytes, repeats: int, *, has_nixl: bool) -> dict[str, Any]:
    rows = []
    for layout in model.layouts:
        with nixl_link(model.plain.view, target) if has_nixl else contextlib.nullcontext() as link:
            rows.append(_layout(model, layout, target, repeats, link))
    columns = [row for row in rows if "column_sliced_ratio" in row]
    return {
        "same_node_contiguous_ratio": min(row["contiguous_ratio"] for row in rows),
        "same_node_column_ratio": min(row["column_sliced_ratio"] for row in columns),
        "same_node_column_row_major_ratio": min(row["column_row_major_ratio"] for row in columns),
        "same_node": rows,
        "many_slices": many_slices(model, target, repeats),
    }


def _layout(model: BenchModel, layout: str, target: Bytes, repeats: int, link: Any) -> dict[str, Any]:
    model.slice_for(layout)
    parts, flat = model.parts(layout), model.parts(layout, columns=False)
    cut = model.parts(layout, columns=True)
    nbytes, flat_bytes, cut_bytes = (model.nbytes_of(found) for found in (parts, flat, cut))
    memory = model.plain.memory
    at_once = min(nbytes, len(memory))  # tensor parallel ranks all have the norms: under 0.1 % more bytes

    def memcpy(count: int) -> None:
        np.copyto(target[:count], memory[:count])

    def write_and_hash(pool: Any) -> None:
        at = 0
        for name, region in parts:
            size = region.numel * model.itemsize
            checksum_bytes(target[at : at + size].data)
            pool.copy_in(name, region, target[at : at + size])
            at += size

    work = {
        "memcpy": partial(memcpy, flat_bytes),
        "read": partial(model.read, model.plain, flat, target),
        "memcpy_all": partial(memcpy, at_once),
        "read_all": partial(model.read, model.plain, parts, target),
        "read_all_sliced": partial(model.read, model.sliced, parts, target),
        "write_all": partial(model.write, model.plain, parts, target),
        "write_all_sliced": partial(model.write, model.sliced, parts, target),
        "write_hashed": partial(write_and_hash, model.plain),
    }
    if cut:
        work |= {
            "memcpy_cut": partial(memcpy, cut_bytes),
            "read_cut": partial(model.read, model.plain, cut, target),
            "read_cut_sliced": partial(model.read, model.sliced, cut, target),
        }
    if link is not None:
        ends = link.prepare(_one(0, at_once), _one(0, at_once))
        work["nixl"] = partial(link.read, ends)
        link.read(ends)  # connects
    model.read(model.plain, parts, target)  # so that the Writes below put back what is there
    times = interleaved({**work, "restore": lambda: model.read(model.plain, parts, target)}, repeats)
    row: dict[str, Any] = {
        "layout": layout,
        "gb": round(nbytes / 1e9, 3),
        "parts": len(parts),
        "memcpy_gb_per_s": times.gb_per_s(nbytes, "memcpy_all"),
        "nixl_raw_gb_per_s": times.gb_per_s(nbytes, "nixl") if link is not None else None,
        "read_gb_per_s": times.gb_per_s(nbytes, "read_all"),
        "read_sliced_gb_per_s": times.gb_per_s(nbytes, "read_all_sliced"),
        "write_gb_per_s": times.gb_per_s(nbytes, "write_all"),
        "write_sliced_gb_per_s": times.gb_per_s(nbytes, "write_all_sliced"),
        "write_with_checksums_gb_per_s": times.gb_per_s(nbytes, "write_hashed"),
        "read_ratio": times.ratio("memcpy_all", "read_all_sliced"),
        "write_ratio": times.ratio("memcpy_all", "write_all_sliced"),
        "contiguous_ratio": times.ratio("memcpy", "read"),
    }
    if cut:
        row["column_gb"] = round(cut_bytes / 1e9, 3)
        row["column_row_major_ratio"] = times.ratio("memcpy_cut", "read_cut")
        row["column_sliced_ratio"] = times.ratio("memcpy_cut", "read_cut_sliced")
    return row


def many_slices(model: BenchModel, target: Bytes, repeats: int) -> list[dict[str, Any]]:
    """The same 256 MB in one piece and in many: what a slice costs beyond its bytes."""
    nbytes = min(256 << 20, target.nbytes)
    rows = []
    for count in (1, 100, 10_000, 100_000):
        size = nbytes // count
        source = model.plain.memory[: size * count].reshape(count, size)
        into = target[: size * count].reshape(count, size)

        def many(source: Bytes = source, into: Bytes = into) -> None:
            for near, far in zip(into, source, strict=True):
                np.copyto(near, far)

        def one(nbytes: int = size * count) -> None:
            np.copyto(target[:nbytes], model.plain.memory[:nbytes])

        times = interleaved({"one": one, "many": many}, repeats)
        rows.append(
            {
                "slices": count,
                "bytes_each": size,
                "ratio": times.ratio("one", "many"),
                "microseconds_each": round((times.median_s("many") - times.median_s("one")) / count * 1e6, 3),
            }
        )
    return rows
