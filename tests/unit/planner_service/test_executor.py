"""Shift transactions over real role shells and replicas: whatever fails, leases and allocation tell the
truth."""

from collections.abc import AsyncIterator

import pytest

from services.planner.executor import Outcome, ShiftExecutor
from services.planner.leases import FREE, DeviceLeases
from shared.contracts.base import Message
from shared.contracts.planner import ShiftEvent
from shared.errors import BusError
from shared.ids import DeviceId, ReplicaId, Role
from shared.inference import role_times
from shared.planning.cluster import Allocation
from shared.planning.plan import Direction, ShiftPlan
from tests.support.cluster import ScriptedTrainer, SimulatedCluster, shared_cluster

SPEC = shared_cluster(2)
RO0, RO1, RW0, RW1 = (ReplicaId(name) for name in ("rollout-0", "rollout-1", "reward-0", "reward-1"))
NOBODY = Allocation()


class Bench:
    """An executor, its peers, and every event; leases are checked at each of them."""

    def __init__(self, house: SimulatedCluster) -> None:
        self.house = house
        self.leases = DeviceLeases(house.bus, house.subjects)
        self.executor = ShiftExecutor(SPEC, self.leases, house.bus, house.subjects, house.clock)
        self.trainer = ScriptedTrainer(house, batch=4, steps=1)
        self.events: list[ShiftEvent] = []
        self.executor.on_event = self._on_event

    def _on_event(self, event: ShiftEvent) -> None:
        self.events.append(event)
        self.check_devices()

    def check_devices(self) -> None:
        """No two awake on one device."""
        for device in SPEC.devices:
            awake = [r.id for r in self.house.replicas.values() if device in r.slot.devices and r.is_awake]
            assert len(awake) + (self.trainer.holds and device in SPEC.training_devices) <= 1, (device, awake)

    async def up(self, *replicas: ReplicaId) -> Allocation:
        return await self.executor.bring_up(Allocation(frozenset(replicas)))

    async def shift(self, plan: ShiftPlan, before: Allocation) -> Outcome:
        """Runs the plan, then compares leases with the outcome."""
        outcome = await self.executor.execute(plan, before)
        outcome.allocation.validate(SPEC)
        await self.check_leases(outcome.allocation)
        self.check_devices()
        last = self.events[-1]
        assert last.phase == ("failed" if outcome.reason else "completed")
        assert last.holders == {int(d): await self.leases.owner(d) for d in plan.devices}
        return outcome

    async def check_leases(self, allocation: Allocation) -> None:
        owners = await self.leases.owners(SPEC.devices)
        assert owners == {d: str(allocation.owner_of(d, SPEC) or FREE) for d in sorted(SPEC.devices)}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SILENCE_S", 0.6), ("HEALTH_INTERVAL_S", 0.1), ("SHIFT_MARGIN_S", 0.2)):
        monkeypatch.setattr(role_times, name, seconds)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with SimulatedCluster(SPEC) as house:
        bench = Bench(house)
        await bench.trainer.start()
        yield bench


def plan(
    up: Role,
    *replicas: ReplicaId,
    down: tuple[ReplicaId, ...] = (),
    training_down: bool = False,
) -> ShiftPlan:
    is_training = up is Role.TRAINING
    devices = {d for r in (*replicas, *down) for d in SPEC.slot(r).devices}
    if is_training or training_down:
        devices |= SPEC.training_devices
    return ShiftPlan("p000001", up, replicas, down, training_down, is_training, tuple(sorted(devices)), 0.0)


async def test_the_first_allocation_comes_up(bench: Bench) -> None:
    assert await bench.up(RO0, RO1) == Allocation(frozenset({RO0, RO1}))
    await bench.check_leases(Allocation(frozenset({RO0, RO1})))
    assert [event.phase for event in bench.events] == ["started", "step_done", "completed"]


async def test_a_shift_tells_its_steps_in_order_and_measures_them(bench: Bench) -> None:
    before = await bench.up(RO0, RO1)
    bench.house.submit(Role.REWARD, "a")
    bench.events.clear()
    outcome = await bench.shift(plan(Role.REWARD, RW0, down=(RO0,)), before)
    assert outcome.allocation == Allocation(frozenset({RO1, RW0}))
    assert outcome.reason == ""
    told = [(e.phase, e.detail) for e in bench.events]
    assert told == [
        ("started", ""),
        ("step_done", "rollout down"),
        ("step_done", "reward up"),
        ("completed", ""),
    ]
    assert outcome.duration_s.keys() == {(Role.ROLLOUT, Direction.DOWN), (Role.REWARD, Direction.UP)}
    assert outcome.freed_bytes > 0
    assert outcome.read_bytes > 0
    stored = await bench.house.bus.replay(
        bench.house.subjects.shifts_stream, bench.house.subjects.shift_event("p000001"), ShiftEvent
    )
    assert [s.message for s in stored] == bench.events
    await bench.house.until_finished("a")


async def test_training_takes_every_device_and_gives_them_back(bench: Bench) -> None:
    before = await bench.up(RO0, RO1)
    outcome = await bench.shift(plan(Role.TRAINING, down=(RO0, RO1)), before)
    assert outcome.allocation == Allocation(training_holds=True)
    await bench.house.until(lambda: bench.trainer.activity == "done")
    outcome = await bench.shift(plan(Role.REWARD, RW0, RW1, training_down=True), outcome.allocation)
    assert outcome.allocation == Allocation(frozenset({RW0, RW1}))
    assert not bench.trainer.holds


