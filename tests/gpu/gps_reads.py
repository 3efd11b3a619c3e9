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
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from bench.gps_bench.timing import Times, interleaved
from services.gps.layouts import UNCUT, Usage
from services.gps.packing import pack, spans_between
from shared.contracts.gps import PeerInfo, PoolView
from shared.errors import PivotError
from shared.layout.parallel import engine_layout
from shared.layout.tensor_layout import Box, FlatRange, whole, zero_range
from shared.weights.mapped_pool import PREFIX, SHM_FOLDER, MappedPool, map_view
from shared.weights.pool_reader import PoolReader
from tests.gpu.replica_worker import SHAPES
from tests.support.stored_pools import packing_of, store_for
from tests.support.tiny_model import TinySpec, write_random_pool
from tests.support.vllm_ranks import as_rank, config_of, make_groups

ROOT = Path(__file__).resolve().parents[2]
USAGE = Usage(num_readers=2, num_writers=2)
STORAGES = {"row-major": UNCUT, "sliced": USAGE}
ENGINE_RANKS = ((0, 1), (0, 2), (1, 2))
ZERO_RANK = 1
MOST_ROUNDS = 5
SECTION_BUDGET_S = 30.0
"""For the timed rounds of a section and shape; there are fewer rounds where this is not enough."""
NIXL_DEADLINE_S, CHILD_DEADLINE_S = 60.0, 240.0


