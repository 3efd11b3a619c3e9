"""The run folder: where everything of a run lies, and `run.json`, by which its processes find each other."""

import hashlib
import json
import os
import secrets
import socket
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from shared.errors import ConfigError, NotFound
from shared.runtime.config import RunConfig

_ENVIRONMENT = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
KERNEL_CACHE = Path.home() / ".cache" / "pivotrl" / "torch_extensions" / _ENVIRONMENT
"""Compiled kernels depend on the environment, not on the run. Each environment has its own: ninja builds anew
what was built with another one's headers, and two would do so in turn for ever."""

SERVICES = ("monitor", "planner", "gps", "rollout", "reward", "trainer")
NATS_PORT = 4222


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses and secrets of a run. The file that holds them is readable by its owner only."""

    nats_url: str
    nats_token: str
    host: str
    """Where a service listens, and where it is reached unless `hosts` says otherwise."""
    http_ports: dict[str, int]
    token: str
    hosts: dict[str, str] = field(default_factory=dict)
    """Where a service is reached, if each has a machine or container of its own."""

    def http_url(self, service: str) -> str:
        return f"http://{self.hosts.get(service, self.host)}:{self.http_ports[service]}"


def on_node(name: str, node: int) -> str:
    """`name`, told from the same on other nodes.

    >>> on_node("gps", 0), on_node("gps", 2)
    ('gps', 'gps-n2')
    """
    return name if node == 0 else f"{name}-n{node}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def processes(self) -> Path:
        """One file per process, written when it is ready."""
        return self.path / "processes"

    def ready_file(self, process: str, node: int = 0) -> Path:
        """What `process` of node `node` writes when it is ready."""
        return self.processes / f"{on_node(process, node)}.json"

    def supervisor_file(self, node: int = 0) -> Path:
        """The processes that the launcher of node `node` has started, and itself."""
        return self.path / f"{on_node('supervisor', node)}.json"

    def up_file(self, node: int = 0) -> Path:
        """There once everything of node `node` is up."""
        return self.path / f"{on_node('up', node)}.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    @property
    def models(self) -> Path:
        return self.path.parent / "models"

    def create(self) -> None:
        for folder in (self.path, self.logs, self.processes, self.journal, self.checkpoints, self.models):
            folder.mkdir(parents=True, exist_ok=True)

    def inside(self, name: str) -> Path:
        """`name` under the run folder.

        Raises:
            ConfigError: it would lie outside.
        """
        path = (self.path / name).resolve()
        root = self.path.resolve()
        if path == root or not path.is_relative_to(root):
            raise ConfigError("path", name, "lies outside the run folder", "Name a path under it")
        return path

    def write(self, config: RunConfig, endpoints: Endpoints) -> None:
        text = json.dumps(
            {"config": config.model_dump(mode="json"), "endpoints": asdict(endpoints)}, indent=1
        )
        temporary = self.run_json.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(self.run_json)

    def read(self) -> tuple[RunConfig, Endpoints]:
        """
        Raises:
            NotFound: no run was ever started here.
        """
        try:
            values = json.loads(self.run_json.read_text())
        except FileNotFoundError:
            raise NotFound(
                f"no run in {self.path}: start one with `pivotrl up`", folder=str(self.path)
            ) from None
        return RunConfig.model_validate(values["config"]), Endpoints(**values["endpoints"])


def spread_endpoints(config: RunConfig, previous: Endpoints | None, address: str) -> Endpoints:
    """As `choose_endpoints`, for services that each have a host name: `address` with the service's name for
    `{service}`. They listen on every interface of theirs, so every mutating call needs the run's token.

    Raises:
        ConfigError: ports are not fixed, or `address` is one name for all.
    """
    if "{service}" not in address:
        raise ConfigError("--address", address, "lacks {service}", "For example '{service}.pivotrl'")
    if not config.network.http_port:
        raise ConfigError("network.http_port", 0, "others cannot know which port is free here", "Use 8600")
    chosen = choose_endpoints(config, previous)
    hosts = {name: address.replace("{service}", name) for name in SERVICES} | _gps_host(config)
    return replace(
        chosen,
        nats_url=config.network.nats_url or f"nats://{address.replace('{service}', 'nats')}:{NATS_PORT}",
        host="0.0.0.0",
        hosts=hosts,
    )


def choose_endpoints(config: RunConfig, previous: Endpoints | None) -> Endpoints:
    """Ports and tokens for a start. Tokens of an earlier start of the run are kept."""
    network = config.network
    if network.http_port:
        ports = {name: network.http_port + i for i, name in enumerate(SERVICES)}
    else:
        ports = {name: _free_port() for name in SERVICES}
    # An external server's credentials are in its URL (nats://user:password@host).
    nats_token = ""
    if network.nats_url is None:
        nats_token = (previous.nats_token if previous else "") or secrets.token_urlsafe(24)
    return Endpoints(
        nats_url=network.nats_url or f"nats://127.0.0.1:{_free_port()}",
        nats_token=nats_token,
        host=network.host,
        http_ports=ports,
        token=network.token or (previous.token if previous else secrets.token_urlsafe(24)),
        hosts=_gps_host(config),
    )


def joined_endpoints(config: RunConfig, previous: tuple[RunConfig, Endpoints] | None) -> Endpoints:
    """For another node than 0: what node 0 has, told by the file alone, or by what it wrote into a run folder
    that both see (`previous`).

    Raises:
        ConfigError: neither tells; names the key that would.
    """
    network = config.network
    unknown = [
        name
        for name, is_told in (
            ("network.nats_url", network.nats_url is not None),
            ("network.token", network.token is not None),
            ("network.http_port", network.http_port != 0),
        )
        if not is_told
    ]
    if not unknown:
        return choose_endpoints(config, None)
    if previous is not None and previous[0] == config:
        return previous[1]
    raise ConfigError(
        unknown[0],
        None,
        "is chosen by node 0, and this node cannot know how",
        "Set it in the file, or let all nodes share run.folder and start node 0 first",
    )


def _gps_host(config: RunConfig) -> dict[str, str]:
    """GPS of node 0, where it is one of several: they listen where `gps.nodes` says."""
    return {"gps": config.gps.nodes[0]} if config.gps is not None and len(config.gps.nodes) > 1 else {}


def port_is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
