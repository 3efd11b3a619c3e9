"""Produced by a role service (rollout or reward): what waits, what is awake."""

from shared.contracts.base import Message
from shared.ids import Role


class ReplicaQueue(Message):
    """What the role's scheduler has put on one serving replica: `lengths` are tokens per sequence,
    ascending."""

    replica_id: str
    lengths: tuple[int, ...]
    kv_capacity_tokens: int


class RoleQueue(Message):
    """role service → monitor, planner, 4 Hz: lengths (prompt + generated tokens) of waiting sequences, and
    the load of each serving replica as the scheduler knows it (ahead of telemetry by what is on its way).

    `outstanding` counts samples this role has accepted and not yet handed on, whatever their place.
    """

    role: Role
    waiting_lengths: tuple[int, ...]
    active_replicas: tuple[str, ...]
    shifting_replicas: tuple[str, ...]
    outstanding: int
    issued_total: int
    finished_total: int
    blocked_on: str = ""
    replicas: tuple[ReplicaQueue, ...] = ()
    mean_new_tokens: float = 0.0
    """Moving average of what finished sequences have generated; 0 while unknown."""

    def summary(self) -> str:
        active = ", ".join(self.active_replicas) or "-"
        return f"{self.role.value}: {len(self.waiting_lengths)} waiting, active {active}"
