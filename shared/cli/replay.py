"""`pivotrl replay`: what the planner would have decided in a recorded run with other settings."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
import yaml
from rich.console import Console
from rich.table import Table

from shared.errors import ConfigError, NotFound
from shared.planning.config import PlannerConfig, PolicyName
from shared.planning.record import Decided, Entry, from_line
from shared.planning.replay import Difference, Outcome, Replay, replay
from shared.runtime.journal import read_journal
from shared.runtime.run_folder import RunFolder

SHORT = {
    "H": "window_s",
    "min_rollout": "rollout.min_replicas",
    "min_reward": "reward.min_replicas",
}
"""Names of the run's configuration and the paper, and the planner's own."""
SHOWN = 30
"""Differing decisions in the table; `--json` has all."""


def replay_run(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    set_: Annotated[
        list[str], typer.Option("--set", help="planner.NAME=VALUE, e.g. planner.H=30; or policy=static")
    ] = [],  # noqa: B006  # typer copies it
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Ask the planner again at every observation of a recorded run, with other settings: which decisions
    differ, and how far predicted throughput was from what was then seen."""
    found = replay(read_decisions(run), lambda config: changed(config, set_))
    if as_json:
        typer.echo(json.dumps(described(found)))
        return
    show(found, Console(width=140))


def read_decisions(run: Path) -> list[Entry]:
    """The run's journal of decisions.

    Raises:
        NotFound: no such run, or it has no decisions.
        InvalidRequest: decisions of another format.
    """
    if not run.is_dir():
        raise NotFound(
            f"run: there is no folder {run}. Give the folder of a run, e.g. runs/demo", field="run"
        )
    path = RunFolder(run).journal / "decisions.jsonl"
    entries = [from_line(line) for line in read_journal(path)]
    if not any(entry.decided for entry in entries):
        raise NotFound(
            f"decisions: {path} has none. Let the run go on until its planner has decided", field="decisions"
        )
    return entries


# Settings


def changed(config: PlannerConfig, overrides: Sequence[str]) -> PlannerConfig:
    """`config` with `overrides`, each `planner.NAME=VALUE` or `policy=VALUE`.

    Raises ConfigError naming the setting: unknown, or a value that cannot be.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError("--set", override, "names no value", "Write planner.NAME=VALUE")
        path = name.removeprefix("planner.")
        if path == name and name != "policy":
            raise ConfigError(f"--set {name}", None, "is no setting of the planner", _known())
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {name}", text, "is no YAML value", "Quote it") from error
        config = _with(config, SHORT.get(path, path).split("."), value, name)
    return config


def _with(settings: Any, path: Sequence[str], value: Any, name: str) -> Any:
    """`settings` (frozen dataclasses in one another) with the value at `path` replaced."""
    first, *rest = path
    kinds = get_type_hints(type(settings))
    if first not in {f.name for f in fields(settings)}:
        raise ConfigError(f"--set {name}", None, "is no setting of the planner", _known())
    present = getattr(settings, first)
    if rest:
        if not is_dataclass(present):
            raise ConfigError(f"--set {name}", None, f"{first} has no settings of its own", _known())
        return replace(settings, **{first: _with(present, rest, value, name)})
    if is_dataclass(present):
        inner = ", ".join(f.name for f in fields(present))
        raise ConfigError(f"--set {name}", value, "is a group of settings", f"Add one of: {inner}")
    return replace(settings, **{first: _checked(kinds[first], value, name)})


def _checked(kind: Any, value: Any, name: str) -> Any:
    """The value, if it is of the type of the setting."""
    if kind == PolicyName:
        if value not in get_args(PolicyName):
            choices = ", ".join(get_args(PolicyName))
            raise ConfigError(f"--set {name}", value, "is no policy", f"One of: {choices}")
        return value
    allowed = get_args(kind) or (kind,)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in allowed:
        wanted = " or ".join(each.__name__ for each in allowed)
        raise ConfigError(f"--set {name}", value, f"is no {wanted}", "Give a value of its type")
    return value


def _known() -> str:
    own = [f.name for f in fields(PlannerConfig) if f.name not in ("rollout", "reward", "policy")]
    return f"Settings: policy, planner.({', '.join([*SHORT, *own])}), planner.rollout.…, planner.reward.…"


# What was found


def described(found: Replay) -> dict[str, Any]:
    """All of it as plain data."""

    def decision(decided: Decided) -> dict[str, Any]:
        return {
            "reason": decided.reason,
            "up_role": decided.up_role,
            "up_replicas": decided.plan.up_replicas if decided.plan else (),
            "down_replicas": decided.plan.down_replicas if decided.plan else (),
            "chosen": asdict(decided.chosen) if decided.chosen else None,
        }

    return {
        "summary": found.summary(),
        "differences": [
            {"at_s": d.at_s, "recorded": decision(d.recorded), "changed": decision(d.changed)}
            for d in found.differences
        ],
        "shifts": [{**asdict(o), "error": o.error} for o in found.outcomes],
    }


def show(found: Replay, console: Console) -> None:
    """Tables for people, times from the first observation that differs or shift."""
    times = [d.at_s for d in found.differences] + [o.at_s for o in found.outcomes]
    start_s = min(times, default=0.0)
    if found.differences:
        console.print(_differences(found.differences, start_s))
    if found.outcomes:
        console.print(_outcomes(found.outcomes, start_s))
    for name, value in found.summary().items():
        text = "-" if value is None else f"{value:.1%}" if isinstance(value, float) else str(value)
        console.print(f"{name.replace('_', ' '):<28}{text}", highlight=False)
    if found.num_reproduced < found.num_decisions:
        console.print(
            f"{found.num_decisions - found.num_reproduced} decisions come out otherwise with the recorded "
            "settings too: this planner is not the one that recorded them",
            highlight=False,
        )


def _differences(differences: Sequence[Difference], start_s: float) -> Table:
    table = Table("s", "recorded", "with these settings", title="decisions that differ")
    for each in differences[:SHOWN]:
        table.add_row(f"{each.at_s - start_s:.1f}", _told(each.recorded), _told(each.changed))
    if len(differences) > SHOWN:
        table.caption = f"{len(differences) - SHOWN} more: --json has all"
    return table


def _told(decided: Decided) -> str:
    plan = decided.plan
    up = ", ".join(plan.up_replicas or ("training",)) if plan else ""
    return f"{up} up: {decided.reason}" if plan else f"no shift: {decided.reason}"


def _outcomes(outcomes: Sequence[Outcome], start_s: float) -> Table:
    table = Table(
        "s", "plan", "shift", "before", "predicted", "seen", "error", title="tokens/s of the shifts made"
    )
    for each in outcomes:
        seen = "-" if each.actual is None else f"{each.actual:,.0f}"
        table.add_row(
            f"{each.at_s - start_s:.1f}",
            each.plan_id,
            f"{each.num_up} more for {each.up_role.value}",
            f"{each.before:,.0f}",
            f"{each.predicted:,.0f}",
            seen,
            "-" if each.error is None else f"{each.error:+.0%}",
        )
    return table
