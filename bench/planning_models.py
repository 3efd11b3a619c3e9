"""What it costs to plan with the throughput model of the paper where engines follow another one.

    python bench/planning_models.py group2 group3 --training 24 56 --seeds 3

Simulated reward replicas of a mixture of experts read more weights the more sequences touch more experts.
The paper's form has no such term. Here planner and schedulers believe either the engines' own model, or the
paper's four constants fitted to that model's step times; engines stay as they are. Prints a JSON line per
run, and the fit's errors.
"""

import argparse
import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.ids import Role
from shared.planning.throughput import Fit, StepTime, fit
from shared.sim.driver import Simulation, engine_models
from shared.sim.modes import MODES
from shared.sim.report import describe
from shared.sim.run import Options
from shared.sim.scenarios import Shares, get_scenario

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
LENGTHS = (500, 2_000, 5_000, 10_000)


def four_constants(scenario_name: str, seed: int) -> Fit:
    """The paper's form, fitted to the step times of the scenario's reward replicas."""
    scenario = get_scenario(scenario_name)
    engine = engine_models(scenario, scenario.workload.batch(seed, 0, 1))[Role.REWARD]
    model = engine.throughput
    points = [
        StepTime(n, n * length, model.latency_s(n, n * length))
        for n in BATCHES
        for length in LENGTHS
        if n * length <= engine.kv_capacity_tokens
    ]
    return fit(points)


def play(job: tuple[str, str, int, int, str]) -> dict[str, Any]:
    """One run's row; `form` is `engines` or `paper`."""
    scenario, mode, training, seed, form = job
    fitted = four_constants(scenario, seed)
    steps, warmup = (15, 6) if get_scenario(scenario).num_devices > 32 else (21, 9)
    beliefs = {} if form == "engines" else {Role.REWARD: fitted.model}
    options = Options(steps, warmup, planning_models=beliefs)
    shares = Shares(0, 0, training)
    row = describe(Simulation(get_scenario(scenario), MODES[mode], shares, seed, options).run())
    return {
        "scenario": scenario,
        "mode": mode,
        "training": training,
        "seed": seed,
        "planned_with": form,
        "throughput_tokens_per_s": row["throughput_tokens_per_s"],
        "fit_error_median": round(fitted.median_rel_error, 4),
        "fit_error_worst": round(fitted.worst_rel_error, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="+")
    parser.add_argument("--training", type=int, nargs="+", required=True, help="devices, one per scenario")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["pivot", "pivot_best"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    jobs = [
        (scenario, mode, training, seed, form)
        for scenario, training in zip(given.scenarios, given.training, strict=True)
        for mode in given.modes
        for seed in range(given.seeds)
        for form in ("engines", "paper")
    ]
    with get_context("spawn").Pool(given.jobs) as pool:
        for row in pool.imap(play, jobs):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
