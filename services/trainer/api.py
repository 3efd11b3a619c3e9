"""REST of the trainer."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from services.trainer.service import TrainerService
from shared.contracts.gps import ReadRequest
from shared.runtime.run_folder import RunFolder
from shared.weights.export import export_model
from shared.weights.gps_client import GpsClient


class ExportRequest(BaseModel):
    """`name` is a folder under the run folder."""

    name: str = "export"


def trainer_router(
    service: TrainerService, phases: Any, gps: GpsClient, folder: RunFolder, model_folder: Path
) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["trainer"])

    @router.get("/status")
    async def status() -> dict[str, Any]:
        """Step, activity, what is collected, what each rank does."""
        return {**service.telemetry().model_dump(mode="json"), "ranks": phases(), "paused": service.paused}

    @router.post("/checkpoints")
    async def checkpoints() -> dict[str, Any]:
        """The checkpoint a restart would continue from (one is saved with every step)."""
        latest = await service.save_checkpoint()
        return {"step": latest.step, "tag": latest.tag}

    @router.post("/export")
    async def export(request: ExportRequest) -> dict[str, Any]:
        """Writes the newest policy as a Hugging Face folder. Reads GPS, so training need not hold devices."""
        out = folder.inside(request.name)
        async with gps.read(ReadRequest(model="policy", receiver="export")) as grant:
            nbytes = await export_model(grant.view, model_folder, out)
            return {"folder": str(out), "policy_version": grant.version, "nbytes": nbytes}

    @router.post("/pause")
    async def pause() -> dict[str, bool]:
        """Start no further step; the one running ends."""
        service.set_paused(True)
        return {"paused": True}

    @router.post("/resume")
    async def resume() -> dict[str, bool]:
        service.set_paused(False)
        return {"paused": False}

    return router
