"""The monitor's shell."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from services.monitor.report import MetricsFiles, write_timeline
from services.monitor.timeline import Timeline, count_shifts
from services.monitor.workload import WorkloadAggregator
from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.planner import ShiftEvent
from shared.contracts.replica import ReplicaTelemetry
from shared.contracts.role import RoleQueue
from shared.contracts.subjects import Subjects
from shared.contracts.trainer import StepCompleted, TrainingTelemetry
from shared.ids import Role
from shared.runtime.clock import Clock
from shared.runtime.run_folder import RunFolder

log = logging.getLogger("pivotrl.monitor")
MAX_EVENTS = 1000


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the counters stood when the last step completed."""

    at_s: float
    rollout_tokens: int = 0
    reward_tokens: int = 0
    num_shifts: int = 0


class MonitorService:
    def __init__(
        self,
        aggregator: WorkloadAggregator,
        timeline: Timeline,
        files: MetricsFiles,
        folder: RunFolder,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
    ) -> None:
        self.aggregator, self.timeline = aggregator, timeline
        self._files, self._folder = files, folder
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self._changed = asyncio.Event()
        self.steps = files.rows()
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._listeners: set[asyncio.Queue[dict[str, Any]]] = set()
        self._mark = _Mark(clock.now_s())
        self._has_begun = False

    async def start(self) -> None:
        s = self._subjects
        await self._bus.subscribe(f"{s.prefix}.telemetry.>", self._on_telemetry)
        await self._bus.subscribe(f"{s.prefix}.queue.>", self._on_queue)
        await self._bus.subscribe(s.training_state, self._on_training)

    # In

    async def _on_telemetry(self, message: Message) -> None:
        if isinstance(message, ReplicaTelemetry):
            self.aggregator.on_telemetry(message, self._clock.now_s())

    async def _on_queue(self, message: Message) -> None:
        if isinstance(message, RoleQueue):
            before = self.aggregator.queues.get(message.role)
            self.aggregator.on_queue(message)
            if before is None or _is_news(before, message):
                self._changed.set()

    async def _on_training(self, message: Message) -> None:
        if isinstance(message, TrainingTelemetry):
            before, after = self.aggregator.training, message
            self.aggregator.on_training(after)
            if before is None or _what_planners_see(before) != _what_planners_see(after):
                self._changed.set()

    async def follow_shifts(self) -> None:
        stream = self._subjects.shifts_stream
        async for stored in self._bus.follow(stream, self._subjects.shift_event("*"), ShiftEvent):
            self.timeline.on_shift(stored.message)
            self._emit("shift", stored.message)

    async def follow_steps(self) -> None:
        stream = self._subjects.training_stream
        async for stored in self._bus.follow(stream, self._subjects.step_completed, StepCompleted):
            self._on_step(stored.message)

    def _on_step(self, step: StepCompleted) -> None:
        if step.step in self.steps:
            return  # of an earlier life of the run
        before, now = self._mark, self._mark_now()
        seconds = max(1e-9, now.at_s - before.at_s)
        shifts = self._run_shifts()[before.num_shifts :]
        extra: dict[str, float] = {
            "rollout_tokens_per_s": (now.rollout_tokens - before.rollout_tokens) / seconds,
            "reward_tokens_per_s": (now.reward_tokens - before.reward_tokens) / seconds,
            "step_s": seconds,
            "shifts": len(shifts),
            "shift_s": sum(event.duration_s for event in shifts),
        }
        self._mark = now
        self.steps[step.step] = {**step.model_dump(mode="json"), **extra}
        self._files.write(step, extra)
        self._emit("step", step)

    def _run_shifts(self) -> list[ShiftEvent]:
        return [event for event in self.timeline.shifts if not event.shift_id.startswith("start-")]

    def _mark_now(self) -> _Mark:
        rollout, reward = (self.aggregator.generated_tokens(role) for role in (Role.ROLLOUT, Role.REWARD))
        return _Mark(self._clock.now_s(), rollout, reward, len(self._run_shifts()))

    # Out

    async def publish_for_ever(self) -> None:
        """On news at once (at most 10 a second), else once a second."""
        while True:
            self._changed.clear()
            now_s = self._clock.now_s()
            state = self.aggregator.state(now_s)
            if state.ready and not self._has_begun:
                self._has_begun, self._mark = True, self._mark_now()  # starting up is not part of a step
            await self._bus.publish(self._subjects.workload, state)
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.1)

    async def sample_for_ever(self) -> None:
        while True:
            now_s = self._clock.now_s()
            rollout, reward = (
                self.aggregator.tokens_per_s(role, now_s) for role in (Role.ROLLOUT, Role.REWARD)
            )
            self.timeline.sample(now_s, rollout, reward, 0.0)
            await asyncio.sleep(0.5)

    def write_report(self) -> None:
        write_timeline(
            self.timeline, self._folder.path, self._clock.now_s(), f"PivotRL run {self._subjects.run}"
        )

    def describe(self) -> dict[str, Any]:
        now_s = self._clock.now_s()
        return {
            "workload": self.aggregator.state(now_s).model_dump(mode="json"),
            "missing": self.aggregator.missing(),
            "waits": self.waits(),
            "tokens_per_s": {
                r.value: self.aggregator.tokens_per_s(r, now_s) for r in (Role.ROLLOUT, Role.REWARD)
            },
            "device_seconds": self.timeline.device_seconds(now_s),
            "shifts": count_shifts(self.timeline.shifts),
            "shift_seconds": self.timeline.shift_seconds(),
            "steps": [self.steps[step] for step in sorted(self.steps)],
        }

    def waits(self) -> list[str]:
        """What waits for whom, in sentences."""
        state = self.aggregator.state(self._clock.now_s())
        if missing := self.aggregator.missing():
            return [f"the run waits for {', '.join(missing)}"]
        waits = []
        for role in (state.rollout, state.reward):
            if role.waiting_lengths and not role.replicas:
                waits.append(f"{role.role.value}: {len(role.waiting_lengths)} sequences wait for a device")
            elif role.blocked_on and not any(r.lengths for r in role.replicas):
                waits.append(f"{role.role.value} waits for {role.blocked_on}")
        if state.training_activity == "active":
            waits.append(
                f"the next policy version waits for training ({state.training_phase or 'a step is running'})"
            )
        elif state.batch_ready:
            waits.append("training waits for its devices")
        elif not state.finished:
            waits.append(f"training waits for samples ({state.collected}/{state.needed})")
        return waits

    def _emit(self, kind: str, message: Message) -> None:
        event = {"kind": kind, "summary": message.summary(), **message.model_dump(mode="json")}
        self.events.append(event)
        for queue in self._listeners:
            if queue.qsize() < MAX_EVENTS:
                queue.put_nowait(event)

    def listen(self) -> "asyncio.Queue[dict[str, Any]]":
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._listeners.add(queue)
        return queue

    def unlisten(self, queue: "asyncio.Queue[dict[str, Any]]") -> None:
        self._listeners.discard(queue)


def _what_planners_see(training: TrainingTelemetry) -> tuple[object, ...]:
    is_complete = training.collected >= training.needed
    return training.activity, training.batch_ready, is_complete, training.finished


def _is_news(before: RoleQueue, after: RoleQueue) -> bool:
    """What a planner would want to know now rather than within a second."""
    return (
        before.active_replicas != after.active_replicas
        or bool(before.waiting_lengths) != bool(after.waiting_lengths)
        or any(r.lengths for r in before.replicas) != any(r.lengths for r in after.replicas)
    )
