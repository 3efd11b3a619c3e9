"""The planner service over a whole cluster: it ends with everything trained, whatever dies on the way."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.monitor.report import MetricsFiles
from services.monitor.service import MonitorService
from services.monitor.timeline import Timeline, count_shifts
from services.monitor.workload import WorkloadAggregator
from services.planner.api import planner_router
from services.planner.app import planner_config_of
from services.planner.executor import ShiftExecutor
from services.planner.leases import DeviceLeases
from services.planner.service import PlannerService, workload_state
from shared.contracts.base import Message
from shared.contracts.monitor import RoleWorkload, WorkloadPublished
from shared.contracts.planner import PlanPublished
from shared.errors import BusError, PivotError
from shared.ids import ReplicaId, Role, sample_id
from shared.inference.records import SequenceRecord
from shared.planning.cluster import Allocation
from shared.planning.config import PlannerConfig, PolicyName, RolePlanning
from shared.planning.policies import initial_allocation, make_policy
from shared.planning.record import from_line
from shared.planning.replay import replay
from shared.runtime.config import load_config
from shared.runtime.http import make_app
from shared.runtime.journal import read_journal
from shared.runtime.run_folder import RunFolder
from shared.scheduling.staleness import num_issuable
from shared.scheduling.throughput import CPU_SMOLLM2_135M
from tests.support.cluster import KV_TOKENS, ScriptedTrainer, SimulatedCluster, record, shared_cluster
from tests.support.role_cases import shorten_waits

SPEC = shared_cluster(2)
BATCH, STEPS, STALENESS = 8, 3, 1


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)
    monkeypatch.setattr("services.planner.executor.SHIFT_DEADLINE_S", 4.0)
    monkeypatch.setattr("services.planner.service.SETTLE_S", 0.3)


class Run:
    """Rollout feeds reward, reward feeds training, training's versions let rollout issue more."""

    def __init__(self, folder: Path, policy: PolicyName = "pivot", staleness: int = STALENESS) -> None:
        self.house = SimulatedCluster(SPEC, length=lambda rng: rng.randrange(20, 60))
        house = self.house
        self.trainer = ScriptedTrainer(house, batch=BATCH, steps=STEPS)
        role = RolePlanning(CPU_SMOLLM2_135M, KV_TOKENS, 64, shift_up_s=0.1, shift_down_s=0.1)
        self.config = PlannerConfig(policy=policy, rollout=role, reward=role)
        self.leases = DeviceLeases(house.bus, house.subjects)
        self.executor = ShiftExecutor(SPEC, self.leases, house.bus, house.subjects, house.clock)
        self.initial = initial_allocation(policy, SPEC)
        self.service = PlannerService(
            make_policy(self.config, SPEC, self.initial),
            self.config,
            SPEC,
            self.executor,
            self.leases,
            house.bus,
            house.subjects,
            house.clock,
            folder / "decisions.jsonl",
        )
        self.files = MetricsFiles(folder)
        self.monitor = MonitorService(
            WorkloadAggregator(frozenset(slot.id for slot in SPEC.slots)),
            Timeline(SPEC),
            self.files,
            RunFolder(folder),
            house.bus,
            house.subjects,
            house.clock,
        )
        self.staleness = staleness
        self.num_issued = 0
        self.num_looks = 0
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def going(self, *, plans: bool = True) -> AsyncIterator["Run"]:
        house = self.house
        house.on_finished = self._on_finished
        self.trainer.on_version = self._on_version
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(house)
            await self.trainer.start()
            await self.monitor.start()
            stack.callback(lambda: [task.cancel() for task in self._tasks])
            for name, work in (
                ("trainer", self.trainer.report_forever()),
                ("monitor", self.monitor.publish_for_ever()),
                ("shifts", self.monitor.follow_shifts()),
                ("look", self._look_forever()),
            ):
                self._tasks.append(house.spawn(work, name))
            allocation = await self.service.start(Allocation(), self.initial)
            self.service.policy = make_policy(self.config, SPEC, allocation)
            if plans:
                await house.bus.subscribe(house.subjects.workload, self.service.on_workload)
            yield self
            await self.service.pause(True)
            await house.until(lambda: self.service.policy.in_flight is None)

    async def _on_finished(self, role: Role, done: SequenceRecord) -> None:
        if role is Role.ROLLOUT:
            self.house.shells[Role.REWARD].submit(record(f"{done.sequence_id}/0", max_new_tokens=60))
        else:
            self.trainer.collected.add(done.sequence_id)

    async def _on_version(self, version: int) -> None:
        self.house.weights[Role.ROLLOUT].version = version
        await self.house.shells[Role.ROLLOUT].shifts.refresh(version)
        self.issue(version)

    def issue(self, version: int) -> None:
        room = num_issuable(version, self.staleness, BATCH, self.num_issued)
        for _ in range(min(room, STEPS * BATCH - self.num_issued)):
            self.house.submit(Role.ROLLOUT, sample_id(self.num_issued, 0), max_new_tokens=60)
            self.num_issued += 1

    async def _look_forever(self) -> None:
        """No device is used by two, at any moment looked at, and each is leased to its user."""
        while True:
            for device in SPEC.devices:
                awake = [
                    r.id for r in self.house.replicas.values() if device in r.slot.devices and r.is_awake
                ]
                assert len(awake) + self.trainer.holds <= 1, (device, awake, self.trainer.holds)
            self.num_looks += 1
            await asyncio.sleep(0.003)

    async def check(self) -> None:
        """Every sample went through both roles once; leases are the policy's allocation."""
        assert self.num_looks > 50
        assert self.trainer.step == STEPS
        samples = {sample_id(i, 0) for i in range(STEPS * BATCH)}
        assert set(self.house.finished) == samples | {f"{s}/0" for s in samples}
        self.house.check_finished()
        await self.service.pause(True)
        await self.house.until(lambda: self.service.policy.in_flight is None)
        allocation = self.service.policy.allocation
        owners = await self.leases.owners(SPEC.devices)
        assert owners == {d: str(allocation.owner_of(d, SPEC) or "") for d in sorted(SPEC.devices)}


