"""The role shell with real replica workers: no sequence lost, no token twice, whatever dies or hangs."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from shared.contracts.replica import SequenceProgress
from shared.errors import Conflict, InvalidRequest, NotFound, PivotError, ShiftFailed
from shared.ids import ReplicaId, Role, SequenceId
from shared.inference import role as role_module
from shared.inference import role_times
from tests.support.cluster import SimulatedCluster, record, until

ROLLOUT = Role.ROLLOUT
R0, R1 = ReplicaId("rollout-0"), ReplicaId("rollout-1")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, shorter."""
    for name, seconds in (
        ("SILENCE_S", 0.6),
        ("DEATH_S", 3.0),
        ("HEALTH_INTERVAL_S", 0.1),
        ("PING_DEADLINE_S", 0.3),
        ("SHIFT_MARGIN_S", 0.2),
    ):
        monkeypatch.setattr(role_times, name, seconds)


@pytest.fixture
async def house() -> AsyncIterator[SimulatedCluster]:
    async with SimulatedCluster(roles=(ROLLOUT,)) as made:
        yield made


def ids(count: int) -> list[str]:
    return [f"{i:08d}.00" for i in range(count)]


async def running(house: SimulatedCluster, *sequence_ids: str, tokens: int = 5) -> None:
    """Until each of them has some tokens."""
    records = house.shells[ROLLOUT].records
    await house.until(lambda: all(s in records and records[s].num_tokens >= tokens for s in sequence_ids))


async def test_every_sequence_finishes_once_with_its_own_tokens(house: SimulatedCluster) -> None:
    for i, name in enumerate(ids(40)):
        house.submit(ROLLOUT, name, max_new_tokens=5 + 3 * i)
    await house.shift_up(ROLLOUT, R0, R1)
    await house.until_finished(*ids(40))
    house.check_finished()
    assert [house.finished[name].num_tokens for name in ids(40)] == [5 + 3 * i for i in range(40)]
    assert set(house.generated().values()) == {1}
    shell = house.shells[ROLLOUT]
    assert not shell.records
    assert all(shell.scheduler.sequence(SequenceId(name)) is None for name in ids(40))


async def test_replicas_that_come_up_together_share_the_queue_without_moving_anything(
    house: SimulatedCluster,
) -> None:
    names = ids(8)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=40)
    await house.shift_up(ROLLOUT, R0, R1)
    loads = house.shells[ROLLOUT].scheduler.load().replicas
    assert sorted(load.num_sequences for load in loads) == [4, 4]
    await house.until_finished(*names)
    assert house.shells[ROLLOUT].num_migrated == 0


async def test_a_sequence_under_way_cannot_be_submitted_again(house: SimulatedCluster) -> None:
    house.submit(ROLLOUT, "a")
    with pytest.raises(Conflict, match="under way"):
        house.submit(ROLLOUT, "a")


async def test_shift_down_moves_sequences_with_their_tokens(house: SimulatedCluster) -> None:
    names = ids(12)
    await house.shift_up(ROLLOUT, R0, R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=300)
    await running(house, *names)
    before = {name: house.shells[ROLLOUT].records[name].num_tokens for name in names}
    done = await house.shift_down(ROLLOUT, R0)
    assert done.freed_bytes > 0
    assert done.migrated_sequences > 0
    assert not house.replicas[R0].is_awake
    records = house.shells[ROLLOUT].records
    assert all(records[name].num_tokens >= before[name] for name in names if name in records)
    await house.until_finished(*names)
    house.check_finished()
    assert set(house.generated().values()) == {1}
    assert sum(house.generated().values()) == sum(r.num_tokens for r in house.finished.values())
    assert house.tokens_on(R0) > 0
    assert house.tokens_on(R1) > 0


async def test_shifting_to_and_fro_repeats_no_token(house: SimulatedCluster) -> None:
    names = ids(10)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=250)
    await house.shift_up(ROLLOUT, R0)
    for up, down in ((R1, R0), (R0, R1), (R1, R0), (R0, R1)):
        await house.shift_down(ROLLOUT, down)
        await house.shift_up(ROLLOUT, up)
    await house.shift_up(ROLLOUT, R1)
    await house.until_finished(*names)
    house.check_finished()
    assert set(house.generated().values()) == {1}


