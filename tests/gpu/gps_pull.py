"""Pulls the first rank of TP2 from another process's host memory into device memory, by NIXL.

    python tests/gpu/gps_pull.py --shape 7b < VIEWS

A process of its own, for what kills NIXL should not end who asks. VIEWS is JSON: the `PoolView` of each
storage. Prints a report as one line of JSON. That NIXL refuses device memory is a finding.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from services.gps.packing import pack, spans_between
from shared.contracts.gps import PeerInfo, PoolView
from shared.errors import PivotError
from shared.layout.parallel import engine_layout
from shared.layout.tensor_layout import Box
from shared.weights.mapped_pool import MappedPool, map_view
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import Memory
from shared.weights.ucx import LaneLog, set_environment
from tests.gpu.measuring import Device, Report, timed
from tests.gpu.two_storages import STORAGES
from tests.support.stored_pools import packing_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S, BUDGET_S = 30.0, 15.0
"""For one pull; and for the timed rounds of one storage."""


def pull(device: Device, shape: str) -> Report:
    """Pulls both storages, which standard input names, one after another."""
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
        transport.wait(transport.read(*ends[name]), DEADLINE_S)

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
        times = timed({name: partial(read, name) for name in ends}, BUDGET_S)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, help="what the report calls the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(vars(pull(Device(options.device), options.shape))))


if __name__ == "__main__":
    main()
