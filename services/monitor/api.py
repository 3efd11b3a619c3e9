"""REST of the monitor."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from services.monitor.service import MonitorService


def monitor_router(service: MonitorService, now_s: Callable[[], float]) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["monitor"])

    @router.get("/workload")
    async def workload() -> dict[str, Any]:
        """The workload state, who waits for whom, rows of the completed steps."""
        return service.describe()

    @router.get("/timeline")
    async def timeline() -> dict[str, Any]:
        """Owner of each device over time, tokens/s per role, shifts."""
        return {
            "spans": [asdict(span) for span in service.timeline.closed(now_s())],
            "throughput": service.timeline.throughput[-4000:],
            "shifts": [event.model_dump(mode="json") for event in service.timeline.shifts],
        }

    @router.post("/report")
    async def report() -> dict[str, str]:
        """Writes timeline.png and timeline.json into the run folder."""
        await asyncio.to_thread(service.write_report)
        return {"written": "timeline.png, timeline.json"}

    @router.get("/events")
    async def events() -> StreamingResponse:
        """Shifts and steps as server-sent events, the newest hundred first."""

        async def stream() -> AsyncIterator[str]:
            queue = service.listen()
            try:
                for event in list(service.events)[-100:]:
                    yield f"data: {json.dumps(event)}\n\n"
                while True:
                    try:
                        async with asyncio.timeout(15.0):
                            event = await queue.get()
                    except TimeoutError:
                        yield ": still here\n\n"
                    else:
                        yield f"data: {json.dumps(event)}\n\n"
            finally:
                service.unlisten(queue)

        return StreamingResponse(stream(), media_type="text/event-stream")

    return router
