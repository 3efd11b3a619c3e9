"""The role shell when its service restarts over replicas that go on."""

from tests.support.cluster import SimulatedCluster, record, until
from tests.support.role_cases import R0, R1, ROLLOUT, ids, running


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