async def test_shift_up_takes_waiting_and_running_sequences_over(house: SimulatedCluster) -> None:
    names = ids(16)
    await house.shift_up(ROLLOUT, R0)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=400)
    await running(house, names[0])
    done = await house.shift_up(ROLLOUT, R1)
    assert done.read_bytes > 0
    await house.until(lambda: house.tokens_on(R1) > 20)
    await house.until_finished(*names)
    house.check_finished()
    assert set(house.generated().values()) == {1}


async def test_all_replicas_down_leaves_sequences_waiting(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0)
    house.submit(ROLLOUT, "a", max_new_tokens=200)
    await running(house, "a")
    await house.shift_down(ROLLOUT, R0)
    kept = house.shells[ROLLOUT].records["a"].num_tokens
    assert kept >= 5
    assert house.shells[ROLLOUT].describe_sequence("a")["place"] == "waiting"
    await house.shift_up(ROLLOUT, R1)
    await house.until_finished("a")
    house.check_finished()
    assert set(house.generated().values()) == {1}


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


async def test_up_of_one_that_serves_changes_nothing(house: SimulatedCluster) -> None:
    """The executor asks for it when it undoes a shift."""
    await house.shift_up(ROLLOUT, R0)
    house.submit(ROLLOUT, "a", max_new_tokens=200)
    await running(house, "a")
    await house.shift_up(ROLLOUT, R0, R0)
    await house.until_finished("a")
    house.check_finished()
    assert set(house.generated().values()) == {1}


async def test_unknown_replicas_are_refused_by_name(house: SimulatedCluster) -> None:
    for names in ((), ("rollout-7",)):
        with pytest.raises(InvalidRequest, match="rollout-0, rollout-1"):
            await house.shift_up(ROLLOUT, *names)


# Versions


async def test_a_refresh_during_generation_stamps_versions(house: SimulatedCluster) -> None:
    names = ids(6)
    await house.shift_up(ROLLOUT, R0, R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=300)
    await running(house, *names)
    house.weights[ROLLOUT].version = 1
    await house.shells[ROLLOUT].shifts.refresh(1)
    assert {r.worker.telemetry().policy_version for r in house.replicas.values() if r.worker} == {1}
    await house.until_finished(*names)
    house.check_finished()
    assert {tuple(v for v, _ in r.versions) for r in house.finished.values()} == {(0, 1)}


async def test_a_replica_that_wakes_while_the_version_flips_serves_with_the_new_one(
    house: SimulatedCluster,
) -> None:
    house.replicas[R0].wake_s = 0.4
    shift = asyncio.create_task(house.shift_up(ROLLOUT, R0))
    await house.until(lambda: house.replicas[R0].is_awake)
    await asyncio.sleep(0.1)
    house.weights[ROLLOUT].version = 3
    house.submit(ROLLOUT, "a")
    await house.shells[ROLLOUT].shifts.refresh(3)
    assert (await shift).policy_version == 3
    await house.until_finished("a")
    assert house.finished["a"].versions == [(3, 50)]


async def test_a_revived_replica_serves_with_the_newest_version(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0)
    await house.replicas[R0].kill()
    house.weights[ROLLOUT].version = 2
    await house.shells[ROLLOUT].shifts.refresh(2)
    house.submit(ROLLOUT, "a")
    await house.replicas[R0].start()
    await house.until_finished("a")
    assert house.finished["a"].versions == [(2, 50)]


async def test_a_replica_killed_in_a_refresh_comes_back(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0)
    house.weights[ROLLOUT].version = 2
    house.replicas[R0].freeze()
    refresh = asyncio.create_task(house.shells[ROLLOUT].shifts.refresh(2))
    await asyncio.sleep(0)
    await house.replicas[R0].kill()
    await house.replicas[R0].start()
    await asyncio.wait_for(refresh, 5)
    house.submit(ROLLOUT, "a")
    await house.until_finished("a")
    assert house.finished["a"].versions == [(2, 50)]


async def test_a_wake_that_gps_refuses_fails_the_shift_and_says_why(house: SimulatedCluster) -> None:
    house.weights[ROLLOUT].error = "no holder has it"
    with pytest.raises(ShiftFailed, match="no holder has it"):
        await house.shift_up(ROLLOUT, R0)
    assert house.shells[ROLLOUT].active_replicas == ()


# Ends of sequences


async def test_cancel_frees_everything_at_once(house: SimulatedCluster) -> None:
    names = ids(30)
    await house.shift_up(ROLLOUT, R0)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=2_000, prompt_tokens=300)
    await running(house, names[0])
    shell = house.shells[ROLLOUT]
    for name in names:
        shell.cancel(name)
    shell.cancel("nobody")
    await house.until(lambda: all(shell.scheduler.sequence(SequenceId(n)) is None for n in names), 2.0)
    assert not shell.records
    assert shell.scheduler.is_empty(R0)
    house.submit(ROLLOUT, names[0], max_new_tokens=10)
    await house.until_finished(names[0])
    house.check_finished()


