"""A transport for asyncio: one thread owns it, copies from several peers run at once, nothing waits for ever.

    pull(pulls, deadline_s)     starts every copy, looks at all of them in turn, returns when all are done
    a copy fails, or is late    all are cancelled, the peer is forgotten, and the error names the peer; what
                                is still on its way is taken in for `DRAIN_S`, into a target that must stay
                                mapped for longer and be used for nothing else

A call of the library that does not come back keeps the thread; whoever waits for it, or behind it, gets
`DeadlineExceeded`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from shared.contracts.gps import PeerInfo
from shared.errors import DeadlineExceeded, TransportError
from shared.layout.spans import Spans, merge_spans
from shared.weights.ports import Descriptors, Memory, Operation, Transport

T = TypeVar("T")
_CALL_DEADLINE_S, _REGISTER_DEADLINE_S = 20.0, 600.0
_LOOK_S, _TURN_S = 0.1, 2e-3
"""How long one look at copies keeps the thread, if nobody else wants it, and if somebody does."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 20e-6, 1e-3
DRAIN_S, _DRAIN_PAUSE_S = 60.0, 0.05
"""After a copy was given up; UCX's TCP calls a connection dead after 5 s of silence and three probes."""
MAX_LISTS = 256
"""Prepared lists kept, the latest used."""


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Copy `theirs` of `remote_region` of `peer` to `ours` of `local_region`, row by row (bytes).

    Pulls of equal `key` have equal spans: their descriptor lists are prepared once.
    """

    peer: PeerInfo
    remote_region: str
    theirs: Spans
    local_region: str
    ours: Spans
    key: str


Key = tuple[str, str, str, str]
"""Agent, its region, own region, key of the spans."""


@dataclass(slots=True, eq=False)
class _Copy:
    pull: Pull
    key: Key
    operation: Operation
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    copies: list[_Copy] = field(default_factory=list)
    pause_s: float = _FIRST_PAUSE_S


class PeerLinks:
    """`make` opens the transport, in its thread. `role` names this process in errors."""

    def __init__(
        self, make: Callable[[], Transport], role: str, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._role, self._now_s = make, role, now_s
        self._thread = ThreadPoolExecutor(1, "transport")
        self._transport: Transport | None = None
        self._peers: dict[str, PeerInfo] = {}
        self._lists: dict[Key, tuple[Descriptors, Descriptors]] = {}
        self._batches: list[_Batch] = []
        self._drain_until_s = float("-inf")
        self._draining: asyncio.Task[None] | None = None
        self._num_asked = 0
        """Calls of the thread; counted outside of it."""
        self._num_begun = 0
        """Those that it began; counted inside."""

    @property
    def num_lists(self) -> int:
        return len(self._lists)

    async def start(self) -> None:
        """Raises TransportError."""
        self._transport = await self._call("start", self._role, self._make, _CALL_DEADLINE_S)

    async def register(self, region: str, memory: Memory) -> None:
        await self._call(
            "register", self._role, lambda: self._live().register(region, memory), _REGISTER_DEADLINE_S
        )

    async def unregister(self, region: str) -> None:
        """Forget `region` and the lists over it; copies into it are cancelled, their peers forgotten."""

        def work() -> None:
            copies = [copy for batch in self._batches for copy in batch.copies if not copy.is_done]
            for agent in {copy.pull.peer.agent for copy in copies if copy.pull.local_region == region}:
                self._forget(agent)
            self._drop([key for key in self._lists if key[2] == region])
            self._live().unregister(region)

        await self._call("unregister", self._role, work, _CALL_DEADLINE_S)

    async def describe(self) -> PeerInfo:
        return await self._call("describe", self._role, lambda: self._live().describe(), _CALL_DEADLINE_S)

    async def explain(self) -> str:
        return await self._call("explain", self._role, lambda: self._live().explain(), _CALL_DEADLINE_S)

    async def forget(self, agent: str) -> None:
        """A peer is gone: its copies, its lists and its endpoint go."""
        await self._call("disconnect", agent, lambda: self._forget(agent), _CALL_DEADLINE_S)

    async def pull(self, pulls: Sequence[Pull], deadline_s: float) -> int:
        """Bytes copied, when all are.

        Raises:
            DeadlineExceeded: names the first peer that was not done.
            TransportError: a copy failed; it names the peer.
        """
        end_s = self._now_s() + deadline_s
        names = ", ".join(dict.fromkeys(pull.peer.agent for pull in pulls))
        batch = _Batch()
        try:
            await self._call("copy", names, lambda: self._start(batch, pulls), deadline_s)
            while not await self._call("copy", names, lambda: self._look(batch), deadline_s):
                if self._now_s() >= end_s:
                    late = next(copy.pull.peer.agent for copy in batch.copies if not copy.is_done)
                    raise DeadlineExceeded(role=self._role, peer=late, phase="copy", deadline_s=deadline_s)
        except BaseException:
            await asyncio.shield(self._call("cancel", names, lambda: self._give_up(batch), _CALL_DEADLINE_S))
            raise
        return sum(copy.operation.nbytes for copy in batch.copies)

    async def _drain(self) -> None:
        """Until what was given up has had its time. What fails here shows at the next copy too."""
        while self._now_s() < self._drain_until_s:
            await asyncio.sleep(_DRAIN_PAUSE_S)
            with contextlib.suppress(TransportError, DeadlineExceeded):
                await self._call("drain", self._role, lambda: self._live().progress(), _CALL_DEADLINE_S)

    def _start_draining(self) -> None:
        if self._now_s() < self._drain_until_s and (self._draining is None or self._draining.done()):
            self._draining = asyncio.create_task(self._drain())

    async def close(self) -> None:
        """Raises DeadlineExceeded if the library does not let go."""
        self._drain_until_s = float("-inf")
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])
        transport = self._transport
        try:
            if transport is not None:
                await self._call("close", self._role, transport.close, _CALL_DEADLINE_S)
        finally:
            self._transport = None
            self._thread.shutdown(wait=False, cancel_futures=True)

    # in the thread

    def _start(self, batch: _Batch, pulls: Sequence[Pull]) -> None:
        self._batches.append(batch)
        for pull in pulls:
            with _blaming(pull.peer.agent):
                if self._peers.get(pull.peer.agent) != pull.peer:
                    self._forget(pull.peer.agent)
                    self._live().connect(pull.peer)
                    self._peers[pull.peer.agent] = pull.peer
                key = (pull.peer.agent, pull.remote_region, pull.local_region, pull.key)
                near, far = self._prepared(pull, key)
                batch.copies.append(_Copy(pull, key, self._live().read(near, far)))

    def _prepared(self, pull: Pull, key: Key) -> tuple[Descriptors, Descriptors]:
        found = self._lists.pop(key, None)
        if found is None:
            ours, theirs = merge_spans(pull.ours, pull.theirs)
            near = self._live().prepare_local(pull.local_region, ours)
            found = near, self._live().prepare_remote(pull.peer.agent, pull.remote_region, theirs)
        self._lists[key] = found
        if len(self._lists) > MAX_LISTS:
            in_use = {copy.key for batch in self._batches for copy in batch.copies}
            self._drop([old for old in self._lists if old != key and old not in in_use][:1])
        return found

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            for descriptors in self._lists.pop(key):
                self._live().release(descriptors)

    def _look(self, batch: _Batch) -> bool:
        """Looks again and again, for a moment: whether all copies are done. The longer they take, the rarer:
        what has arrived since the last look is then taken in larger pieces."""
        begin_s = self._now_s()
        while True:
            for copy in batch.copies:
                if not copy.is_done:
                    with _blaming(copy.pull.peer.agent):
                        copy.is_done = self._live().poll(copy.operation)
            if all(copy.is_done for copy in batch.copies):
                self._batches.remove(batch)
                return True
            if self._now_s() - begin_s >= (_TURN_S if self._num_begun < self._num_asked else _LOOK_S):
                return False
            time.sleep(batch.pause_s)
            batch.pause_s = min(2 * batch.pause_s, _LAST_PAUSE_S)

    def _give_up(self, batch: _Batch) -> None:
        for agent in {copy.pull.peer.agent for copy in batch.copies if not copy.is_done}:
            self._forget(agent)
        if batch in self._batches:
            self._batches.remove(batch)

    def _forget(self, agent: str) -> None:
        for batch in self._batches:
            for copy in batch.copies:
                if copy.pull.peer.agent == agent and not copy.is_done:
                    self._drain_until_s = self._now_s() + DRAIN_S
                    self._live().cancel(copy.operation)
        self._drop([key for key in self._lists if key[0] == agent])
        if self._peers.pop(agent, None) is not None:
            self._live().disconnect(agent)

    def _live(self) -> Transport:
        if self._transport is None:
            raise TransportError(f"the transport of {self._role} is not open")
        return self._transport

    async def _call(self, phase: str, peer: str, work: Callable[[], T], deadline_s: float) -> T:
        def begin() -> T:
            self._num_begun += 1
            return work()

        self._num_asked += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, begin)
        try:
            async with asyncio.timeout(deadline_s):  # `wait_for` may swallow a cancellation before 3.12
                return await asyncio.shield(future)
        except TimeoutError:
            raise DeadlineExceeded(role=self._role, peer=peer, phase=phase, deadline_s=deadline_s) from None
        finally:
            self._start_draining()


@contextlib.contextmanager
def _blaming(agent: str) -> Iterator[None]:
    """A failed copy names its peer."""
    try:
        yield
    except TransportError as error:
        error.data.setdefault("peer", agent)
        raise
