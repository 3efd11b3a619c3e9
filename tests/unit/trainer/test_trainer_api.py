"""The trainer's REST routes, over the app that serves them."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.trainer.api import trainer_router
from services.trainer.rank_group import RankGroup
from services.trainer.service import TrainerService
from shared.bus.memory_bus import MemoryBus
from shared.contracts.subjects import Subjects
from shared.runtime.checkpoints import Checkpoint, Checkpoints
from shared.runtime.clock import SystemClock
from shared.runtime.config import RunConfig
from shared.runtime.http import make_app
from shared.runtime.journal import Journal
from shared.runtime.run_folder import RunFolder
from shared.weights.gps_client import GpsClient

TOKEN = "secret"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    checkpoints = Checkpoints(folder.checkpoints)
    checkpoints.commit(Checkpoint(3, "step-000003"))
    config = RunConfig.model_validate({"models": {"policy": "p", "genrm": "g"}})
    bus, subjects, clock = MemoryBus(), Subjects("test"), SystemClock()
    ranks = RankGroup(2, bus, subjects, clock)

    async def gps_version() -> int:
        return 3

    journal = Journal(folder.journal / "trainer.jsonl")
    service = TrainerService(config, ranks, checkpoints, journal, gps_version, bus, subjects, clock)
    gps = GpsClient("http://gps", token=TOKEN)
    router = trainer_router(service, ranks.phases, gps, folder, tmp_path)
    app = make_app("trainer", token=TOKEN, routers=[router], ready=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://trainer") as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client
    await gps.close()
    journal.close()


async def test_status_says_what_training_does(client: httpx.AsyncClient) -> None:
    status = (await client.get("/v1/status")).json()
    assert (status["activity"], status["needed"], status["paused"]) == ("starting", 16, False)
    assert status["ranks"] == {}


async def test_pause_and_resume(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/pause")).json() == {"paused": True}
    assert (await client.get("/v1/status")).json()["paused"]
    assert (await client.post("/v1/resume")).json() == {"paused": False}


async def test_the_newest_checkpoint(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/checkpoints")).json() == {"step": 3, "tag": "step-000003"}


async def test_an_export_stays_in_the_run_folder(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/export", json={"name": "../../elsewhere"})
    assert answer.status_code == 400
    assert "outside the run folder" in answer.json()["message"]


async def test_commands_need_the_token(client: httpx.AsyncClient) -> None:
    del client.headers["Authorization"]
    assert (await client.post("/v1/pause")).status_code == 401
