"""`pivotrl sim`: deployments compared on a simulated cluster."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from shared.errors import ConfigError
from shared.planning.config import PlannerConfig
from shared.sim.compare import run_all
from shared.sim.modes import MODES, get_mode
from shared.sim.report import digest, summary
from shared.sim.run import Options
from shared.sim.scenarios import SCENARIOS, Scenario, get_scenario, scenario_from

Rows = list[dict[str, Any]]


def sim(
    scenario: Annotated[
        list[str], typer.Option("--scenario", help="a built-in name, a YAML file, or all")
    ] = ["group2"],  # noqa: B006  # typer copies it
    mode: Annotated[list[str], typer.Option("--mode", help="a mode, or all")] = ["all"],  # noqa: B006
    steps: Annotated[int, typer.Option(help="steps of a run, warm-up included")] = 10,
    warmup: Annotated[int, typer.Option(help="steps before counting")] = 3,
    seeds: Annotated[int, typer.Option(help="runs of each, from seed 0")] = 3,
    gpus: Annotated[int | None, typer.Option(help="devices in place of the scenario's; shares scale")] = None,
    window: Annotated[float, typer.Option(help="H of the planner, seconds")] = 60.0,
    best: Annotated[bool, typer.Option(help="search the best split of the baselines too")] = True,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="train on parts of a batch while the rest finishes")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
    out: Annotated[Path | None, typer.Option(help="write the rows here too")] = None,
    jobs: Annotated[int, typer.Option(help="runs side by side, each in a process")] = 1,
    list_: Annotated[bool, typer.Option("--list", help="name scenarios and modes")] = False,
) -> None:
    """Compare deployments on a simulated cluster: throughput, efficiency, where the device time goes."""
    if list_:
        typer.echo("scenarios: " + " ".join(SCENARIOS))
        typer.echo("modes:     " + " ".join(MODES))
        return
    if jobs < 1:
        raise ConfigError("jobs", jobs, "must be at least 1", "Try the number of cores")
    if steps <= warmup:
        raise ConfigError("steps", steps, f"must exceed warmup = {warmup}", "Raise it")
    names = list(SCENARIOS) if scenario == ["all"] else scenario
    scenarios = [load_scenario(name, gpus) for name in names]
    modes = list(MODES) if mode == ["all"] else [get_mode(name).name for name in mode]
    options = Options(steps, warmup, PlannerConfig(window_s=window), timer=time.process_time)
    rows: Rows = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def on_phase(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done)

        for row in run_all(
            scenarios, modes, seeds, options, best=best, streams=streaming, jobs=jobs, on_phase=on_phase
        ):
            rows.append(row)
            if as_json:
                typer.echo(json.dumps(row))
            if out:
                out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not as_json:
        for each in scenarios:
            Console(width=150).print(table(each, [r for r in rows if r["scenario"] == each.name]))
        typer.echo(f"digest of all figures: {digest(rows)}")


def load_scenario(name: str, gpus: int | None = None) -> Scenario:
    """A built-in scenario or a YAML file, on `gpus` devices if given."""
    if name.endswith((".yaml", ".yml")):
        values = yaml.safe_load(Path(name).read_text())
        if not isinstance(values, dict):
            raise ConfigError("scenario", name, "is no mapping", "Give `base:` and what differs from it")
        found = scenario_from(values)
    else:
        found = get_scenario(name)
    return found if gpus is None else found.on_devices(gpus)


def table(scenario: Scenario, rows: Rows) -> Table:
    """Means over seeds, beside the paper's figures where it has them."""
    models = f"{scenario.policy.name} + {scenario.genrm.name}"
    shown = Table(title=f"{scenario.name}: {models}, {scenario.num_devices} {scenario.device.name}")
    for column in [
        "mode",
        "split",
        "devices",
        "tokens/s",
        "±",
        "step_s",
        "efficiency",
        "shifts/step",
        "pivot_is",
        "paper",
    ]:
        shown.add_column(column.replace("_", " "), justify="left" if column in ("mode", "split") else "right")
    grouped: dict[tuple[str, str], Rows] = {}
    for row in rows:
        grouped.setdefault((row["mode"], row["split"]), []).append(row)
    means = {key: summary(group) for key, group in grouped.items()}
    pivot = max(
        (m["throughput_tokens_per_s"] for (name, _), m in means.items() if name.startswith("pivot")),
        default=None,
    )
    theirs = scenario.paper_throughput
    for (name, split), mean in means.items():
        speed, shares = mean["throughput_tokens_per_s"], mean["allocation"]
        shown.add_row(
            name,
            " ".join(filter(None, (split, grouped[name, split][0]["streaming"]))),
            "/".join(str(shares[role]) for role in ("rollout", "reward", "training")),
            f"{speed:,.0f}",
            f"{mean['spread']:,.0f}",
            f"{mean['step_time_s']:.0f}",
            f"{mean['efficiency']:.2f}",
            f"{mean['shifts_per_step']:.1f}",
            f"{pivot / speed:.2f}×" if pivot else "",
            f"{theirs['pivot'] / theirs[name]:.2f}×" if name in theirs else "",
        )
    return shown
