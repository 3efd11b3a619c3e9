"""The role shell with real replica workers: every sequence finishes once, with its own tokens."""

import pytest

from shared.contracts.replica import SequenceProgress
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.ids import SequenceId
from shared.inference import role as role_module
from tests.support.cluster import SimulatedCluster, record
from tests.support.role_cases import R0, R1, ROLLOUT, ids, running


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


async def test_large_batches_are_sent_in_parts(
    house: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_module, "MAX_RUN_TOKENS", 100)
    for name in ids(20):
        house.submit(ROLLOUT, name, max_new_tokens=5, prompt_tokens=60)
    await house.shift_up(ROLLOUT, R0)
    await house.until_finished(*ids(20))
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


async def test_describe_names_what_is_not_there(house: SimulatedCluster) -> None:
    with pytest.raises(NotFound, match="no sequence x"):
        house.shells[ROLLOUT].describe_sequence("x")
    house.submit(ROLLOUT, "a")
    described = house.shells[ROLLOUT].describe_sequence("a")
    assert (described["place"], described["prompt_tokens"]) == ("waiting", 20)
    await house.until(lambda: house.shells[ROLLOUT].ready() is None)
