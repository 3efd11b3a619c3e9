"""Landing buffers of this node's receivers, and Reads into them.

A node that holds the whole model lends its own buffer. A node that holds a shard copies what it has, pulls
the rest from its peers, and lends the receiver's landing buffer: made and registered once, reused by every
Read, untouched while a lease holds it, and replaced once a pull into it was given up.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.gps.boxes import Part
from services.gps.checks import asked_bytes
from services.gps.holder import Holder
from services.gps.remote_reads import RemoteReads, Target
from services.gps.slices import copy_slices
from services.gps.versions import Lease
from services.gps.view_plans import split_by_place, without_repeats
from shared.contracts.gps import PoolView, ReadGrant, ReadRequest
from shared.errors import Conflict, InvalidRequest, PivotError, told
from shared.layout.tensor_layout import whole
from shared.weights.landing import Landing, check_name, make_landing

MAX_RECEIVERS = 1024


@dataclass(slots=True)
class Receiver:
    """`nbytes` are read. `held` is the (lineage, version, boxes) that the buffer has whole; None while it is
    filled."""

    nbytes: int
    landing: Landing
    target: Target
    view: PoolView
    lease: Lease | None = None
    is_busy: bool = False
    held: tuple[int, int, tuple[Part, ...]] | None = None


@dataclass(slots=True)
class Receivers:
    """Receivers by (name, model). `refresh` reads the view that stands."""

    holder: Holder
    reads: RemoteReads
    refresh: Callable[[], Awaitable[None]]
    _known: dict[tuple[str, str], Receiver] = field(default_factory=dict)

    @property
    def num(self) -> int:
        return len(self._known)

    async def add(self, receiver: str, model: str, nbytes: int) -> PoolView | None:
        """A landing buffer for `receiver`, which will Read `nbytes` of `model`. The same one if asked again;
        None if the node holds all of the model.

        Raises InvalidRequest for a name that cannot be used, ConfigError if there is no room.
        """
        check_name(receiver)
        if self.holder.packing(model).is_whole:
            return None
        if found := self._known.get((receiver, model)):
            return found.view
        if len(self._known) >= MAX_RECEIVERS:
            problem = f"{MAX_RECEIVERS} receivers are registered"
            raise Conflict(**told("receiver", problem, "Remove some with DELETE /v1/receivers/NAME"))
        landing, target, view = await self._land(receiver, model, nbytes)
        self._known[receiver, model] = Receiver(nbytes, landing, target, view)
        return view

    async def _land(self, receiver: str, model: str, nbytes: int) -> tuple[Landing, Target, PoolView]:
        """A new landing buffer. Raises ConfigError if there is no room."""
        canonical = self.holder.cluster.canonical(model)
        landing = make_landing(
            self.holder.run,
            self.holder.cluster.node,
            f"{model}-landing.{receiver}",
            canonical.nbytes,
            filled_bytes=nbytes,
            folder=self.holder.store.pool.folder,
        )
        self.holder.receivers[receiver, model] = landing
        await self.holder.register()
        target = Target(landing.region, landing.memory, canonical)
        return landing, target, canonical.view(str(landing.path))

    async def remove(self, receiver: str) -> int:
        """Forget the landing buffers of `receiver`; how many there were."""
        keys = [key for key in self._known if key[0] == receiver]
        for key in keys:
            del self._known[key]
            self.holder.receivers.pop(key).remove()
        await self.holder.register()
        return len(keys)

    async def read(self, request: ReadRequest, parts: tuple[Part, ...], deadline_s: float) -> ReadGrant:
        """Lend `parts` of the readable version. Raises what `Store.read` and `RemoteReads.pull` do, and
        InvalidRequest for a receiver that is not registered where one must be."""
        holder, store = self.holder, self.holder.store
        packing = holder.packing(request.model)
        specs = holder.cluster.specs[request.model]
        nbytes = asked_bytes(specs, parts)
        if packing.is_whole:
            granted = store.read(request, holder.now_s())
            return ReadGrant(
                model=request.model,
                version=granted.lease.version,
                lease_id=granted.lease.lease_id,
                view=granted.view,
                plan_id="local",
                nbytes=nbytes,
            )
        found = self._known.get((request.receiver, request.model))
        if found is None:
            raise InvalidRequest(
                "receiver",
                f"{request.receiver!r} has no landing buffer for {request.model} on {holder.cluster.name}",
                f"Register it once: PUT /v1/receivers/{request.receiver}",
            )
        if found.is_busy or (found.lease and found.lease.expires_s > holder.now_s()):
            remedy = "release the earlier Read first"
            raise Conflict(
                f"{request.receiver} is reading already. {remedy}", field="receiver", remedy=remedy
            )
        found.is_busy = True
        try:
            wanted = parts or tuple((name, whole(spec)) for name, spec in specs.items())
            plan_id = await self._fill(found, request, wanted, deadline_s)
        finally:
            found.is_busy = False
        assert found.held is not None
        lease = Lease(store.new_id(), request.receiver, found.held[1], holder.now_s() + request.lease_s)
        found.lease = lease
        return ReadGrant(
            model=request.model,
            version=lease.version,
            lease_id=lease.lease_id,
            view=found.view,
            plan_id=plan_id,
            nbytes=nbytes,
        )

    async def _fill(
        self, found: Receiver, request: ReadRequest, parts: tuple[Part, ...], deadline_s: float
    ) -> str:
        holder, store, model = self.holder, self.holder.store, request.model
        packing, canonical = holder.packing(model), holder.cluster.canonical(model)
        end_s = holder.now_s() + deadline_s
        here, away = split_by_place(packing, parts)

        async def target() -> Target:
            if found.target.is_torn:
                found.landing.remove()
                found.landing, found.target, found.view = await self._land(
                    request.receiver, model, found.nbytes
                )
            return found.target

        while True:
            own = store.read(
                request.model_copy(update={"lease_s": min(deadline_s * 2, store.max_lease_s)}),
                holder.now_s(),
            )
            version, lineage = own.lease.version, holder.lineages.get(model, 0)
            if found.held == (lineage, version, parts):
                store.release(own.lease.lease_id, holder.now_s())
                return "kept"
            found.held = None
            source = own.model.readable.region.memory
            try:
                left_s = max(end_s - holder.now_s(), 0.1)
                plan = await self.reads.pull(
                    model, version, lineage, request.receiver, without_repeats(away), target, left_s
                )
                into = (await target()).memory
                await asyncio.to_thread(copy_slices, packing, source, canonical, into, without_repeats(here))
            except Conflict as error:
                # peers flip a moment earlier or later than this node, and the view may be a beat old
                epoch, held = holder.cluster.view.epoch, (lineage, version)
                with contextlib.suppress(PivotError):  # what the Read ends with says more
                    await self.refresh()
                has_moved = (
                    error.data.get("field") == "version"
                    or holder.cluster.view.epoch != epoch
                    or (holder.lineages.get(model, 0), own.model.version) != held
                )
                if holder.now_s() >= end_s or not has_moved:
                    raise
                await asyncio.sleep(0.01)
                continue
            finally:
                store.release_quietly(own.lease.lease_id)
            found.held = (lineage, version, parts)
            return plan.plan_id if plan else "local"

    def release(self, lease_id: str) -> bool:
        """Whether this was the lease of a landing buffer, and it had not run out."""
        for found in self._known.values():
            if found.lease and found.lease.lease_id == lease_id:
                lease, found.lease = found.lease, None
                return lease.expires_s > self.holder.now_s()
        return False

    def leases(self) -> list[Lease]:
        now_s = self.holder.now_s()
        return [f.lease for f in self._known.values() if f.lease and f.lease.expires_s > now_s]
