"""A cluster in this process, of two rollout replicas, whose waits are short."""

from collections.abc import AsyncIterator

import pytest

from tests.support.cluster import SimulatedCluster
from tests.support.role_cases import ROLLOUT, shorten_waits


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


@pytest.fixture
async def house(impatient: None) -> AsyncIterator[SimulatedCluster]:
    async with SimulatedCluster(roles=(ROLLOUT,)) as made:
        yield made
