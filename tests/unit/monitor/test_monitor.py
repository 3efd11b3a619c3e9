"""The monitor: what the planner sees, who held which device, and what is left on disk."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.api import monitor_router
from services.monitor.report import MetricsFiles, write_timeline
from services.monitor.service import MonitorService
from services.monitor.timeline import Timeline, count_shifts
from services.monitor.workload import STALE_S, WorkloadAggregator
from shared.bus.memory_bus import MemoryBus
from shared.contracts.base import Message
from shared.contracts.monitor import WorkloadPublished
from shared.contracts.planner import ShiftEvent
from shared.contracts.replica import ReplicaTelemetry
from shared.contracts.role import ReplicaQueue, RoleQueue
from shared.contracts.subjects import Subjects
from shared.contracts.trainer import StepCompleted, TrainingTelemetry
from shared.ids import Role
from shared.runtime.clock import ManualClock
from shared.runtime.http import make_app
from shared.runtime.run_folder import RunFolder
from tests.support.cluster import cancel, shared_cluster, until
from tests.support.messages import EXAMPLES

SPEC = shared_cluster(2)
REPLICAS = frozenset(slot.id for slot in SPEC.slots)
SUBJECTS = Subjects("test")
STEP = next(m for m in EXAMPLES if isinstance(m, StepCompleted))
TELEMETRY = next(m for m in EXAMPLES if isinstance(m, ReplicaTelemetry))
TRAINING = next(m for m in EXAMPLES if isinstance(m, TrainingTelemetry))


def telemetry(replica: str, **more: Any) -> ReplicaTelemetry:
    return TELEMETRY.model_copy(update={"replica_id": replica, "role": Role(replica.split("-")[0]), **more})


def queue(
    role: Role, *active: str, waiting: tuple[int, ...] = (), lengths: tuple[int, ...] = ()
) -> RoleQueue:
    return RoleQueue(
        role=role,
        waiting_lengths=waiting,
        active_replicas=active,
        shifting_replicas=(),
        outstanding=len(waiting) + len(lengths) * len(active),
        issued_total=0,
        finished_total=0,
        replicas=tuple(ReplicaQueue(replica_id=r, lengths=lengths, kv_capacity_tokens=900) for r in active),
    )


def full() -> WorkloadAggregator:
    seen = WorkloadAggregator(REPLICAS)
    for replica in sorted(REPLICAS):
        seen.on_telemetry(telemetry(replica, state="asleep"), 0.0)
    for role in (Role.ROLLOUT, Role.REWARD):
        seen.on_queue(queue(role))
    seen.on_training(TRAINING)
    return seen


# Workload


def test_the_state_is_ready_once_everybody_reported() -> None:
    seen = WorkloadAggregator(REPLICAS)
    assert seen.missing() == [*sorted(REPLICAS), "rollout", "reward", "training"]
    assert not seen.state(0.0).ready
    seen = full()
    assert seen.missing() == []
    assert seen.state(0.0).ready
    seen.on_telemetry(telemetry("reward-1", state="starting"), 1.0)
    assert seen.missing() == ["reward-1"]
    seen = full()
    seen.on_training(TRAINING.model_copy(update={"activity": "starting"}))
    assert seen.missing() == ["training"]


def test_load_comes_from_the_scheduler_and_speed_from_the_replica() -> None:
    seen = full()
    seen.on_queue(queue(Role.ROLLOUT, "rollout-0", waiting=(7, 9), lengths=(10, 20)))
    seen.on_telemetry(telemetry("rollout-0", lengths=(1,), tokens_per_s=33.0), 2.0)
    state = seen.state(2.0)
    (replica,) = state.rollout.replicas
    assert (replica.lengths, replica.tokens_per_s, replica.kv_capacity_tokens) == ((10, 20), 33.0, 900)
    assert (state.rollout.waiting_lengths, state.rollout.outstanding) == ((7, 9), 4)
    assert state.reward.replicas == ()


def test_an_active_replica_that_crashed_is_still_listed_without_load() -> None:
    seen = full()
    lost = queue(Role.ROLLOUT, "rollout-0").model_copy(update={"replicas": ()})
    seen.on_queue(lost)
    (replica,) = seen.state(0.0).rollout.replicas
    assert (replica.replica_id, replica.lengths, replica.kv_capacity_tokens) == ("rollout-0", (), 0)


def test_silent_and_sleeping_replicas_do_not_count_towards_speed() -> None:
    seen = full()
    seen.on_telemetry(telemetry("rollout-0", tokens_per_s=40.0), 10.0)
    seen.on_telemetry(telemetry("rollout-1", tokens_per_s=50.0), 12.0)
    assert seen.tokens_per_s(Role.ROLLOUT, 12.0) == 90.0
    assert seen.tokens_per_s(Role.ROLLOUT, 10.1 + STALE_S) == 50.0
    seen.on_telemetry(telemetry("rollout-1", tokens_per_s=50.0, state="asleep"), 13.0)
    assert seen.tokens_per_s(Role.ROLLOUT, 13.0) == 40.0
    assert seen.tokens_per_s(Role.REWARD, 13.0) == 0.0


def test_tokens_of_a_replicas_former_lives_count() -> None:
    seen = WorkloadAggregator(REPLICAS)
    for incarnation, total in (("a", 100), ("a", 150), ("b", 5), ("b", 20), ("c", 0)):
        seen.on_telemetry(telemetry("reward-0", incarnation=incarnation, generated_tokens_total=total), 1.0)
        seen.on_telemetry(telemetry("reward-1", generated_tokens_total=0), 1.0)
    assert seen.generated_tokens(Role.REWARD) == 170


# Timeline


def shift(at_s: float, phase: str, **more: Any) -> ShiftEvent:
    values: dict[str, Any] = {
        "shift_id": "p1",
        "phase": phase,
        "now_s": at_s,
        "up_role": Role.REWARD,
        "up_replicas": ("reward-0",),
        "down_replicas": ("rollout-0",),
        "devices": (0,),
        "duration_s": 1.0,
    }
    return ShiftEvent(**{**values, **more})


def test_a_shift_is_shifting_then_its_holders() -> None:
    timeline = Timeline(SPEC)
    start = {"shift_id": "start-rollout", "devices": (0, 1)}
    timeline.on_shift(shift(0.0, "started", **start))
    timeline.on_shift(shift(2.0, "completed", holders={0: "rollout-0", 1: "rollout-1"}, **start))
    timeline.on_shift(shift(10.0, "started"))
    timeline.on_shift(shift(10.5, "step_done"))
    timeline.on_shift(shift(11.0, "completed", holders={0: "reward-0"}))
    spans = [(s.device, s.owner, s.start_s, s.end_s) for s in timeline.closed(20.0)]
    assert spans == [
        (0, "shifting", 0.0, 2.0),
        (1, "shifting", 0.0, 2.0),
        (0, "rollout", 2.0, 10.0),
        (0, "shifting", 10.0, 11.0),
        (0, "reward", 11.0, 20.0),
        (1, "rollout", 2.0, 20.0),
    ]
    assert timeline.device_seconds(20.0) == {"shifting": 5.0, "rollout": 26.0, "reward": 9.0}


@pytest.mark.parametrize(
    ("holders", "owner"), [({0: "rollout-0"}, "rollout"), ({0: ""}, "free"), ({0: "training"}, "training")]
)
def test_a_failed_shift_leaves_who_really_holds(holders: dict[int, str], owner: str) -> None:
    timeline = Timeline(SPEC)
    timeline.on_shift(shift(0.0, "started"))
    timeline.on_shift(shift(1.0, "failed", holders=holders))
    assert timeline.closed(5.0)[-1].owner == owner
    assert timeline.shift_seconds() == 1.0


HOLDERS = st.sampled_from(["", "training", "rollout-0", "reward-0"])


@given(st.lists(st.tuples(st.floats(0.01, 9), HOLDERS, st.booleans()), max_size=15), st.floats(0, 9))
def test_spans_of_a_device_join_without_gap_and_sum_to_its_time(
    steps: list[tuple[float, str, bool]], rest_s: float
) -> None:
    timeline, now_s = Timeline(SPEC), 0.0
    timeline.on_shift(shift(0.0, "started", devices=(0, 1)))
    for wait_s, holder, is_done in steps:
        now_s += wait_s
        if is_done:
            timeline.on_shift(shift(now_s, "completed", holders={0: holder}))
        else:
            timeline.on_shift(shift(now_s, "started"))
    now_s += rest_s
    for device in (0, 1):
        spans = [s for s in timeline.closed(now_s) if s.device == device]
        assert spans[0].start_s == 0.0
        assert [s.end_s for s in spans[:-1]] == [s.start_s for s in spans[1:]]
        assert spans[-1].end_s == now_s
        assert all(a.owner != b.owner for a, b in pairwise(spans))
    assert sum(timeline.device_seconds(now_s).values()) == pytest.approx(2 * now_s)


def test_shifts_are_counted_by_kind() -> None:
    training = {"up_role": Role.TRAINING, "up_replicas": (), "training_up": True}
    back = {"down_replicas": (), "training_down": True}
    events = [
        shift(0, "completed", shift_id="start-rollout"),
        shift(1, "completed"),
        shift(2, "completed", up_role=Role.ROLLOUT, up_replicas=("rollout-0",), down_replicas=("reward-0",)),
        shift(3, "completed", **training),
        shift(4, "completed", **back),
        shift(5, "completed", **back),
        shift(6, "completed", down_replicas=()),
        shift(7, "failed"),
    ]
    assert count_shifts(events) == {
        "rollout_to_reward": 1,
        "reward_to_rollout": 1,
        "to_training": 1,
        "from_training": 2,
        "failed": 1,
    }


# Files


def test_a_report_is_a_picture_and_its_numbers(tmp_path: Path) -> None:
    timeline = Timeline(SPEC)
    timeline.on_shift(shift(0.0, "started", devices=(0, 1)))
    timeline.on_shift(shift(2.0, "completed", devices=(0, 1), holders={0: "reward-0", 1: "training"}))
    timeline.on_shift(shift(3.0, "started"))
    timeline.on_shift(shift(4.0, "failed", holders={0: ""}))
    for second in range(5):
        timeline.sample(float(second), 10.0 * second, 5.0, 0.0)
    timeline.throughput.insert(0, (-30.0, 0.0, 0.0, 0.0))  # starting up, before any device had an owner
    write_timeline(timeline, tmp_path, 6.0, "a run")
    picture = (tmp_path / "timeline.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 500
    assert height > 200
    values = json.loads((tmp_path / "timeline.json").read_text())
    assert sum(s["end_s"] - s["start_s"] for s in values["spans"]) == pytest.approx(12.0)
    assert values["device_seconds"] == timeline.device_seconds(6.0)
    assert len(values["shifts"]) == 2


def test_a_report_before_anything_happened_has_no_picture(tmp_path: Path) -> None:
    write_timeline(Timeline(SPEC), tmp_path, 1.0, "a run")
    assert json.loads((tmp_path / "timeline.json").read_text())["spans"] == []


# Service


class House:
    def __init__(self, folder: Path) -> None:
        self.bus, self.clock, self.folder = MemoryBus(), ManualClock(), folder
        self.files = MetricsFiles(folder)
        self.service = self._service()
        self.tasks: list[asyncio.Task[None]] = []

    def _service(self) -> MonitorService:
        timeline = Timeline(SPEC)
        folder = RunFolder(self.folder)
        seen = WorkloadAggregator(REPLICAS)
        return MonitorService(seen, timeline, self.files, folder, self.bus, SUBJECTS, self.clock)

    async def start(self) -> None:
        for spec in SUBJECTS.streams:
            await self.bus.ensure_stream(spec)
        await self.service.start()
        self.tasks = [
            asyncio.ensure_future(self.service.follow_shifts()),
            asyncio.ensure_future(self.service.follow_steps()),
        ]

    async def restart(self) -> None:
        await cancel(*self.tasks)
        self.service = self._service()
        await self.start()

    async def step(self, number: int, **more: Any) -> None:
        step = STEP.model_copy(update={"step": number, "policy_version": number, **more})
        await self.bus.append(SUBJECTS.step_completed, step)
        await until(lambda: number in self.service.steps)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    await made.start()
    yield made
    await cancel(*made.tasks)
    await made.bus.close()
    made.files.close()


async def test_a_row_per_step_outlives_a_restart_of_the_monitor(house: House) -> None:
    house.clock.advance(10)
    await house.step(1)
    house.clock.advance(10)
    await house.step(2)
    rows = house.rows()
    assert [(r["step"], r["reward_mean"]) for r in rows] == [(1, 0.5), (2, 0.5)]
    await house.restart()
    house.clock.advance(10)
    await house.step(3)
    assert [r["step"] for r in house.rows()] == [1, 2, 3]
    assert house.rows()[:2] == rows
    assert [r["step"] for r in house.service.describe()["steps"]] == [1, 2, 3]


async def test_news_are_published_at_once(house: House) -> None:
    seen: list[WorkloadPublished] = []

    async def on_workload(message: Message) -> None:
        assert isinstance(message, WorkloadPublished)
        seen.append(message)

    await house.bus.subscribe(SUBJECTS.workload, on_workload)
    house.tasks.append(asyncio.ensure_future(house.service.publish_for_ever()))
    await until(lambda: len(seen) == 1)
    assert not seen[0].ready
    for replica in sorted(REPLICAS):
        subject = SUBJECTS.telemetry(Role(replica.split("-")[0]), replica)
        await house.bus.publish(subject, telemetry(replica))
    for role in (Role.ROLLOUT, Role.REWARD):
        await house.bus.publish(SUBJECTS.role_queue(role), queue(role, f"{role.value}-0", lengths=(5,)))
    await house.bus.publish(SUBJECTS.training_state, TRAINING)
    await until(lambda: seen[-1].ready, 0.9)
    assert house.bus.handler_errors == 0


async def test_a_batch_that_gets_complete_is_news_and_one_more_sample_is_not(house: House) -> None:
    part = TRAINING.model_copy(update={"batch_ready": True, "collected": 14, "needed": 16})
    changed = []
    for collected in (14, 15, 16):
        house.service._changed.clear()
        await house.bus.publish(SUBJECTS.training_state, part.model_copy(update={"collected": collected}))
        await until(lambda: house.service.aggregator.training is not None)
        await asyncio.sleep(0.02)
        changed.append(house.service._changed.is_set())
    assert changed == [True, False, True]


async def test_waits_say_who_waits_for_whom(house: House) -> None:
    service = house.service
    assert service.waits()[0].startswith("the run waits for reward-0, reward-1, rollout-0")
    service.aggregator = full()
    service.aggregator.on_queue(queue(Role.REWARD, waiting=(5, 6)))
    service.aggregator.on_training(TRAINING.model_copy(update={"activity": "idle"}))
    assert service.waits() == [
        "reward: 2 sequences wait for a device",
        "training waits for samples (3/16)",
    ]
    service.aggregator.on_training(TRAINING.model_copy(update={"activity": "idle", "batch_ready": True}))
    assert service.waits()[-1] == "training waits for its devices"


async def test_rest_tells_and_writes(house: House) -> None:
    await house.bus.append(SUBJECTS.shift_event("p1"), shift(0.0, "started"))
    await house.bus.append(SUBJECTS.shift_event("p1"), shift(1.0, "completed", holders={0: "reward-0"}))
    await until(lambda: len(house.service.timeline.shifts) == 1)
    house.clock.advance(4)
    routers = [monitor_router(house.service, house.clock.now_s)]
    app = make_app("monitor", token=None, routers=routers, ready=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://monitor") as http:
        told = (await http.get("/v1/workload")).json()
        assert told["shifts"]["rollout_to_reward"] == 1
        assert told["device_seconds"] == {"shifting": 1.0, "reward": 3.0}
        spans = (await http.get("/v1/timeline")).json()["spans"]
        assert [(s["owner"], s["start_s"], s["end_s"]) for s in spans] == [
            ("shifting", 0.0, 1.0),
            ("reward", 1.0, 4.0),
        ]
        assert (await http.post("/v1/report")).status_code == 200
    assert (house.folder / "timeline.png").exists()


async def test_listeners_get_events_in_order(house: House) -> None:
    listening = house.service.listen()
    await house.step(1)
    await house.bus.append(SUBJECTS.shift_event("p1"), shift(1.0, "completed"))
    async with asyncio.timeout(5):
        kinds = [(await listening.get())["kind"] for _ in range(2)]
    assert kinds == ["step", "shift"]
    house.service.unlisten(listening)
    assert [e["kind"] for e in house.service.events] == ["step", "shift"]
