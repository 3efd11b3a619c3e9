"""REST of the reward service beyond what both roles have."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from services.reward.service import RewardService


class ScoreRequest(BaseModel):
    question: str = Field(max_length=200_000)
    response: str = Field(max_length=200_000)
    answer: str = Field("", max_length=20_000)


def reward_router(service: RewardService) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["reward"])

    @router.post("/score")
    async def score(request: ScoreRequest) -> dict[str, Any]:
        """Asks the GenRM about one response; `score` is null when it gives no verdict."""
        return await service.score(request.question, request.response, request.answer)

    @router.get("/transcripts")
    async def transcripts(limit: int = 20) -> list[dict[str, Any]]:
        """What the GenRM said last, newest first."""
        return list(reversed(service.transcripts))[: max(0, limit)]

    return router
