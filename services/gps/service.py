"""GPS around its store: who waits for whom, what runs in a thread, and what goes on the bus.

    read           waits for `min_version` to be committed            woken by a commit
    begin_write    waits for readers of the spare buffer to leave     woken by a release, or by a lease's end
    commit_write   its checksums run in a thread; the last writer's call also checksums the whole version

A commit is answered when the version has flipped, whether or not the bus is there; what the bus did not take
is published again until it does.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from services.gps.checks import asked_bytes, checked_parts
from services.gps.manifest import Manifest, entry_of
from services.gps.plans import Plans
from services.gps.seeding import Seed as Seed
from services.gps.seeding import Seeding
from services.gps.store import Store
from services.gps.versions import Seal
from shared.contracts.gps import (
    ModelStatus,
    NodesStatus,
    NodeStatus,
    PolicyVersion,
    ReadGrant,
    ReadRequest,
    ReceiverRequest,
    ReceiverStatus,
    WriteCommit,
    WriteGrant,
    WriteRequest,
    WriteStatus,
)
from shared.errors import NotFound, PivotError, told

POLICY, GENRM = "policy", "genrm"
Publish = Callable[[PolicyVersion], Awaitable[None]]
_PUBLISH_RETRY_S = 1.0
_log = logging.getLogger("pivotrl.gps")


class GpsService:
    """`publish` puts the policy's version on the bus; `now_s` is the process's clock."""

    def __init__(
        self,
        store: Store,
        plans: Plans,
        publish: Publish,
        now_s: Callable[[], float],
        manifest: Manifest | None = None,
    ) -> None:
        self.store, self.plans = store, plans
        self._publish, self._now_s, self._manifest = publish, now_s, manifest
        self._changed = asyncio.Event()
        self._unpublished: PolicyVersion | None = None
        self._must_publish = asyncio.Event()
        self._sealing: set[asyncio.Task[WriteStatus]] = set()
        self._on_record, self._on_bus = asyncio.Lock(), asyncio.Lock()
        self._seeding = Seeding(store, manifest, self._became_readable)
        self._num_reads = self._num_commits = self._num_lease_misses = 0

    # start

    async def seed_all(self, seeds: Sequence[Seed]) -> None:
        """Fill the pool with models from Hugging Face folders, or find them as an earlier life left them.

        Raises ConfigError: a folder is no checkpoint, or buffers do not fit.
        """
        await self._seeding.seed_all(seeds)

    def waits_for(self) -> str | None:
        """What readiness waits for; None once it is ready."""
        return self._seeding.waits_for

    # what the router calls

    def models(self) -> tuple[ModelStatus, ...]:
        return self.store.models(self._now_s())

    def model(self, name: str) -> ModelStatus:
        return self.store.status(name, self._now_s())

    def nodes(self) -> NodesStatus:
        return NodesStatus(
            node=0,
            epoch=self.plans.layout_epoch,
            group_size=1,
            leader=0,
            is_cut_off=False,
            nodes=(NodeStatus(node=0, state="joining" if self.waits_for() else "serving", group=0),),
            waits_for=self.waits_for(),
        )

    async def add_receiver(self, receiver: str, request: ReceiverRequest) -> ReceiverStatus:
        """Nothing to do: this node holds everything. Raises NotFound, InvalidRequest."""
        model = self.store.model(request.model)
        nbytes = asked_bytes(model.specs, checked_parts(model.specs, request.boxes))
        return ReceiverStatus(receiver=receiver, model=request.model, nbytes=nbytes)

    async def remove_receiver(self, receiver: str) -> None:
        problem = f"no receiver {receiver} is registered: a node alone needs none"
        raise NotFound(**told("receiver", problem, "Read without registering"))

    async def read(self, request: ReadRequest) -> ReadGrant:
        """Raises NotFound, InvalidRequest; Conflict if `min_version` is not committed within `wait_s`."""
        end_s = self._now_s() + request.wait_s
        model = self.store.model(request.model)
        parts = checked_parts(model.specs, request.boxes)
        while model.version < request.min_version and self._now_s() < end_s:
            await self._wait_change(end_s)
        plan = await self.plans.for_read(model.name, model.specs, request.receiver, parts)
        granted = self.store.read(request, self._now_s())
        self._num_reads += 1
        return ReadGrant(
            model=model.name,
            version=granted.lease.version,
            lease_id=granted.lease.lease_id,
            view=granted.view,
            plan_id=plan.plan_id,
            nbytes=asked_bytes(model.specs, parts),
        )

    def release(self, lease_id: str) -> None:
        """Raises NotFound if the lease ran out."""
        try:
            self.store.release(lease_id, self._now_s())
        except PivotError:
            self._num_lease_misses += 1
            raise
        self._wake()

    async def begin_write(self, request: WriteRequest) -> WriteGrant:
        """Raises NotFound, InvalidRequest; Conflict on the version, or if readers stay for `wait_s`."""
        end_s = self._now_s() + request.wait_s
        while True:
            self.store.check_write(request)
            leave_s = self.store.readers_leave_s(request.model, self._now_s())
            if leave_s is None or self._now_s() >= end_s:
                async with self._on_record:  # the spare may be what the manifest still names
                    return self.store.begin_write(request, self._now_s())
            await self._wait_change(min(end_s, leave_s))

    async def commit_write(self, write_id: str, commit: WriteCommit) -> WriteStatus:
        """Raises NotFound, InvalidRequest naming the checksum that differs, Conflict."""
        verification = self.store.start_commit(write_id, commit)
        if isinstance(verification, WriteStatus):
            return verification
        problem = await asyncio.to_thread(verification.problem)
        outcome = self.store.finish_commit(verification, problem)
        if isinstance(outcome, WriteStatus):
            return outcome
        # the caller may hang up while its version is sealed; the version flips all the same
        sealing = asyncio.create_task(self._seal(outcome, commit.writer))
        self._sealing.add(sealing)
        sealing.add_done_callback(self._sealing.discard)
        return await asyncio.shield(sealing)

    async def _seal(self, seal: Seal, source: str) -> WriteStatus:
        checksum = None
        try:
            checksum = await asyncio.to_thread(seal.checksum)
        finally:
            status = self.store.finish_seal(seal, checksum)
        self._num_commits += 1
        await self._became_readable(seal.write.model, source)
        return status

    async def write_status(self, write_id: str) -> WriteStatus:
        return self.store.write_status(write_id)

    async def abandon(self, write_id: str) -> None:
        self.store.abandon(write_id)
        self._wake()

    # waiting

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self, end_s: float) -> None:
        """Until something was released or committed, or `end_s` came."""
        left_s = max(end_s - self._now_s(), 0.0)
        try:
            async with asyncio.timeout(left_s):
                await self._changed.wait()
        except TimeoutError:
            return

    # what others hear

    async def _became_readable(self, name: str, source: str) -> None:
        self._wake()
        if self._manifest is not None:
            async with self._on_record:
                try:
                    await asyncio.to_thread(self._manifest.put, entry_of(self.store.model(name)))
                except OSError as error:  # the version is readable all the same
                    _log.error("a restarted GPS will not find %s: %s", name, error)
        model = self.store.model(name)
        if name == POLICY:
            self._unpublished = PolicyVersion(
                model=name,
                version=model.version,
                layout_epoch=self.plans.layout_epoch,
                checksum=model.checksum,
                source=source,
            )
            await self._publish_now()

    async def _publish_now(self) -> None:
        async with self._on_bus:  # an older version never overtakes a newer one
            message = self._unpublished
            if message is None:
                return
            try:
                await self._publish(message)
            except PivotError as error:
                _log.warning("%s is not on the bus yet: %s", message.summary(), error)
                self._must_publish.set()
                return
            if self._unpublished is message:
                self._unpublished = None

    async def publish_for_ever(self) -> None:
        """Publish again what the bus did not take. A task of the process."""
        while True:
            await self._must_publish.wait()
            self._must_publish.clear()
            await asyncio.sleep(_PUBLISH_RETRY_S)
            await self._publish_now()

    def gauges(self) -> dict[str, float]:
        """For `/metrics`."""
        statuses = self.models()
        policy = next((s.version for s in statuses if s.model == POLICY), -1)
        return {
            "policy_version": policy,
            "pool_bytes": self.store.pool.used_bytes,
            "leases": sum(len(s.leases) for s in statuses),
            "open_writes": sum(s.open_write is not None for s in statuses),
            "reads_total": self._num_reads,
            "commits_total": self._num_commits,
            "lease_misses_total": self._num_lease_misses,
            "plan_cache_hits_total": self.plans.cache.num_hits,
            "plan_cache_misses_total": self.plans.cache.num_misses,
        }
