"""Produced by the monitor: the workload state the planner decides on."""

from shared.contracts.base import Message
from shared.contracts.trainer import TrainingActivity
from shared.ids import Role


class ReplicaWorkload(Message):
    """One active replica: `lengths` are resident tokens per running sequence."""

    replica_id: str
    lengths: tuple[int, ...]
    kv_capacity_tokens: int
    tokens_per_s: float
    step_latency_s: float


class RoleWorkload(Message):
    """One generating role."""

    role: Role
    replicas: tuple[ReplicaWorkload, ...]
    waiting_lengths: tuple[int, ...]
    outstanding: int
    blocked_on: str = ""
    mean_new_tokens: float = 0.0


class WorkloadPublished(Message):
    """monitor → planner, CLI; on change and 1 Hz."""

    now_s: float
    rollout: RoleWorkload
    reward: RoleWorkload
    training_activity: TrainingActivity
    training_holds_devices: bool
    batch_ready: bool
    collected: int
    needed: int
    step: int
    policy_version: int
    finished: bool = False
    ready: bool = True
    training_phase: str = ""

    def summary(self) -> str:
        parts = []
        for load in (self.rollout, self.reward):
            running = sum(len(r.lengths) for r in load.replicas)
            parts.append(
                f"{load.role.value} {running} running {len(load.waiting_lengths)} waiting "
                f"on {len(load.replicas)}"
            )
        return "; ".join(parts) + f"; training {self.training_activity} {self.collected}/{self.needed}"
