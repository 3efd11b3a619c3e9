"""Produced by the planner service: plans, shift events, and the executor's commands to the role services."""

from typing import Any, Literal

from pydantic import Field

from shared.contracts.base import Message
from shared.ids import Role

ShiftPhase = Literal["started", "step_done", "completed", "failed"]


class PlanPublished(Message):
    """planner → anyone (stream `SHIFTS`): one decision with every candidate, so that it can be explained."""

    plan_id: str
    now_s: float
    chosen: bool
    reason: str
    up_role: Role | None
    record: dict[str, Any]

    def summary(self) -> str:
        return f"{self.plan_id}: {self.reason}"


class ShiftEvent(Message):
    """planner → anyone (stream `SHIFTS`): a shift transaction as it proceeds."""

    shift_id: str
    phase: ShiftPhase
    now_s: float
    up_role: Role
    up_replicas: tuple[str, ...] = ()
    down_replicas: tuple[str, ...] = ()
    training_up: bool = False
    training_down: bool = False
    devices: tuple[int, ...] = ()
    detail: str = ""
    duration_s: float = 0.0
    freed_bytes: int = 0
    read_bytes: int = 0
    expected_gain_tokens_per_s: float = 0.0
    holders: dict[int, str] = Field(default_factory=dict)
    """Of each device once the shift is over, done or failed: a replica, `training`, or "" for nobody."""

    def summary(self) -> str:
        ups = ", ".join(self.up_replicas) or ("training" if self.training_up else "-")
        downs = ", ".join(self.down_replicas) or ("training" if self.training_down else "-")
        return f"{self.shift_id} {self.phase}: {downs} → {ups} {self.detail}".rstrip()


class ShiftDown(Message):
    """executor → role service or trainer: release the devices of these replicas (training: all of them)."""

    shift_id: str
    role: Role
    replicas: tuple[str, ...] = ()
    deadline_s: float

    def summary(self) -> str:
        return f"{self.shift_id}: {self.role.value} down {', '.join(self.replicas)}"


class ShiftUp(Message):
    """executor → role service or trainer: these replicas now own their devices: wake and serve."""

    shift_id: str
    role: Role
    replicas: tuple[str, ...] = ()
    deadline_s: float

    def summary(self) -> str:
        return f"{self.shift_id}: {self.role.value} up {', '.join(self.replicas)}"


class ShiftStepDone(Message):
    """role service or trainer → executor: measured outcome of one half of a shift."""

    duration_s: float
    freed_bytes: int = 0
    read_bytes: int = 0
    migrated_sequences: int = 0
    policy_version: int = 0
    failed_replicas: tuple[str, ...] = ()

    def summary(self) -> str:
        freed, read = self.freed_bytes / 2**20, self.read_bytes / 2**20
        return f"done in {self.duration_s:.2f} s, freed {freed:.0f} MiB, read {read:.0f} MiB"


class DeviceLease(Message):
    """planner → KV `device.<id>`: who owns a device. Written with compare-and-set, so never two owners."""

    device: int
    owner: str
    epoch: int

    def summary(self) -> str:
        return f"device {self.device}: {self.owner or 'free'} (epoch {self.epoch})"
