"""What UCX is told before it starts, and what it says it chose. UCX falls back silently: it must be asked.

UCX writes one line per endpoint configuration at log level `info`::

    ... UCX  INFO    gps-1 inter-node cfg#1 rma_am(tcp/eth0)  amo_am(tcp/eth0)  am(tcp/eth0)  ka(tcp/eth0)
    ... UCX  INFO    gps-1 inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)

It reads its environment once, when the process first uses it.
"""

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from shared.errors import TransportError

WireKind = Literal["rdma", "tcp", "any"]

_CONFIGURATION = re.compile(r"UCX\s+INFO\s+\S+ (?P<scope>self|intra-node|inter-node) cfg#\d+ (?P<lanes>.*)")
_USE = re.compile(r"(?P<use>[a-z_]+)\((?P<lanes>[^)]*)\)")
_LANE = re.compile(r"(?P<transport>[a-z0-9_]+)/(?P<device>\S+)")
_RDMA = re.compile(r"^(rc|dc|ud|srd|gga)(_|$)")
_MAX_READ_BYTES = 4 << 20


@dataclass(frozen=True, order=True, slots=True)
class Lane:
    """`transport` on `device` carries `use` (UCX's words: rma, rma_am, am ...)."""

    transport: str
    device: str
    use: str

    @property
    def is_rdma(self) -> bool:
        return _RDMA.match(self.transport) is not None


def set_environment(kind: WireKind, address: str, log_file: Path) -> None:
    """Tell UCX what to use; what the environment says already wins.

    TCP connects without blocking (a peer that is not there would block its caller for minutes) and over the
    interface of `address` only (a bridge of containers has the same address on every machine).
    """
    chosen = {
        "UCX_LOG_LEVEL": "info",
        "UCX_LOG_FILE": str(log_file),
        "UCX_TCP_CONN_NB": "y",
        "UCX_TCP_SYN_CNT": "2",
        "UCX_TCP_KEEPIDLE": "5s",
        "NIXL_LOG_LEVEL": "ERROR",
    }
    if kind == "tcp":
        chosen["UCX_TLS"] = "tcp"
        if interface := interface_of(address):
            chosen["UCX_NET_DEVICES"] = interface
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def interface_of(address: str) -> str | None:
    """The network interface that has `address`; None if none has, or for a host name."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def lanes_to_peers(log: str) -> tuple[Lane, ...]:
    """The lanes that carry parameters to other processes, sorted; of a log as above."""
    found: set[Lane] = set()
    for line in log.splitlines():
        matched = _CONFIGURATION.search(line)
        if matched is None or matched["scope"] == "self":
            continue
        for used in _USE.finditer(matched["lanes"]):
            if used["use"].startswith("rma"):
                lanes = _LANE.finditer(used["lanes"])
                found |= {Lane(lane["transport"], lane["device"], used["use"]) for lane in lanes}
    return tuple(sorted(found))


class LaneLog:
    """The lanes that UCX wrote to its log so far; each line is read once."""

    def __init__(self, log_file: Path) -> None:
        self._path, self._offset, self._rest = log_file, 0, b""
        self._lanes: set[Lane] = set()

    def lanes(self) -> tuple[Lane, ...]:
        """None before the first peer is connected. UCX keeps lines back in a C stream, so all streams of the
        process are flushed first."""
        ctypes.CDLL(None).fflush(None)
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return ()
        self._offset += len(new)
        whole, _, self._rest = (self._rest + new).rpartition(b"\n")
        self._lanes |= set(lanes_to_peers(whole.decode(errors="replace")))
        return tuple(sorted(self._lanes))


def check_lanes(kind: WireKind, lanes: tuple[Lane, ...]) -> None:
    """Raises TransportError if UCX chose something else than the configuration asks for."""
    wrong = [
        lane
        for lane in lanes
        if (kind == "rdma" and not lane.is_rdma) or (kind == "tcp" and lane.transport != "tcp")
    ]
    if wrong:
        used = ", ".join(f"{lane.transport} on {lane.device}" for lane in wrong)
        raise TransportError(
            f"gps.transport is {kind!r}, and UCX chose {used}. Mend the fabric, or set it to 'any'",
            field="gps.transport",
            lanes=[f"{lane.use}({lane.transport}/{lane.device})" for lane in lanes],
        )
