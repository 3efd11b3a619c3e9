"""GPS measured beside its limits: `python bench/gps.py [--json] [--gb 4.2] [--repeats 5]`.

First that every layout's bytes are exact, through both storages; then times. Every figure is a ratio or
stands beside the plain copy of the same bytes, measured in the same rounds: medians over interleaved repeats,
because the machine does other work too. It needs about 3.2 times `--gb` of memory, two thirds of it in
/dev/shm.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from gps_bench import cross_node, more_nodes, peers, plans, same_node, service
from gps_bench.model import BenchModel

from shared.weights.host_copy import copy_environment
from shared.weights.host_pool import HostPool

SECTIONS = ("plans", "same-node", "cross-node", "service", "more-nodes", "peers")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"gb": options.gb, "repeats": options.repeats, "cores": os.cpu_count()}
    found["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    if "plans" in options.sections:
        found |= plans.measure()
    if {"same-node", "cross-node"} & set(options.sections):
        found |= on_a_model(options)
    if "service" in options.sections and not options.no_nixl:
        found |= service.measure(min(options.gb, options.service_gb), options.repeats)
    if "more-nodes" in options.sections and not options.no_nixl:
        found |= more_nodes.measure(min(options.gb, options.service_gb), options.repeats)
    if "peers" in options.sections:
        found |= peers.measure(min(options.gb, options.peers_gb), options.repeats)
    return found


def on_a_model(options: argparse.Namespace) -> dict[str, Any]:
    host = HostPool(run=f"bench{os.getpid()}", node=0, budget_bytes=1 << 50)
    found: dict[str, Any] = {}
    try:
        model = BenchModel.make(host, int(options.gb * 1e9))
        target = np.zeros(int(model.nbytes * 1.01) + (1 << 20), np.uint8)
        model.check(target)
        found["is_bit_exact"] = True
        found["model_gb"] = round(model.nbytes / 1e9, 3)
        if "same-node" in options.sections:
            found |= same_node.measure(model, target, options.repeats, has_nixl=not options.no_nixl)
        if "cross-node" in options.sections and not options.no_nixl:
            found |= cross_node.measure(model, target, options.repeats)
    finally:
        host.close()
    return found


def show(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, list):
            print(f"\n{name}")
            columns = list(dict.fromkeys(column for row in value for column in row))
            print("  " + "  ".join(columns))
            for row in value:
                print("  " + "  ".join(f"{row.get(c, '')!s:>{len(c)}}" for c in columns))
        else:
            print(f"{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.2, help="size of the model in GB")
    parser.add_argument("--peers-gb", type=float, default=1.2, help="the same for the section on peers")
    parser.add_argument("--service-gb", type=float, default=1.0, help="and for those on the service")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--no-nixl", action="store_true", help="leave NIXL out where it is not installed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-streaming", action="store_true", help="with memcpy as the system sets it up")
    options = parser.parse_args()
    if not options.no_streaming and (more := copy_environment(os.environ)):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dict(more)})
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


if __name__ == "__main__":
    main()
