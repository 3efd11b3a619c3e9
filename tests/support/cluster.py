"""A whole cluster in one process: the real services' shells and replica workers, over simulated engines.

async with SimulatedCluster(two_device_cluster()) as house:
    await house.shift_up(Role.ROLLOUT, "rollout-0")
    house.submit(Role.ROLLOUT, "a", max_new_tokens=50)
    await house.until(lambda: "a" in house.finished)
    await house.replicas["rollout-0"].kill()

A killed replica neither answers nor speaks; whoever waits for it learns nothing. `start` brings it back as
a new incarnation, asleep. A frozen one is a process that got SIGSTOP."""

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self

from shared.bus.memory_bus import MemoryBus
from shared.bus.ports import Subscription
from shared.contracts.base import Message
from shared.contracts.gps import PoolView, ReadGrant
from shared.contracts.planner import DeviceLease, ShiftDown, ShiftStepDone, ShiftUp
from shared.contracts.replica import ReplicaTelemetry, SamplingSpec, SequenceProgress, TokenDelta
from shared.contracts.subjects import Subjects
from shared.contracts.trainer import TrainingActivity, TrainingTelemetry
from shared.errors import Conflict, EngineError, TransportError
from shared.ids import DeviceId, ReplicaId, Role, replica_id
from shared.inference.engines.simulated_engine import SimulatedEngine, SimulatedEngineConfig
from shared.inference.ports import ReadReport
from shared.inference.records import SequenceRecord
from shared.inference.replica import ReplicaWorker
from shared.inference.role import RoleShell
from shared.planning.cluster import ClusterSpec, ReplicaSlot
from shared.runtime.clock import SystemClock
from shared.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.scheduling.throughput import CPU_SMOLLM2_135M

GENERATING = (Role.ROLLOUT, Role.REWARD)
STEP_S = 0.002
KV_TOKENS = 4_000


def shared_cluster(num_devices: int = 2) -> ClusterSpec:
    """Every device can host one replica of each role and a training rank."""
    devices = [DeviceId(i) for i in range(num_devices)]
    slots = tuple(
        ReplicaSlot(replica_id(role, i), role, frozenset({i})) for role in GENERATING for i in devices
    )
    return ClusterSpec(frozenset(devices), slots, frozenset(devices))


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Polls; fails at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "condition not met in time"
        await asyncio.sleep(0.005)


class Weights:
    """Where replicas read from: hands out the newest version, or fails."""

    def __init__(self) -> None:
        self.version = 0
        self.error: str = ""

    @asynccontextmanager
    async def read(self, min_version: int) -> AsyncIterator[ReadGrant]:
        if self.error:
            raise TransportError(self.error)
        if self.version < min_version:
            raise Conflict(f"version {min_version} is not committed")
        view = PoolView(path="/nowhere", nbytes=1 << 20, tensors=())
        yield ReadGrant(
            model="m", version=self.version, lease_id="l", view=view, plan_id="p", nbytes=view.nbytes
        )


class CountingEngine(SimulatedEngine):
    """Counts what it generated; stands still while `gate` is closed; `wake_s` and `fails_to_wake` as told."""

    def __init__(self, owner: "SimulatedReplica", length: Callable[[random.Random], int]) -> None:
        config = SimulatedEngineConfig(kv_capacity_tokens=KV_TOKENS, max_model_len=KV_TOKENS)
        super().__init__(lambda n, tokens: owner.step_s, config, length=length)
        self._owner = owner

    def step(self) -> list[TokenDelta]:
        self._owner.gate.wait(30)
        deltas = super().step()
        if self._owner.is_alive:
            for delta in deltas:
                for i in range(delta.start, delta.start + len(delta.token_ids)):
                    key = (delta.sequence_id, i)
                    self._owner.generated[key] = self._owner.generated.get(key, 0) + 1
        return deltas

    def wake(self, view: PoolView, version: int) -> ReadReport:
        time.sleep(self._owner.wake_s)
        if self._owner.fails_to_wake:
            raise EngineError("out of memory")
        return super().wake(view, version)


