"""REST of the planner."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from services.planner.service import PlannerService, plain
from shared.ids import Role


class ShiftRequest(BaseModel):
    """Bring `replicas` of `role` up (for training: nothing to name); who must leave follows from the
    devices."""

    role: Role
    replicas: tuple[str, ...] = ()
    dry_run: bool = False


def planner_router(service: PlannerService) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["planner"])

    @router.get("/allocation")
    async def allocation() -> dict[str, Any]:
        """Owner of every device, and the shift under way."""
        return await service.describe_allocation()

    @router.get("/plans")
    async def plans(limit: int = 50) -> dict[str, Any]:
        """The newest decisions with every candidate, and the last one whatever it was."""
        return {"last": service.last_decision, "plans": list(reversed(service.plans))[: max(0, limit)]}

    @router.get("/plans/{plan_id}")
    async def plan(plan_id: str) -> dict[str, Any]:
        """One decision, and what became of it."""
        return service.plan(plan_id)

    @router.get("/shifts")
    async def shifts(limit: int = 100) -> list[dict[str, Any]]:
        """Shift events, newest first."""
        return [event.model_dump(mode="json") for event in list(reversed(service.shifts))[: max(0, limit)]]

    @router.post("/shifts")
    async def shift(request: ShiftRequest) -> dict[str, Any]:
        """A manual shift; with `dry_run` only what it would do."""
        return await service.request_shift(request.role, request.replicas, request.dry_run)

    @router.post("/planner/pause")
    async def pause() -> dict[str, bool]:
        """Decide nothing until resumed. A shift under way goes on."""
        await service.pause(True)
        return {"paused": True}

    @router.post("/planner/resume")
    async def resume() -> dict[str, bool]:
        await service.pause(False)
        return {"paused": False}

    @router.patch("/planner/config")
    async def config(changes: dict[str, Any]) -> dict[str, Any]:
        """Changes settings of the running policy, for example `{"window_s": 30}`."""
        changed: dict[str, Any] = plain(await service.change(changes))
        return changed

    return router
