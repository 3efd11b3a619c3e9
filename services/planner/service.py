"""The planner's shell: workload in, plans out, one shift at a time handed to the executor."""

import asyncio
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.planner.executor import Outcome, ShiftExecutor
from services.planner.leases import FREE, DeviceLeases
from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.monitor import RoleWorkload, WorkloadPublished
from shared.contracts.planner import PlanPublished, ShiftEvent
from shared.contracts.subjects import Subjects
from shared.errors import InvalidRequest, NotFound, PivotError
from shared.ids import ReplicaId, Role
from shared.planning.cluster import Allocation, ClusterSpec
from shared.planning.config import PlannerConfig
from shared.planning.plan import (
    ConfigChanged,
    ExecuteShift,
    ManualShiftRequested,
    Paused,
    PlannerEffect,
    PlannerEvent,
    PlanRecord,
    PlanRecorded,
    Resumed,
    ShiftCompleted,
    ShiftFailed,
    ShiftStarted,
    WorkloadObserved,
)
from shared.planning.policy import Policy
from shared.planning.record import Decided, Entry, Started, observed, to_line
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.runtime.clock import Clock
from shared.runtime.logs import trace_scope
from shared.scheduling.sequence import ReplicaLoad, RoleLoad

log = logging.getLogger("pivotrl.planner")
SETTLE_S = 0.6
"""After a shift, observations older than this are of the former allocation."""
MAX_PLANS = 2000


class PlannerService:
    def __init__(
        self,
        policy: Policy,
        config: PlannerConfig,
        cluster: ClusterSpec,
        executor: ShiftExecutor,
        leases: DeviceLeases,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        decisions: Path,
    ) -> None:
        self.policy, self.config, self.cluster = policy, config, cluster
        self._executor, self._leases = executor, leases
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self._decisions = open(decisions, "a")  # noqa: SIM115  # held for the life of the process
        self._shift: asyncio.Task[None] | None = None
        self._settled_s = 0.0
        self._last_reason = ""
        self._last_published_s = 0.0
        self.plans: deque[dict[str, Any]] = deque(maxlen=MAX_PLANS)
        self.shifts: deque[ShiftEvent] = deque(maxlen=MAX_PLANS)
        self.last_decision: dict[str, Any] | None = None
        executor.on_event = self.shifts.append
        self._recorded: Policy | None = None
        """The policy whose start is in the journal; a restart replaces it."""
        self._num_records = 0
        self._finished = False

    async def on_workload(self, message: Message) -> None:
        assert isinstance(message, WorkloadPublished)
        if message.finished and not self._finished:
            self._finished = True
            await self._step(Paused())
        if not message.ready or message.now_s < self._settled_s:
            return
        measured = {
            load.role.value: sum(replica.tokens_per_s for replica in load.replicas)
            for load in (message.rollout, message.reward)
        }
        await self._step(WorkloadObserved(workload_state(message)), measured)

    async def request_shift(self, role: Role, replicas: tuple[str, ...], dry_run: bool) -> dict[str, Any]:
        """A person's shift. Raises InvalidRequest with the policy's reason if it is refused."""
        effects = await self._step(
            ManualShiftRequested(role, tuple(ReplicaId(name) for name in replicas), dry_run)
        )
        record = next(effect.record for effect in effects if isinstance(effect, PlanRecorded))
        if record.plan is None:
            raise InvalidRequest("replicas", record.reason, "See GET /v1/allocation")
        described: dict[str, Any] = plain(record)
        return described

    async def pause(self, paused: bool) -> None:
        await self._step(Paused() if paused else Resumed())

    async def change(self, changes: dict[str, Any]) -> PlannerConfig:
        """Changes settings of the running policy.

        Raises:
            InvalidRequest: an unknown or read-only setting.
            ConfigError: a value that cannot be.
        """
        fixed = {"policy", "rollout", "reward"}
        known = {f.name for f in dataclasses.fields(PlannerConfig)} - fixed
        for name, value in changes.items():
            if name not in known:
                raise InvalidRequest(name, "cannot be changed", f"Settings: {', '.join(sorted(known))}")
            wanted = type(getattr(self.config, name))
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise InvalidRequest(name, f"{value!r} is no {wanted.__name__}", "Give a value of its type")
        self.config = dataclasses.replace(self.config, **changes)
        await self._step(ConfigChanged(self.config))
        return self.config

    async def describe_allocation(self) -> dict[str, Any]:
        allocation = self.policy.allocation
        owners = await self._leases.owners(self.cluster.devices)
        return {
            "devices": {str(device): owner or None for device, owner in owners.items()},
            "active_replicas": sorted(allocation.active),
            "training_holds": allocation.training_holds,
            "in_flight": plain(self.policy.in_flight) if self.policy.in_flight else None,
        }

    def plan(self, plan_id: str) -> dict[str, Any]:
        for entry in reversed(self.plans):
            if entry["plan_id"] == plan_id:
                return {
                    **entry,
                    "events": [e.model_dump(mode="json") for e in self.shifts if e.shift_id == plan_id],
                }
        raise NotFound(f"no plan {plan_id}", plan=plan_id)

    # Carrying out

    async def _step(
        self, event: PlannerEvent, measured: Mapping[str, float] | None = None
    ) -> list[PlannerEffect]:
        now_s = self._clock.now_s()
        if self._recorded is not self.policy:
            self._recorded = self.policy
            self._write(Entry(now_s, Started(self.config, self.cluster, self.policy.allocation)))
        effects = self.policy.step(event, now_s)
        self._record(now_s, event, effects, measured or {})
        record: PlanRecord | None = None
        for effect in effects:
            match effect:
                case PlanRecorded(record):
                    await self._publish(record)
                case ExecuteShift(plan):
                    gain = _expected_gain(record)
                    self._shift = asyncio.create_task(
                        self._execute(plan.id, effect, gain), name=f"shift {plan.id}"
                    )
        return effects

    async def _execute(self, plan_id: str, effect: ExecuteShift, gain: float) -> None:
        await self._step(ShiftStarted(plan_id))
        before = self.policy.allocation
        try:
            with trace_scope(plan_id):  # every command and log line of this shift can be found by its plan
                outcome = await self._executor.execute(effect.plan, before, expected_gain=gain)
        except Exception as error:
            log.exception("shift %s broke", plan_id)
            outcome = Outcome(before, f"{type(error).__name__}: {error}")
        self._settled_s = self._clock.now_s() + SETTLE_S
        if outcome.reason:
            await self._step(ShiftFailed(plan_id, outcome.reason, outcome.allocation))
        else:
            await self._step(ShiftCompleted(plan_id, outcome.duration_s))

    async def _publish(self, record: PlanRecord) -> None:
        self.last_decision = plain(record)
        unchanged = record.plan is None and record.reason.split(":")[0] == self._last_reason
        if unchanged and self._clock.now_s() - self._last_published_s < 10.0:
            return
        self._last_reason = record.reason.split(":")[0]
        self._last_published_s = self._clock.now_s()
        self._num_records += 1
        plan_id = record.plan.id if record.plan else f"none-{self._num_records}"
        values = plain(record)
        self.plans.append({"plan_id": plan_id, **values})
        published = PlanPublished(
            plan_id=plan_id,
            now_s=record.at_s,
            chosen=record.plan is not None,
            reason=record.reason,
            up_role=record.up_role,
            record=values,
        )
        try:
            await self._bus.append(self._subjects.plan, published)
        except PivotError as error:  # the shift that follows matters more than its record
            log.warning("plan %s is not on the bus: %s", plan_id, error.message)

    def _record(
        self, now_s: float, event: PlannerEvent, effects: list[PlannerEffect], measured: Mapping[str, float]
    ) -> None:
        """One line per event, from which decisions can be made again: `pivotrl replay`."""
        records = [effect.record for effect in effects if isinstance(effect, PlanRecorded)]
        decided = Decided.of(records[0]) if records else None
        if isinstance(event, WorkloadObserved):
            kept = event if decided else None  # nothing could be decided, so the state is not needed
            self._write(Entry(now_s, kept, decided, observed(event.state), measured))
        else:
            self._write(Entry(now_s, event, decided))

    def _write(self, entry: Entry) -> None:
        self._decisions.write(json.dumps(to_line(entry), separators=(",", ":")) + "\n")
        self._decisions.flush()

    # Start

    async def start(self, actual: Allocation, initial: Allocation) -> Allocation:
        """Takes over what is awake already (a restarted planner), or brings the initial allocation up."""
        owners = dict.fromkeys(self.cluster.devices, FREE)
        for replica in actual.active:
            owners |= dict.fromkeys(self.cluster.slot(replica).devices, str(replica))
        if actual.training_holds:
            owners |= dict.fromkeys(self.cluster.training_devices, Role.TRAINING.value)
        await self._leases.reset(owners)
        if actual.active or actual.training_holds:
            log.warning("taking over: %s", ", ".join(sorted(actual.active)) or "training")
            return actual
        return await self._executor.bring_up(initial)


