"""Same-node transport: plain copies through the mapped host pool.

A peer's region must be a pool file. It moves DRAM only: a GPU process copies from its pinned mapping itself.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.gps import PeerInfo, PeerRegion, PoolView
from shared.errors import DeadlineExceeded, PivotError, TransportError
from shared.layout.spans import Spans, merge_spans
from shared.weights.host_pool import SHM_FOLDER, MappedPool, map_view
from shared.weights.ports import Descriptors, Memory, Operation, check_pair, check_spans

_CHUNK_BYTES = 64 << 20
"""A deadline is looked at this often."""


@dataclass(frozen=True, slots=True)
class _Spans:
    owner: str
    region: str
    address: int
    spans: Spans

    @property
    def nbytes(self) -> int:
        return int(self.spans[:, 1].sum())


@dataclass(slots=True)
class _Copy:
    target: _Spans
    source: _Spans
    is_done: bool = False

    @property
    def nbytes(self) -> int:
        return self.target.nbytes


class MemoryTransport:
    """`agent` names this process to its peers. Copies run inside `wait`, without the interpreter lock."""

    def __init__(
        self, agent: str, *, folder: Path = SHM_FOLDER, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._agent, self._folder, self._now_s = agent, folder, now_s
        self._regions: dict[str, Memory] = {}
        self._peers: dict[str, dict[str, MappedPool | None]] = {}
        self._is_closed = False

    def register(self, region: str, memory: Memory) -> None:
        self._check_open()
        if memory.kind != "DRAM":
            raise TransportError("the memory transport moves host memory only", region=region)
        if region in self._regions:
            raise TransportError(f"region {region} is registered already", region=region)
        self._regions[region] = memory

    def unregister(self, region: str) -> None:
        self._regions.pop(region, None)

    def describe(self) -> PeerInfo:
        self._check_open()
        regions = tuple(
            PeerRegion(name=name, address=m.address, nbytes=m.nbytes, path=m.path)
            for name, m in self._regions.items()
        )
        return PeerInfo(transport="memory", agent=self._agent, regions=regions)

    def connect(self, peer: PeerInfo) -> None:
        self._check_open()
        self.disconnect(peer.agent)
        mapped: dict[str, MappedPool | None] = {}
        for region in peer.regions:
            if region.path:
                view = PoolView(path=region.path, nbytes=region.nbytes, tensors=())
                try:
                    mapped[region.name] = map_view(view, writable=True, folder=self._folder)
                except (PivotError, OSError) as error:
                    raise TransportError(f"region {region.name} of {peer.agent}: {error}") from error
            else:
                mapped[region.name] = None
        self._peers[peer.agent] = mapped

    def disconnect(self, agent: str) -> None:
        for mapped in self._peers.pop(agent, {}).values():
            if mapped is not None:
                mapped.close()

    def prepare_local(self, region: str, spans: Spans) -> Descriptors:
        self._check_open()
        if region not in self._regions:
            raise TransportError(f"region {region} is not registered", region=region)
        memory = self._regions[region]
        check_spans(spans, memory.nbytes, region)
        return _Spans("", region, memory.address, spans)

    def prepare_remote(self, agent: str, region: str, spans: Spans) -> Descriptors:
        self._check_open()
        if agent not in self._peers or region not in self._peers[agent]:
            raise TransportError(f"no region {region} of a peer {agent} is known", peer=agent, region=region)
        mapped = self._peers[agent][region]
        if mapped is None:
            raise TransportError(f"region {region} of {agent} is not a pool file", peer=agent, region=region)
        check_spans(spans, mapped.view.nbytes, region)
        return _Spans(agent, region, mapped.address, spans)

    def read(self, local: Descriptors, remote: Descriptors) -> Operation:
        return self._copy(target=local, source=remote)

    def write(self, local: Descriptors, remote: Descriptors) -> Operation:
        return self._copy(target=remote, source=local)

    def _copy(self, *, target: Descriptors, source: Descriptors) -> Operation:
        self._check_open()
        assert isinstance(target, _Spans)
        assert isinstance(source, _Spans)
        check_pair(target.spans, source.spans)
        to, of = merge_spans(target.spans, source.spans)
        return _Copy(
            _Spans(target.owner, target.region, target.address, to),
            _Spans(source.owner, source.region, source.address, of),
        )

    def wait(self, operation: Operation, deadline_s: float) -> None:
        assert isinstance(operation, _Copy)
        self._check_open()
        for side in (operation.target, operation.source):
            if side.owner and side.owner not in self._peers:
                raise TransportError(f"peer {side.owner} was disconnected", peer=side.owner)
            if not side.owner and side.region not in self._regions:
                raise TransportError(f"region {side.region} was unregistered", region=side.region)
        if operation.is_done:
            return
        end_s, since_check = self._now_s() + deadline_s, _CHUNK_BYTES
        to, of = operation.target, operation.source
        for (to_offset, length), of_offset in zip(to.spans.tolist(), of.spans[:, 0].tolist(), strict=True):
            for at in range(0, length, _CHUNK_BYTES):
                if since_check >= _CHUNK_BYTES:
                    since_check = 0
                    if self._now_s() >= end_s:
                        peer = to.owner or of.owner
                        raise DeadlineExceeded(
                            role=self._agent, peer=peer, phase="copy", deadline_s=deadline_s
                        )
                size = min(_CHUNK_BYTES, length - at)
                ctypes.memmove(to.address + to_offset + at, of.address + of_offset + at, size)
                since_check += size
        operation.is_done = True

    def poll(self, operation: Operation) -> bool:
        self.wait(operation, float("inf"))
        return True

    def cancel(self, operation: Operation) -> None:
        assert isinstance(operation, _Copy)

    def progress(self) -> None:
        self._check_open()

    def release(self, descriptors: Descriptors) -> None:
        assert isinstance(descriptors, _Spans)

    def explain(self) -> str:
        return "memory: copies through the mapped host pool of this node"

    def close(self) -> None:
        self._is_closed = True
        for agent in list(self._peers):
            self.disconnect(agent)
        self._regions.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError(f"the memory transport of {self._agent} is closed")
