"""A cluster in this process, of two rollout replicas, whose waits are short."""

from collections.abc import AsyncIterator

import pytest

from shared.inference import role_times
from tests.support.cluster import SimulatedCluster
from tests.support.role_cases import ROLLOUT


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, shorter."""
    for name, seconds in (
        ("SILENCE_S", 0.6),
        ("DEATH_S", 3.0),
        ("HEALTH_INTERVAL_S", 0.1),
        ("PING_DEADLINE_S", 0.3),
        ("SHIFT_MARGIN_S", 0.2),
    ):
        monkeypatch.setattr(role_times, name, seconds)


@pytest.fixture
async def house(impatient: None) -> AsyncIterator[SimulatedCluster]:
    async with SimulatedCluster(roles=(ROLLOUT,)) as made:
        yield made