def workload_state(message: WorkloadPublished) -> WorkloadState:
    """The planner's view of a published workload."""
    activity = {
        "starting": TrainingActivity.IDLE,
        "idle": TrainingActivity.IDLE,
        "active": TrainingActivity.ACTIVE,
        "done": TrainingActivity.DONE,
    }[message.training_activity]
    is_publishing = activity is TrainingActivity.DONE and message.policy_version < message.step
    return WorkloadState(
        _role_load(message.rollout),
        _role_load(message.reward),
        TrainingState(
            activity,
            message.batch_ready,
            is_publishing,
            is_batch_complete=message.collected >= message.needed,
        ),
    )


def _role_load(role: RoleWorkload) -> RoleLoad:
    replicas = tuple(
        ReplicaLoad(
            ReplicaId(r.replica_id),
            len(r.lengths),
            sum(r.lengths),
            r.kv_capacity_tokens,
            tuple(sorted(r.lengths)),
        )
        for r in role.replicas
    )
    return RoleLoad(replicas, role.waiting_lengths, role.mean_new_tokens)


def plain(value: Any) -> Any:
    """A frozen value as JSON-ready plain data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not f.name.startswith("_")
        }
    if isinstance(value, dict):
        return {":".join(map(str, k)) if isinstance(k, tuple) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, frozenset | set):
        return sorted(plain(v) for v in value)
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value


def _expected_gain(record: PlanRecord | None) -> float:
    if record is None:
        return 0.0
    chosen = [c.tokens_per_s for c in record.candidates if c.is_chosen]
    return chosen[0] - record.current_tokens_per_s if chosen else 0.0
