"""A whole run as a user starts it, in a process of its own, watched over REST."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]


def write_config(folder: Path, model: Path, **sections: Any) -> Path:
    """A run of the tiny model on two CPU slots under `folder`; `sections` are put over it."""
    template = folder / "genrm.txt"
    template.write_text("Q: {question}\nA: {response}\nScore?")
    values: dict[str, Any] = {
        "run": {
            "name": f"t{os.getpid()}-{folder.name}"[:31].rstrip("-_").replace("_", "-"),
            "folder": str(folder / "run"),
        },
        "models": {"policy": str(model), "genrm": str(model)},
        "cluster": {"devices": 2, "kv_tokens": 16384},
        "data": {"source": "reasoning_gym:basic_arithmetic", "options": {"min_terms": 2, "max_terms": 2}},
        "rollout": {"samples_per_prompt": 4, "max_prompt_tokens": 128, "max_new_tokens": 96},
        "reward": {"max_new_tokens": 48, "template": str(template)},
        "training": {"steps": 3, "prompts_per_step": 4, "learning_rate": 1e-3},
        "network": {"http_port": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class WholeRun:
    """`pivotrl run CONFIG`. Everything it starts ends with it."""

    def __init__(self, config: Path, *options: str) -> None:
        self.folder = Path(yaml.safe_load(config.read_text())["run"]["folder"])
        self.log = config.parent / "cli.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shared.cli.main", "run", str(config), *options],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_the_test,
            )

    def __enter__(self) -> "WholeRun":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def wait(self, deadline_s: float) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done within {deadline_s} s\n{self.output()}") from None

    def until(
        self, condition: Callable[[dict[str, Any]], bool], deadline_s: float, what: str
    ) -> dict[str, Any]:
        """Polls the monitor until `condition` holds of `/v1/workload`."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}\n{self.output()}")
            try:
                seen = self.get("monitor", "/v1/workload")
            except (httpx.HTTPError, OSError, ValueError, KeyError):
                seen = None
            if seen is not None and condition(seen):
                return seen
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {deadline_s} s\n{self.output()}")

    def until_replica(self, replica: str, deadline_s: float, *, not_pid: int) -> dict[str, Any]:
        """Telemetry of a replica once another process than `not_pid` is up."""
        role = replica.rsplit("-", 1)[0]
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            for entry in self.get(role, "/v1/replicas"):
                telemetry: dict[str, Any] = entry["telemetry"] if entry["replica_id"] == replica else None
                if telemetry and telemetry["pid"] != not_pid and telemetry["state"] != "starting":
                    return telemetry
            time.sleep(0.2)
        raise AssertionError(f"{replica} did not come back within {deadline_s} s\n{self.output()}")

    def get(self, service: str, path: str, host: str | None = None) -> Any:
        """What `service` answers; `host` is for one that is on several nodes."""
        endpoints = json.loads((self.folder / "run.json").read_text())["endpoints"]
        host = endpoints["hosts"].get(service, endpoints["host"]) if host is None else host
        url = f"http://{host}:{endpoints['http_ports'][service]}{path}"
        return httpx.get(url, timeout=5).json()

    def pids(self) -> dict[str, int]:
        values: dict[str, int] = json.loads((self.folder / "supervisor.json").read_text())
        return values

    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return values

    def output(self) -> str:
        """The end of what it printed, and the errors its processes logged."""
        text = self.log.read_text(errors="replace")[-3000:]
        for log in sorted((self.folder / "logs").glob("*.log")):
            errors = [
                line for line in log.read_text(errors="replace").splitlines() if '"level": "error"' in line
            ]
            text += "".join(f"\n{log.name}: {line[:1500]}" for line in errors[-3:])
        return text


def _end_with_the_test() -> None:
    """A test run that is killed takes the run along (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
