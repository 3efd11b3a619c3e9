"""How long one planning decision takes, ours and the pseudocode's: `python bench/planner.py [--json]`.

    --devices 16 32 …     cluster sizes             --repeat 20     decisions of each up to 128 devices
    --reference 128       time the pseudocode up to this size; 0: not
    --figure cost.png     cost against cluster size  --misses 500    how often bounds miss the best candidate

CPU milliseconds of one decision, median and 99th percentile over random states mid-run, reward and rollout
pressed in turn (`tests/support/planner_states.py`), in three parts: pre-processing (loads and shift pairs,
and all that is not one of the others), construction (the candidates) and simulation (the replay of those
that are judged).
The pseudocode (`tests/support/reference.py`) judges every candidate. The first decision of each size is not
counted: it loads compiled loops and makes tables, which the planner does before it is ready.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.ids import Role
from shared.planning import planner as planner_module
from shared.planning.evaluate import RoleReplay
from shared.planning.plan import PlanRecord, PlanRecorded, WorkloadObserved
from shared.planning.planner import Planner
from shared.scheduling.migration import warm_up
from tests.support import reference
from tests.support.planner_states import DENSE, MOE, Situation, mid_run, random_situation

PHASES = ("preprocess", "construct", "simulate", "total")
KINDS = {"dense": (DENSE, DENSE), "moe_reward": (DENSE, MOE), "moe_rollout": (MOE, DENSE), "moe": (MOE, MOE)}
PRESSED = (Role.REWARD, Role.ROLLOUT)
Row = dict[str, Any]


class Stopwatch:
    """CPU milliseconds by phase."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.ms[name] += (time.process_time() - start) * 1e3

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return timed


def ours(situation: Situation) -> tuple[dict[str, float], PlanRecord]:
    """Milliseconds by phase, and the decision."""
    watch = Stopwatch()
    planner = Planner(situation.config, situation.cluster, situation.allocation)
    up, down = RoleReplay.after_shift_up, RoleReplay.after_shift_down
    with (
        patch.object(planner_module, "candidates", watch.around("construct", planner_module.candidates)),
        patch.object(RoleReplay, "after_shift_up", watch.around("simulate", up)),
        patch.object(RoleReplay, "after_shift_down", watch.around("simulate", down)),
        watch.phase("total"),
    ):
        effects = planner.step(WorkloadObserved(situation.state), 0.0)
    watch.ms["preprocess"] = watch.ms["total"] - watch.ms["construct"] - watch.ms["simulate"]
    record = effects[0]
    assert isinstance(record, PlanRecorded)
    return watch.ms, record.record


def pseudocode(situation: Situation) -> tuple[dict[str, float], reference.Decision]:
    """The same for the pseudocode."""
    watch = Stopwatch()
    config, cluster, allocation, state = situation
    shift_s = Planner(config, cluster, allocation).shift_s
    with watch.phase("total"):
        with watch.phase("preprocess"):
            prepared = reference.prepare(config, cluster, allocation, state, shift_s)
        if prepared is None:
            return watch.ms, reference.Decision(None, None)
        with watch.phase("construct"):
            found = reference.construct(config, prepared)
        with watch.phase("simulate"):
            decision = reference.simulate(config, prepared, found)
    return watch.ms, decision


def chosen(record: PlanRecord) -> tuple[Any, Any] | None:
    return next(((c.up_replicas, c.down_replicas) for c in record.candidates if c.is_chosen), None)


