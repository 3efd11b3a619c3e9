"""The role shell when replicas die, hang or do not come up: nothing is lost, no token comes twice."""

import asyncio
import random

import pytest

from shared.errors import PivotError, ShiftFailed
from shared.ids import SequenceId
from tests.support.cluster import SimulatedCluster
from tests.support.role_cases import R0, R1, ROLLOUT, ids, running


async def test_a_killed_replicas_sequences_resume_elsewhere_and_it_serves_again(
    house: SimulatedCluster,
) -> None:
    names = ids(12)
    await house.shift_up(ROLLOUT, R0, R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=400)
    await running(house, *names)
    kept = {name: house.shells[ROLLOUT].records[name].num_tokens for name in names}
    await house.replicas[R0].kill()
    await house.replicas[R0].start()
    first_life = house.tokens_on(R0)
    await house.until(lambda: house.replicas[R0].is_awake)
    records = house.shells[ROLLOUT].records
    assert all(records[name].num_tokens >= kept[name] for name in names if name in records)
    more = [f"1{name}" for name in ids(20)]
    for name in more:
        house.submit(ROLLOUT, name, max_new_tokens=60)
    await house.until_finished(*names, *more)
    house.check_finished()
    assert house.tokens_on(R0) > first_life
    assert house.shells[ROLLOUT].num_replica_deaths >= 1
    repeated = sum(count - 1 for count in house.generated().values())
    assert repeated <= len(names) * 120  # at most what one replica had not sent: 100 ms of its tokens


async def test_a_replica_that_stays_dead_gives_its_sequences_up(house: SimulatedCluster) -> None:
    names = ids(8)
    await house.shift_up(ROLLOUT, R0, R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=300)
    await running(house, *names)
    await house.replicas[R1].kill()
    await house.until_finished(*names)
    house.check_finished()


async def test_a_kill_in_the_middle_of_a_run_request_does_not_hold_its_next_life_up(
    house: SimulatedCluster,
) -> None:
    """The request to the dead process would wait for half a minute; nobody else may."""
    await house.shift_up(ROLLOUT, R0)
    house.replicas[R0].freeze()
    house.submit(ROLLOUT, "a", max_new_tokens=20)
    await asyncio.sleep(0)
    await house.replicas[R0].kill()
    await house.replicas[R0].start()
    await house.until_finished("a", deadline_s=5.0)
    house.check_finished()


async def test_shift_down_of_a_hanging_replica_ends_at_its_deadline_and_its_sequences_go_on(
    house: SimulatedCluster,
) -> None:
    names = ids(8)
    await house.shift_up(ROLLOUT, R0, R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=200)
    await running(house, *names)
    house.replicas[R0].freeze()
    with pytest.raises(PivotError):
        await house.shift_down(ROLLOUT, R0, deadline_s=2.5)
    await house.until_finished(*names)
    house.check_finished()
    assert house.shells[ROLLOUT].active_replicas == (R1,)
    house.replicas[R0].thaw()
    await house.until(lambda: not house.replicas[R0].is_awake)


async def test_a_hung_replica_that_comes_to_its_senses_serves_again(house: SimulatedCluster) -> None:
    names = ids(6)
    await house.shift_up(ROLLOUT, R0, R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=500)
    await running(house, *names)
    house.replicas[R0].freeze()
    await house.until(lambda: house.shells[ROLLOUT].num_replica_deaths >= 1)
    house.replicas[R0].thaw()
    before = house.tokens_on(R0)
    more = [f"1{name}" for name in ids(10)]
    await house.until(lambda: len(house.shells[ROLLOUT].scheduler.load().replicas) == 2)
    for name in more:
        house.submit(ROLLOUT, name, max_new_tokens=50)
    await house.until_finished(*names, *more)
    house.check_finished()
    assert house.tokens_on(R0) > before


