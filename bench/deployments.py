"""Deployments on the simulated cluster, as `pivotrl sim` compares them, with as many processes as cores.

    python bench/deployments.py group1 group2 --modes colocated disaggregated pivot pivot_best \\
        --steps 21 --warmup 9 --seeds 3 --out rows.jsonl

Needs numpy and numba only, so that it also runs where the rest is not installed. Rows are those of
`pivotrl sim --json`; a row appears in the file as soon as it is known.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.planning.config import PlannerConfig
from shared.sim.compare import run_all
from shared.sim.modes import MODES
from shared.sim.run import Options
from shared.sim.scenarios import get_scenario


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="+")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--streaming", action="store_true", help="train on parts of a batch while the rest finishes"
    )
    parser.add_argument("--no-best", action="store_true", help="without the search of splits")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    options = Options(given.steps, given.warmup, PlannerConfig(), timer=time.process_time)
    scenarios = [get_scenario(name) for name in given.scenarios]
    began = time.perf_counter()

    def on_phase(phase: str, done: int, total: int) -> None:
        if phase != "runs" or done == total:
            print(f"{time.perf_counter() - began:6.0f} s  {phase} {done}/{total}", flush=True)

    with given.out.open("w") as out:
        for row in run_all(
            scenarios,
            given.modes,
            given.seeds,
            options,
            best=not given.no_best,
            streams=given.streaming,
            jobs=given.jobs,
            on_phase=on_phase,
        ):
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