def measure(num_devices: int, repeat: int, seed: int, reference_up_to: int) -> Row:
    """One row: sizes, and milliseconds of each phase over `repeat` states."""
    times: dict[str, list[dict[str, float]]] = {"": [], "reference_": []}
    sizes: list[tuple[int, int]] = []
    differ = 0
    with_reference = num_devices <= reference_up_to
    for i in range(repeat):
        situation = mid_run(num_devices, random.Random(f"{seed}-{num_devices}-{i}"), pressed=PRESSED[i % 2])
        ms, record = ours(situation)
        times[""].append(ms)
        num_sequences = situation.state.rollout.num_sequences + situation.state.reward.num_sequences
        sizes.append((num_sequences, len(record.candidates)))
        if with_reference and i < max(1, repeat // 4):
            ms, decision = pseudocode(situation)
            times["reference_"].append(ms)
            wanted = decision.chosen and (decision.chosen.up, decision.chosen.down)
            differ += wanted != chosen(record)
    names = ("sequences", "judged")
    row: Row = {"devices": num_devices, "decisions": repeat}
    row |= {name: round(statistics.mean(s[i] for s in sizes)) for i, name in enumerate(names)}
    for prefix, each in times.items():
        for phase in PHASES if each else ():
            ordered = sorted(ms[phase] for ms in each)
            row[f"{prefix}{phase}_p50_ms"] = round(statistics.median(ordered), 3)
            row[f"{prefix}{phase}_p99_ms"] = round(
                ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3
            )
    if with_reference:
        row["choices_that_differ"] = differ
    return row


def misses(num_states: int, seed: int) -> Iterator[Row]:
    """How often judging few candidates misses the best one, and what that costs, by kind of models."""
    for kind, models in KINDS.items():
        lost: list[float] = []
        num_shifts = 0
        for i in range(num_states):
            situation = random_situation(random.Random(f"{seed}-{kind}-{i}"), models)
            _, record = ours(situation)
            _, exact = ours(situation._replace(config=replace(situation.config, exact=True)))
            found, best = ([c.benefit_tokens for c in r.candidates if c.is_chosen] for r in (record, exact))
            num_shifts += bool(best)
            if chosen(record) != chosen(exact):
                lost.append(1.0 - (found[0] if found else 0.0) / best[0])
        yield {
            "models": kind,
            "states": num_states,
            "shifts": num_shifts,
            "missed": len(lost),
            "benefit_lost_median": round(statistics.median(lost), 4) if lost else 0.0,
            "benefit_lost_worst": round(max(lost), 4) if lost else 0.0,
        }


def draw(rows: list[Row], path: Path) -> None:
    """Milliseconds against devices, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    devices = [row["devices"] for row in rows]
    for phase, style in zip(PHASES, ("o-", "s-", "^-", "D-"), strict=True):
        axis.plot(devices, [row[f"{phase}_p50_ms"] for row in rows], style, label=f"PivotRL, {phase}")
    axis.plot(devices, [row["total_p99_ms"] for row in rows], "k:", label="PivotRL, total, p99")
    timed = [row for row in rows if "reference_total_p50_ms" in row]
    if timed:
        totals = [row["reference_total_p50_ms"] for row in timed]
        axis.plot([row["devices"] for row in timed], totals, "x--", color="gray", label="pseudocode, total")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(devices, [f"{n:,}" for n in devices])
    axis.set_xlabel("devices")
    axis.set_ylabel("CPU ms of one decision")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def show(row: Row) -> str:
    """One row for people: p50 / p99 of each phase."""
    parts = [f"{row['devices']:>6} devices {row['sequences']:>7} sequences {row['judged']:>3} judged"]
    for prefix, name in (("", "PivotRL"), ("reference_", "pseudocode")):
        if f"{prefix}total_p50_ms" in row:
            cells = (
                f"{phase} {row[f'{prefix}{phase}_p50_ms']:.2f}/{row[f'{prefix}{phase}_p99_ms']:.2f}"
                for phase in PHASES
            )
            parts.append(f"    {name:<10} ms: " + "  ".join(cells))
    if row.get("choices_that_differ"):
        parts.append(f"    {row['choices_that_differ']} choices differ")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 32, 64, 128, 1024, 4096])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", type=int, default=128, metavar="DEVICES")
    parser.add_argument("--misses", type=int, default=0, metavar="STATES")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    warm_up()
    if options.misses:
        for row in misses(options.misses, options.seed):
            print(json.dumps(row), flush=True)
        return
    rows = []
    for num_devices in options.devices:
        for pressed in PRESSED:  # tables of this size are made once
            ours(mid_run(num_devices, random.Random(options.seed), pressed=pressed))
        repeat = options.repeat if num_devices <= 128 else max(1, options.repeat // 4)
        rows.append(measure(num_devices, repeat, options.seed, options.reference))
        print(json.dumps(rows[-1]) if options.json else show(rows[-1]), flush=True)
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