async def test_shift_down_of_a_dead_replica_counts_as_done(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0, R1)
    house.submit(ROLLOUT, "a", max_new_tokens=200)
    await running(house, "a")
    await house.replicas[R0].kill()
    await house.replicas[R1].kill()
    await house.replicas[R1].start()
    await house.shift_down(ROLLOUT, R0, R1)
    assert house.shells[ROLLOUT].active_replicas == ()
    await house.shift_up(ROLLOUT, R1)
    await house.until_finished("a")
    house.check_finished()


async def test_a_shift_up_that_partly_fails_names_the_replica_that_did_not_come(
    house: SimulatedCluster,
) -> None:
    house.replicas[R1].fails_to_wake = True
    done = await house.shift_up(ROLLOUT, R0, R1)
    assert done.failed_replicas == (R1,)
    assert house.shells[ROLLOUT].active_replicas == (R0,)
    with pytest.raises(ShiftFailed, match="rollout-1"):
        await house.shift_up(ROLLOUT, R1)
    house.replicas[R1].fails_to_wake = False
    await house.shift_up(ROLLOUT, R1)
    assert house.shells[ROLLOUT].active_replicas == (R0, R1)


async def test_a_wake_that_ends_after_its_deadline_is_put_to_sleep_again(house: SimulatedCluster) -> None:
    house.replicas[R0].wake_s = 1.6
    with pytest.raises(PivotError):
        await house.shift_up(ROLLOUT, R0, deadline_s=1.3)
    await house.until(lambda: house.replicas[R0].is_awake)
    await house.until(lambda: not house.replicas[R0].is_awake)
    house.replicas[R0].wake_s = 0.0
    await house.until(lambda: not house.shells[ROLLOUT].describe_replicas()[0]["shifting"])
    await house.shift_up(ROLLOUT, R0)
    assert house.shells[ROLLOUT].active_replicas == (R0,)


async def test_a_sequence_that_ends_on_a_replica_taken_for_dead_leaves_no_ghost(
    house: SimulatedCluster,
) -> None:
    """Its last tokens arrive after it went back to the queue: done is done, and nobody runs it again."""
    await house.shift_up(ROLLOUT, R0)
    house.submit(ROLLOUT, "a", max_new_tokens=100)
    await running(house, "a")
    shell = house.shells[ROLLOUT]
    shell.lose(shell.peers[R0])
    await house.until_finished("a")
    await house.until(lambda: len(shell.scheduler.load().replicas) == 1)
    assert shell.scheduler.sequence(SequenceId("a")) is None
    assert shell.scheduler.is_empty(R0)
    assert shell.scheduler.load().queue == ()
    house.check_finished()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(3))
async def test_under_random_faults_every_sequence_finishes_once(seed: int) -> None:
    """Deaths, hangs, shifts and refreshes at random; only tokens that were never sent are generated again."""
    rng = random.Random(seed)
    async with SimulatedCluster(roles=(ROLLOUT,), length=lambda r: r.randrange(20, 200)) as house:
        await house.shift_up(ROLLOUT, R0)
        names = ids(30)
        for name in names:
            house.submit(ROLLOUT, name, max_new_tokens=160)
        for _ in range(12):
            replica = house.replicas[rng.choice([R0, R1])]
            await asyncio.sleep(rng.uniform(0.0, 0.12))
            match rng.randrange(5):
                case 0:
                    await replica.kill()
                    await asyncio.sleep(rng.uniform(0, 0.3))
                    await replica.start()
                case 1:
                    replica.freeze()
                    await asyncio.sleep(rng.uniform(0, 0.4))
                    replica.thaw()
                case 2:
                    house.weights[ROLLOUT].version += 1
                    await house.shells[ROLLOUT].shifts.refresh(house.weights[ROLLOUT].version)
                case _:
                    active = replica.id in house.shells[ROLLOUT].active_replicas
                    try:
                        await house.shift(ROLLOUT, "down" if active else "up", replica.id, deadline_s=5)
                    except PivotError:
                        assert not active or not replica.is_alive
        if not house.shells[ROLLOUT].active_replicas:
            await house.shift_up(ROLLOUT, R0)
        await house.until_finished(*names, deadline_s=15)
        house.check_finished()
        assert not house.shells[ROLLOUT].records
