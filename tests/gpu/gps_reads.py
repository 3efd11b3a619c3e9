"""Parameter storage and a GPU: Reads and Writes of both storages, beside plain copies of as many bytes.

    python tests/gpu/gps_reads.py --out gps_reads.json              # 1.5B and 7B shapes on the first GPU
    python tests/gpu/gps_reads.py --shapes 7b --sections engines
    python tests/gpu/gps_reads.py --shapes tiny --device cpu

A model lies in shared memory twice: row-major, and in slices as parameter storage keeps it for engines of two
devices and two training ranks. Three sections, each for both storages:

    engines   TP1, both ranks of TP2: the loader map of vLLM's own loading, out of a pinned mapping
    ranks     a ZeRO rank of two: what it loads, what it Writes; out of a plain mapping, as ranks do, and a
              pinned one
    nixl      the first rank of TP2 is pulled from another process into device memory

Every Read and Write is compared with the source byte by byte, then timed: the median of at most 5 rounds, in
each of which everything is done once. Prints JSON, writes it to --out. Exits with 1 when a check fails. That
NIXL refuses device memory is a finding, not a failure.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from services.gps.layouts import UNCUT
from shared.contracts.gps import PoolView
from shared.layout.tensor_layout import FlatRange, whole, zero_range
from shared.weights.mapped_pool import MappedPool, map_view
from shared.weights.pool_reader import PoolReader
from tests.gpu.measuring import Device, Report, same, timed
from tests.gpu.replica_worker import SHAPES
from tests.gpu.two_storages import STORAGES, USAGE, stored_twice
from tests.support.stored_pools import packing_of
from tests.support.vllm_ranks import as_rank, config_of, make_groups

ENGINE_RANKS = ((0, 1), (0, 2), (1, 2))
ZERO_RANK = 1
BUDGET_S = 15.0
"""For the timed rounds of one thing; there are fewer rounds where this is not enough."""
PULL = Path(__file__).with_name("gps_pull.py")
PULL_DEADLINE_S = 180.0


class Pools:
    """Both storages of a model, mapped as engines do and as training ranks do."""

    def __init__(self, views: Mapping[str, PoolView], device: Device) -> None:
        self.device = device
        self._reader = PoolReader(folder=None, is_pinning=device.is_gpu)
        begin = time.perf_counter()
        self.pinned = {name: self._reader.map(view, writable=True) for name, view in views.items()}
        self.pin_s = time.perf_counter() - begin
        self.plain = {name: map_view(view, writable=True, folder=None) for name, view in views.items()}
        self.tensors = views["row-major"].tensors

    @property
    def source(self) -> MappedPool:
        return self.plain["row-major"]

    def plain_copy(self, nbytes: int, *, to_device: bool) -> Callable[[], None]:
        """One copy of `nbytes` between pinned memory and the device."""
        host = torch.from_numpy(self.pinned["row-major"].memory)[:nbytes]
        there = self.device.empty(host.shape, torch.uint8)
        there.copy_(host)

        def copy() -> None:
            target, source = (there, host) if to_device else (host, there)
            target.copy_(source, non_blocking=True)
            self.device.finish()

        return copy

    def close(self) -> None:
        self._reader.close()


def read_engines(config: Any, pools: Pools, shape: str, report: Report) -> None:
    for rank, size in ENGINE_RANKS:
        _read_engine(config, pools, (rank, size), shape, report)
        if pools.device.is_gpu:
            torch.cuda.empty_cache()


def _read_engine(config: Any, pools: Pools, place: tuple[int, int], shape: str, report: Report) -> None:
    from shared.inference.engines.vllm_model import build_model
    from shared.weights.loader_map import LoaderMap

    device, reader = pools.device, f"TP{place[1]} rank {place[0]}"
    with as_rank(config, *place):
        loaded = build_model(config, device.name)
        loaded.load_weights((name, pools.source.torch(name)) for name in pools.source.names)
        recorded = LoaderMap.record(build_model(config, "meta"), pools.tensors)
    expected = dict(loaded.named_parameters(remove_duplicate=False))
    got = {name: device.empty(spec.shape, spec.dtype) for name, spec in recorded.parameters.items()}
    stage = partial(torch.Tensor.to, device=device.name, non_blocking=True) if device.is_gpu else None

    def read(pool: MappedPool) -> int:
        nbytes = recorded.apply(pool.tensors, got, stage=stage)
        device.finish()
        return nbytes

    for name, pool in pools.pinned.items():
        for parameter in got.values():
            parameter.fill_(torch.nan)
        nbytes = read(pool)
        report.checks[f"{shape}: {reader} reads {name} as vLLM loads"] = (
            got.keys() <= expected.keys()
            and all(same(expected[parameter], value) for parameter, value in got.items())
        )
    del loaded, expected
    work = {name: partial(read, pool) for name, pool in pools.pinned.items()}
    plain = pools.plain_copy(nbytes, to_device=True)
    times = timed({"limit": plain, **work}, BUDGET_S)
    for name in work:
        report.row(times, nbytes, "limit", name, shape=shape, what="read", who=reader, storage=name)


class ZeroRank:
    """The shard of one training rank, on the device."""

    def __init__(self, pools: Pools) -> None:
        self.device, self.pools = pools.device, pools
        specs = packing_of(pools.source.view, UNCUT).specs
        ranges = {name: zero_range(spec.numel, ZERO_RANK, USAGE.num_writers) for name, spec in specs.items()}
        self.specs = specs
        self.parts = {name: part for name, part in ranges.items() if part.count}
        self.shard = {
            name: self.device.empty(part.count, getattr(torch, specs[name].dtype))
            for name, part in self.parts.items()
        }
        self.nbytes = sum(value.nbytes for value in self.shard.values())
        self._scratch = np.empty((2, max(spec.nbytes for spec in specs.values())), np.uint8)

    def read(self, pool: MappedPool) -> None:
        for name, part in self.parts.items():
            pool.read_flat(name, part.start, self.shard[name])

    def write(self, pool: MappedPool) -> None:
        for name, part in self.parts.items():
            pool.write_flat(name, part.start, self.shard[name])

    def checksums(self, pool: MappedPool) -> list[str]:
        from shared.weights.checksum import checksum_region  # the one need of a package beyond an engine's

        return [
            checksum_region(
                pool.raw(name), self.specs[name].shape, self.specs[name].itemsize, part, pool.storage(name)
            )
            for name, part in self.parts.items()
        ]

    def flip(self) -> None:
        """Every byte of the shard becomes another one, and at the second call what it was."""
        for value in self.shard.values():
            value.view(torch.uint8).bitwise_xor_(0xFF)

    def has_shard_of(self, pool: MappedPool) -> bool:
        return all(
            same(self.shard[name].cpu(), pool.flat(name, part.start, part.count))
            for name, part in self.parts.items()
        )

    def differs_by_shard(self, written: MappedPool, other: MappedPool) -> bool:
        """Whether `written` has `other`'s bytes outside the shard, and other ones everywhere in it."""
        for name, spec in self.specs.items():
            left, right = self._scratch[:, : spec.nbytes]
            written.copy_out(name, whole(spec), left)
            other.copy_out(name, whole(spec), right)
            part = self.parts.get(name, FlatRange(0, 0))
            inside = slice(part.start * spec.itemsize, (part.start + part.count) * spec.itemsize)
            right[inside] ^= 0xFF
            if not np.array_equal(left, right):
                return False
        return True


