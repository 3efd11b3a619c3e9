"""`pivotrl`: one program for everything a person does with a run."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console
from rich.table import Table

from shared.cli import node as nodes
from shared.cli import preflight
from shared.cli.decode import print_decoded
from shared.cli.decode import tap as tap_bus
from shared.cli.local_run import EXPORT_NAME, LocalRun, audit_of, living_supervisor, plain_audit
from shared.cli.profile import UNSURE_ERROR, profile_run, profile_table
from shared.cli.progress import Progress
from shared.cli.replay import replay_run
from shared.cli.sim import sim
from shared.cli.tables import placement_table, steps_table
from shared.errors import ConfigError, NotFound, PivotError
from shared.ids import Role
from shared.runtime.config import RunConfig, load_config
from shared.runtime.nodes import machine_of
from shared.runtime.run_folder import Endpoints, RunFolder, choose_endpoints

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console() if sys.stdout.isatty() else Console(width=140)

ConfigArgument = Annotated[Path, typer.Argument(help="the run's YAML")]
SetOption = Annotated[list[str], typer.Option("--set", help="KEY=VALUE over the YAML, e.g. policy=colocated")]
NodeOption = Annotated[
    int | None,
    typer.Option("--node", min=0, help="this machine's number in gps.nodes; without it all nodes are here"),
]
RunOption = Annotated[Path, typer.Option("--run", help="the run folder")]
DEFAULT_RUN = Path("runs/demo")


def main() -> None:
    try:
        app()
    except PivotError as error:
        Console(stderr=True).print(
            f"[bold red]{error.code}[/]: {error.message}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


app.command()(sim)
app.command("replay")(replay_run)


@app.command()
def run(
    config: ConfigArgument,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    node: NodeOption = None,
) -> None:
    """Start a run, train it to its last step, export the model, print the table. Goes on where a former
    start stopped. Of several machines the first does this; the others `up --node N`."""
    if node:
        remedy = f"On this machine: pivotrl up {config} --node {node}"
        raise ConfigError("--node", node, "does not see the run's end: the services are on node 0", remedy)
    asyncio.run(_run(_load(config, set_), node, until_finished=True))


@app.command()
def up(
    config: ConfigArgument,
    set_: SetOption = [],  # noqa: B006
    detach: Annotated[bool, typer.Option("--detach", "-d", help="return once everything is ready")] = False,
    node: NodeOption = None,
) -> None:
    """Start a run, or one node's part of it, and keep it up until Ctrl-C, also after the last step."""
    loaded = _load(config, set_)
    if not detach:
        asyncio.run(_run(loaded, node, until_finished=False))
        return
    folder = RunFolder(loaded.run.folder)
    folder.create()
    argv = [
        sys.executable,
        "-m",
        "shared.cli.main",
        "up",
        str(config),
        *(a for s in set_ for a in ("--set", s)),
        *(() if node is None else ("--node", str(node))),
    ]
    log_file = folder.logs / folder.supervisor_file(node or 0).with_suffix(".log").name
    with open(log_file, "ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    marker = folder.up_file(node or 0)
    marker.unlink(missing_ok=True)
    while not marker.exists():
        if process.poll() is not None:
            raise PivotError(f"the run did not start: see {log_file}")
        time.sleep(0.2)
    part = "" if node is None else f" --node {node}"
    console.print(f"up, process {process.pid}; stop it with: pivotrl stop --run {folder.path}{part}")


async def _run(config: RunConfig, node: int | None, *, until_finished: bool) -> None:
    folder = RunFolder(config.run.folder)
    progress = Progress(console)
    local = LocalRun(config, folder, progress, node)
    with progress:
        async with local.running():
            folder.up_file(node or 0).write_text(json.dumps({"pid": os.getpid()}))
            if not until_finished:
                url = local.endpoints.http_url("monitor") if local.endpoints else ""
                console.print(f"dashboard and REST: {url}/docs")
                await local.until_stopped()
                return
            if not await local.until_finished():
                console.print(f"stopped; `pivotrl run` goes on from here (run folder {folder.path})")
                raise typer.Exit(130)
            result = await local.finish()
    _show(result, folder)


def _show(result: dict[str, Any], folder: RunFolder) -> None:
    console.print(steps_table(result))
    _print_files(folder)
    audited = audit_of(folder)[1]
    if not audited.is_clean:
        console.print(f"[bold red]audit: not clean[/] {json.dumps(plain_audit(audited))}")
        raise typer.Exit(1)


def _print_files(folder: RunFolder) -> None:
    console.print(f"\nin {folder.path}/:", highlight=False)
    for name, what in (
        ("summary.json", "the run in numbers"),
        ("metrics.jsonl", "one line per step"),
        ("timeline.png", "allocation and throughput over time"),
        ("tensorboard/", "scalars"),
        (f"{EXPORT_NAME}/", "the trained model (Hugging Face format)"),
        ("journal/", "what `pivotrl audit` reads"),
        ("logs/", "one file per process"),
    ):
        console.print(f"  {name:<16}{what}", highlight=False)


@app.command()
def init(
    config: ConfigArgument,
    set_: SetOption = [],  # noqa: B006
    address: Annotated[
        str, typer.Option(help="where a service is reached, {service} being its name")
    ] = "{service}",
) -> None:
    """Prepare a run whose services are containers or pods: checks, models, run.json."""
    loaded = _load(config, set_)
    with Progress(console) as progress:
        asyncio.run(nodes.init(loaded, RunFolder(loaded.run.folder), address, progress))


@app.command()
def node(run: RunOption = DEFAULT_RUN, node: NodeOption = None) -> None:
    """Run the replicas and ranks of this machine until stopped; the services run elsewhere."""
    with Progress(console) as progress:
        asyncio.run(nodes.serve_node(RunFolder(run), progress, node))


@app.command()
def follow(run: RunOption = DEFAULT_RUN) -> None:
    """Watch a run that is up elsewhere to its last step; export, report, print the table."""
    folder = RunFolder(run)
    with Progress(console) as progress:
        result = asyncio.run(nodes.follow(folder, progress))
    _show(result, folder)


@app.command()
def profile(
    config: ConfigArgument,
    set_: SetOption = [],  # noqa: B006
    role: Annotated[str, typer.Option(help="rollout, reward, or both")] = "both",
) -> None:
    """Measure how fast replicas decode and prefill here. Runs of the same models use it: planning gets their
    constants, replicas are not filled beyond what pays, and moves are charged their prefill."""
    loaded = _load(config, set_)
    roles = {"both": [Role.ROLLOUT, Role.REWARD], "rollout": [Role.ROLLOUT], "reward": [Role.REWARD]}
    if role not in roles:
        raise ConfigError("--role", role, "is no generating role", "One of rollout, reward, both")
    with Progress(console) as progress:
        found = profile_run(loaded, roles[role], progress)
    console.print(profile_table(loaded, found))
    for path, measured in dict(found.values()).items():
        console.print(f"  {path}", highlight=False, soft_wrap=True)
        if measured.held_out_median > UNSURE_ERROR:
            console.print("  [bold]unsure[/]: the error is large. Was the machine busy? Profile again")


@app.command()
def plan(
    config: ConfigArgument,
    set_: SetOption = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show (the one mode there is)")] = True,
    node: NodeOption = None,
) -> None:
    """Show placement, and bytes on this machine, before anything starts."""
    loaded = _load(config, set_)
    folder = RunFolder(loaded.run.folder)
    machine = machine_of(loaded, node)
    console.print(placement_table(loaded))
    for what, nbytes in preflight.memory_plan(loaded, folder, machine).items():
        console.print(f"  {what:<40}{nbytes / 2**30:6.2f} GiB", highlight=False)


@app.command()
def doctor(
    config: Annotated[Path, typer.Argument()] = Path("deploy/config/demo.yaml"),
    set_: SetOption = [],  # noqa: B006
    node: NodeOption = None,
) -> None:
    """Check this machine for a run: models, data, devices, memory, shared memory, ports, compiler."""
    loaded = _load(config, set_)
    folder = RunFolder(loaded.run.folder)
    machine = machine_of(loaded, node)
    endpoints = None if living_supervisor(folder, node or 0) else choose_endpoints(loaded, None)
    failed = False
    for check in preflight.checks(loaded, folder, endpoints, machine):
        failed |= check.error is not None
        mark = "[red]✗[/]" if check.error else "[green]✓[/]"
        console.print(f"{mark} {check.name}: {check.detail}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


@app.command()
def ps(run: RunOption = DEFAULT_RUN, node: NodeOption = None) -> None:
    """The run's processes on this machine."""
    folder = RunFolder(run)
    if living_supervisor(folder, node or 0) is None:
        raise NotFound(f"no run is up in {run}")
    import psutil

    table = Table("process", "pid", "memory", "up")
    for name, pid in json.loads(folder.supervisor_file(node or 0).read_text()).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            memory = f"{process.memory_info().rss / 2**20:.0f} MiB"
            table.add_row(name, str(pid), memory, f"{time.time() - process.create_time():.0f} s")
    console.print(table)


@app.command()
def status(run: RunOption = DEFAULT_RUN, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """What the run does, and what waits for whom."""
    _, endpoints = RunFolder(run).read()
    seen = _get(endpoints, "monitor", "/v1/workload")
    allocation = _get(endpoints, "planner", "/v1/allocation")
    if as_json:
        print(json.dumps({**seen, "allocation": allocation}))
        return
    workload = seen["workload"]
    console.print(f"step {workload['step']}, policy version {workload['policy_version']}", highlight=False)
    for role in ("rollout", "reward"):
        load = workload[role]
        running = sum(len(r["lengths"]) for r in load["replicas"])
        serving = ", ".join(r["replica_id"] for r in load["replicas"]) or "-"
        console.print(
            f"  {role:<9}{running} running, {len(load['waiting_lengths'])} waiting, "
            f"{seen['tokens_per_s'][role]:.0f} tok/s on {serving}",
            highlight=False,
        )
    console.print(
        f"  training {workload['training_activity']} {workload['training_phase']}, "
        f"{workload['collected']}/{workload['needed']} samples of the next batch",
        highlight=False,
    )
    for wait in seen["waits"]:
        console.print(f"  → {wait}", highlight=False)
    owners = ", ".join(f"{d}: {o or 'free'}" for d, o in allocation["devices"].items())
    console.print(f"  devices  {owners}", highlight=False)


@app.command()
def logs(
    process: Annotated[str, typer.Argument(help="a process name, or 'all'")] = "all",
    run: RunOption = DEFAULT_RUN,
    lines: Annotated[int, typer.Option("-n")] = 30,
) -> None:
    """The end of the processes' logs, merged by time."""
    folder = RunFolder(run).logs
    files = sorted(folder.glob("*.log")) if process == "all" else [folder / f"{process}.log"]
    entries: list[tuple[float, str]] = []
    for file in files:
        if not file.exists():
            raise NotFound(f"no log {file}: processes are {', '.join(f.stem for f in folder.glob('*.log'))}")
        last = 0.0
        for line in file.read_text(errors="replace").splitlines()[-lines:]:
            try:
                values = json.loads(line)
                last = float(values["ts"])
                stamp = time.strftime("%H:%M:%S", time.localtime(last))
                text = f"{stamp} {values['process']:<10} {values['level']:<7} {values['message']}"
                if "exception" in values:
                    text += "\n" + values["exception"]
            except (ValueError, KeyError, TypeError):
                text = f"{'':8} {file.stem:<10} {line}"
            entries.append((last, text))
    for _, text in sorted(entries, key=lambda e: e[0])[-lines:]:
        print(text)


@app.command()
def stop(run: RunOption = DEFAULT_RUN, node: NodeOption = None) -> None:
    """Stop the run in this folder, or this node's part; `pivotrl run` or `up` goes on from there."""
    folder = RunFolder(run)
    pid = living_supervisor(folder, node or 0)
    if pid is None:
        raise NotFound(f"no run is up in {run}")
    os.kill(pid, signal.SIGTERM)
    for _ in range(200):
        if living_supervisor(folder, node or 0) is None:
            console.print("stopped")
            return
        time.sleep(0.1)
    raise PivotError(f"process {pid} did not stop within 20 s")


@app.command()
def tap(
    run: RunOption = DEFAULT_RUN,
    subject: Annotated[str, typer.Argument(help="below the run's prefix, e.g. 'planner.>'")] = ">",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show bus traffic as text, until Ctrl-C."""
    config, endpoints = RunFolder(run).read()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(tap_bus(endpoints, config.run.name, subject, as_json))


@app.command()
def decode() -> None:
    """A message's payload from standard input as JSON: `nats sub 'pivotrl.>' --translate 'pivotrl
    decode'`."""
    print_decoded(sys.stdin.buffer.read())


@app.command()
def audit(run: RunOption = DEFAULT_RUN) -> None:
    """Prove from the journals that every issued sample was trained once, is in flight, or is accounted for
    by name."""
    _, result = audit_of(RunFolder(run))
    print(json.dumps(plain_audit(result), indent=1))
    raise typer.Exit(0 if result.is_clean else 1)


@app.command()
def export(
    run: RunOption = DEFAULT_RUN,
    name: Annotated[str, typer.Option(help="folder under the run folder")] = EXPORT_NAME,
) -> None:
    """Write the newest policy of a run that is up as a Hugging Face folder."""
    _, endpoints = RunFolder(run).read()
    print(json.dumps(_post(endpoints, "trainer", "/v1/export", {"name": name})))


@app.command()
def shift(
    role: Annotated[str, typer.Argument(help="rollout, reward or training")],
    replicas: Annotated[list[str], typer.Argument(help="which replicas come up")] = [],  # noqa: B006
    run: RunOption = DEFAULT_RUN,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
) -> None:
    """Shift devices by hand; who must leave follows from the devices."""
    _, endpoints = RunFolder(run).read()
    body = {"role": role, "replicas": replicas, "dry_run": dry_run}
    print(json.dumps(_post(endpoints, "planner", "/v1/shifts", body), indent=1))


def _load(path: Path, overrides: list[str]) -> RunConfig:
    values: dict[str, Any] = {}
    for item in overrides:
        key, equals, value = item.partition("=")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}", value, "is no YAML value", "Quote it") from error
        if not equals:
            raise ConfigError("--set", item, "names no value", "Write KEY=VALUE, e.g. training.steps=6")
    return load_config(path, values)


def _get(endpoints: Endpoints, service: str, path: str) -> dict[str, Any]:
    return _call(endpoints, service, "GET", path, None)


def _post(endpoints: Endpoints, service: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return _call(endpoints, service, "POST", path, body)


def _call(endpoints: Endpoints, service: str, method: str, path: str, body: Any) -> dict[str, Any]:
    url = endpoints.http_url(service) + path
    try:
        response = httpx.request(
            method, url, json=body, headers={"Authorization": f"Bearer {endpoints.token}"}, timeout=600
        )
    except httpx.TransportError as error:
        raise NotFound(f"{service} does not answer at {url}: is the run up? ({error})") from error
    try:
        values: dict[str, Any] = response.json()
    except ValueError as error:
        raise NotFound(f"what answers at {url} is no {service} of a run") from error
    if response.status_code >= 400:
        raise PivotError(str(values.get("message", values)))
    return values


if __name__ == "__main__":
    main()
