"""The role shell when the policy version changes: refreshes, and wakes around them."""

import asyncio

import pytest

from shared.errors import ShiftFailed
from tests.support.cluster import SimulatedCluster
from tests.support.role_cases import R0, R1, ROLLOUT, ids, running


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
