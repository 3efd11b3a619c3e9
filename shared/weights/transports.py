"""The one place that chooses a `Transport`."""

from typing import Literal, assert_never

from shared.weights.memory_transport import MemoryTransport
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import Transport

TransportKind = Literal["memory", "nixl"]


def open_transport(kind: TransportKind, agent: str) -> Transport:
    """A transport of `agent`: "memory" inside one node, "nixl" between nodes. Raises TransportError."""
    match kind:
        case "memory":
            return MemoryTransport(agent)
        case "nixl":
            return NixlTransport(agent)
        case _:
            assert_never(kind)
