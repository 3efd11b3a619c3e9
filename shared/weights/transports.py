"""The one place that chooses a `Transport`."""

from typing import Literal, assert_never

from shared.errors import TransportError
from shared.weights.memory_transport import MemoryTransport
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import Transport
from shared.weights.split_transport import SplitTransport

TransportKind = Literal["memory", "nixl", "rdma"]


def open_transport(kind: TransportKind, agent: str) -> Transport:
    """A transport of `agent`: "memory" inside one node, "nixl" between nodes, "rdma" where it must be RDMA.

    Raises TransportError.
    """
    match kind:
        case "memory":
            return MemoryTransport(agent)
        case "nixl":
            return _split(agent)
        case "rdma":  # copies need no thread at either end, and memory is pinned once
            return NixlTransport(agent, require_rdma=True)
        case _:
            assert_never(kind)


def _split(agent: str) -> Transport:
    serving = NixlTransport(agent)
    try:
        return SplitTransport(serving, NixlTransport(f"{agent}/pull", has_progress_thread=False))
    except TransportError:
        serving.close()
        raise
