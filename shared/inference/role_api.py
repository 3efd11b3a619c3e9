"""REST that rollout and reward share."""

from typing import Any

from fastapi import APIRouter

from shared.inference.role import RoleShell


def role_router(shell: RoleShell) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=[shell.role.value])

    @router.get("/replicas")
    async def replicas() -> list[dict[str, object]]:
        """Every replica: whether it serves, and its last telemetry."""
        return shell.describe_replicas()

    @router.get("/queue")
    async def queue() -> dict[str, Any]:
        """Waiting lengths in dispatch order, the load of each replica, the scheduler's gauges."""
        load = shell.scheduler.load()
        outstanding, issued, finished, blocked_on = shell.describe()
        return {
            "waiting_lengths": load.queue,
            "replicas": [
                {"replica_id": r.replica, "num_sequences": r.num_sequences, "num_tokens": r.num_tokens}
                for r in load.replicas
            ],
            "outstanding": outstanding,
            "issued_total": issued,
            "finished_total": finished,
            "blocked_on": blocked_on,
            "gauges": shell.scheduler.gauges(),
        }

    @router.get("/sequences/{sequence_id}")
    async def sequence(sequence_id: str) -> dict[str, object]:
        """Where one sequence is, and how far."""
        return shell.describe_sequence(sequence_id)

    return router
