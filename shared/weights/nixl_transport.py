"""Between nodes: NIXL over UCX, DRAM or VRAM at either end. The only file that knows NIXL.

Threads: copies are one-sided, but UCX over TCP or shared memory needs both ends to make progress. An agent
that serves peers keeps NIXL's progress thread on; one that only starts copies and then sits in `wait` may
turn it off, which is faster on host memory.

Pitfalls this file takes care of: metadata is exchanged again after every registration; spans that continue
each other on both sides become one descriptor; a copy that does not end in time is cancelled by releasing
its handle; a peer that died is a `TransportError`, not a hang.

UCX has no way to stop a copy: what was cancelled goes on over TCP as soon as the link and the agent's
progress allow, also after its peer was disconnected (measured: all of 1.4 GB, some of it seconds later). To
destroy the agent would stop it, but a peer that is just sending then aborts on an assertion of UCX. So
whoever cancels keeps the target mapped, puts nothing else there, and lets the agent make `progress` for a
while.
"""

import base64
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PeerInfo, PeerRegion
from shared.errors import DeadlineExceeded, TransportError
from shared.layout.spans import Spans, merge_spans
from shared.weights.ports import Descriptors, Memory, Operation, check_pair, check_spans

_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 1e-3
_PROGRESS_DELAY_US = 1
_OPENING = threading.Lock()


@dataclass(slots=True)
class _Spans:
    agent: str
    region: str
    address: int
    kind: str
    device: int
    spans: Spans
    prepared: Any = None
    """NIXL's handle of this very list, made at the first copy that uses it unmerged."""

    @property
    def nbytes(self) -> int:
        return int(self.spans[:, 1].sum())


@dataclass(slots=True, eq=False)
class _Copy:
    handle: Any
    peer: str
    nbytes: int
    lists: list[Any] = field(default_factory=list)
    """Prepared lists of this copy alone, released with it."""
    is_done: bool = False


def rdma_devices(folder: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Names of the node's RDMA devices."""
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def _api_name() -> str:
    """The module of the one installed build. `nixl` itself would import torch to choose between builds, which
    costs a process that has no other use for it 1 to 2 s and 150 MiB."""
    builds = [name for name in ("nixl_cu13", "nixl_cu12", "nixl_rocm") if importlib.util.find_spec(name)]
    return f"{builds[0]}._api" if len(builds) == 1 else "nixl._api"


def _open_agent(api: Any, agent: str, config: Any) -> Any:
    """An agent whose progress thread sleeps until something arrives.

    NIXL's Python front end asks for a delay of 0, with which that thread spins: an idle agent takes a whole
    core (measured: 0.9 to 1.0 of one, and 0.01 with a delay; copies are no slower). It offers no setting, so
    its settings class is replaced while the agent is made.
    """
    plain = api.nixlBind.nixlAgentConfig

    class SleepingConfig(plain):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_DELAY_US if name == "pthrDelay" else value)

    with _OPENING:
        api.nixlBind.nixlAgentConfig = SleepingConfig
        try:
            return api.nixl_agent(agent, config)
        finally:
            api.nixlBind.nixlAgentConfig = plain


