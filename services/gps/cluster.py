"""GPS on one of several nodes: what the router calls, and what the other nodes ask.

A Read is served here, from this node's shard and its peers'. A Write's bytes are put here by its writers;
the leader is asked to open it and told when they are in place, and brings them to every other holder.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.gps.checks import asked_bytes, checked_parts
from services.gps.holder import Holder
from services.gps.leader import Leader
from services.gps.local_writes import LocalWrites
from services.gps.members import Members
from services.gps.membership import group_of, leader, serving
from services.gps.receivers import Receivers
from services.gps.refill import Refill
from services.gps.view_plans import ViewPlans
from shared.contracts.gps import (
    ModelStatus,
    NodesStatus,
    NodeStatus,
    PolicyVersion,
    ReadGrant,
    ReadRequest,
    ReceiverRequest,
    ReceiverStatus,
    TransportStatus,
    WriteCommit,
    WriteGrant,
    WriteRequest,
    WriteStatus,
)
from shared.contracts.gps_cluster import (
    ClusterView,
    VersionCommit,
)
from shared.errors import NotFound, PivotError, told

POLICY = "policy"
_log = logging.getLogger("pivotrl.gps")


@dataclass(slots=True)
class ClusterService:
    """`publish` puts the policy's version on the bus; `transport` says what was chosen."""

    holder: Holder
    plans: ViewPlans
    receivers: Receivers
    members: Members
    refill: Refill
    leads: Leader
    writes: LocalWrites
    publish: Callable[[PolicyVersion], Awaitable[None]]
    transport: Callable[[], TransportStatus]
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _published: tuple[int, int] = (-1, -1)
    _num_reads: int = 0
    _num_commits: int = 0
    _num_lease_misses: int = 0

    def waits_for(self) -> str | None:
        """What readiness waits for; None once this node serves."""
        return self.members.waits_for

    # what the router calls

    def models(self) -> tuple[ModelStatus, ...]:
        store = self.holder.store
        return tuple(self.model(name) for name in sorted(self.holder.cluster.specs) if store.has(name))

    def model(self, name: str) -> ModelStatus:
        status = self.holder.store.status(name, self.holder.now_s())
        open_shard = self.holder.open.get(name)
        if open_shard is None:
            return status
        write = WriteStatus(
            write_id=open_shard.write_id,
            version=open_shard.version,
            committed=False,
            pending_writers=self.writes.writers_of(open_shard.write_id),
        )
        return status.model_copy(update={"open_write": write})

    async def read(self, request: ReadRequest) -> ReadGrant:
        """Raises NotFound, InvalidRequest; Conflict if `min_version` is not committed within `wait_s`, or no
        serving node holds a part; DeadlineExceeded, TransportError if the nodes that hold it fail."""
        now_s, store = self.holder.now_s, self.holder.store
        end_s = now_s() + request.wait_s
        model = store.model(request.model)
        parts = checked_parts(model.specs, request.boxes)
        while model.version < request.min_version and now_s() < end_s:
            await self._wait_change(end_s)
        store.check_read(request)
        grant = await self.receivers.read(request, parts, self.holder.cluster.config.copy_deadline_s)
        self._num_reads += 1
        return grant

    def release(self, lease_id: str) -> None:
        """Raises NotFound if the lease ran out."""
        if self.receivers.release(lease_id):
            return
        try:
            self.holder.store.release(lease_id, self.holder.now_s())
        except PivotError:
            self._num_lease_misses += 1
            raise
        self.changed()

    async def add_receiver(self, receiver: str, request: ReceiverRequest) -> ReceiverStatus:
        """Raises NotFound, InvalidRequest, ConfigError."""
        model = self.holder.store.model(request.model)
        parts = checked_parts(model.specs, request.boxes)
        nbytes = asked_bytes(model.specs, parts)
        view = await self.receivers.add(receiver, request.model, nbytes)
        return ReceiverStatus(receiver=receiver, model=request.model, nbytes=nbytes, view=view)

    async def remove_receiver(self, receiver: str) -> None:
        """Raises NotFound."""
        if not await self.receivers.remove(receiver):
            problem = f"no receiver {receiver} is registered on this node"
            raise NotFound(**told("receiver", problem, "Ask the node where it was registered"))

    async def begin_write(self, request: WriteRequest) -> WriteGrant:
        return await self.writes.begin(request)

    async def commit_write(self, write_id: str, commit: WriteCommit) -> WriteStatus:
        status = await self.writes.commit(write_id, commit)
        self._num_commits += status.committed
        return status

    async def write_status(self, write_id: str) -> WriteStatus:
        return await self.writes.status(write_id)

    async def abandon(self, write_id: str) -> None:
        await self.writes.abandon(write_id)

    def nodes(self) -> NodesStatus:
        cluster = self.holder.cluster
        groups = {node: index for index, group in enumerate(cluster.view.groups) for node in group}
        states = {member.node: member.state for member in cluster.view.members}
        addresses = dict(enumerate(cluster.config.nodes))
        return NodesStatus(
            node=cluster.node,
            epoch=cluster.view.epoch,
            group_size=cluster.view.group_size,
            leader=leader(cluster.view),
            is_cut_off=self.members.silence.is_cut_off(self.holder.now_s()),
            nodes=tuple(
                NodeStatus(
                    node=node,
                    state=states.get(node, "gone"),
                    group=groups.get(node, -1),
                    address=addresses.get(node, ""),
                )
                for node in sorted(groups.keys() | states.keys())
            ),
            transport=self.transport(),
            reseeded=tuple(f"{model}: {why}" for model, why in sorted(self.refill.reseeded.items())),
            waits_for=self.members.waits_for,
        )

    # waiting, and what others hear

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self, end_s: float) -> None:
        try:
            async with asyncio.timeout(max(end_s - self.holder.now_s(), 0.0)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def view_changed(self, old: ClusterView, new: ClusterView) -> None:
        """Plans, endpoints and Writes follow the nodes."""
        self.plans.moved(old, new)
        for node in set(serving(old)) - set(serving(new)):
            await self.holder.cluster.forget(node)
        await self.leads.nodes_changed()
        self.changed()

    async def commit_seen(self, commit: VersionCommit) -> None:
        """The record moved: flip at once if this node has sealed it, else the next beat fills."""
        if self.holder.flip(commit):
            await self.refill.record(commit.model)
        try:
            await self.publish_policy()
        except PivotError as error:  # the version is readable all the same; the next beat publishes it
            _log.warning("%s is not on the bus yet: %s", commit.summary(), error)

    async def publish_policy(self) -> None:
        """The leader tells everybody the policy's version, once per commit. Raises BusError."""
        cluster = self.holder.cluster
        commit = cluster.commits.get(POLICY)
        if commit is None or leader(cluster.view) != cluster.node or not group_of(cluster.view, cluster.node):
            return
        if self._published == (commit.lineage, commit.version):
            return
        version = PolicyVersion(
            model=POLICY,
            version=commit.version,
            layout_epoch=cluster.view.epoch,
            checksum=commit.checksum,
            source=commit.source,
        )
        await self.publish(version)
        self._published = (commit.lineage, commit.version)

    def gauges(self) -> dict[str, float]:
        """For `/metrics`."""
        statuses, cluster = self.models(), self.holder.cluster
        reads = self.receivers.reads
        return {
            "policy_version": next((s.version for s in statuses if s.model == POLICY), -1),
            "pool_bytes": self.holder.store.pool.used_bytes,
            "leases": sum(len(s.leases) for s in statuses) + len(self.receivers.leases()),
            "open_writes": sum(s.open_write is not None for s in statuses),
            "reads_total": self._num_reads,
            "commits_total": self._num_commits,
            "lease_misses_total": self._num_lease_misses,
            "plan_cache_hits_total": self.plans.cache.num_hits,
            "plan_cache_misses_total": self.plans.cache.num_misses,
            "layout_epoch": cluster.view.epoch,
            "serving_nodes": sum(m.state == "serving" for m in cluster.view.members),
            "pulled_bytes_total": reads.num_pulled_bytes,
            "pulled_ranges_total": reads.num_pulled_ranges,
            "reroutes_total": reads.num_reroutes,
            "receivers": self.receivers.num,
            "descriptor_lists": cluster.links.num_lists,
        }
