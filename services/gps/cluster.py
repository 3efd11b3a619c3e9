"""GPS on one of several nodes: what the router calls, and what the other nodes ask.

A Read is served here, from this node's shard and its peers'. A Write's bytes are put here by its writers;
the leader is asked to open it and told when they are in place, and brings them to every other holder.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from services.gps.boxes import Part, count_bytes
from services.gps.checks import checked_cover, checked_parts
from services.gps.holder import Holder
from services.gps.leader import Leader
from services.gps.members import Members
from services.gps.membership import group_of, leader, serving
from services.gps.receivers import Receivers
from services.gps.refill import Refill
from services.gps.versions import OpenWrite, Verification, WriterPart
from services.gps.view_plans import ViewPlans
from shared.contracts.base import Done, Message
from shared.contracts.gps import (
    ModelStatus,
    NodesStatus,
    NodeStatus,
    PolicyVersion,
    PoolView,
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
    AbortWrite,
    BeginWrite,
    ClusterView,
    QueryWrite,
    VersionCommit,
    WriteBegun,
    WriterDone,
)
from shared.errors import Conflict, InvalidRequest, NotFound, PivotError, told

POLICY = "policy"
R = TypeVar("R", bound=Message)
_log = logging.getLogger("pivotrl.gps")


@dataclass(slots=True)
class _LocalWrite:
    """Writers of an open Write that copy to this node."""

    request: WriteRequest
    leader: int
    parts: dict[str, WriterPart] = field(default_factory=dict)


@dataclass(slots=True)
class ClusterService:
    """`publish` puts the policy's version on the bus; `transport` says what was chosen."""

    holder: Holder
    plans: ViewPlans
    receivers: Receivers
    members: Members
    refill: Refill
    leads: Leader
    publish: Callable[[PolicyVersion], Awaitable[None]]
    transport: Callable[[], TransportStatus]
    _writes: dict[str, _LocalWrite] = field(default_factory=dict)
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
        mine = self._writes.get(open_shard.write_id) if open_shard else None
        if open_shard is None:
            return status
        write = WriteStatus(
            write_id=open_shard.write_id,
            version=open_shard.version,
            committed=False,
            pending_writers=mine.request.writers if mine else (),
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
        nbytes = count_bytes(model.specs, parts) if parts else sum(s.nbytes for s in model.specs.values())
        view = await self.receivers.add(receiver, request.model, nbytes)
        return ReceiverStatus(receiver=receiver, model=request.model, nbytes=nbytes, view=view)

    async def remove_receiver(self, receiver: str) -> None:
        """Raises NotFound."""
        if not await self.receivers.remove(receiver):
            problem = f"no receiver {receiver} is registered on this node"
            raise NotFound(**told("receiver", problem, "Ask the node where it was registered"))

    async def begin_write(self, request: WriteRequest) -> WriteGrant:
        """Raises NotFound, InvalidRequest; Conflict on the version, or if readers stay; DeadlineExceeded,
        BusError if the cluster cannot be reached."""
        cluster, holder = self.holder.cluster, self.holder
        model = holder.store.model(request.model)
        part = holder.store.check_write(request)
        if len(request.writers) == 1:  # before a Write is opened; with more, the last to join is checked
            checked_cover(model.specs, part.parts)
        begun, coordinator = await self._of_leader(
            "begin",
            BeginWrite(node=cluster.node, request=request),
            WriteBegun,
            request.wait_s + 2 * cluster.config.control_deadline_s,
        )
        path, memory = holder.staging(request.model, begun.write_id)
        for old in [write_id for write_id in self._writes if not holder.has_open(write_id)]:
            del self._writes[old]
        mine = self._writes.setdefault(begun.write_id, _LocalWrite(request, coordinator))
        mine.parts[request.writer] = part
        view = PoolView(path=path, nbytes=memory.nbytes, tensors=cluster.canonical(request.model).tensors)
        return WriteGrant(write_id=begun.write_id, model=request.model, version=begun.version, view=view)

    async def commit_write(self, write_id: str, commit: WriteCommit) -> WriteStatus:
        """Raises NotFound, InvalidRequest naming the checksum that differs, Conflict; and what a Write over
        several nodes can end with."""
        if status := self._committed(write_id):
            return status
        mine = self._writes.get(write_id)
        if mine is None or not self.holder.has_open(write_id):
            raise self._gone(write_id)
        config, request = self.holder.cluster.config, mine.request
        if commit.writer not in request.writers:
            raise InvalidRequest(
                "writer",
                f"{commit.writer!r} is none of the writers {list(request.writers)}",
                "Commit as the writer that began the Write",
            )
        part = mine.parts.get(commit.writer)
        if part is None:
            problem = f"{commit.writer} did not begin Write {write_id} here"
            raise Conflict(**told("writer", problem, "Begin the Write at this node first", write_id=write_id))
        if len(commit.checksums) != len(part.parts):
            raise InvalidRequest(
                "checksums",
                f"{len(commit.checksums)} checksums for {len(part.parts)} boxes",
                "Send one per box, in the order of the boxes",
            )
        await self._verify(write_id, mine, commit, part.parts)
        status = await self._of_coordinator(
            write_id,
            "done",
            WriterDone(write_id=write_id, writer=commit.writer, node=self.holder.cluster.node),
            WriteStatus,
            4 * config.copy_deadline_s,
        )
        self._num_commits += status.committed
        return status

    async def _verify(
        self, write_id: str, mine: _LocalWrite, commit: WriteCommit, parts: tuple[Part, ...]
    ) -> None:
        request, holder = mine.request, self.holder
        _, memory = holder.staging(request.model, write_id)
        canonical = holder.cluster.canonical(request.model)
        write = OpenWrite(write_id, request.model, request.version, request.attempt, request.writers)
        verification = Verification(
            write,
            commit.writer,
            parts,
            commit.checksums,
            canonical.specs,
            canonical.by_name,
            memory,
        )
        problem = await asyncio.to_thread(verification.problem)
        if problem is not None:
            remedy = "Copy the box again, then commit again"
            raise InvalidRequest(f"checksums[{problem[0]}]", problem[1], remedy)

    async def write_status(self, write_id: str) -> WriteStatus:
        """Raises NotFound if the Write is unknown or ended without a version."""
        if status := self._committed(write_id):
            return status
        query = QueryWrite(write_id=write_id)
        return await self._of_coordinator(
            write_id, "status", query, WriteStatus, self.holder.cluster.config.control_deadline_s
        )

    async def abandon(self, write_id: str) -> None:
        """Raises NotFound; Conflict if it was committed."""
        if self._committed(write_id):
            problem = f"Write {write_id} is committed"
            raise Conflict(**told("write_id", problem, "Write a newer version", write_id=write_id))
        message = AbortWrite(write_id=write_id, reason="its writer gave it up")
        limit_s = 2 * self.holder.cluster.config.control_deadline_s
        await self._of_coordinator(write_id, "abandon", message, Done, limit_s)

    def _committed(self, write_id: str) -> WriteStatus | None:
        for commit in self.holder.cluster.commits.values():
            if commit.write_id == write_id:
                return WriteStatus(
                    write_id=write_id, version=commit.version, committed=True, pending_writers=()
                )
        return None

    def _gone(self, write_id: str) -> NotFound:
        problem = f"no Write {write_id} is open here: it was abandoned, or replaced"
        return NotFound(**told("write_id", problem, "Begin the Write again", write_id=write_id))

    async def _of_coordinator(
        self, write_id: str, command: str, message: Message, reply: type[R], deadline_s: float
    ) -> R:
        """Ask the node that opened the Write: another one may lead by now."""
        mine = self._writes.get(write_id)
        if mine is not None:
            return await self.holder.cluster.ask(mine.leader, command, message, reply, deadline_s=deadline_s)
        return (await self._of_leader(command, message, reply, deadline_s))[0]

    async def _of_leader(
        self, command: str, message: Message, reply: type[R], deadline_s: float
    ) -> tuple[R, int]:
        """The answer of whoever leads, and who that is. A view that is behind is read again once."""
        cluster = self.holder.cluster
        for attempt in (1, 2):
            node = leader(cluster.view)
            if node is None:
                remedy = "wait until nodes have joined"
                raise Conflict(
                    f"no node serves: nobody can coordinate. {remedy}", field="model", remedy=remedy
                )
            try:
                return await cluster.ask(node, command, message, reply, deadline_s=deadline_s), node
            except Conflict as error:
                if attempt == 2 or "does not lead" not in error.message:
                    raise
                await self.members.refresh()
        raise AssertionError

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
        await self.publish_policy()

    async def publish_policy(self) -> None:
        """The leader tells everybody the policy's version, once per commit."""
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
            "reroutes_total": reads.num_reroutes,
            "receivers": self.receivers.num,
            "descriptor_lists": cluster.links.num_lists,
        }