@pytest.mark.parametrize(("policy", "staleness"), [("pivot", 1), ("colocated", 0)])
async def test_a_whole_run_ends_with_every_sample_trained_once(
    tmp_path: Path, policy: PolicyName, staleness: int
) -> None:
    async with Run(tmp_path, policy, staleness).going() as run:
        run.issue(0)
        await run.house.until(lambda: run.trainer.is_finished, deadline_s=25)
        await run.check()
        assert set(run.house.generated().values()) == {1}
        counts = count_shifts(run.monitor.timeline.shifts)
        assert counts["to_training"] >= 1
        assert counts["rollout_to_reward"] + counts["from_training"] >= 1
        assert counts["failed"] == 0
        now_s = run.house.clock.now_s()
        spans = run.monitor.timeline.closed(now_s)
        assert sum(run.monitor.timeline.device_seconds(now_s).values()) == pytest.approx(
            sum(now_s - min(s.start_s for s in spans if s.device == d) for d in SPEC.devices)
        )
        entries = [from_line(line) for line in read_journal(tmp_path / "decisions.jsonl")]
        found = replay(entries, lambda config: config)
        assert found.num_decisions == found.num_reproduced > 0, "the journal is enough to decide again"
        assert found.num_shifts_recorded > 0


@pytest.mark.parametrize("seed", range(2))
async def test_under_deaths_and_failing_wakes_the_run_still_ends(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with Run(tmp_path).going() as run:
        run.issue(0)
        for _ in range(10):
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            replica = run.house.replicas[rng.choice(sorted(run.house.replicas))]
            match rng.randrange(4):
                case 0 | 1:
                    await replica.kill()
                    await asyncio.sleep(rng.uniform(0, 0.5))
                    await replica.start()
                case 2:
                    replica.fails_to_wake = not replica.fails_to_wake
                case 3:
                    replica.wake_s = rng.uniform(0, 0.4)
        for replica in run.house.replicas.values():
            replica.fails_to_wake, replica.wake_s = False, 0.0
        await run.house.until(lambda: run.trainer.is_finished, deadline_s=25)
        await run.check()


async def test_a_broker_that_refuses_plans_does_not_stop_shifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    append = run.house.bus.append

    async def refuse(subject: str, message: Message, *, dedupe_id: str | None = None) -> int:
        if isinstance(message, PlanPublished):
            raise BusError("stream is full")
        return await append(subject, message, dedupe_id=dedupe_id)

    monkeypatch.setattr(run.house.bus, "append", refuse)
    async with run.going():
        run.issue(0)
        await run.house.until(lambda: run.trainer.is_finished, deadline_s=25)
        await run.check()


async def test_a_restarted_planner_takes_over_what_is_awake(tmp_path: Path) -> None:
    async with Run(tmp_path).going(plans=False) as run:
        starts = {r.id: r.worker for r in run.house.replicas.values()}
        actual = Allocation(frozenset({ReplicaId("rollout-1")}))
        await run.leases.reset(dict.fromkeys(SPEC.devices, "p000007"))  # a shift was under way
        assert await run.service.start(actual, run.initial) == actual
        assert await run.leases.owners(SPEC.devices) == {0: "", 1: "rollout-1"}
        assert {r.id: r.worker for r in run.house.replicas.values()} == starts


@pytest.mark.parametrize(("collected", "is_complete"), [(15, False), (16, True)])
def test_a_batch_is_complete_when_all_of_it_is_there(collected: int, is_complete: bool) -> None:
    empty = {
        role: RoleWorkload(role=role, replicas=(), waiting_lengths=(), outstanding=0)
        for role in (Role.ROLLOUT, Role.REWARD)
    }
    message = WorkloadPublished(
        seq=1,
        now_s=1.0,
        ready=True,
        rollout=empty[Role.ROLLOUT],
        reward=empty[Role.REWARD],
        training_activity="idle",
        training_holds_devices=False,
        batch_ready=True,
        collected=collected,
        needed=16,
        step=0,
        policy_version=0,
    )
    training = workload_state(message).training
    assert training.batch_ready
    assert training.is_batch_complete == is_complete


@pytest.mark.parametrize(
    ("streaming", "rest"), [("off", inf), ("eager", inf), ("bursts", inf), ("late", 40.0)]
)
def test_the_way_to_stream_sets_how_much_may_be_left(tmp_path: Path, streaming: str, rest: float) -> None:
    overrides = {"training.streaming": streaming, "cluster.split.training": 1}
    config = load_config(Path("deploy/config/demo.yaml"), overrides)
    assert planner_config_of(config, RunFolder(tmp_path)).training_rest_per_replica == rest


# REST


@asynccontextmanager
async def client(run: Run) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app("planner", token="secret", routers=[planner_router(run.service)], ready=lambda: None)
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://planner", headers=headers) as made:
        yield made


async def test_rest_tells_the_allocation_and_shifts_by_hand(tmp_path: Path) -> None:
    async with Run(tmp_path).going(plans=False) as run, client(run) as http:
        before = (await http.get("/v1/allocation")).json()
        assert before["devices"] == {"0": "rollout-0", "1": "rollout-1"}
        assert before["active_replicas"] == ["rollout-0", "rollout-1"]
        body: dict[str, Any] = {"role": "reward", "replicas": ["reward-1"], "dry_run": True}
        dry = (await http.post("/v1/shifts", json=body)).json()
        assert dry["plan"]["down_replicas"] == ["rollout-1"]
        assert (await http.get("/v1/allocation")).json() == before
        body["dry_run"] = False
        assert (await http.post("/v1/shifts", json=body)).status_code == 200
        await run.house.until(lambda: run.service.policy.in_flight is None)
        after = (await http.get("/v1/allocation")).json()
        assert after["devices"] == {"0": "rollout-0", "1": "reward-1"}
        shifts = (await http.get("/v1/shifts")).json()
        assert [s["phase"] for s in shifts[:4]] == ["completed", "step_done", "step_done", "started"]
        plans = (await http.get("/v1/plans")).json()["plans"]
        chosen = next(p for p in plans if p["plan_id"] == "p000001")
        told = (await http.get(f"/v1/plans/{chosen['plan_id']}")).json()
        assert [e["phase"] for e in told["events"]] == ["started", "step_done", "step_done", "completed"]
        assert (await http.get("/v1/plans/p999999")).status_code == 404


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"role": "reward", "replicas": ["reward-9"]}, "give replicas of reward"),
        ({"role": "reward"}, "give replicas of reward"),
        ({"role": "rollout", "replicas": ["rollout-0"]}, "active already"),
        ({"role": "nobody"}, "role"),
    ],
)
async def test_rest_refuses_a_shift_that_cannot_be(tmp_path: Path, body: dict[str, Any], why: str) -> None:
    async with Run(tmp_path).going(plans=False) as run, client(run) as http:
        answer = await http.post("/v1/shifts", json=body)
        assert answer.status_code in (400, 422)
        assert why in answer.json()["message"]


