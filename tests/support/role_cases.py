"""What tests of the role shell share: two replicas of one role, and names of sequences."""

import pytest

from shared.ids import ReplicaId, Role
from shared.inference import role_times
from tests.support.cluster import SimulatedCluster

ROLLOUT = Role.ROLLOUT
R0, R1 = ReplicaId("rollout-0"), ReplicaId("rollout-1")


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The role shell's waits, the same but shorter."""
    for name, seconds in (
        ("SILENCE_S", 0.6),
        ("DEATH_S", 3.0),
        ("HEALTH_INTERVAL_S", 0.1),
        ("PING_DEADLINE_S", 0.3),
        ("SHIFT_MARGIN_S", 0.2),
    ):
        monkeypatch.setattr(role_times, name, seconds)


def ids(count: int) -> list[str]:
    """Sequence ids of that many prompts."""
    return [f"{i:08d}.00" for i in range(count)]


async def running(house: SimulatedCluster, *sequence_ids: str, tokens: int = 5) -> None:
    """Until each of them has some tokens."""
    records = house.shells[ROLLOUT].records
    await house.until(lambda: all(s in records and records[s].num_tokens >= tokens for s in sequence_ids))
