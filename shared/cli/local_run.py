"""A run on this machine, from start to end: what `pivotrl run` and `pivotrl up` do."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from shared.cli.preflight import require
from shared.cli.processes import process_specs
from shared.errors import ConfigError, DeadlineExceeded, PivotError
from shared.runtime.audit import Audit, audit_folder
from shared.runtime.config import RunConfig
from shared.runtime.models import PACKAGE_PREFIX, is_prepared, model_folder
from shared.runtime.nodes import Machine, are_all_here, machine_of
from shared.runtime.run_folder import Endpoints, RunFolder, choose_endpoints, joined_endpoints
from shared.runtime.supervisor import Event, Supervisor

POLL_S = 1.0
EXPORT_NAME = "export"

OnPhase = Callable[[str, int, int, str], None]
"""(phase, done, total, text)"""


class LocalRun:
    """Owns the supervisor of one run, or of its node `node`. `on_phase` is told of progress; nothing here
    prints."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, on_phase: OnPhase, node: int | None = None
    ) -> None:
        self.config, self.folder, self._node = config, folder, node
        self._supervisor_file = folder.supervisor_file(node or 0)
        self._on_phase = on_phase
        self._stop = asyncio.Event()
        self._ready: set[str] = set()
        self.supervisor: Supervisor | None = None
        self.endpoints: Endpoints | None = None
        self.started_s = time.monotonic()

    def request_stop(self) -> None:
        self._stop.set()

    @contextlib.asynccontextmanager
    async def running(self):  # type: ignore[no-untyped-def]
        """Everything started and ready while the block runs; everything stopped after it."""
        machine = machine_of(self.config, self._node)
        self.folder.create()
        _refuse_second(self.folder, self._node or 0)
        previous = self.folder.read() if self.folder.run_json.exists() else None
        endpoints = self.endpoints = endpoints_for(self.config, machine, previous)
        await asyncio.to_thread(require, self.config, self.folder, endpoints, machine)
        await self.prepare_models()
        if previous != (self.config, endpoints):
            self.folder.write(self.config, endpoints)
        specs = process_specs(self.config, self.folder, endpoints, machine)
        for spec in specs:  # of a former start: they would lie about this one
            if spec.ready_file is not None:
                spec.ready_file.unlink(missing_ok=True)
        self.supervisor = Supervisor(specs, self.folder.logs, self._on_process)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        try:
            starting = asyncio.create_task(self.supervisor.start())
            await self._unless_stopped(starting, "start")
            if not self._stop.is_set():
                await starting
            yield self
        finally:
            self._on_phase("stop", 0, 1, "stopping")
            await self.supervisor.stop()
            self._supervisor_file.unlink(missing_ok=True)
            self._on_phase("stop", 1, 1, "stopped")

    async def until_finished(self) -> bool:
        """Waits for the last step; False if asked to stop before. Raises when a process cannot be kept
        alive."""
        assert self.supervisor is not None
        finishing = asyncio.create_task(self.watch_steps())
        return await self._unless_stopped(finishing, "training")

    async def until_stopped(self) -> None:
        never: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())
        await self._unless_stopped(never, "serve")

    async def _unless_stopped(self, work: "asyncio.Task[Any]", phase: str) -> bool:
        assert self.supervisor is not None
        stop = asyncio.create_task(self._stop.wait())
        waits: set[asyncio.Task[Any]] = {work, stop}
        failed: asyncio.Task[Any] | None = None
        if phase != "start":
            failed = asyncio.create_task(self.supervisor.failed())
            waits.add(failed)
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                work.result()
                return True
            if failed is not None and failed in done:
                raise failed.result()
            return False
        finally:
            for task in waits - {work}:
                task.cancel()
            if not work.done():
                work.cancel()

    async def watch_steps(self) -> None:
        """Returns at the last step; the run may be on other machines."""
        total = self.config.training.steps
        async with httpx.AsyncClient(timeout=10) as http:
            while True:
                try:
                    seen = (await http.get(f"{self._url('monitor')}/v1/workload")).json()
                except (httpx.HTTPError, ValueError):
                    await asyncio.sleep(POLL_S)
                    continue
                workload = seen["workload"]
                waits = "; ".join(seen["waits"][:2])
                self._on_phase("train", workload["step"], total, waits)
                if workload["finished"] and len(seen["steps"]) and seen["steps"][-1]["step"] >= total:
                    return
                await asyncio.sleep(POLL_S)

    async def finish(self) -> dict[str, Any]:
        """Export, report and summary; call while everything still runs."""
        self._on_phase("export", 0, 1, "exporting the trained policy")
        async with httpx.AsyncClient(timeout=600, headers=self._auth()) as http:
            exported = await _checked(
                http.post(f"{self._url('trainer')}/v1/export", json={"name": EXPORT_NAME})
            )
            await _checked(http.post(f"{self._url('monitor')}/v1/report"))
            seen = await _checked(http.get(f"{self._url('monitor')}/v1/workload"))
            model = await _checked(http.get(f"{self._url('gps')}/v1/models/policy"))
        self._on_phase("export", 1, 1, exported["folder"])
        result = summary(self.config, self.folder, seen, model["version"], exported["folder"])
        result["wall_s"] = round(time.monotonic() - self.started_s, 1)
        (self.folder.path / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _url(self, service: str) -> str:
        assert self.endpoints is not None
        return self.endpoints.http_url(service)

    def _auth(self) -> dict[str, str]:
        assert self.endpoints is not None
        return {"Authorization": f"Bearer {self.endpoints.token}"}

    async def prepare_models(self) -> None:
        """Converts packaged models that are not yet on disk."""
        specs = dict.fromkeys(
            s for s in (self.config.models.policy, self.config.models.genrm) if s.startswith(PACKAGE_PREFIX)
        )
        for i, spec in enumerate(specs):
            path = model_folder(spec, self.folder)
            if is_prepared(path):
                continue
            self._on_phase("models", i, len(specs), f"converting {spec} (once, about half a minute)")
            package = spec.removeprefix(PACKAGE_PREFIX)
            command = [sys.executable, "-m", "shared.weights.package_model", package, str(path)]
            answer = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=600
            )
            if answer.returncode != 0:
                raise ConfigError("models", spec, f"cannot be converted: {answer.stderr[-500:]}", "See above")
            self._on_phase("models", i + 1, len(specs), "")

    def _on_process(self, event: Event, name: str, detail: str) -> None:
        assert self.supervisor is not None
        pids = {"supervisor": os.getpid(), **self.supervisor.pids}
        temporary = self._supervisor_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(pids))
        temporary.replace(self._supervisor_file)
        if event == "ready":
            self._ready.add(name)
        if event in ("starting", "ready"):
            total = len(self.supervisor.names)
            self._on_phase("start", len(self._ready), total, f"{name} {event} {detail}".strip())
        elif event in ("died", "restarting"):
            self._on_phase("event", 0, 0, f"{name} {event} {detail}".strip())