class NixlTransport:
    """An agent named `agent`. With `require_rdma`, refuses to start where UCX would silently fall back to
    TCP.

    Raises TransportError if NIXL is not installed or UCX does not start.
    """

    def __init__(
        self,
        agent: str,
        *,
        has_progress_thread: bool = True,
        require_rdma: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if require_rdma and not rdma_devices():
            raise TransportError("this node has no RDMA device: UCX would use TCP", agent=agent)
        try:
            api = importlib.import_module(_api_name())
        except ImportError as error:
            raise TransportError(f"NIXL cannot be imported ({error}); install nixl") from error
        self._name, self._now_s, self._has_progress_thread = agent, now_s, has_progress_thread
        self._regions: dict[str, tuple[Memory, Any]] = {}
        self._peers: dict[str, PeerInfo] = {}
        self._open: list[_Copy] = []
        self._agent: Any = self._call(
            "start",
            lambda: _open_agent(
                api,
                agent,
                api.nixl_agent_config(
                    enable_prog_thread=has_progress_thread,
                    backends=["UCX"],
                    sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
                ),
            ),
        )

    def register(self, region: str, memory: Memory) -> None:
        if region in self._regions:
            raise TransportError(f"region {region} is registered already", region=region)
        entry = [(memory.address, memory.nbytes, memory.device, region)]
        handle = self._call("register", lambda: self._live().register_memory(entry, memory.kind))
        self._regions[region] = (memory, handle)

    def unregister(self, region: str) -> None:
        if found := self._regions.pop(region, None):
            self._call("unregister", lambda: self._live().deregister_memory(found[1]))

    def describe(self) -> PeerInfo:
        metadata = self._call("describe", lambda: self._live().get_agent_metadata())
        regions = tuple(
            PeerRegion(
                name=name, address=m.address, nbytes=m.nbytes, kind=m.kind, device=m.device, path=m.path
            )
            for name, (m, _) in self._regions.items()
        )
        return PeerInfo(
            transport="nixl",
            agent=self._name,
            metadata=base64.b64encode(metadata).decode(),
            regions=regions,
        )

    def connect(self, peer: PeerInfo) -> None:
        if peer.transport != "nixl":
            raise TransportError(f"peer {peer.agent} speaks {peer.transport}, not nixl", peer=peer.agent)
        if peer.agent in self._peers:
            self.disconnect(peer.agent)
        blob = base64.b64decode(peer.metadata)
        name = self._call("connect", lambda: self._live().add_remote_agent(blob))
        known = name.decode() if isinstance(name, bytes) else str(name)
        if known != peer.agent:
            raise TransportError(f"peer {peer.agent} sent the metadata of {known}", peer=peer.agent)
        self._peers[peer.agent] = peer

    def disconnect(self, agent: str) -> None:
        if self._peers.pop(agent, None) is not None:
            self._call("disconnect", lambda: self._live().remove_remote_agent(agent))

    def prepare_local(self, region: str, spans: Spans) -> Descriptors:
        if region not in self._regions:
            raise TransportError(f"region {region} is not registered", region=region)
        memory = self._regions[region][0]
        check_spans(spans, memory.nbytes, region)
        return _Spans("", region, memory.address, memory.kind, memory.device, spans)

    def prepare_remote(self, agent: str, region: str, spans: Spans) -> Descriptors:
        peer = self._peers.get(agent)
        found = next((r for r in peer.regions if r.name == region), None) if peer else None
        if found is None:
            raise TransportError(f"no region {region} of a peer {agent} is known", peer=agent, region=region)
        check_spans(spans, found.nbytes, region)
        return _Spans(agent, region, found.address, found.kind, found.device, spans)

    def read(self, local: Descriptors, remote: Descriptors) -> Operation:
        return self._start("READ", local, remote)

    def write(self, local: Descriptors, remote: Descriptors) -> Operation:
        return self._start("WRITE", local, remote)

    def _start(self, direction: str, local: Descriptors, remote: Descriptors) -> Operation:
        assert isinstance(local, _Spans)
        assert isinstance(remote, _Spans)
        check_pair(local.spans, remote.spans)
        copy = _Copy(None, remote.agent, local.nbytes)
        if not copy.nbytes:
            copy.is_done = True
            return copy
        near, far = merge_spans(local.spans, remote.spans)
        lists = [self._prepared(local, near, copy.lists), self._prepared(remote, far, copy.lists)]
        indices = np.arange(len(near), dtype=np.int32)
        try:
            copy.handle = self._call(
                direction.lower(),
                lambda: self._live().make_prepped_xfer(direction, lists[0], indices, lists[1], indices),
            )
            state = self._call(direction.lower(), lambda: self._live().transfer(copy.handle))
        except TransportError:
            self._finish(copy)
            raise
        self._open.append(copy)
        self._settle(copy, state)
        return copy

    def _prepared(self, side: _Spans, spans: Spans, of_copy: list[Any]) -> Any:
        """NIXL's list of `spans`. One that equals the caller's own list is kept for its next copies."""
        is_own = len(spans) == len(side.spans)
        if is_own and side.prepared is not None:
            return side.prepared
        table = _table(side, spans)
        name = side.agent or "NIXL_INIT_AGENT"
        made = self._call("prepare", lambda: self._live().prep_xfer_dlist(name, table, side.kind))
        if is_own:
            side.prepared = made
        else:
            of_copy.append(made)
        return made

    def wait(self, operation: Operation, deadline_s: float) -> None:
        assert isinstance(operation, _Copy)
        end_s, pause_s = self._now_s() + deadline_s, _FIRST_POLL_S
        while not self.poll(operation):
            if self._now_s() >= end_s:
                self._finish(operation)
                raise DeadlineExceeded(
                    role=self._name, peer=operation.peer, phase="copy", deadline_s=deadline_s
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def poll(self, operation: Operation) -> bool:
        assert isinstance(operation, _Copy)
        if operation.is_done:
            return True
        if operation.handle is None:
            raise TransportError(f"the copy with {operation.peer} failed or was cancelled before")
        try:
            state = self._call("wait", lambda: self._live().check_xfer_state(operation.handle))
        except TransportError:
            self._finish(operation)
            raise
        return self._settle(operation, state)

    def cancel(self, operation: Operation) -> None:
        assert isinstance(operation, _Copy)
        if not operation.is_done:
            self._finish(operation)

    def progress(self) -> None:
        if not self._has_progress_thread:  # asking for messages, of which we send none, makes progress
            self._call("progress", lambda: self._live().get_new_notifs())

    def _settle(self, copy: _Copy, state: str) -> bool:
        """Whether `copy` is done, in NIXL's words for its state. Raises TransportError if it failed."""
        if state == "PROC":
            return False
        self._finish(copy)
        if state != "DONE":
            raise TransportError(f"the copy with {copy.peer} failed (NIXL says {state})", peer=copy.peer)
        copy.is_done = True
        return True

    def _finish(self, copy: _Copy) -> None:
        """Release the handle, which cancels a copy in flight, and the lists of this copy."""
        handle, copy.handle = copy.handle, None
        lists, copy.lists = copy.lists, []
        if copy in self._open:
            self._open.remove(copy)
        if handle is not None:
            self._call("release", lambda: self._live().release_xfer_handle(handle))
        for prepared in lists:
            self._release_list(prepared)

    def _release_list(self, prepared: Any) -> None:
        self._call("release", lambda: self._live().release_dlist_handle(prepared))

    def release(self, descriptors: Descriptors) -> None:
        assert isinstance(descriptors, _Spans)
        prepared, descriptors.prepared = descriptors.prepared, None
        if prepared is not None:
            self._release_list(prepared)

    def explain(self) -> str:
        chosen = os.environ.get("UCX_TLS")
        devices = rdma_devices()
        paths = f"UCX_TLS={chosen}" if chosen else "UCX_TLS unset, UCX chooses"
        wires = f"RDMA devices {', '.join(devices)}" if devices else "no RDMA device: TCP between nodes"
        return f"nixl: UCX backend; {paths}; {wires}"

    def close(self) -> None:
        if self._agent is None:
            return
        for copy in list(self._open):
            self._finish(copy)
        for agent in list(self._peers):
            self.disconnect(agent)
        for region in list(self._regions):
            self.unregister(region)
        self._agent = None

    def _live(self) -> Any:
        if self._agent is None:
            raise TransportError(f"the NIXL transport of {self._name} is closed")
        return self._agent

    def _call(self, phase: str, call: Callable[[], Any]) -> Any:
        """`call`, with NIXL's errors as ours. NIXL's bindings raise their own classes, all plain
        exceptions."""
        try:
            return call()
        except TransportError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise TransportError(f"{self._name}: {phase}: {kind}: {error}", phase=phase, kind=kind) from error


def _table(side: _Spans, spans: Spans) -> NDArray[np.uint64]:
    """NIXL's (address, length, device) rows."""
    table = np.empty((len(spans), 3), np.uint64)
    table[:, 0] = spans[:, 0] + side.address
    table[:, 1] = spans[:, 1]
    table[:, 2] = side.device
    return table