class SimulatedReplica:
    """One replica process: started, killed, frozen and started again at will."""

    def __init__(
        self,
        slot: ReplicaSlot,
        bus: MemoryBus,
        subjects: Subjects,
        weights: Weights,
        length: Callable[[random.Random], int],
    ) -> None:
        self.slot, self.id = slot, slot.id
        self._bus, self._subjects, self._weights, self._length = bus, subjects, weights, length
        self.worker: ReplicaWorker | None = None
        self.gate = threading.Event()
        self.gate.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.step_s, self.wake_s, self.fails_to_wake = STEP_S, 0.0, False
        self.generated: dict[tuple[str, int], int] = {}
        """How often token i of a sequence was generated here, over all lives."""
        self.num_starts = 0
        self.is_alive = False
        self._served: list[Subscription] = []
        self._life: asyncio.Task[None] | None = None

    @property
    def is_awake(self) -> bool:
        """Holds memory of its devices."""
        return self.is_alive and self.worker is not None and self.worker.state in ("waking", "awake")

    async def start(self) -> None:
        assert not self.is_alive
        self.is_alive, self.num_starts = True, self.num_starts + 1
        life = self.num_starts

        async def publish_progress(message: SequenceProgress) -> None:
            await self._thawed.wait()
            if self.num_starts == life and self.is_alive:
                await self._bus.append(self._subjects.progress(self.slot.role, self.id), message)

        async def publish_telemetry(message: ReplicaTelemetry) -> None:
            await self._thawed.wait()
            if self.num_starts == life and self.is_alive:
                await self._bus.publish(self._subjects.telemetry(self.slot.role, self.id), message)

        worker = self.worker = ReplicaWorker(
            replica_id=self.id,
            role=self.slot.role,
            devices=sorted(self.slot.devices),
            engine=CountingEngine(self, self._length),
            weights=self._weights,
            publish_progress=publish_progress,
            publish_telemetry=publish_telemetry,
            incarnation=secrets.token_hex(6),
        )
        self._life = asyncio.create_task(worker.run_forever(), name=f"life of {self.id}")
        await worker.ready.wait()
        commands: list[tuple[str, Callable[[Any], Awaitable[Message]]]] = [
            ("run", worker.run),
            ("abort", worker.abort),
            ("sleep", worker.sleep),
            ("wake", worker.wake),
            ("refresh", worker.refresh),
        ]
        for name, handler in commands:
            subject = self._subjects.replica(self.id, name)
            self._served.append(await self._bus.serve(subject, self._as_process(handler, life)))

    def _as_process(
        self, handler: Callable[[Any], Awaitable[Message]], life: int
    ) -> Callable[[Message], Awaitable[Message]]:
        async def call(message: Message) -> Message:
            await self._thawed.wait()
            try:
                return await handler(message)
            finally:
                await self._thawed.wait()
                if self.num_starts != life or not self.is_alive:
                    await asyncio.Event().wait()  # the dead do not answer

        return call

    async def kill(self) -> None:
        """As SIGKILL: what was not sent is gone."""
        if not self.is_alive:
            return
        self.is_alive = False
        for subscription in self._served:
            await subscription.close()
        self._served.clear()
        self.thaw()
        assert self._life is not None
        assert self.worker is not None
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        await self.worker.close()

    def freeze(self) -> None:
        self.gate.clear()
        self._thawed.clear()

    def thaw(self) -> None:
        self.gate.set()
        self._thawed.set()