def use_ranks(pools: Pools, shape: str, report: Report) -> None:
    rank, who = ZeroRank(pools), f"ZeRO-{USAGE.num_writers} rank {ZERO_RANK}"
    mappings = {
        f"{name}, {how}": pool
        for how, found in (("plain", pools.plain), ("pinned", pools.pinned))
        for name, pool in found.items()
    }
    for name, pool in mappings.items():
        for value in rank.shard.values():
            value.fill_(torch.nan)
        rank.read(pool)
        report.checks[f"{shape}: {who} reads {name}"] = rank.has_shard_of(pools.source)
    for name, other in (("row-major", "sliced"), ("sliced", "row-major")):
        rank.flip()
        rank.write(pools.plain[name])
        report.checks[f"{shape}: {who} writes {name}"] = rank.differs_by_shard(
            pools.plain[name], pools.plain[other]
        )
        rank.flip()
        rank.write(pools.pinned[name])
        report.checks[f"{shape}: {who} writes {name} back"] = rank.has_shard_of(pools.plain[name])
    to_device, to_host = (pools.plain_copy(rank.nbytes, to_device=way) for way in (True, False))
    for what, do, limit, found in (
        ("read", rank.read, to_device, mappings),
        ("write", rank.write, to_host, mappings),
        ("checksums of a write", rank.checksums, to_host, pools.plain),
    ):
        work = {name: partial(do, pool) for name, pool in found.items()}
        times = timed({"limit": limit, **work}, BUDGET_S)
        for name in work:
            report.row(times, rank.nbytes, "limit", name, shape=shape, what=what, who=who, storage=name)
    sums = {name: rank.checksums(pools.plain[name]) for name in STORAGES}
    report.checks[f"{shape}: {who} finds equal checksums"] = sums["row-major"] == sums["sliced"]


def pull_apart(views: Mapping[str, PoolView], device: Device, shape: str, report: Report) -> None:
    """NIXL in a process of its own: what kills it there is a finding here."""
    asked = json.dumps({name: view.model_dump(mode="json") for name, view in views.items()})
    command = [sys.executable, str(PULL), "--shape", shape, "--device", device.name]
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=PULL_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        report.findings.append(f"{shape}: NIXL did not end within {PULL_DEADLINE_S:.0f} s")
        return
    print(done.stderr, file=sys.stderr, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"checks"')]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["silent"])[-1]
        report.findings.append(f"{shape}: NIXL ended with status {done.returncode}: {last}")
        return
    found = json.loads(lines[-1])
    report.checks |= found["checks"]
    report.findings += found["findings"]
    report.rows += found["rows"]


SECTIONS = ("engines", "ranks", "nixl")


def measure(shape: str, device: Device, sections: list[str], report: Report) -> None:
    spec = replace(SHAPES[shape], dtype="bfloat16")
    with ExitStack() as stack:
        views = stack.enter_context(stored_twice(spec, shape))
        if "nixl" in sections:
            with report.section(f"{shape} nixl"):
                pull_apart(views, device, shape, report)
        pools = Pools(views, device)
        stack.callback(pools.close)
        pinned = {"shape": shape, "pin_s": round(pools.pin_s, 3), "gb": 2 * views["sliced"].nbytes / 1e9}
        report.rows.append(pinned)
        if "engines" in sections:
            with report.section(f"{shape} engines"):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                (folder / "config.json").write_text(json.dumps(spec.config()))
                config = config_of(str(folder), spec.dtype)
                if not torch.distributed.is_initialized():
                    make_groups(config)
                read_engines(config, pools, shape, report)
        if "ranks" in sections:
            with report.section(f"{shape} ranks"):
                use_ranks(pools, shape, report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5b", "7b"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", default="gps_reads.json", help="where the JSON goes")
    options = parser.parse_args()
    device = Device(options.device)
    report = Report()
    for shape in options.shapes:
        measure(shape, device, options.sections, report)
    text = json.dumps({"options": vars(options), **vars(report)}, indent=2)
    print(text)
    Path(options.out).write_text(text)
    return 0 if all(report.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
