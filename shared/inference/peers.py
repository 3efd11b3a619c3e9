"""A role service's replicas: what is known of each, and the requests to it.

Whoever waits for an answer is freed by a deadline, or at once when the replica's process is replaced or taken
for dead (`lost`). A replica makes one transition at a time (`turns`), whoever asks for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.replica import (
    AbortSequences,
    ReplicaSlept,
    ReplicaTelemetry,
    SequencesAborted,
    SleepReplica,
    TokenDelta,
)
from shared.contracts.subjects import Subjects
from shared.errors import Conflict, DeadlineExceeded, NoResponder, PivotError
from shared.ids import DeviceId, ReplicaId, Role
from shared.inference import role_times as times
from shared.runtime.clock import Clock
from shared.scheduling.sequence import AbortSequence, RunSequence

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What every peer of a role needs to be asked."""

    role: Role
    bus: Bus
    subjects: Subjects
    clock: Clock


@dataclass(slots=True)
class ReplicaPeer:
    """One replica process as its role service sees it: what is known of it, and how to ask it."""

    id: ReplicaId
    devices: tuple[DeviceId, ...]
    link: PeerLink
    outbox: asyncio.Queue[RunSequence | AbortSequence] = field(default_factory=asyncio.Queue)
    telemetry: ReplicaTelemetry | None = None
    seen_s: float = float("-inf")
    is_active: bool = False
    """Serves, as far as the planner is concerned; a crashed one is woken again."""
    is_shifting: bool = False
    version: int = 0
    """Of its parameters, as it proved at its last wake or refresh."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held through a wake, sleep or refresh: a replica refuses a second one meanwhile."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this life of it is over; the next life has another."""

    def state(self) -> str:
        """What it last said, if that was not long ago."""
        if self.telemetry is None or self.link.clock.now_s() - self.seen_s > times.SILENCE_S:
            return "unknown"
        return self.telemetry.state

    async def is_dead(self, silent_s: float) -> bool:
        """An empty abort is a question any living replica answers at once."""
        try:
            ping = AbortSequences(sequences=())
            await self.ask("abort", ping, SequencesAborted, times.PING_DEADLINE_S, "health")
        except NoResponder:
            return True
        except PivotError:
            return silent_s > times.DEATH_S
        return False

    def lose(self) -> None:
        """This life of it is over: whoever waits for its answer is freed, what it was to do is dropped."""
        self.lost.set()
        self.lost = asyncio.Event()
        self.version = 0
        while not self.outbox.empty():
            self.outbox.get_nowait()

    async def stop_all(self) -> tuple[TokenDelta, ...]:
        """Ends whatever it runs; nothing if it does not answer."""
        everything = AbortSequences(sequences=None)
        with contextlib.suppress(PivotError):
            answer = await self.ask("abort", everything, SequencesAborted, 5.0, "stop all")
            return answer.deltas
        return ()

    async def sleep(self, deadline_s: float) -> ReplicaSlept:
        """A replica whose process died, or was started anew, holds nothing: that counts as asleep."""
        try:
            return await self.ask("sleep", SleepReplica(), ReplicaSlept, deadline_s, "sleep")
        except NoResponder:
            pass
        except Conflict as conflict:
            if conflict.data.get("state") not in ("asleep", "starting"):
                raise
        return ReplicaSlept(freed_bytes=0, resident_bytes=0, duration_s=0.0)

    async def ask(self, command: str, message: Message, reply: type[M], deadline_s: float, phase: str) -> M:
        """
        Raises:
            NoResponder: also if the process was replaced, or taken for dead, while it was waited for.
        """
        life = asyncio.ensure_future(self.lost.wait())
        answer = asyncio.ensure_future(
            self.link.bus.request(
                self.link.subjects.replica(self.id, command),
                message,
                reply,
                deadline_s=deadline_s,
                role=self.link.role.value,
                peer=self.id,
                phase=phase,
            )
        )
        try:
            await asyncio.wait({life, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise NoResponder(role=self.link.role.value, peer=self.id, phase=phase, deadline_s=deadline_s)
            return answer.result()
        finally:
            for task in (life, answer):
                task.cancel()


@contextlib.asynccontextmanager
async def turns(peers: Sequence[ReplicaPeer], deadline_s: float) -> AsyncIterator[None]:
    """Their transitions are the caller's alone while the block runs."""
    async with contextlib.AsyncExitStack() as turns:
        try:
            async with asyncio.timeout(deadline_s):
                for peer in sorted(peers, key=lambda r: r.id):
                    await turns.enter_async_context(peer.turn)
        except TimeoutError:
            names = ", ".join(peer.id for peer in peers)
            raise DeadlineExceeded(
                role=peers[0].link.role.value, peer=names, phase="turn", deadline_s=deadline_s
            ) from None
        for peer in peers:
            peer.is_shifting = True
        try:
            yield
        finally:
            for peer in peers:
                peer.is_shifting = False