class SimulatedCluster:
    """Bus, replicas and a role shell per generating role. `on_finished` may be replaced before it starts."""

    def __init__(
        self,
        spec: ClusterSpec | None = None,
        *,
        roles: tuple[Role, ...] = GENERATING,
        length: Callable[[random.Random], int] = lambda rng: 1 << 30,
        migration: bool = True,
    ) -> None:
        self.spec = spec or shared_cluster()
        self.bus, self.subjects, self.clock = MemoryBus(), Subjects("test"), SystemClock()
        self.weights = {role: Weights() for role in GENERATING}
        self._roles, self._length = roles, length
        self._scheduling = SchedulerConfig(CPU_SMOLLM2_135M, migration=migration, growth_margin_tokens=64)
        self.replicas = {
            slot.id: SimulatedReplica(slot, self.bus, self.subjects, self.weights[slot.role], length)
            for slot in self.spec.slots
            if slot.role in roles
        }
        self.shells: dict[Role, RoleShell] = {}
        self.finished: dict[str, SequenceRecord] = {}
        self.failed: dict[str, str] = {}
        self.num_finished: dict[str, int] = {}
        self.on_finished: Callable[[Role, SequenceRecord], Awaitable[None]] = self._nothing
        self._tasks: dict[Role, list[asyncio.Task[None]]] = {}
        self.errors: list[BaseException] = []

    async def _nothing(self, role: Role, record: SequenceRecord) -> None:
        pass

    async def __aenter__(self) -> Self:
        for spec in self.subjects.streams:
            await self.bus.ensure_stream(spec)
        await self.bus.ensure_bucket(self.subjects.device_bucket)
        await self.bus.ensure_bucket(self.subjects.policy_bucket)
        await asyncio.gather(*(replica.start() for replica in self.replicas.values()))
        for role in self._roles:
            await self.start_shell(role, [])
        return self

    async def __aexit__(self, *_: object) -> None:
        for role in list(self._tasks):
            await self.stop_shell(role)
        await asyncio.gather(*(replica.kill() for replica in self.replicas.values()))
        await self.bus.close()
        assert not self.errors, self.errors
        assert not self.bus.handler_errors

    # Role services

    async def start_shell(self, role: Role, records: list[SequenceRecord]) -> int:
        """The role service as a fresh process; gives the number of tokens it recovered."""

        async def on_finished(record: SequenceRecord) -> None:
            self.finished[record.sequence_id] = record
            self.num_finished[record.sequence_id] = self.num_finished.get(record.sequence_id, 0) + 1
            await self.on_finished(role, record)

        async def on_failed(record: SequenceRecord, reason: str) -> None:
            self.failed[record.sequence_id] = reason

        shell = RoleShell(
            role,
            self.spec.slots_of(role),
            Scheduler(self._scheduling),
            self.bus,
            self.subjects,
            self.clock,
            on_finished=on_finished,
            on_failed=on_failed,
        )
        self.shells[role] = shell
        await shell.start()
        kept = await shell.recover(records)
        self._tasks[role] = [self.spawn(task(), f"{role}: {name}") for name, task in shell.tasks()]
        return kept

    async def stop_shell(self, role: Role) -> RoleShell:
        """Its process dies."""
        for task in self._tasks.pop(role):
            task.cancel()
        shell = self.shells[role]
        await shell.shifts.close()
        return shell

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task whose failure fails the test."""

        def on_done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.errors.append(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(on_done)
        return task

    # What a test does

    def submit(
        self, role: Role, sequence_id: str, *, max_new_tokens: int = 50, prompt_tokens: int = 20
    ) -> None:
        self.shells[role].submit(
            record(sequence_id, max_new_tokens=max_new_tokens, prompt_tokens=prompt_tokens)
        )

    async def shift(
        self, role: Role, direction: str, *replicas: str, deadline_s: float = 20.0
    ) -> ShiftStepDone:
        kind = ShiftUp if direction == "up" else ShiftDown
        return await self.bus.request(
            self.subjects.shift(role, direction),
            kind(shift_id="s", role=role, replicas=replicas, deadline_s=deadline_s),
            ShiftStepDone,
            deadline_s=deadline_s,
            role="test",
            peer=role.value,
            phase=direction,
        )

    async def shift_up(self, role: Role, *replicas: str, deadline_s: float = 20.0) -> ShiftStepDone:
        return await self.shift(role, "up", *replicas, deadline_s=deadline_s)

    async def shift_down(self, role: Role, *replicas: str, deadline_s: float = 20.0) -> ShiftStepDone:
        return await self.shift(role, "down", *replicas, deadline_s=deadline_s)

    async def lease(self, replica: str) -> None:
        """What the planner writes before it brings `replica` up."""
        for device in self.spec.slot(ReplicaId(replica)).devices:
            lease = DeviceLease(device=device, owner=replica, epoch=1)
            await self.bus.kv_put(self.subjects.device_bucket, f"{device}", lease)

    async def until(self, condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
        await until(lambda: bool(self.errors) or condition(), deadline_s)
        assert not self.errors, self.errors

    async def until_finished(self, *sequence_ids: str, deadline_s: float = 10.0) -> None:
        await self.until(lambda: self.finished.keys() >= set(sequence_ids), deadline_s)

    def tokens_on(self, replica: str) -> int:
        """Tokens generated there, repeated ones included."""
        return sum(self.replicas[ReplicaId(replica)].generated.values())

    def generated(self) -> dict[tuple[str, int], int]:
        """How often each token was generated, anywhere."""
        counts: dict[tuple[str, int], int] = {}
        for replica in self.replicas.values():
            for key, count in replica.generated.items():
                counts[key] = counts.get(key, 0) + count
        return counts

    def check_finished(self) -> None:
        """Each sequence once, whole, with the tokens an undisturbed run gives."""
        assert set(self.num_finished.values()) <= {1}, self.num_finished
        for record in self.finished.values():
            assert record.token_ids == expected_tokens(record), record.sequence_id
            assert len(record.logprobs) == record.num_tokens
            assert sum(count for _, count in record.versions) == record.num_tokens
            assert [v for v, _ in record.versions] == sorted(v for v, _ in record.versions)


def record(sequence_id: str, *, max_new_tokens: int = 50, prompt_tokens: int = 20) -> SequenceRecord:
    return SequenceRecord(
        sequence_id, tuple(range(prompt_tokens)), SamplingSpec(max_new_tokens=max_new_tokens)
    )


def expected_tokens(record: SequenceRecord) -> list[int]:
    """The simulated engine's tokens of a sequence depend on its id and the position only."""
    config = SimulatedEngineConfig()
    return [
        random.Random(f"{config.seed}:{record.sequence_id}:{i}").randrange(config.vocab_size)
        for i in range(record.num_tokens)
    ]


