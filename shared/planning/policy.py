"""What every shift policy shares: the allocation, the one shift in flight, pausing, manual shifts.

Invariants
- While a shift is in flight no other is proposed.
- The allocation changes only when a shift completes or fails, and no device ever has two owners.
- Every decision is recorded, with its reason.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, assert_never

from shared.errors import PivotError
from shared.ids import ReplicaId, Role
from shared.planning.cluster import Allocation, ClusterSpec
from shared.planning.config import PlannerConfig
from shared.planning.plan import (
    ConfigChanged,
    Direction,
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
    ShiftPlan,
    ShiftStarted,
    WorkloadObserved,
)
from shared.planning.workload import WorkloadState
from shared.scheduling.migration import tie_order


class Policy(Protocol):
    """What a caller needs of a shift policy."""

    @property
    def allocation(self) -> Allocation: ...

    @property
    def in_flight(self) -> ShiftPlan | None: ...

    def step(self, event: PlannerEvent, now_s: float) -> list[PlannerEffect]: ...

    def gauges(self) -> dict[str, float]: ...


class ShiftPolicy(ABC):
    """Bookkeeping of a policy; a subclass only decides."""

    def __init__(self, config: PlannerConfig, cluster: ClusterSpec, allocation: Allocation) -> None:
        allocation.validate(cluster)
        self.config, self.cluster = config, cluster
        self._allocation = allocation
        self._in_flight: ShiftPlan | None = None
        self._is_paused = False
        self._num_plans = 0
        self._training_active = False
        self._counts = dict.fromkeys(("num_decisions", "num_shifts", "num_shifts_failed"), 0)
        self._shift_s = {
            (Role.ROLLOUT, Direction.UP): config.rollout.shift_up_s,
            (Role.ROLLOUT, Direction.DOWN): config.rollout.shift_down_s,
            (Role.REWARD, Direction.UP): config.reward.shift_up_s,
            (Role.REWARD, Direction.DOWN): config.reward.shift_down_s,
            (Role.TRAINING, Direction.UP): config.training_shift_up_s,
            (Role.TRAINING, Direction.DOWN): config.training_shift_down_s,
        }

    @abstractmethod
    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        """The decision for this observation, with the plan in it if there is one."""

    @property
    def allocation(self) -> Allocation:
        """Who holds devices, up to the last completed shift."""
        return self._allocation

    @property
    def in_flight(self) -> ShiftPlan | None:
        """The plan under way."""
        return self._in_flight

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def step(self, event: PlannerEvent, now_s: float) -> list[PlannerEffect]:
        """Take in `event`; at most one ExecuteShift comes back, behind its record."""
        match event:
            case WorkloadObserved(state):
                self._training_active = state.training.is_active
                if self._in_flight is None and not self._is_paused:
                    return self._announce(self.decide(state, now_s))
            case ShiftStarted():
                pass
            case ShiftCompleted():
                self._complete(event, now_s)
            case ShiftFailed():
                if plan := self._landed(event.plan_id):
                    self._counts["num_shifts_failed"] += 1
                    self._allocation = event.allocation or plan.apply_down(self._allocation)
            case Paused():
                self._is_paused = True
            case Resumed():
                self._is_paused = False
            case ConfigChanged(config):
                self.config = config
            case ManualShiftRequested():
                record = self._manual(event, now_s)
                return [PlanRecorded(record)] if event.dry_run else self._announce(record)
            case _:
                assert_never(event)
        return []

    def gauges(self) -> dict[str, float]:
        """Counts since the start, and the present state."""
        measured = {f"{role}_shift_{way}_s": s for (role, way), s in self._shift_s.items()}
        return {
            **self._counts,
            **measured,
            "is_paused": self._is_paused,
            "is_shifting": self._in_flight is not None,
            "num_rollout_replicas": len(self._allocation.active_of(Role.ROLLOUT, self.cluster)),
            "num_reward_replicas": len(self._allocation.active_of(Role.REWARD, self.cluster)),
            "training_holds": self._allocation.training_holds,
        }

    def adopt(self, plan: ShiftPlan) -> None:
        """Take a plan decided elsewhere as the one in flight; the replay of a recorded run does."""
        self._num_plans += 1
        self._in_flight = plan

    # For subclasses

    def plan_for(
        self, up_role: Role, up_replicas: Sequence[ReplicaId] = (), *, penalty_tokens: float = 0.0
    ) -> ShiftPlan:
        """The plan that brings these up, with everyone who holds one of their devices leaving."""
        wanted = (
            self.cluster.training_devices
            if up_role is Role.TRAINING
            else frozenset(d for r in up_replicas for d in self.cluster.slot(r).devices)
        )
        down = [slot.id for slot in self.cluster.overlapping(wanted) if slot.id in self._allocation.active]
        training_down = bool(
            up_role is not Role.TRAINING
            and self._allocation.training_holds
            and wanted & self.cluster.training_devices
        )
        return self.make_plan(up_role, up_replicas, down, training_down, penalty_tokens)

    def make_plan(
        self,
        up_role: Role,
        up_replicas: Sequence[ReplicaId],
        down_replicas: Sequence[ReplicaId],
        training_down: bool,
        penalty_tokens: float,
    ) -> ShiftPlan:
        """A plan with the next id (which is only used up when the plan is executed)."""
        training_up = up_role is Role.TRAINING
        devices = {d for r in (*up_replicas, *down_replicas) for d in self.cluster.slot(r).devices}
        if training_up or training_down:
            devices |= self.cluster.training_devices
        return ShiftPlan(
            id=f"p{self._num_plans + 1:06d}",
            up_role=up_role,
            up_replicas=tuple(sorted(up_replicas, key=tie_order)),
            down_replicas=tuple(sorted(down_replicas, key=tie_order)),
            training_down=training_down,
            training_up=training_up,
            devices=tuple(sorted(devices)),
            penalty_tokens=penalty_tokens,
        )

    def shift_s(self, up: Role, down: Role) -> float:
        """τ_shift: seconds from the donor's stop to the start of `up`."""
        return self._shift_s[down, Direction.DOWN] + self._shift_s[up, Direction.UP]

    def on_completed(self, plan: ShiftPlan, now_s: float) -> None:  # noqa: B027
        """Called when a shift of this policy is done; most policies need not know."""

    # Own

    def _announce(self, record: PlanRecord) -> list[PlannerEffect]:
        self._counts["num_decisions"] += 1
        if record.plan is None:
            return [PlanRecorded(record)]
        record.plan.apply(self._allocation).validate(self.cluster)
        self._num_plans += 1
        self._in_flight = record.plan
        return [PlanRecorded(record), ExecuteShift(record.plan)]

    def _landed(self, plan_id: str) -> ShiftPlan | None:
        plan = self._in_flight
        if plan is None or plan.id != plan_id:
            return None
        self._in_flight = None
        return plan

    def _complete(self, event: ShiftCompleted, now_s: float) -> None:
        plan = self._landed(event.plan_id)
        if plan is None:
            return
        self._counts["num_shifts"] += 1
        self._allocation = plan.apply(self._allocation)
        for key, seconds in event.duration_s.items():
            self._shift_s[key] += self.config.measured_shift_weight * (seconds - self._shift_s[key])
        self.on_completed(plan, now_s)

    def _manual(self, event: ManualShiftRequested, now_s: float) -> PlanRecord:
        refusal = self._why_not(event)
        if refusal:
            return PlanRecord(now_s, f"manual shift refused: {refusal}", event.up_role)
        try:
            plan = self.plan_for(event.up_role, event.up_replicas)
            plan.apply(self._allocation).validate(self.cluster)
        except PivotError as error:
            return PlanRecord(now_s, f"manual shift refused: {error.message}", event.up_role)
        return PlanRecord(
            now_s, "manual shift" + (" (dry run)" if event.dry_run else ""), event.up_role, plan
        )

    def _why_not(self, event: ManualShiftRequested) -> str:
        if self._in_flight:
            return f"{self._in_flight.id} is in flight"
        if event.up_role is Role.TRAINING:
            return "training holds its devices already" if self._allocation.training_holds else ""
        known = {slot.id for slot in self.cluster.slots_of(event.up_role)}
        if not event.up_replicas or not known.issuperset(event.up_replicas):
            return f"give replicas of {event.up_role}"
        if already := self._allocation.active.intersection(event.up_replicas):
            return f"{', '.join(sorted(already))} active already"
        if self._training_active and self.plan_for(event.up_role, event.up_replicas).training_down:
            return "training is active on these devices"
        return ""
