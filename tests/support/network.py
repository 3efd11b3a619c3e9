"""Machines of a cluster as network namespaces: one bridge, one address each, links that can be cut.

The bridge has a namespace of its own, so that the host's firewall (Docker's drops what is bridged) is not
asked. The test itself is reached and reaches by one more link.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

_NUMBERS = itertools.count()


def why_not() -> str | None:
    """Why this machine has no namespaces for tests; None if it has."""
    if shutil.which("ip") is None:
        return "the ip command is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pvt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    pair = ["ip", "link", "add", "v0", "netns", name, "type", "veth", "peer", "name", "v1", "netns", name]
    linked = subprocess.run(pair, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"veth: {linked.stderr.strip()}" if linked.returncode else None


def _ip(*words: str, inside: str | None = None) -> None:
    prefix = ["ip", "netns", "exec", inside] if inside else []
    subprocess.run([*prefix, "ip", *words], check=True, capture_output=True)


@dataclass
class Network:
    """`nodes` machines at `address(i)`, the broker's place at `hub_address`."""

    name: str
    subnet: str
    nodes: int
    _made: list[str] = field(default_factory=list)

    @property
    def hub(self) -> str:
        return f"{self.name}h"

    @property
    def hub_address(self) -> str:
        return f"{self.subnet}.1"

    def space(self, node: int) -> str:
        return f"{self.name}n{node}"

    def address(self, node: int) -> str:
        return f"{self.subnet}.{10 + node}"

    def make(self) -> None:
        self._space(self.hub)
        _ip("link", "add", "br0", "type", "bridge", inside=self.hub)
        _ip("addr", "add", f"{self.hub_address}/24", "dev", "br0", inside=self.hub)
        _ip("link", "set", "br0", "up", inside=self.hub)
        for node in range(self.nodes):
            space = self.space(node)
            self._space(space)
            port = f"p{node}"
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", port, "netns", self.hub)
            _ip("link", "set", port, "master", "br0", "up", inside=self.hub)
            _ip("addr", "add", f"{self.address(node)}/24", "dev", "eth0", inside=space)
            _ip("link", "set", "eth0", "up", inside=space)
        _ip("link", "add", self.name, "type", "veth", "peer", "pt", "netns", self.hub)
        _ip("link", "set", "pt", "master", "br0", "up", inside=self.hub)
        _ip("addr", "add", f"{self.subnet}.254/24", "dev", self.name)
        _ip("link", "set", self.name, "up")

    def _space(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("link", "set", "lo", "up", inside=name)

    def cut(self, node: int) -> None:
        """Pull the cable of `node`."""
        _ip("link", "set", f"p{node}", "down", inside=self.hub)

    def heal(self, node: int) -> None:
        _ip("link", "set", f"p{node}", "up", inside=self.hub)

    def start(self, space: str, argv: list[str], **options: object) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["ip", "netns", "exec", space, *argv], **options)  # type: ignore[call-overload, no-any-return]

    def close(self) -> None:
        for name in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self.name)


@contextlib.contextmanager
def network(nodes: int) -> Iterator[Network]:
    """Up while the block runs. Names and subnet belong to this process and this call."""
    number = next(_NUMBERS)
    host = os.getpid() * 16 + number % 16  # 16 networks at a time per process
    made = Network(
        f"pv{os.getpid() % 100000}{number % 16:x}", f"10.{192 + host // 250 % 64}.{host % 250}", nodes
    )
    try:
        made.make()
        yield made
    finally:
        made.close()
