"""`pivotrl profile`: how fast this machine's replicas are, for the planner and the schedulers."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rich.table import Table

from shared.cli.local_run import LocalRun, OnPhase
from shared.cli.preflight import checks
from shared.cli.processes import node_specs
from shared.errors import DeadlineExceeded, EngineError
from shared.ids import Role
from shared.planning.profile import Profile
from shared.runtime.config import RunConfig
from shared.runtime.nodes import machine_of
from shared.runtime.profiles import model_spec, profile_path
from shared.runtime.run_folder import RunFolder
from shared.runtime.topology import cluster_of
from shared.weights.host_pool import remove_leftovers

DEADLINE_S = 1800.0
UNSURE_ERROR = 0.1
"""A held-out median error above this is told: a fit on a quiet machine stays below a few percent."""
_NEEDED = ("models.policy", "models.genrm", "devices")


def profile_run(config: RunConfig, roles: list[Role], on_phase: OnPhase) -> dict[Role, tuple[Path, Profile]]:
    """Profiles the replicas of `roles`, one after another, on their first devices; where each was written.

    Roles that serve the same model alike share one profile, which is made once.

    Raises:
        ConfigError: a model or the devices are not there.
        EngineError: the engine failed; the message ends with its last words.
        DeadlineExceeded: it was not done in half an hour.
    """
    folder = RunFolder(config.run.folder)
    folder.create()
    machine = machine_of(config, None)
    for check in checks(config, folder, None, machine):
        if check.error is not None and check.name in _NEEDED:
            raise check.error
    asyncio.run(LocalRun(config, folder, on_phase).prepare_models())
    made: dict[Path, Profile] = {}
    found: dict[Role, tuple[Path, Profile]] = {}
    for role in roles:
        path = profile_path(config, role, folder)
        if path not in made:
            slot = cluster_of(config).slots_of(role)[0]
            env = next(spec.env for spec in node_specs(config, folder, machine) if spec.name == slot.id)
            made[path] = _profile_one(config, role, folder, dict(env), on_phase)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(made[path].to_json() + "\n")
            temporary.replace(path)
        found[role] = (path, made[path])
    return found


def _profile_one(
    config: RunConfig, role: Role, folder: RunFolder, env: dict[str, str], on_phase: OnPhase
) -> Profile:
    asked = {"config": config.model_dump(mode="json"), "run": str(folder.path), "role": role.value}
    log = folder.logs / f"profile-{role.value}.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "shared.inference.profile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **env},
        ) as process,
    ):
        late = threading.Timer(DEADLINE_S, process.kill)
        late.start()
        try:
            last = _follow(process, asked, role, on_phase)
            is_late = not late.is_alive()
        finally:  # also of an interruption: no engine and no weights stay behind
            late.cancel()
            process.kill()
            process.wait()
            remove_leftovers(run=f"profile{process.pid}")
    if is_late:
        raise DeadlineExceeded(role="cli", peer=f"engine of {role}", phase="profile", deadline_s=DEADLINE_S)
    if "profile" not in last:
        said = last.get("error") or log.read_text(errors="replace").strip()[-500:]
        raise EngineError(f"the engine of {role} could not be profiled: {said} (see {log})")
    return Profile.from_json(json.dumps(last["profile"]), str(log))


def _follow(
    process: "subprocess.Popen[str]", asked: dict[str, Any], role: Role, on_phase: OnPhase
) -> dict[str, Any]:
    """Tells of each point as it begins; the last that the process said."""
    assert process.stdin is not None
    assert process.stdout is not None
    on_phase("profile", 0, 1, f"{role}: starting the engine")
    with contextlib.suppress(BrokenPipeError):  # it died at once: its log says why
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
    last: dict[str, Any] = {}
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        last = json.loads(line)
        if "point" in last:
            n, context = last["point"]
            on_phase("profile", last["done"], last["total"], f"{role}: {n} sequences of {context} tokens")
    return last


def profile_table(config: RunConfig, found: dict[Role, tuple[Path, Profile]]) -> Table:
    """What was measured, a row for each role."""
    table = Table()
    columns = ("role", "model", "tokens/s at 1", "16", "64", "prefill tokens/s", "held-out error", "worst")
    for column in columns:
        table.add_column(column, justify="left" if column in ("role", "model") else "right")
    for role, (_, profile) in found.items():
        speeds = [f"{profile.model.tokens_per_s(n, 256.0 * n):,.0f}" for n in (1, 16, 64)]
        prefill = 1 / profile.prefill_s_per_token if profile.prefill_s_per_token else float("inf")
        errors = (f"{100 * e:.1f}%" for e in (profile.held_out_median, profile.held_out_worst))
        table.add_row(role.value, model_spec(config, role), *speeds, f"{prefill:,.0f}", *errors)
    return table
