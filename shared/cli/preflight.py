"""What must hold before anything starts. Each problem is one message with field, value and remedy."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.bus.embedded_nats import server_binary
from shared.errors import ConfigError
from shared.ids import DeviceId
from shared.runtime.config import RunConfig
from shared.runtime.models import PACKAGE_PREFIX, check_model, is_prepared, model_folder, parameter_bytes
from shared.runtime.nodes import Machine, node_addresses, node_of
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


def checks(
    config: RunConfig, folder: RunFolder, endpoints: Endpoints | None, machine: Machine
) -> Iterator[Check]:
    """All checks of what `machine` does, in the order in which a person would mend them."""
    yield _run("models.policy", lambda: _model("models.policy", config.models.policy, folder))
    yield _run("models.genrm", lambda: _model("models.genrm", config.models.genrm, folder))
    yield _run("data and template", lambda: _data(config, folder))
    yield _run("devices", lambda: _devices(config, machine))
    yield _run("shared memory", lambda: _shared_memory(config, folder, machine))
    yield _run("memory", lambda: _memory(config, folder, machine))
    yield _run("NATS server", lambda: config.network.nats_url or server_binary())
    if endpoints is not None:
        yield _run("ports", lambda: _ports(config, endpoints, machine))
    yield _run("compiler", _compiler)


def require(config: RunConfig, folder: RunFolder, endpoints: Endpoints, machine: Machine) -> None:
    """
    Raises:
        ConfigError: the first check that fails.
    """
    for check in checks(config, folder, endpoints, machine):
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


@dataclass(frozen=True, slots=True)
class _Part:
    """How much of the run is on a machine."""

    devices: int
    replicas: int
    ranks: int


def _part(config: RunConfig, machine: Machine) -> _Part:
    def is_here(devices: Iterable[DeviceId]) -> bool:
        return node_of(config, devices) in machine.nodes

    cluster = cluster_of(config)
    return _Part(
        sum(is_here([device]) for device in cluster.devices),
        sum(is_here(slot.devices) for slot in cluster.slots),
        sum(is_here([device]) for device in rank_devices(config)),
    )


def _devices(config: RunConfig, machine: Machine) -> str:
    part, nodes = _part(config, machine), len(node_addresses(config))
    of_nodes = "" if nodes == len(machine.nodes) else f", of which {part.devices} on this of {nodes} nodes"
    if config.cluster.kind == "cuda":
        found = _num_gpus()
        if part.devices > found:
            raise ConfigError(
                "cluster.devices",
                config.num_devices,
                f"this machine has {found} GPUs{of_nodes}",
                "Lower it, or use cluster.kind: cpu",
            )
        return f"{part.devices} of {found} GPUs"
    cores = os.cpu_count() or 1
    if part.devices > 4 * cores:
        raise ConfigError(
            "cluster.devices",
            config.num_devices,
            f"this machine has {cores} cores{of_nodes}",
            f"Use at most {4 * cores} on one machine",
        )
    shared = f" (more than the {cores} cores: they share them)" if part.devices > cores else ""
    return f"{part.devices} CPU slots{shared}, {part.replicas} replicas, {part.ranks} ranks"


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


def pool_bytes(config: RunConfig, folder: RunFolder, machine: Machine) -> int:
    """GPS holds the policy twice (a version is written while the other is read) and the GenRM once; on each
    node, or as much of it as `gps.node_bytes` allows."""
    policy, genrm = _sizes(config, folder)
    whole = 2 * policy + genrm
    most = config.gps.node_bytes if config.gps is not None else None
    return len(machine.nodes) * (whole if most is None else min(whole, most))


def _shared_memory(config: RunConfig, folder: RunFolder, machine: Machine) -> str:
    needed = pool_bytes(config, folder, machine)
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


def memory_plan(config: RunConfig, folder: RunFolder, machine: Machine) -> dict[str, int]:
    """Bytes of host memory of `machine` by what needs them, with everything that can be awake at once
    awake."""
    policy, genrm = _sizes(config, folder)
    part, ranks = _part(config, machine), len(rank_devices(config))
    awake = part.devices * max(policy, genrm) if config.cluster.kind == "cpu" else 0
    return {
        "GPS pool": pool_bytes(config, folder, machine),
        "engine processes": part.replicas * PROCESS_BYTES,
        "engine weights and KV": awake + part.devices * (128 << 20),
        "ranks (master, optimizer, gradients)": 9 * policy * part.ranks // ranks + part.ranks * PROCESS_BYTES,
        "services": (6 if machine.has_services else 1) * (120 << 20),
    }


def _memory(config: RunConfig, folder: RunFolder, machine: Machine) -> str:
    needed = sum(memory_plan(config, folder, machine).values())
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            "memory",
            f"{available / 2**30:.1f} GiB available",
            f"the run needs about {needed / 2**30:.1f} GiB",
            "Lower cluster.devices or take a smaller model (see `pivotrl plan --dry-run`)",
        )
    return f"about {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB available"


def _ports(config: RunConfig, endpoints: Endpoints, machine: Machine) -> str:
    """GPS of several nodes listens where `gps.nodes` says, everything else at the run's host."""
    addresses = node_addresses(config)
    listening = [("gps", addresses[n] if len(addresses) > 1 else endpoints.host) for n in machine.nodes]
    if machine.has_services:
        listening += [(name, endpoints.host) for name in SERVICES if name != "gps"]
    for name, host in listening:
        port = endpoints.http_ports[name]
        if not port_is_free(host, port):
            raise ConfigError(
                "network.http_port",
                port,
                f"port {port} ({name}) is taken on {host}",
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