def summary(
    config: RunConfig, folder: RunFolder, seen: dict[str, Any], policy_version: int, exported: str
) -> dict[str, Any]:
    """The run in numbers; every one is counted from the bus, the journals or GPS."""
    result = audit_folder(folder.journal, prompts_per_step=config.training.prompts_per_step)
    return {
        "policy": config.policy,
        "steps": seen["workload"]["step"],
        "policy_version": policy_version,
        "shifts": seen["shifts"],
        "shift_s": round(seen["shift_seconds"], 2),
        "samples": {
            "issued": result.issued,
            "trained": result.trained,
            "in_flight": result.in_flight,
            "unscored": result.unscored,
            "lost": len(result.lost),
            "duplicated": len(result.duplicated),
        },
        "device_seconds": {k: round(v, 1) for k, v in seen["device_seconds"].items()},
        "rows": seen["steps"],
        "exported_model": exported,
    }


def audit_of(folder: RunFolder) -> tuple[RunConfig, Audit]:
    config, _ = folder.read()
    return config, audit_folder(folder.journal, prompts_per_step=config.training.prompts_per_step)


def plain_audit(result: Audit) -> dict[str, Any]:
    return {**asdict(result), "clean": result.is_clean}


async def _checked(call: Any) -> dict[str, Any]:
    try:
        response = await call
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(
            role="cli", peer=str(error.request.url), phase="finish", deadline_s=600
        ) from error
    if response.status_code >= 400:
        raise PivotError(f"{response.request.url}: {response.text[:500]}")
    values: dict[str, Any] = response.json()
    return values


def endpoints_for(
    config: RunConfig, machine: Machine, previous: tuple[RunConfig, Endpoints] | None
) -> Endpoints:
    """Ports and tokens for a start on `machine`; `previous` is what the run folder tells of an earlier one.

    Raises:
        ConfigError: other nodes could not reach the bus, or know what node 0 chose.
    """
    if config.network.nats_url is None and not are_all_here(config):
        raise ConfigError(
            "network.nats_url",
            None,
            "is needed where gps.nodes names several machines: only node 0 reaches a server of the run's own",
            "Start a NATS server that all nodes reach, and name it",
        )
    if machine.has_services:
        return choose_endpoints(config, previous[1] if previous else None)
    return joined_endpoints(config, previous)


def living_supervisor(folder: RunFolder, node: int = 0) -> int | None:
    """The pid of the supervisor that runs this folder, or this node's part of it, if it lives."""
    try:
        pid = int(json.loads(folder.supervisor_file(node).read_text())["supervisor"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (OSError, ValueError):  # no such file, torn by a power cut, or no such process
        return None
    return pid if "pivotrl" in command or "shared.cli" in command else None


def _refuse_second(folder: RunFolder, node: int) -> None:
    pid = living_supervisor(folder, node)
    if pid is not None and pid != os.getpid():
        raise ConfigError(
            "run.folder", str(folder.path), f"is in use by process {pid}", "pivotrl stop it first"
        )
