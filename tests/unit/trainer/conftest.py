import pytest

from services.trainer import service


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "START_OVER_PAUSE_S", 0.0)