async def test_a_sequence_the_engine_refuses_fails_once_and_is_forgotten(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0)
    shell = house.shells[ROLLOUT]
    bad = record("bad", max_new_tokens=50, prompt_tokens=0)
    shell.submit(bad)
    house.submit(ROLLOUT, "good")
    await house.until_finished("good")
    await house.until(lambda: "bad" in house.failed)
    assert "do not fit" in house.failed["bad"]
    assert shell.scheduler.sequence(SequenceId("bad")) is None
    assert shell.scheduler.is_empty(R0)


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


async def test_large_batches_are_sent_in_parts(
    house: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_module, "MAX_RUN_TOKENS", 100)
    for name in ids(20):
        house.submit(ROLLOUT, name, max_new_tokens=5, prompt_tokens=60)
    await house.shift_up(ROLLOUT, R0)
    await house.until_finished(*ids(20))
    house.check_finished()


# Restart of the service


async def test_a_restarted_service_keeps_tokens_and_adopts_its_replicas(house: SimulatedCluster) -> None:
    names = ids(10)
    await house.shift_up(ROLLOUT, R0, R1)
    await house.lease(R0)
    await house.lease(R1)
    for name in names:
        house.submit(ROLLOUT, name, max_new_tokens=400)
    await running(house, *names)
    house.shells[ROLLOUT].cancel("nobody")
    old = await house.stop_shell(ROLLOUT)
    known = {name: old.records[name].num_tokens for name in names}
    kept = await house.start_shell(ROLLOUT, [record(name, max_new_tokens=400) for name in names])
    assert kept >= sum(known.values())
    await house.until_finished(*names)
    house.check_finished()
    assert set(house.generated().values()) == {1}
    assert set(house.shells[ROLLOUT].active_replicas) == {R0, R1}


async def test_a_restarted_service_hands_on_what_finished_meanwhile(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0)
    await house.lease(R0)
    house.submit(ROLLOUT, "a", max_new_tokens=160)
    await running(house, "a", tokens=1)
    await house.stop_shell(ROLLOUT)
    worker = house.replicas[R0].worker
    assert worker is not None
    await until(lambda: worker.telemetry().num_running == 0)
    await house.start_shell(ROLLOUT, [record("a", max_new_tokens=160)])
    await house.until_finished("a")
    house.check_finished()
    assert set(house.generated().values()) == {1}


async def test_a_restarted_service_leaves_replicas_without_a_lease_asleep(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0, R1)
    await house.lease(R0)
    await house.stop_shell(ROLLOUT)
    await house.start_shell(ROLLOUT, [])
    await house.until(lambda: not house.replicas[R1].is_awake)
    assert house.shells[ROLLOUT].active_replicas == (R0,)
    house.submit(ROLLOUT, "a")
    await house.until_finished("a")
    house.check_finished()


async def test_late_and_repeated_progress_changes_nothing(house: SimulatedCluster) -> None:
    await house.shift_up(ROLLOUT, R0)
    house.submit(ROLLOUT, "a", max_new_tokens=120)
    await running(house, "a", tokens=20)
    subject = house.subjects.progress(ROLLOUT, R0)
    stored = await house.bus.replay(house.subjects.progress_stream, subject, SequenceProgress)
    for entry in [*stored, *stored]:
        await house.bus.append(subject, entry.message)
    await house.shift_down(ROLLOUT, R0)
    for entry in stored:
        await house.bus.append(subject, entry.message)
    await house.shift_up(ROLLOUT, R1)
    await house.until_finished("a")
    house.check_finished()
    assert set(house.generated().values()) == {1}


def test_describe_names_what_is_not_there() -> None:
    async def check() -> None:
        async with SimulatedCluster(roles=(ROLLOUT,)) as house:
            with pytest.raises(NotFound, match="no sequence x"):
                house.shells[ROLLOUT].describe_sequence("x")
            house.submit(ROLLOUT, "a")
            described = house.shells[ROLLOUT].describe_sequence("a")
            assert (described["place"], described["prompt_tokens"]) == ("waiting", 20)
            await house.until(lambda: house.shells[ROLLOUT].ready() is None)

    asyncio.run(check())


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
