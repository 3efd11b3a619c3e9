"""One Write by all ranks, tried again: what ends it, and that two tries never meet."""

import asyncio

import pytest

from services.trainer.policy_write import PolicyWriter, Tries
from services.trainer.rank_group import RankGroup
from shared.bus.memory_bus import MemoryBus
from shared.contracts.rank import RankWrote, WritePolicy
from shared.contracts.subjects import Subjects
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NoResponder,
    PivotError,
    TransportError,
)
from shared.runtime.clock import ManualClock, SystemClock
from tests.unit.trainer.rank_responder import RankResponders

WORLD_SIZE = 2
SUBJECTS = Subjects("test")


class House:
    """Ranks, their group, and a GPS that may not tell its version."""

    def __init__(self) -> None:
        bus = MemoryBus()
        self.ranks = RankResponders(bus, SUBJECTS, WORLD_SIZE)
        self.group = RankGroup(WORLD_SIZE, bus, SUBJECTS, SystemClock())
        self.clock = ManualClock()
        self.try_s = 0.0
        """How long a try takes, by the clock."""
        self.is_gps_away = False
        self.retried: list[tuple[int, str]] = []

    async def gps_version(self) -> int:
        self.clock.advance(self.try_s)
        if self.is_gps_away:
            raise TransportError("GPS cannot be reached")
        return self.ranks.gps_version

    async def write(self, version: int, tries: Tries = Tries(most=3, first_pause_s=0.01)) -> None:
        writer = PolicyWriter(self.group, self.gps_version, self.clock, tries)
        await writer.write(version, lambda number, why: self.retried.append((number, why)))


@pytest.fixture
async def house() -> House:
    house = House()
    await house.ranks.start()
    return house


def away() -> TransportError:
    return TransportError("GPS cannot be reached")


async def test_a_new_try_waits_for_every_rank_to_have_answered(house: House) -> None:
    """Rank 0 fails at once, rank 1 is still in the first try."""
    gate = house.ranks.hold["write 1"] = asyncio.Event()
    house.ranks.errors["write"] = [away()]
    writing = asyncio.create_task(house.write(1))
    await asyncio.sleep(0.1)
    assert house.ranks.calls == [(0, "write"), (1, "write")]
    gate.set()
    await asyncio.wait_for(writing, 5)
    assert house.ranks.calls == [(0, "write"), (1, "write")] * 2
    assert house.retried == [(2, away().message)]


async def test_a_version_that_is_readable_is_written(house: House) -> None:
    """GPS refuses a version that is not newer; the ranks' refusals are no failure then."""
    house.ranks.gps_version = 4
    house.ranks.errors["write"] = [Conflict("policy is at version 4, 4 is not newer")]
    await house.write(4)
    assert (house.ranks.count("write"), house.retried) == (1, [])


async def test_an_older_readable_version_is_no_excuse(house: House) -> None:
    house.ranks.gps_version = 3
    house.ranks.errors["write"] = [Conflict("readers hold the spare buffer")]
    await house.write(4)
    assert (house.ranks.count("write"), house.ranks.gps_version) == (2, 4)


async def test_a_gps_that_cannot_tell_its_version_is_written_to_again(house: House) -> None:
    house.is_gps_away = True
    house.ranks.errors["write"] = [away()]
    await house.write(1)
    assert house.ranks.count("write") == 2


async def test_answers_without_a_commit_are_no_version(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that ran out of time on its way may still be under way when the writers come again."""
    pending = RankWrote(rank=0, version=1, nbytes=10, committed=False, duration_s=0.1)
    monkeypatch.setattr(house.ranks, "_write", lambda rank, message: pending)
    await house.ranks.start()
    with pytest.raises(Conflict, match="none saw it committed"):
        await house.write(1)
    assert house.ranks.count("write") == 3


@pytest.mark.parametrize(
    "error",
    [
        EngineError("rank 0 failed in write", phase="write"),
        InvalidRequest("checksums", "differ from what is in the buffer"),
    ],
)
async def test_what_no_new_try_mends_is_raised_at_once(house: House, error: PivotError) -> None:
    house.ranks.errors["write"] = [error]
    with pytest.raises(type(error)):
        await house.write(1)
    assert house.ranks.count("write") == 1


async def test_what_no_new_try_mends_comes_before_what_one_does(house: House) -> None:
    group = house.group

    async def both(*_: object, **__: object) -> list[PivotError]:
        return [away(), EngineError("rank 1 failed in write")]

    group.ask_each = both  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        await house.write(1)


async def test_tries_are_counted(house: House) -> None:
    house.ranks.errors["write"] = [Conflict(f"node {n} was lost") for n in range(9)]
    with pytest.raises(Conflict, match="node 2"):
        await house.write(1)
    assert [number for number, _ in house.retried] == [2, 3]


async def test_no_try_begins_after_the_deadline(house: House) -> None:
    house.ranks.errors["write"] = [away() for _ in range(99)]
    house.try_s = 40.0
    with pytest.raises(TransportError):
        await house.write(1, Tries(most=99, first_pause_s=0.01, last_pause_s=0.01, deadline_s=100.0))
    assert house.ranks.count("write") == 3


async def test_a_rank_that_does_not_answer_may_still_write_so_nobody_tries_again(house: House) -> None:
    house.ranks.hold["write 1"] = asyncio.Event()
    with pytest.raises(DeadlineExceeded, match="trainer: no answer from rank 1 in phase 'write'"):
        await house.group.ask_each("write", WritePolicy(version=1), RankWrote, deadline_s=0.05)


async def test_a_rank_that_is_not_there_is_no_answer(house: House) -> None:
    group = RankGroup(WORLD_SIZE, MemoryBus(), SUBJECTS, SystemClock())
    writer = PolicyWriter(group, house.gps_version, SystemClock(), Tries())
    with pytest.raises(NoResponder):
        await writer.write(1, lambda number, why: None)


async def test_a_deadline_of_a_rank_itself_is_its_answer(house: House) -> None:
    late = DeadlineExceeded(role="rank-0", peer="gps", phase="commit write", deadline_s=180)
    house.ranks.errors["write"] = [late]
    answers = await house.group.ask_each("write", WritePolicy(version=1), RankWrote, deadline_s=5)
    assert [type(answer) for answer in answers] == [DeadlineExceeded, RankWrote]