class ScriptedTrainer:
    """Answers `shift.training.{up,down}` and reports like the trainer: a step takes `train_s` once a batch is
    here and the devices are its own."""

    def __init__(self, house: SimulatedCluster, *, batch: int, steps: int, train_s: float = 0.1) -> None:
        self._house, self._batch, self._steps, self._train_s = house, batch, steps, train_s
        self.activity: TrainingActivity = "idle"
        self.holds = False
        self.step = 0
        self.collected: set[str] = set()
        self.refusal = ""
        self.on_version: Callable[[int], Awaitable[None]] | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def batch_ready(self) -> bool:
        return self.step < self._steps and len(self.collected) >= (self.step + 1) * self._batch

    @property
    def is_finished(self) -> bool:
        return self.step >= self._steps

    def telemetry(self) -> TrainingTelemetry:
        return TrainingTelemetry(
            activity=self.activity,
            batch_ready=self.batch_ready and self.activity != "active",
            holds_devices=self.holds,
            step=self.step,
            policy_version=self.step,
            collected=len(self.collected) - self.step * self._batch,
            needed=self._batch,
            tokens_total=0,
            finished=self.is_finished,
        )

    async def start(self) -> None:
        bus, subjects = self._house.bus, self._house.subjects
        await bus.serve(subjects.shift(Role.TRAINING, "up"), self._up)
        await bus.serve(subjects.shift(Role.TRAINING, "down"), self._down)

    async def report_forever(self) -> None:
        while True:
            await self._report()
            await asyncio.sleep(0.1)

    async def _report(self) -> None:
        await self._house.bus.publish(self._house.subjects.training_state, self.telemetry())

    async def _up(self, message: Message) -> Message:
        assert isinstance(message, ShiftUp)
        if self.refusal:
            raise Conflict(self.refusal)
        self.holds = True
        self._work = self._house.spawn(self._train(), "train")
        return ShiftStepDone(duration_s=0.01)

    async def _down(self, message: Message) -> Message:
        assert isinstance(message, ShiftDown)
        if self.refusal or self.activity == "active":
            raise Conflict(self.refusal or "a step is running")
        self.holds, self.activity = False, "idle"
        await self._report()
        return ShiftStepDone(duration_s=0.01, freed_bytes=1 << 20)

    async def _train(self) -> None:
        while self.batch_ready and self.holds:
            self.activity = "active"
            await self._report()
            await asyncio.sleep(self._train_s)
            self.step += 1
            if self.on_version is not None:
                await self.on_version(self.step)
        self.activity = "done"
        await self._report()


async def cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
