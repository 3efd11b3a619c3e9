"""What whoever moves parameters needs of a transport, and no more.

A region is registered once, large, by name; its description goes to peers over the control plane; copies are
lists of byte spans inside two regions. The caller need not know whether bytes go through shared memory, TCP
or RDMA.

    owner                                     peer
    register("policy-b0", memory)             register("staging", memory)
    describe()  ── PeerInfo over HTTP ──▶     connect(info)
                                              local = prepare_local("staging", spans)
                                              remote = prepare_remote(info.agent, "policy-b0", spans)
                                              wait(read(local, remote), deadline_s=30)
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PeerInfo
from shared.errors import TransportError
from shared.layout.spans import Spans

MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Contiguous bytes to register: `nbytes` at `address`; `device` counts GPUs.

    `owner` is kept alive while registered. `path` names the shared-memory file that the bytes are, if they
    are one.
    """

    address: int
    nbytes: int
    kind: MemoryKind = "DRAM"
    device: int = 0
    path: str = ""
    owner: object = None


def memory_of(array: NDArray[np.uint8], path: str = "") -> Memory:
    """The memory of a contiguous byte array."""
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous arrays can be registered")
    return Memory(array.ctypes.data, array.nbytes, path=path, owner=array)


class Descriptors(Protocol):
    """One side of copies: spans inside one region. Opaque; made by the transport that uses it."""

    @property
    def nbytes(self) -> int: ...


class Operation(Protocol):
    """A copy that was started. Opaque."""

    @property
    def nbytes(self) -> int: ...


class Transport(Protocol):
    """Not thread-safe: one owner. Every error is a `TransportError`, except the deadline of `wait`."""

    def register(self, region: str, memory: Memory) -> None:
        """Make `memory` reachable under `region`. Slow for big memory (6-13 GB/s): do it once."""

    def unregister(self, region: str) -> None:
        """Forget `region`; before its memory goes away."""

    def describe(self) -> PeerInfo:
        """Who this is and what is registered *now*: describe again after a new `register`."""

    def connect(self, peer: PeerInfo) -> None:
        """Know `peer`, or know it anew."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer."""

    def prepare_local(self, region: str, spans: Spans) -> Descriptors:
        """Spans inside an own region."""

    def prepare_remote(self, agent: str, region: str, spans: Spans) -> Descriptors:
        """Spans inside a connected peer's region."""

    def read(self, local: Descriptors, remote: Descriptors) -> Operation:
        """Start copying remote → local, row by row of the two span lists."""

    def write(self, local: Descriptors, remote: Descriptors) -> Operation:
        """Start copying local → remote."""

    def wait(self, operation: Operation, deadline_s: float) -> None:
        """Until the copy is done.

        Raises:
            DeadlineExceeded: it was not done within `deadline_s`; it is cancelled, the target holds rubbish.
            TransportError: it failed, for example because the peer died.
        """

    def poll(self, operation: Operation) -> bool:
        """Whether the copy is done; does not block for longer than a look takes. Raises TransportError if it
        failed."""

    def cancel(self, operation: Operation) -> None:
        """Give up a copy that is not done: its target holds rubbish, and its peer must be connected anew.

        What its peer still sends may be written into the target later, whenever the link allows: the memory
        must stay mapped, and be used for nothing else.
        """

    def progress(self) -> None:
        """Take in what has arrived of copies that were given up, where only a look at other copies would."""

    def release(self, descriptors: Descriptors) -> None:
        """Give back what a prepared list holds."""

    def explain(self) -> str:
        """One line for a person: which paths bytes take."""

    def close(self) -> None:
        """Cancel, unregister, forget. A second call does nothing."""


def check_spans(spans: Spans, nbytes: int, region: str) -> None:
    """Raises TransportError if a span is not inside `[0, nbytes)`."""
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise TransportError(f"spans of region {region} have shape {spans.shape}, not (n, 2)", region=region)
    if len(spans) and (spans.min() < 0 or int((spans[:, 0] + spans[:, 1]).max()) > nbytes):
        raise TransportError(f"a span is outside region {region} of {nbytes} bytes", region=region)


def check_pair(local: Spans, remote: Spans) -> None:
    """Raises TransportError if the two ends of a copy differ in number or lengths."""
    if local.shape != remote.shape or not np.array_equal(local[:, 1], remote[:, 1]):
        raise TransportError(f"the two ends of a copy differ: {len(local)} and {len(remote)} spans")
