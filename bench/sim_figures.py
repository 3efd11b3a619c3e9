"""Figures of simulated results, as PNG: `python bench/sim_figures.py KIND --out DIR [...]`.

bars      --rows A.jsonl …       throughput and spread over seeds, as Figure 9; rows of `pivotrl sim --out`
timeline  --scenario group2      devices and tokens/s over time, as Figure 10
window    --scenario group2      tokens/s and shifts per step over H, as Figure 14; prints a table
ablations --rows A.jsonl …       strategies and components over disaggregated, as Figure 11
causes    --rows A.jsonl …       where the device-seconds of a step go, best fixed split and pivot_best
sensitivity --scenario group2    pivot_best over the best fixed split against reward weight and length spread;
                                 searches both splits at each point, and keeps the points beside the figure
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from shared.planning.config import PlannerConfig
from shared.sim.driver import Simulation
from shared.sim.modes import get_mode, paper_shares
from shared.sim.report import describe, summary
from shared.sim.run import Options, RunResult
from shared.sim.scenarios import get_scenario
from shared.sim.search import best_split

Rows = list[dict[str, Any]]
BARS = (
    ("colocated", "-"),
    ("disaggregated", "paper"),
    ("disaggregated", "best"),
    ("rollout_reward_colocated", "paper"),
    ("pivot", "paper"),
    ("pivot_best", "paper"),
    ("pivot_best", "best"),
)
CAUSES = ("useful", "underfilled", "prefill", "refresh", "idle", "shifting", "free")
VERDICT_MEDIANS = (200, 800, 2_000, 6_000, 12_000)
VERDICT_SIGMAS = (0.1, 0.4, 0.7, 1.1)
KINDS = ("bars", "timeline", "window", "ablations", "causes", "sensitivity")
ABLATIONS = ("static", "rule_based", "vanilla", "vanilla_model", "pivot")
WINDOW_STEPS, WINDOW_WARMUP = 21, 9
WINDOWS_S = (0.01, 5.0, 30.0, 60.0, 90.0, 120.0, 600.0)


def read(paths: list[Path]) -> dict[str, dict[tuple[str, str], dict[str, Any]]]:
    """Means over seeds by scenario, mode and split."""
    rows: Rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    grouped: dict[tuple[str, str, str], Rows] = {}
    for row in rows:
        grouped.setdefault((row["scenario"], row["mode"], row["split"]), []).append(row)
    means: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for (scenario, mode, split), group in grouped.items():
        means.setdefault(scenario, {})[mode, split] = summary(group)
    return means


def bars(paths: list[Path], out: Path) -> None:
    means = read(paths)
    figure, axes = plt.subplots(1, len(means), figsize=(4 * len(means), 3.6), squeeze=False)
    for axis, (scenario, found) in zip(axes[0], means.items(), strict=True):
        shown = [key for key in BARS if key in found]
        values = [found[key]["throughput_tokens_per_s"] / 1e3 for key in shown]
        axis.bar(range(len(shown)), values, yerr=[found[key]["spread"] / 1e3 for key in shown], capsize=3)
        best = max(values)
        for i, value in enumerate(values):
            axis.annotate(f"{best / value:.2f}×", (i, value), ha="center", va="bottom", fontsize=8)
        labels = [f"{m.replace('_', ' ')}\n{s}" if s != "-" else m for m, s in shown]
        axis.set_xticks(range(len(shown)), labels, rotation=60, ha="right", fontsize=7)
        axis.set_title(scenario, fontsize=9)
        axis.set_ylabel("thousand tokens/s")
    save(figure, out / "sim-throughput.png")


def ablations(paths: list[Path], out: Path) -> None:
    means = {s: found for s, found in read(paths).items() if ("vanilla", "paper") in found}
    figure, axes = plt.subplots(1, len(means), figsize=(4 * len(means), 3.2), squeeze=False)
    for axis, (scenario, found) in zip(axes[0], means.items(), strict=True):
        base = found["disaggregated", "paper"]["throughput_tokens_per_s"]
        names = [name for name in ABLATIONS if (name, "paper") in found]
        ratios = [found[name, "paper"]["throughput_tokens_per_s"] / base for name in names]
        axis.bar(range(len(names)), ratios)
        for i, ratio in enumerate(ratios):
            axis.annotate(f"{ratio:.2f}×", (i, ratio), ha="center", va="bottom", fontsize=8)
        axis.axhline(1.0, color="grey", lw=0.8)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
        axis.set_title(f"{scenario}, over disaggregated with the paper's split", fontsize=9)
    save(figure, out / "sim-ablations.png")


def causes(paths: list[Path], out: Path) -> None:
    rows: Rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    shown = [
        row
        for row in rows
        if row["seed"] == 0
        and (row["mode"], row["split"]) in (("disaggregated", "best"), ("pivot_best", "best"))
    ]
    shown.sort(key=lambda row: (row["scenario"], row["mode"]))
    figure, axis = plt.subplots(figsize=(11, 4))
    bottom = [0.0] * len(shown)
    for cause in CAUSES:
        shares = [
            100
            * sum(role.get(cause, 0.0) for role in row["device_s"].values())
            / row["devices"]
            / row["step_time_s"]
            for row in shown
        ]
        axis.bar(range(len(shown)), shares, bottom=bottom, label=cause)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    labels = [
        f"{row['scenario']} {'fixed' if row['mode'] == 'disaggregated' else 'pivot_best'}" for row in shown
    ]
    axis.set_xticks(range(len(shown)), labels, rotation=70, ha="right", fontsize=7)
    axis.set_ylabel("% of device time")
    axis.legend(fontsize=7, ncols=len(CAUSES), loc="upper center", bbox_to_anchor=(0.5, 1.15))
    save(figure, out / "sim-causes.png")


def sensitivity(scenario_name: str, out: Path) -> None:
    base = get_scenario(scenario_name)
    verdict = base.workload.verdict
    points = [("reward weight", float(median), replace(verdict, median=median)) for median in VERDICT_MEDIANS]
    points += [("length spread", sigma, replace(verdict, sigma=sigma)) for sigma in VERDICT_SIGMAS]
    options = Options(num_steps=12, warmup_steps=6)
    found: Rows = []
    for name, value, lengths in points:
        scenario = replace(base, workload=replace(base.workload, verdict=lengths))
        fixed, ours = (best_split(scenario, mode, 0, options) for mode in ("disaggregated", "pivot_best"))
        speeds = fixed.tried[0][1], ours.tried[0][1]
        found.append(
            {
                "axis": name,
                "value": value,
                "fixed": str(fixed.best.shares),
                "fixed_tokens_per_s": speeds[0],
                "pivot_best_training": ours.best.shares.training,
                "pivot_best_tokens_per_s": speeds[1],
                "speed_up": round(speeds[1] / speeds[0], 3),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    (out / "sim-sensitivity.jsonl").write_text("".join(json.dumps(point) + "\n" for point in found))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for axis, name, label in zip(
        axes, ("reward weight", "length spread"), ("median verdict, tokens", "sigma of verdicts"), strict=True
    ):
        along = [point for point in found if point["axis"] == name]
        axis.plot([p["value"] for p in along], [p["speed_up"] for p in along], marker="o")
        axis.axhline(1.0, color="grey", lw=0.8)
        axis.set_xlabel(label)
    axes[0].set_xscale("log")
    axes[0].set_ylabel("pivot_best over the best fixed split")
    save(figure, out / "sim-sensitivity.png")


def run(scenario_name: str, mode_name: str, options: Options, training: int | None = None) -> RunResult:
    scenario, mode = get_scenario(scenario_name), get_mode(mode_name)
    shares = paper_shares(scenario, mode)
    return Simulation(scenario, mode, replace(shares, training=training or shares.training), 0, options).run()


def timeline(scenario: str, out: Path, training: int | None) -> None:
    figure, axes = plt.subplots(4, 1, figsize=(9, 9), sharex=True)
    for mode in ("disaggregated", "pivot"):
        result = run(scenario, mode, Options(num_steps=6), training if mode == "pivot" else None)
        marks = result.timeline
        for axis, role in zip(axes, ("rollout", "reward"), strict=False):
            tokens = [getattr(p, f"{role}_tokens") for p in marks]
            axis.plot(*rates(marks, tokens), label=mode, lw=0.9)
            axis.set_ylabel(f"{role} tokens/s")
        total = [p.rollout_tokens + p.reward_tokens for p in marks]
        axes[2].plot(*rates(marks, total), label=mode, lw=0.9)
    axes[2].set_ylabel("all tokens/s")
    axes[0].legend()
    at = [p.at_s for p in marks]
    axes[3].step(at, [p.rollout_devices for p in marks], where="post", label="rollout")
    axes[3].step(at, [p.reward_devices for p in marks], where="post", label="reward")
    axes[3].fill_between(
        at, 0, [32 * p.is_training for p in marks], step="post", alpha=0.2, color="red", label="training"
    )
    axes[3].set_ylabel("devices (pivot)")
    axes[3].set_xlabel("s")
    axes[3].legend()
    save(figure, out / "sim-timeline.png")


def rates(marks: Any, tokens: list[float], over_s: float = 10.0) -> tuple[list[float], list[float]]:
    """Tokens per second over windows of at least `over_s`."""
    at, found, last = [], [], 0
    for i, mark in enumerate(marks):
        if mark.at_s - marks[last].at_s >= over_s:
            at.append(mark.at_s)
            found.append((tokens[i] - tokens[last]) / (mark.at_s - marks[last].at_s))
            last = i
    return at, found


def window(scenario: str, mode: str, out: Path, training: int | None) -> None:
    speeds, shifts = [], []
    for window_s in WINDOWS_S:
        options = Options(WINDOW_STEPS, WINDOW_WARMUP, PlannerConfig(window_s=window_s))
        row = describe(run(scenario, mode, options, training))
        speeds.append(row["throughput_tokens_per_s"])
        shifts.append(row["shifts_per_step"])
        print(json.dumps({"window_s": window_s, "tokens_per_s": speeds[-1], "shifts_per_step": shifts[-1]}))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    for axis, values, name in ((axes[0], speeds, "tokens/s"), (axes[1], shifts, "shifts per step")):
        axis.plot(range(len(WINDOWS_S)), values, marker="o")
        axis.set_xticks(range(len(WINDOWS_S)), [f"{w:g}" for w in WINDOWS_S])
        axis.set_xlabel("H, s")
        axis.set_ylabel(name)
    save(figure, out / ("sim-window.png" if mode == "pivot" else f"sim-window-{mode}.png"))


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rows", type=Path, nargs="+", default=[])
    parser.add_argument("--scenario", default="group2")
    parser.add_argument("--mode", default="pivot", help="of window")
    parser.add_argument("--training", type=int, help="training devices of pivot, instead of the paper's")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    match options.kind:
        case "bars":
            bars(options.rows, options.out)
        case "ablations":
            ablations(options.rows, options.out)
        case "causes":
            causes(options.rows, options.out)
        case "sensitivity":
            sensitivity(options.scenario, options.out)
        case "timeline":
            timeline(options.scenario, options.out, options.training)
        case "window":
            window(options.scenario, options.mode, options.out, options.training)


if __name__ == "__main__":
    main()
