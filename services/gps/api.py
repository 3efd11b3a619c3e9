"""GPS over HTTP. Every error is `{code, message, data}`; `data.field` names what was wrong."""

from typing import Any, Protocol

from fastapi import APIRouter

from services.gps.loads import load_version
from shared.contracts.base import Message
from shared.contracts.gps import (
    LoadRequest,
    ModelStatus,
    NodesStatus,
    ReadGrant,
    ReadRequest,
    ReceiverRequest,
    ReceiverStatus,
    WriteCommit,
    WriteGrant,
    WriteRequest,
    WriteStatus,
)
from shared.errors import NotFound, told
from shared.layout.transfer_plan import PlanCache, PlanKey, TransferPlan
from shared.runtime.config import DTYPE
from shared.runtime.run_folder import RunFolder


class LinkBytes(Message):
    sender: str
    receiver: str
    nbytes: int


class PlanSummaryView(Message):
    """A cached plan in short. `balance` is mean / largest load of the senders; 1 is perfect."""

    plan_id: str
    operation: str
    model: str
    layout_epoch: int
    receivers: tuple[str, ...]
    num_transfers: int
    total_bytes: int
    makespan_s: float
    lower_bound_s: float
    balance: float


class PlanView(PlanSummaryView):
    """A cached plan: which link carries how much, and how busy each sender is."""

    links: tuple[LinkBytes, ...]
    load_s_per_sender: dict[str, float]


class CachedPlans(Protocol):
    """Where plans are kept."""

    @property
    def cache(self) -> PlanCache: ...


class Gps(Protocol):
    """GPS of one node, alone or among several."""

    @property
    def plans(self) -> CachedPlans: ...

    def models(self) -> tuple[ModelStatus, ...]: ...

    def model(self, name: str) -> ModelStatus: ...

    def nodes(self) -> NodesStatus: ...

    async def read(self, request: ReadRequest) -> ReadGrant: ...

    def release(self, lease_id: str) -> None: ...

    async def add_receiver(self, receiver: str, request: ReceiverRequest) -> ReceiverStatus: ...

    async def remove_receiver(self, receiver: str) -> None: ...

    async def begin_write(self, request: WriteRequest) -> WriteGrant: ...

    async def write_status(self, write_id: str) -> WriteStatus: ...

    async def commit_write(self, write_id: str, commit: WriteCommit) -> WriteStatus: ...

    async def abandon(self, write_id: str) -> None: ...


def gps_router(service: Gps, folder: RunFolder) -> APIRouter:
    """The routes of `/v1`. Mutating ones are guarded by the app's bearer token; paths lie under `folder`."""
    router = APIRouter(prefix="/v1", tags=["gps"])

    @router.get("/models")
    async def models() -> tuple[ModelStatus, ...]:
        """What the host pool holds."""
        return service.models()

    @router.get("/models/{model}")
    async def model(model: str) -> ModelStatus:
        """One model. 404 for an unknown one."""
        return service.model(model)

    @router.get("/nodes")
    async def nodes() -> NodesStatus:
        """The nodes of parameter storage, and what carries parameters between them."""
        return service.nodes()

    @router.post("/models/{model}/load")
    async def load(model: str, request: LoadRequest) -> WriteStatus:
        """Make the next version from a Hugging Face folder under the run folder. 400 for a path outside."""
        return await load_version(service, folder, model, request.path, DTYPE)

    @router.put("/receivers/{receiver}")
    async def add_receiver(receiver: str, request: ReceiverRequest) -> ReceiverStatus:
        """A landing buffer for a receiver on a node that holds only a shard. The same one if asked again."""
        return await service.add_receiver(receiver, request)

    @router.delete("/receivers/{receiver}", status_code=204)
    async def remove_receiver(receiver: str) -> None:
        """Forget its landing buffers. 404 if it has none."""
        await service.remove_receiver(receiver)

    @router.post("/read")
    async def read(request: ReadRequest) -> ReadGrant:
        """Read(M, G, P) for one receiver: a lease on the readable version. 409 if `min_version` is not
        there."""
        return await service.read(request)

    @router.delete("/read/{lease_id}", status_code=204)
    async def release(lease_id: str) -> None:
        """End a lease. 404 if it ran out: what was read may be torn."""
        service.release(lease_id)

    @router.post("/writes")
    async def begin_write(request: WriteRequest) -> WriteGrant:
        """Write(M, G, P) of one writer: the spare buffer. 409 for a version that is not newer, or readers
        that stay."""
        return await service.begin_write(request)

    @router.get("/writes/{write_id}")
    async def write_status(write_id: str) -> WriteStatus:
        """Who is still to commit. 404 if it was abandoned or replaced."""
        return await service.write_status(write_id)

    @router.post("/writes/{write_id}/commit")
    async def commit_write(write_id: str, commit: WriteCommit) -> WriteStatus:
        """This writer's bytes are in place; the last one flips the version. 400 if a checksum differs."""
        return await service.commit_write(write_id, commit)

    @router.delete("/writes/{write_id}", status_code=204)
    async def abandon_write(write_id: str) -> None:
        """Give a Write up; the readable version stays."""
        await service.abandon(write_id)

    @router.get("/transfer-plans")
    async def plans() -> tuple[PlanSummaryView, ...]:
        """Cached plans, the latest used last."""
        return tuple(PlanSummaryView(**_summary(key, plan)) for key, plan in service.plans.cache.plans())

    @router.get("/transfer-plans/{plan_id}")
    async def plan(plan_id: str) -> PlanView:
        """One cached plan. 404 if it was dropped."""
        found = service.plans.cache.find(plan_id)
        if found is None:
            remedy = "See GET /v1/transfer-plans"
            raise NotFound(**told("plan_id", f"no cached transfer plan {plan_id}", remedy, plan_id=plan_id))
        explained = found[1].explain()
        links = tuple(
            LinkBytes(sender=sender, receiver=receiver, nbytes=nbytes)
            for (sender, receiver), nbytes in explained.bytes_per_link.items()
        )
        return PlanView(**_summary(*found), links=links, load_s_per_sender=dict(explained.load_s_per_sender))

    return router


def _summary(key: PlanKey, plan: TransferPlan) -> dict[str, Any]:
    explained = plan.explain()
    return {
        "plan_id": key.plan_id,
        "operation": key.operation,
        "model": key.model,
        "layout_epoch": key.layout_epoch,
        "receivers": key.receivers,
        "num_transfers": explained.num_transfers,
        "total_bytes": explained.total_bytes,
        "makespan_s": explained.makespan_s,
        "lower_bound_s": explained.lower_bound_s,
        "balance": explained.balance,
    }
