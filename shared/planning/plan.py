"""The planner's words: what it hears, what it orders, and the record that explains it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.ids import DeviceId, ReplicaId, Role
from shared.planning.cluster import Allocation
from shared.planning.config import PlannerConfig
from shared.planning.workload import WorkloadState


class Direction(StrEnum):
    """Half of a shift."""

    UP = "up"
    DOWN = "down"


ShiftSeconds = Mapping[tuple[Role, Direction], float]
"""How long each half took, for the roles that took part."""


@dataclass(frozen=True, slots=True)
class ShiftPlan:
    """One transaction: everything that leaves is down before anything that starts comes up."""

    id: str
    """`p000001`, `p000002`, … in order of decision."""
    up_role: Role
    up_replicas: tuple[ReplicaId, ...]
    down_replicas: tuple[ReplicaId, ...]
    training_down: bool
    training_up: bool
    devices: tuple[DeviceId, ...]
    """All devices that are taken or given, ascending."""
    penalty_tokens: float
    """φ, tokens not generated because of the shift."""

    def apply(self, allocation: Allocation) -> Allocation:
        """The allocation once the plan is done."""
        return Allocation(
            (allocation.active - set(self.down_replicas)) | set(self.up_replicas),
            self.training_up or (allocation.training_holds and not self.training_down),
        )

    def apply_down(self, allocation: Allocation) -> Allocation:
        """The allocation if nothing came up: what a failed shift leaves."""
        return Allocation(
            allocation.active - set(self.down_replicas), allocation.training_holds and not self.training_down
        )


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """One candidate as it was judged. Throughputs in tokens/s after the shift, benefit in tokens."""

    up_replicas: tuple[ReplicaId, ...]
    down_replicas: tuple[ReplicaId, ...]
    training_down: bool
    penalty_tokens: float
    rollout_tokens_per_s: float
    reward_tokens_per_s: float
    tokens_per_s: float
    benefit_tokens: float
    is_chosen: bool = False
    refusal: str = ""
    """Why it could not be chosen whatever its benefit; empty if it could."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A decision and why, also when it is to leave everything as it is."""

    at_s: float
    reason: str
    """One line for people."""
    up_role: Role | None = None
    plan: ShiftPlan | None = None
    current_tokens_per_s: float = 0.0
    candidates: tuple[CandidateRecord, ...] = ()


# Events


@dataclass(frozen=True, slots=True)
class WorkloadObserved:
    """monitor → planner: time to decide."""

    state: WorkloadState


@dataclass(frozen=True, slots=True)
class ShiftStarted:
    """executor → planner: the plan is being carried out."""

    plan_id: str


@dataclass(frozen=True, slots=True)
class ShiftCompleted:
    """executor → planner: everything is up; how long each half took."""

    plan_id: str
    duration_s: ShiftSeconds


@dataclass(frozen=True, slots=True)
class ShiftFailed:
    """executor → planner: rolled back. Without an `allocation`, what left is gone and nothing came up."""

    plan_id: str
    reason: str
    allocation: Allocation | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """Decide nothing until Resumed. A shift under way goes on."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Decide again, from the next observation on."""


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """From the next decision on."""

    config: PlannerConfig


@dataclass(frozen=True, slots=True)
class ManualShiftRequested:
    """A person wants these replicas (or training, for Role.TRAINING) up. Obeyed also while paused.

    Who must leave follows from the devices. With `dry_run` the record says what would be done.
    """

    up_role: Role
    up_replicas: tuple[ReplicaId, ...] = ()
    dry_run: bool = False


PlannerEvent = (
    WorkloadObserved
    | ShiftStarted
    | ShiftCompleted
    | ShiftFailed
    | Paused
    | Resumed
    | ConfigChanged
    | ManualShiftRequested
)


# Effects


@dataclass(frozen=True, slots=True)
class ExecuteShift:
    """Carry the plan out and report ShiftCompleted or ShiftFailed. There is never a second one meanwhile."""

    plan: ShiftPlan


@dataclass(frozen=True, slots=True)
class PlanRecorded:
    """Keep and publish the record."""

    record: PlanRecord


PlannerEffect = ExecuteShift | PlanRecorded
