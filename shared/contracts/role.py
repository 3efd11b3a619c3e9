"""Produced by a role service (rollout or reward): what waits, what is awake."""

from shared.contracts.base import Message
from shared.ids import Role


class RoleQueue(Message):
    """role service → monitor: lengths (prompt + generated tokens) of waiting sequences, and which replicas serve.

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

    def summary(self) -> str:
        return f"{self.role.value}: {len(self.waiting_lengths)} waiting, active {', '.join(self.active_replicas) or '-'}"
