"""The ranks' weights into parameter storage, tried again where a node of it was lost in the middle.

A Write that loses a node ends without a version, and every writer is told so; the ranks still hold the
weights. Who waits for whom:

    try      every rank answers, also after one has failed: then no rank is in the old try any more, and a
             new one cannot meet it
    check    the version may be readable all the same: the commit happened and its answer was lost
    pause    the lost node is noticed, or comes back; then the next try, in the new epoch

Errors that no new try mends (an engine that failed, ranks that are lost or do not answer) end it at once.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.trainer.rank_group import RankGroup
from shared.contracts.rank import RankWrote, WritePolicy
from shared.errors import Conflict, DeadlineExceeded, PivotError, TransportError
from shared.runtime.clock import Clock

log = logging.getLogger("pivotrl.trainer")
MENDABLE = (Conflict, TransportError, DeadlineExceeded)
TRY_DEADLINE_S = 600.0
Retrying = Callable[[int, str], None]
"""Told the number of the try that begins, and why the one before failed."""


@dataclass(frozen=True, slots=True)
class Tries:
    """At most `most`, none begun later than `deadline_s` after the first; pauses double between the two
    bounds.

    By default they last a minute of pauses: a node is out after `gps.dead_after_s`, a process that died is
    back within seconds.
    """

    most: int = 8
    first_pause_s: float = 1.0
    last_pause_s: float = 15.0
    deadline_s: float = 300.0

    def pause_s(self, num_failed: int) -> float:
        """The pause after so many failed tries.

        >>> [Tries().pause_s(n) for n in (1, 2, 3, 4, 5, 6)]
        [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
        """
        return float(min(self.first_pause_s * 2 ** (num_failed - 1), self.last_pause_s))


class PolicyWriter:
    """`gps_version` is the version that GPS has readable; it raises where GPS cannot tell."""

    def __init__(
        self, ranks: RankGroup, gps_version: Callable[[], Awaitable[int]], clock: Clock, tries: Tries
    ) -> None:
        self._ranks, self._gps_version, self._clock, self._tries = ranks, gps_version, clock, tries

    async def write(self, version: int, retrying: Retrying) -> None:
        """Until `version` is readable. Writing one that is readable already is a success.

        Raises:
            Conflict, TransportError, DeadlineExceeded: of the last try, if none brought it about.
            RanksLost, EngineError, and whatever else a rank answered that no new try mends.
        """
        begin_s = self._clock.now_s()
        for number in itertools.count(1):
            error = await self._try(version)
            if error is None or await self._is_readable(version):
                return
            pause_s = self._tries.pause_s(number)
            is_late = self._clock.now_s() + pause_s - begin_s > self._tries.deadline_s
            if number == self._tries.most or is_late:
                log.error("version %d is not written after %d tries", version, number)
                raise error
            log.warning("Write of version %d fails, again in %g s: %s", version, pause_s, error.message)
            await asyncio.sleep(pause_s)
            retrying(number + 1, error.message)

    async def _try(self, version: int) -> PivotError | None:
        """Why this try made no version, if another one may. Raises what none mends."""
        answers = await self._ranks.ask_each(
            "write", WritePolicy(version=version), RankWrote, deadline_s=TRY_DEADLINE_S
        )
        error = _failure(version, answers)
        if error is not None and not isinstance(error, MENDABLE):
            raise error
        return error

    async def _is_readable(self, version: int) -> bool:
        try:
            return await self._gps_version() >= version
        except PivotError as error:  # a GPS that is away: the next try tells
            log.warning("GPS does not tell its version: %s", error.message)
            return False


def _failure(version: int, answers: Sequence[RankWrote | PivotError]) -> PivotError | None:
    """One error for all ranks' answers, of those that nothing mends if there are any; None if one rank saw
    the commit and no rank failed."""
    errors = [answer for answer in answers if isinstance(answer, PivotError)]
    if errors:
        return min(errors, key=lambda error: isinstance(error, MENDABLE))
    if not any(answer.committed for answer in answers if isinstance(answer, RankWrote)):
        return Conflict(f"every rank wrote version {version}, and none saw it committed", version=version)
    return None
