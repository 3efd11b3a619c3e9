"""The ranks as one peer: every command goes to all of them at once and fails as soon as one is gone."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.rank import RankStatus
from shared.contracts.subjects import Subjects
from shared.errors import BusError, EngineError, PivotError
from shared.runtime.clock import Clock

M = TypeVar("M", bound=Message)
T = TypeVar("T")
ROLE = "trainer"
log = logging.getLogger("pivotrl.trainer")
SILENCE_S = 60.0
AWAITS_LOAD, OFFLOADED = "waiting for load", "offloaded"
"""Phases of a rank that keeps nothing on its device."""


class RanksLost(EngineError):
    """A rank died or fell silent; the group comes back together and must be loaded anew."""

    code = "ranks_lost"


class RankGroup:
    def __init__(self, world_size: int, bus: Bus, subjects: Subjects, clock: Clock) -> None:
        self.world_size = world_size
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self.statuses: dict[int, RankStatus] = {}
        self._seen_s: dict[int, float] = {}
        self._lost = asyncio.Event()
        self._reported = asyncio.Event()

    async def start(self) -> None:
        await self._bus.subscribe(f"{self._subjects.prefix}.rank.*.status", self._on_status)

    async def _on_status(self, message: Message) -> None:
        assert isinstance(message, RankStatus)
        before = self.statuses.get(message.rank)
        self.statuses[message.rank] = message
        self._seen_s[message.rank] = self._clock.now_s()
        if before is not None and before.incarnation != message.incarnation:
            log.error("rank %d restarted", message.rank)
            self._lost.set()
        self._reported.set()

    async def watch_for_ever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now_s = self._clock.now_s()
            if silent := [r for r, seen_s in self._seen_s.items() if now_s - seen_s > SILENCE_S]:
                log.error("ranks %s are silent for %.0f s", silent, SILENCE_S)
                self.forget()
                self._lost.set()

    def forget(self) -> None:
        """Believe none of the ranks until it reports again."""
        self.statuses.clear()
        self._seen_s.clear()

    async def lost(self) -> None:
        await self._lost.wait()

    async def wait_all(self) -> None:
        """Until every rank of one generation has reported; clears what was lost before."""
        while True:
            self._reported.clear()
            fresh = [s for s in self.statuses.values() if s.world_size == self.world_size]
            if len(fresh) == self.world_size and len({s.incarnation.split("/")[0] for s in fresh}) == 1:
                self._lost.clear()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self._reported.wait()

    async def ask(
        self, command: str, messages: Sequence[Message] | Message, reply: type[M], *, deadline_s: float
    ) -> list[M]:
        """Sends one message per rank (or the same to all); the answers in rank order.

        Raises:
            RanksLost: a rank is gone. Others may or may not have carried the command out.
            DeadlineExceeded: one did not answer in time.
        """
        if isinstance(messages, Message):
            messages = [messages] * self.world_size
        requests = [self._request(r, command, m, reply, deadline_s) for r, m in enumerate(messages)]
        return await self._unless_lost(command, requests)

    async def ask_each(
        self, command: str, message: Message, reply: type[M], *, deadline_s: float
    ) -> list[M | PivotError]:
        """Sends the same message to all and waits for every rank: an error that a rank answers is its answer.
        Afterwards no rank is in the command any more.

        Raises:
            RanksLost: a rank is gone.
            DeadlineExceeded, BusError: a rank's answer did not come; it may still be in the command.
        """

        async def answer(rank: int) -> M | PivotError:
            try:
                return await self._request(rank, command, message, reply, deadline_s)
            except PivotError as error:
                if isinstance(error, BusError) or error.data.get("role") == ROLE:  # not said by the rank
                    raise
                return error

        return await self._unless_lost(command, [answer(rank) for rank in range(self.world_size)])

    async def _request(
        self, rank: int, command: str, message: Message, reply: type[M], deadline_s: float
    ) -> M:
        return await self._bus.request(
            self._subjects.rank(rank, command),
            message,
            reply,
            deadline_s=deadline_s,
            role=ROLE,
            peer=f"rank {rank}",
            phase=command,
        )

    async def _unless_lost(self, command: str, requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results, or the first error; RanksLost as soon as a rank is gone."""
        asked = [asyncio.create_task(request) for request in requests]
        lost = asyncio.create_task(self._lost.wait())
        everyone = asyncio.ensure_future(asyncio.gather(*asked))
        waits: list[asyncio.Future[Any]] = [everyone, lost]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not everyone.done():
                raise RanksLost(f"a rank was lost during {command!r}", phase=command)
            return await everyone
        finally:
            for task in (*waits, *asked):
                task.cancel()
            await asyncio.gather(*waits, *asked, return_exceptions=True)

    @property
    def are_on_device(self) -> bool:
        """Every rank that reported has its states on its device."""
        return all(s.phase not in (AWAITS_LOAD, OFFLOADED) for s in self.statuses.values())

    def phases(self) -> dict[int, str]:
        return {rank: status.phase for rank, status in sorted(self.statuses.items())}
