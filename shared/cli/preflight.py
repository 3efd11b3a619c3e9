"""What must hold before anything starts. Each problem is one message with field, value and remedy."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.bus.embedded_nats import server_binary
from shared.errors import ConfigError
from shared.runtime.config import RunConfig
from shared.runtime.models import PACKAGE_PREFIX, check_model, is_prepared, model_folder, parameter_bytes
from shared.runtime.run_folder import SERVICES, Endpoints, RunFolder, port_is_free
from shared.runtime.topology import cluster_of, rank_devices

SHM = Path("/dev/shm")
PROCESS_BYTES = 700 << 20
"""Resident memory of a sleeping engine on CPU without its weights, measured."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    detail: str
    error: ConfigError | None = None


def checks(config: RunConfig, folder: RunFolder, endpoints: Endpoints | None) -> Iterator[Check]:
    """All checks, in the order in which a person would mend them."""
    yield _run("models.policy", lambda: _model("models.policy", config.models.policy, folder))
    yield _run("models.genrm", lambda: _model("models.genrm", config.models.genrm, folder))
    yield _run("data and template", lambda: _data(config, folder))
    yield _run("devices", lambda: _devices(config))
    yield _run("shared memory", lambda: _shared_memory(config, folder))
    yield _run("memory", lambda: _memory(config, folder))
    yield _run("NATS server", lambda: config.network.nats_url or server_binary())
    if endpoints is not None:
        yield _run("ports", lambda: _ports(endpoints))
    yield _run("compiler", _compiler)


def require(config: RunConfig, folder: RunFolder, endpoints: Endpoints) -> None:
    """
    Raises:
        ConfigError: the first check that fails.
    """
    for check in checks(config, folder, endpoints):
        if check.error is not None:
            raise check.error


def _run(name: str, what: Callable[[], str]) -> Check:
    try:
        return Check(name, what())
    except ConfigError as error:
        return Check(name, error.message, error)


def _model(field: str, spec: str, folder: RunFolder) -> str:
    path = model_folder(spec, folder)
    if spec.startswith(PACKAGE_PREFIX):
        return f"{spec}, {'ready in ' + str(path) if is_prepared(path) else 'will be converted once'}"
    check_model(field, spec, path)
    return f"{path}, {parameter_bytes(path) / 2**20:.0f} MiB"


def _data(config: RunConfig, folder: RunFolder) -> str:
    """The rollout service reads its own data; here only its verdict counts."""
    answer = subprocess.run(
        [sys.executable, "-m", "services.rollout.check"],
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        values = json.loads(answer.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError("data.source", config.data.source, "cannot be read", answer.stderr[-400:]) from None
    if "problem" in values:
        raise ConfigError(values["field"], values["value"], values["problem"], values["remedy"])
    return str(values["detail"])


def _devices(config: RunConfig) -> str:
    cluster = cluster_of(config)
    if config.cluster.kind == "cuda":
        found = _num_gpus()
        if config.num_devices > found:
            raise ConfigError(
                "cluster.devices",
                config.num_devices,
                f"this machine has {found} GPUs",
                "Lower it, or use cluster.kind: cpu",
            )
        return f"{config.num_devices} of {found} GPUs"
    cores = os.cpu_count() or 1
    if config.num_devices > 4 * cores:
        raise ConfigError(
            "cluster.devices",
            config.num_devices,
            f"this machine has {cores} cores",
            f"Use at most {4 * cores}",
        )
    shared = f" (more than the {cores} cores: they share them)" if config.num_devices > cores else ""
    hosted = f"{len(cluster.slots)} replicas, {len(rank_devices(config))} ranks"
    return f"{config.num_devices} CPU slots{shared}, {hosted}"


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def _sizes(config: RunConfig, folder: RunFolder) -> tuple[int, int]:
    def size(spec: str) -> int:
        path = model_folder(spec, folder)
        return parameter_bytes(path) if is_prepared(path) else 270 << 20

    return size(config.models.policy), size(config.models.genrm)


def pool_bytes(config: RunConfig, folder: RunFolder) -> int:
    """GPS holds the policy twice (a version is written while the other is read) and the GenRM once."""
    policy, genrm = _sizes(config, folder)
    return 2 * policy + genrm


def _shared_memory(config: RunConfig, folder: RunFolder) -> str:
    needed = pool_bytes(config, folder)
    usage = shutil.disk_usage(SHM)
    held = sum(f.stat().st_size for f in SHM.glob(f"pivotrl-{config.run.name}-*"))
    if needed > usage.free + held:
        raise ConfigError(
            str(SHM),
            f"{usage.free / 2**20:.0f} MiB free",
            f"GPS needs {needed / 2**20:.0f} MiB for two versions of the policy and the GenRM",
            f"Enlarge it (mount -o remount,size={2 * needed >> 20}m {SHM}; in Docker: shm_size)",
        )
    return f"{needed / 2**20:.0f} MiB of {usage.free / 2**20:.0f} MiB free"


def memory_plan(config: RunConfig, folder: RunFolder) -> dict[str, int]:
    """Bytes of host memory by what needs them, with everything that can be awake at once awake."""
    policy, genrm = _sizes(config, folder)
    cluster = cluster_of(config)
    ranks = len(rank_devices(config))
    awake = config.num_devices * max(policy, genrm) if config.cluster.kind == "cpu" else 0
    return {
        "GPS pool": pool_bytes(config, folder),
        "engine processes": len(cluster.slots) * PROCESS_BYTES,
        "engine weights and KV": awake + config.num_devices * (128 << 20),
        "ranks (master, optimizer, gradients)": 9 * policy + ranks * PROCESS_BYTES,
        "services": 6 * (120 << 20),
    }


def _memory(config: RunConfig, folder: RunFolder) -> str:
    needed = sum(memory_plan(config, folder).values())
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            "memory",
            f"{available / 2**30:.1f} GiB available",
            f"the run needs about {needed / 2**30:.1f} GiB",
            "Lower cluster.devices or take a smaller model (see `pivotrl plan --dry-run`)",
        )
    return f"about {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB available"


def _ports(endpoints: Endpoints) -> str:
    for name in SERVICES:
        port = endpoints.http_ports[name]
        if not port_is_free(endpoints.host, port):
            raise ConfigError(
                "network.http_port",
                port,
                f"port {port} ({name}) is taken on {endpoints.host}",
                "Choose another, or 0 for free ones",
            )
    ports = sorted(endpoints.http_ports.values())
    return f"{ports[0]}–{ports[-1]} free"


def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        raise ConfigError(
            "g++", None, "not found", "Install a C++ compiler: DeepSpeed builds its optimizer with it"
        )
    return found
