"""Device leases: compare-and-set, all or none."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.leases import FREE, DeviceLeases
from shared.bus.memory_bus import MemoryBus
from shared.contracts.planner import DeviceLease
from shared.contracts.subjects import Subjects
from shared.errors import Conflict
from shared.ids import DeviceId

SUBJECTS = Subjects("test")
D0, D1, D2 = DeviceId(0), DeviceId(1), DeviceId(2)
ALL = (D0, D1, D2)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    made = MemoryBus()
    yield made
    await made.close()


@pytest.fixture
def leases(bus: MemoryBus) -> DeviceLeases:
    return DeviceLeases(bus, SUBJECTS)


async def test_a_device_nobody_ever_leased_is_free(leases: DeviceLeases) -> None:
    assert await leases.owners(ALL) == {D0: FREE, D1: FREE, D2: FREE}


async def test_moves_are_all_or_none(leases: DeviceLeases) -> None:
    await leases.move([D2], expected=FREE, to="reward-2")
    with pytest.raises(Conflict, match="device 2 is leased to reward-2, not to nobody"):
        await leases.move(ALL, expected=FREE, to="rollout-0")
    assert await leases.owners(ALL) == {D0: FREE, D1: FREE, D2: "reward-2"}


async def test_every_write_raises_the_epoch(bus: MemoryBus, leases: DeviceLeases) -> None:
    for owner, to in ((FREE, "a"), ("a", "b"), ("b", FREE)):
        await leases.move([D0], expected=owner, to=to)
    await leases.reset({D0: "c"})
    found = await bus.kv_get(SUBJECTS.device_bucket, "0", DeviceLease)
    assert found is not None
    assert (found[0].owner, found[0].epoch) == ("c", 4)


async def test_somebody_elses_write_is_a_conflict(bus: MemoryBus, leases: DeviceLeases) -> None:
    await bus.kv_put(SUBJECTS.device_bucket, "0", DeviceLease(device=0, owner="thief", epoch=9))
    with pytest.raises(Conflict, match="thief"):
        await leases.move([D0], expected=FREE, to="rollout-0")
    assert await leases.owner(D0) == "thief"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from(ALL), min_size=1), st.sampled_from(["", "a", "b"]), st.sampled_from("ab")
        ),
        max_size=12,
    )
)
async def test_leases_follow_the_model(moves: list[tuple[set[DeviceId], str, str]]) -> None:
    bus = MemoryBus()
    leases = DeviceLeases(bus, SUBJECTS)
    model = dict.fromkeys(ALL, FREE)
    for devices, expected, to in moves:
        if all(model[d] == expected for d in devices):
            await leases.move(devices, expected=expected, to=to)
            model |= dict.fromkeys(devices, to)
        else:
            with pytest.raises(Conflict):
                await leases.move(devices, expected=expected, to=to)
        assert await leases.owners(ALL) == model
    await bus.close()