@dataclass(frozen=True, slots=True)
class Device:
    """Where parameters live; on a CPU all is the same, but for the pinning."""

    name: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "cuda"

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.name)

    def finish(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


@dataclass
class Report:
    checks: dict[str, bool] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def row(self, times: Times, nbytes: int, limit: str, name: str, **labels: Any) -> None:
        """How fast `name` was, beside the plain copy `limit` of as many bytes."""
        self.rows.append(
            labels
            | {
                "gb": round(nbytes / 1e9, 3),
                "gb_per_s": times.gb_per_s(nbytes, name),
                "limit_gb_per_s": times.gb_per_s(nbytes, limit),
                "ratio": times.ratio(limit, name),
                "rounds": len(times.rounds[name]),
            }
        )
        print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """An error in it fails its check, and the next section runs."""
        begin = time.perf_counter()
        try:
            yield
            self.checks.setdefault(f"{name}: ran to its end", True)
        except Exception as error:
            traceback.print_exc()
            self.checks[f"{name}: ran to its end"] = False
            self.findings.append(f"{name}: {type(error).__name__}: {error}")
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def timed(work: Mapping[str, Callable[[], object]], budget_s: float) -> Times:
    """`work` in rounds, as many as fit the budget."""
    begin = time.perf_counter()
    for do in work.values():
        do()
    once_s = time.perf_counter() - begin
    return interleaved(work, max(1, min(MOST_ROUNDS, int(budget_s / once_s) - 1)))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in every byte."""
    return left.shape == right.shape and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def stored_twice(spec: TinySpec, shape: str) -> Iterator[dict[str, PoolView]]:
    """The pools of both storages, in files whose names parameter storage could have given."""
    paths = {name: SHM_FOLDER / f"{PREFIX}gps-reads-{os.getpid()}-{shape}-{name}" for name in STORAGES}
    try:
        plain = write_random_pool(spec, paths["row-major"])
        yield {"row-major": plain, "sliced": store_for(USAGE, plain, paths["sliced"])}
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


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
    times = timed({"limit": plain, **work}, SECTION_BUDGET_S / len(ENGINE_RANKS))
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
            self.shard[name].copy_(pool.flat(name, part.start, part.count))
        self.device.finish()

    def write(self, pool: MappedPool) -> None:
        for name, part in self.parts.items():
            pool.write_flat(name, part.start, self.shard[name])
        self.device.finish()

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
        times = timed({"limit": limit, **work}, SECTION_BUDGET_S / 3)
        for name in work:
            report.row(times, rank.nbytes, "limit", name, shape=shape, what=what, who=who, storage=name)
    sums = {name: rank.checksums(pools.plain[name]) for name in STORAGES}
    report.checks[f"{shape}: {who} finds equal checksums"] = sums["row-major"] == sums["sliced"]


def pull_apart(views: Mapping[str, PoolView], device: Device, shape: str, report: Report) -> None:
    """NIXL in a process of its own: what kills it there is a finding here."""
    asked = json.dumps({name: view.model_dump(mode="json") for name, view in views.items()})
    command = [sys.executable, __file__, "--pull", shape, "--device", device.name]
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        report.findings.append(f"{shape}: NIXL did not end within {CHILD_DEADLINE_S:.0f} s")
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


def pull(device: Device, shape: str) -> Report:
    """Pulls both storages, which standard input names, one after another."""
    from shared.weights.ucx import LaneLog, set_environment

    of_peer = dict(os.environ)  # each process needs a log of its own
    views = {name: PoolView.model_validate(view) for name, view in json.load(sys.stdin).items()}
    source, report = map_view(views["row-major"], folder=None), Report()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ucx.log"
        set_environment("any", "127.0.0.1", log)
        for name, view in views.items():
            try:
                with _Peer(view, of_peer) as peer:
                    _pull_one(peer, view, name, source, device, shape, report)
            except PivotError as error:
                report.findings.append(f"{shape}: NIXL, {name} into {device.name}: {error.message}")
        LaneLog(log).lanes()  # makes UCX write what it keeps back
        chosen = [line.partition("INFO")[2] for line in log.read_text().splitlines() if "node cfg#" in line]
        report.findings += [f"{shape}: UCX chose {' '.join(line.split())}" for line in dict.fromkeys(chosen)]
    return report


def _pull_one(
    peer: "_Peer",
    view: PoolView,
    storage: str,
    source: MappedPool,
    device: Device,
    shape: str,
    report: Report,
) -> None:
    from shared.weights.nixl_transport import NixlTransport
    from shared.weights.ports import Memory

    there = packing_of(view, STORAGES[storage])
    specs = list(there.specs.values())
    parts = engine_layout(specs, [["g0", "g1"]]).placements
    boxes = {p.tensor: p.region for p in parts if p.holder == "g0" and isinstance(p.region, Box)}
    here = pack(there.specs, boxes, there.storages)
    spans = spans_between(here, there, list(boxes.items()))
    nbytes = int(spans[0][:, 1].sum())
    target = device.empty(here.nbytes, torch.uint8)
    transport = NixlTransport(f"reader-{os.getpid()}-{storage}", has_progress_thread=False)
    kind = "VRAM" if device.is_gpu else "DRAM"
    one = np.array([[0, nbytes]], np.int64)

    def read(name: str) -> None:
        transport.wait(transport.read(*ends[name]), NIXL_DEADLINE_S)

    try:
        transport.register("target", Memory(target.data_ptr(), target.nbytes, kind, owner=target))
        transport.connect(peer.info)
        ends = {
            name: (
                transport.prepare_local("target", near),
                transport.prepare_remote(peer.info.agent, "pool", far),
            )
            for name, (near, far) in {"limit": (one, one), "parts": spans}.items()
        }
        read("limit")  # connects
        target.fill_(0xFF)
        device.finish()
        begin = time.perf_counter()
        read("parts")
        first_s = time.perf_counter() - begin
        landed = MappedPool(here.view("landed"), target.cpu().numpy(), writable=False)
        report.checks[f"{shape}: NIXL pulls {storage} into {kind}"] = all(
            _equal(landed, source, name, box) for name, box in boxes.items()
        )
        times = timed({name: partial(read, name) for name in ends}, SECTION_BUDGET_S / len(STORAGES))
    finally:
        transport.close()
    report.row(
        times,
        nbytes,
        "limit",
        "parts",
        shape=shape,
        what=f"pull into {kind}",
        who="TP2 rank 0",
        storage=storage,
        descriptors=len(spans[0]),
        first_s=round(first_s, 3),
    )


def _equal(landed: MappedPool, source: MappedPool, name: str, box: Box) -> bool:
    piece = landed.tensor(name)
    size = len(landed.raw(name))
    got, wanted = np.empty(size, np.uint8), np.empty(size, np.uint8)
    landed.copy_out(name, Box((0,) * len(piece.shape), piece.shape), got)
    source.copy_out(name, box, wanted)
    return np.array_equal(got, wanted)


class _Peer:
    """The process that holds a pool in host memory and offers it."""

    def __init__(self, view: PoolView, environment: Mapping[str, str]) -> None:
        region = view.model_copy(update={"tensors": (), "sliced": ()})
        command = [sys.executable, str(ROOT / "bench/gps_bench/nixl_peer.py"), "offer"]
        self._process = subprocess.Popen(
            [*command, region.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
        )
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith(b"{"):
            if not line:
                raise PivotError(f"the process that offers {view.path} ended")
        self.info = PeerInfo.model_validate_json(line)

    def __enter__(self) -> "_Peer":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


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
    parser.add_argument("--pull", metavar="SHAPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = Device(options.device)
    if options.pull:
        print(json.dumps(vars(pull(device, options.pull))))
        return 0
    report = Report()
    for shape in options.shapes:
        measure(shape, device, options.sections, report)
    text = json.dumps({"options": vars(options), **vars(report)}, indent=2)
    print(text)
    Path(options.out).write_text(text)
    return 0 if all(report.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