async def test_rest_pauses_and_changes_settings(tmp_path: Path) -> None:
    async with Run(tmp_path).going(plans=False) as run, client(run) as http:
        assert (await http.post("/v1/planner/pause")).json() == {"paused": True}
        assert run.service.policy.gauges()["is_paused"]
        assert (await http.post("/v1/planner/resume")).json() == {"paused": False}
        assert (await http.patch("/v1/planner/config", json={"window_s": 30})).json()["window_s"] == 30
        assert run.service.config.window_s == 30
        changed = await http.patch("/v1/planner/config", json={"migration": True})
        assert changed.json()["training_rest_per_replica"] == "inf"
        changed = await http.patch("/v1/planner/config", json={"training_rest_per_replica": 40})
        assert changed.json()["training_rest_per_replica"] == 40


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"windows": 3}, "windows: cannot be changed"),
        ({"policy": "static"}, "policy: cannot be changed"),
        ({"window_s": "soon"}, "'soon' is no float"),
        ({"window_s": None}, "None is no float"),
        ({"window_s": -1}, "must be positive"),
        ({"training_rest_per_replica": -1}, "must not be negative"),
        ({"migration": "yes"}, "'yes' is no bool"),
        ({"max_evaluated": True}, "True is no int"),
    ],
)
async def test_rest_refuses_settings_that_cannot_be(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    async with Run(tmp_path).going(plans=False) as run, client(run) as http:
        before = run.service.config
        answer = await http.patch("/v1/planner/config", json=changes)
        assert answer.status_code == 400
        assert why in answer.json()["message"]
        assert run.service.config == before


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Bearer sécret"])
async def test_rest_needs_the_token_for_what_changes_something(tmp_path: Path, header: str) -> None:
    async with Run(tmp_path).going(plans=False) as run, client(run) as http:
        headers = {"Authorization": header.encode()}
        answer = await http.post("/v1/planner/pause", headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert (await http.get("/v1/allocation", headers=headers)).status_code == 200  # type: ignore[arg-type]
        assert not run.service.policy.gauges()["is_paused"]


async def test_a_manual_shift_that_fails_is_told(tmp_path: Path) -> None:
    async with Run(tmp_path).going(plans=False) as run:
        run.house.replicas[ReplicaId("reward-0")].fails_to_wake = True
        await run.service.request_shift(Role.REWARD, ("reward-0",), False)
        await run.house.until(lambda: run.service.policy.in_flight is None)
        assert run.service.policy.allocation == Allocation(frozenset({ReplicaId("rollout-1")}))
        assert run.service.shifts[-1].phase == "failed"
        with pytest.raises(PivotError, match="active already"):
            await run.service.request_shift(Role.ROLLOUT, ("rollout-1",), False)