async def test_training_that_refuses_to_go_keeps_its_devices(bench: Bench) -> None:
    await bench.leases.reset(dict.fromkeys(SPEC.devices, "training"))
    bench.trainer.holds, bench.trainer.activity = True, "active"
    before = Allocation(training_holds=True)
    outcome = await bench.shift(plan(Role.REWARD, RW0, training_down=True), before)
    assert outcome.allocation == before
    assert "a step is running" in outcome.reason
    assert bench.trainer.holds


async def test_training_that_does_not_come_up_leaves_its_devices_free(bench: Bench) -> None:
    before = await bench.up(RO0, RO1)
    bench.trainer.refusal = "a rank died"
    outcome = await bench.shift(plan(Role.TRAINING, down=(RO0, RO1)), before)
    assert (outcome.allocation, outcome.reason) == (NOBODY, "a rank died")


async def test_a_donor_that_will_not_go_down_is_brought_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await bench.up(RO0, RO1)
    monkeypatch.setattr("services.planner.executor.SHIFT_DEADLINE_S", 1.5)
    for i in range(6):
        bench.house.submit(Role.ROLLOUT, f"{i}", max_new_tokens=400)
    await bench.house.until(lambda: bench.house.tokens_on(RO1) > 10)
    bench.house.replicas[RO0].freeze()
    outcome = await bench.executor.execute(plan(Role.REWARD, RW0, RW1, down=(RO0, RO1)), before)
    assert outcome.reason
    assert RO1 in outcome.allocation.active
    await bench.check_leases(outcome.allocation)
    bench.house.replicas[RO0].thaw()
    await bench.house.until_finished(*(f"{i}" for i in range(6)))
    bench.house.check_finished()


async def test_a_receiver_that_does_not_come_up_leaves_its_device_free_and_its_sequences_waiting(
    bench: Bench,
) -> None:
    before = await bench.up(RO0, RO1)
    bench.house.submit(Role.REWARD, "a")
    bench.house.replicas[RW0].fails_to_wake = True
    outcome = await bench.shift(plan(Role.REWARD, RW0, down=(RO0,)), before)
    assert outcome.allocation == Allocation(frozenset({RO1}))
    assert "reward-0" in outcome.reason
    assert await bench.leases.owner(DeviceId(0)) == FREE
    assert bench.house.shells[Role.REWARD].describe_sequence("a")["place"] == "waiting"
    bench.house.replicas[RW0].fails_to_wake = False
    outcome = await bench.shift(plan(Role.REWARD, RW0), outcome.allocation)
    assert not outcome.reason
    await bench.house.until_finished("a")


async def test_one_of_two_receivers_comes_up(bench: Bench) -> None:
    before = await bench.up(RO0, RO1)
    bench.house.replicas[RW1].fails_to_wake = True
    outcome = await bench.shift(plan(Role.REWARD, RW0, RW1, down=(RO0, RO1)), before)
    assert outcome.allocation == Allocation(frozenset({RW0}))
    assert "reward-1 did not come up" in outcome.reason


async def test_a_dead_receiver_fails_the_shift_at_once(bench: Bench) -> None:
    before = await bench.up(RO0)
    await bench.house.replicas[RW0].kill()
    outcome = await bench.shift(plan(Role.REWARD, RW0, down=(RO0,)), before)
    assert outcome.allocation == NOBODY


async def test_a_dead_donor_counts_as_gone(bench: Bench) -> None:
    before = await bench.up(RO0)
    await bench.house.replicas[RO0].kill()
    outcome = await bench.shift(plan(Role.REWARD, RW0, down=(RO0,)), before)
    assert outcome.allocation == Allocation(frozenset({RW0}))


@pytest.mark.parametrize("taken", [0, 1])
async def test_a_device_that_somebody_else_holds_stops_the_shift_before_anything_moves(
    bench: Bench, taken: int
) -> None:
    before = await bench.up(RO0, RO1)
    bench.house.submit(Role.ROLLOUT, "a", max_new_tokens=300)
    await bench.house.until(lambda: bench.house.tokens_on(RO0) + bench.house.tokens_on(RO1) > 5)
    held = f"rollout-{taken}"
    await bench.leases.move([DeviceId(taken)], expected=held, to="thief")
    outcome = await bench.executor.execute(plan(Role.REWARD, RW0, RW1, down=(RO0, RO1)), before)
    assert "thief" in outcome.reason
    assert outcome.allocation == before
    assert await bench.leases.owner(DeviceId(1 - taken)) == f"rollout-{1 - taken}"
    await bench.house.until_finished("a")
    assert set(bench.house.generated().values()) == {1}


async def test_a_receivers_device_that_somebody_else_holds_takes_no_other_lease(bench: Bench) -> None:
    await bench.leases.move([DeviceId(1)], expected=FREE, to="thief")
    outcome = await bench.executor.execute(plan(Role.REWARD, RW0, RW1), NOBODY)
    assert "thief" in outcome.reason
    assert outcome.allocation == NOBODY
    assert await bench.leases.owners(SPEC.devices) == {0: FREE, 1: "thief"}


async def test_events_that_the_broker_refuses_stop_no_shift(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await bench.up(RO0)
    append = bench.house.bus.append

    async def refuse(subject: str, message: Message, *, dedupe_id: str | None = None) -> int:
        if isinstance(message, ShiftEvent):
            raise BusError("stream is full")
        return await append(subject, message, dedupe_id=dedupe_id)

    monkeypatch.setattr(bench.house.bus, "append", refuse)
    outcome = await bench.shift(plan(Role.REWARD, RW0, down=(RO0,)), before)
    assert outcome.allocation == Allocation(frozenset({RW0}))
