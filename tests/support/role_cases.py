"""What tests of the role shell share: two replicas of one role, and names of sequences."""

from shared.ids import ReplicaId, Role
from tests.support.cluster import SimulatedCluster

ROLLOUT = Role.ROLLOUT
R0, R1 = ReplicaId("rollout-0"), ReplicaId("rollout-1")


def ids(count: int) -> list[str]:
    """Sequence ids of that many prompts."""
    return [f"{i:08d}.00" for i in range(count)]


async def running(house: SimulatedCluster, *sequence_ids: str, tokens: int = 5) -> None:
    """Until each of them has some tokens."""
    records = house.shells[ROLLOUT].records
    await house.until(lambda: all(s in records and records[s].num_tokens >= tokens for s in sequence_ids))
