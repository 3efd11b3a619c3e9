"""One transport of two agents: peers copy from and to `serving`, `pulling` starts this process's own copies.

Without RDMA both ends of a copy need a thread to make progress. An agent that serves must have one of its own
for that, at all times. Where the same agent pulls too, that thread and whoever waits for the copy get in each
other's way: over TCP a pull then takes twice the processor time and half again as long. So an agent that only
pulls has none, and makes progress when it is looked at.

Memory is registered with both. `describe` is of the serving agent: the other one is known to nobody.
"""

from shared.contracts.gps import PeerInfo
from shared.errors import TransportError
from shared.layout.spans import Spans
from shared.weights.ports import Descriptors, Memory, Operation, Transport


class SplitTransport:
    """Owns both."""

    def __init__(self, serving: Transport, pulling: Transport) -> None:
        self._serving, self._pulling = serving, pulling

    def register(self, region: str, memory: Memory) -> None:
        self._serving.register(region, memory)
        try:
            self._pulling.register(region, memory)
        except TransportError:
            self._serving.unregister(region)
            raise

    def unregister(self, region: str) -> None:
        self._pulling.unregister(region)
        self._serving.unregister(region)

    def describe(self) -> PeerInfo:
        return self._serving.describe()

    def connect(self, peer: PeerInfo) -> None:
        self._pulling.connect(peer)

    def disconnect(self, agent: str) -> None:
        self._pulling.disconnect(agent)

    def prepare_local(self, region: str, spans: Spans) -> Descriptors:
        return self._pulling.prepare_local(region, spans)

    def prepare_remote(self, agent: str, region: str, spans: Spans) -> Descriptors:
        return self._pulling.prepare_remote(agent, region, spans)

    def read(self, local: Descriptors, remote: Descriptors) -> Operation:
        return self._pulling.read(local, remote)

    def write(self, local: Descriptors, remote: Descriptors) -> Operation:
        return self._pulling.write(local, remote)

    def wait(self, operation: Operation, deadline_s: float) -> None:
        self._pulling.wait(operation, deadline_s)

    def poll(self, operation: Operation) -> bool:
        return self._pulling.poll(operation)

    def cancel(self, operation: Operation) -> None:
        self._pulling.cancel(operation)

    def progress(self) -> None:
        self._pulling.progress()

    def release(self, descriptors: Descriptors) -> None:
        self._pulling.release(descriptors)

    def explain(self) -> str:
        return self._serving.explain()

    def close(self) -> None:
        try:
            self._pulling.close()
        finally:
            self._serving.close()
