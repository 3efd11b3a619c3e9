"""The lowest serving node coordinates Writes. Who waits for whom:

    begin      the leader fences (moves the commit record's revision), then waits for every serving node to
               empty its spare buffer; other writers of the same Write wait for that
    done       the last writer's call waits for all stages, all seals and the commit record
    a lost node, a failed copy, a checksum that differs: the Write is aborted, every node forgets it

Before the record is written nothing is readable anywhere; after it, every node flips: told at once, or by
reading the record at its next heartbeat. If it is not known whether the record was written (the broker went
away in that very moment), nothing is aborted: the record will tell.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.gps.boxes import parts_of
from services.gps.cluster_write import ClusterWrite, JoinedWriter, batches, shard_problem
from services.gps.forwarding import Hop
from services.gps.membership import complete_groups, leader, serving
from services.gps.peers import Cluster, gather_all
from services.gps.slices import slice_box
from shared.contracts.base import Done
from shared.contracts.gps import WriteStatus
from shared.contracts.gps_cluster import (
    MAX_SLICES,
    AbortWrite,
    BeginWrite,
    FetchSlices,
    FlipVersion,
    OpenSpare,
    SealShard,
    ShardSealed,
    SpareOpened,
    VersionCommit,
    WriteBegun,
    WriterDone,
)
from shared.errors import BusError, Conflict, NotFound, PivotError, TransportError, told
from shared.weights.checksum import combine

_log = logging.getLogger("pivotrl.gps")


@dataclass(slots=True)
class _Open:
    """A Write, the regions of its nodes, and the revision that its commit must find."""

    write: ClusterWrite
    regions: dict[int, SpareOpened]
    revision: int
    moving: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Leader:
    """`refresh` reads the view that stands; `read_commit` and `swap_commit` are the record; `committed` is
    called after it was written."""

    cluster: Cluster
    new_id: Callable[[], str]
    refresh: Callable[[], Awaitable[None]]
    read_commit: Callable[[str], Awaitable[tuple[VersionCommit, int]]]
    swap_commit: Callable[[VersionCommit, int], Awaitable[int]]
    committed: Callable[[VersionCommit], Awaitable[None]]
    _open: dict[str, _Open] = field(default_factory=dict)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def begin(self, message: BeginWrite) -> WriteBegun:
        """Open or join. Raises Conflict, InvalidRequest; DeadlineExceeded if a node does not answer."""
        request, cluster = message.request, self.cluster
        await self.refresh()
        if leader(cluster.view) != cluster.node:
            problem = f"{cluster.name} does not lead in epoch {cluster.view.epoch}"
            raise Conflict(**told("model", problem, "Ask the node that does"))
        specs = cluster.specs[request.model]
        writer = JoinedWriter(message.node, parts_of(specs, request.boxes))
        async with self._locks.setdefault(request.model, asyncio.Lock()):
            found = self._open.get(request.model)
            if found is None or not found.write.takes(request):
                found = await self._begin(message, found.write if found else None)
            found.write.join(request, writer, specs)
            return WriteBegun(write_id=found.write.write_id, version=found.write.version)

    async def _begin(self, message: BeginWrite, replaced: ClusterWrite | None) -> _Open:
        request, cluster = message.request, self.cluster
        if not complete_groups(cluster.view):
            problem = "no replication group is complete"
            raise Conflict(**told("model", problem, "Start the nodes that are away"))
        nodes = serving(cluster.view)
        if message.node not in nodes:
            problem = f"node {message.node} does not serve yet"
            raise Conflict(**told("model", problem, "Wait until its /readyz is ready"))
        standing, revision = await self.read_commit(request.model)
        if request.version <= standing.version:
            problem = f"{request.model} is at version {standing.version}, {request.version} is not newer"
            remedy = f"Write a version after {standing.version}"
            raise Conflict(
                **told("version", problem, remedy, version=standing.version, asked=request.version)
            )
        if replaced is not None:
            await self._abort(replaced, f"replaced by {request.writer} of another attempt")
        write_id = self.new_id()
        revision = await self.swap_commit(standing.model_copy(update={"next_write": write_id}), revision)
        write = ClusterWrite(
            write_id,
            request.model,
            request.version,
            request.attempt,
            request.writers,
            nodes,
            cluster.view.groups,
        )
        question = OpenSpare(
            model=request.model,
            version=request.version,
            write_id=write_id,
            wait_s=request.wait_s,
            after=standing,
        )
        limit_s = request.wait_s + cluster.config.control_deadline_s
        asked = {node: cluster.ask(node, "open", question, SpareOpened, deadline_s=limit_s) for node in nodes}
        try:
            regions = dict(zip(asked, await gather_all(asked.values()), strict=True))
        except PivotError as error:
            await self._abort(write, error.message)
            raise
        if write.lose(serving(cluster.view)):
            await self._tell_aborted(write)
            self._check_alive(write)
        self._open[request.model] = _Open(write, regions, revision)
        return self._open[request.model]

    async def done(self, message: WriterDone) -> WriteStatus:
        """A writer's bytes are on its node; the last one's call ends when the version is readable."""
        found = self._find(message.write_id)
        if found.write.finish(message.writer, message.node):
            found.moving = asyncio.create_task(self._move(found))
            await asyncio.wait([found.moving])
            if found.moving.cancelled():
                self._check_alive(found.write)
            found.moving.result()
        return found.write.status()

    async def _move(self, found: _Open) -> None:
        write, cluster = found.write, self.cluster
        packings = {node: cluster.packing(write.model, node) for node in write.nodes}
        try:
            for stage in batches(write.hops(packings), MAX_SLICES):
                await gather_all([self._fetch(found, hops) for hops in stage])
                self._check_alive(write)
            limit_s = cluster.config.copy_deadline_s
            seal = SealShard(write_id=write.write_id)
            sealed = await gather_all(
                [cluster.ask(node, "seal", seal, ShardSealed, deadline_s=limit_s) for node in write.nodes]
            )
            checksums = {node: s.checksum for node, s in zip(write.nodes, sealed, strict=True)}
            if problem := shard_problem(packings, checksums):
                raise TransportError(f"Write {write.write_id}: {problem}")
            self._check_alive(write)
        except PivotError as error:
            await self._abort(write, error.message)
            raise
        await self._commit(found, checksums)

    def _check_alive(self, write: ClusterWrite) -> None:
        if write.is_over:
            problem = f"Write {write.write_id} was aborted: {write.reason}"
            raise Conflict(**told("write_id", problem, "Begin it again", write_id=write.write_id))

    async def _fetch(self, found: _Open, hops: list[Hop]) -> None:
        first = hops[0]
        opened = found.regions[first.sender]
        is_staging = first.stage == 0
        message = FetchSlices(
            write_id=found.write.write_id,
            model=found.write.model,
            sender=first.sender,
            region=opened.staging if is_staging else opened.spare,
            is_staging=is_staging,
            slices=tuple(slice_box((hop.tensor, hop.box)) for hop in hops),
        )
        config = self.cluster.config
        limit_s = config.copy_deadline_s + config.control_deadline_s
        await self.cluster.ask(first.receiver, "fetch", message, Done, deadline_s=limit_s)

    async def _commit(self, found: _Open, checksums: dict[int, str]) -> None:
        write, cluster = found.write, self.cluster
        standing = cluster.commits.get(write.model)
        group = next(g for g in write.groups if set(g) <= set(checksums))
        whole = [(str(seat), checksums[node]) for seat, node in enumerate(group)]
        commit = VersionCommit(
            model=write.model,
            version=write.version,
            write_id=write.write_id,
            checksum=whole[0][1] if len(whole) == 1 else combine(whole),
            holders={str(node): checksum for node, checksum in checksums.items()},
            lineage=standing.lineage if standing else 0,
            source=write.writers[0],
        )
        write.start_commit()
        try:
            await self.swap_commit(commit, found.revision)
        except Conflict:
            write.refuse("another Write or another leader was first")
            await self._tell_aborted(write)
            raise
        except BusError:
            _log.error("it is not known whether Write %s was committed: the record will tell", write.write_id)
            raise
        write.commit()
        await self.committed(commit)
        flip = FlipVersion(commit=commit)
        told = await asyncio.gather(
            *(cluster.ask(node, "flip", flip, Done) for node in write.nodes), return_exceptions=True
        )
        for node, answer in zip(write.nodes, told, strict=True):
            if isinstance(answer, BaseException):
                _log.warning("gps-%d will read of version %d itself: %s", node, commit.version, answer)

    def status(self, write_id: str) -> WriteStatus:
        """Raises NotFound if the Write is unknown or was aborted."""
        return self._find(write_id).write.status()

    def _find(self, write_id: str) -> _Open:
        found = next((o for o in self._open.values() if o.write.write_id == write_id), None)
        if found is None or found.write.phase == "aborted":
            why = f": {found.write.reason}" if found else ""
            problem = f"no Write {write_id}{why}"
            raise NotFound(**told("write_id", problem, "Begin it again", write_id=write_id))
        return found

    async def abandon(self, write_id: str, reason: str) -> None:
        """Raises NotFound; Conflict if it was committed."""
        write = self._find(write_id).write
        if write.phase == "committed":
            problem = f"Write {write_id} is committed"
            raise Conflict(**told("write_id", problem, "Write a newer version", write_id=write_id))
        await self._abort(write, reason)

    async def nodes_changed(self) -> None:
        """End the Writes that lost a node."""
        for found in list(self._open.values()):
            if found.write.lose(serving(self.cluster.view)):
                if found.moving is not None:
                    found.moving.cancel()  # nobody waits for the deadline of a node that is known to be lost
                await self._tell_aborted(found.write)

    async def _abort(self, write: ClusterWrite, reason: str) -> None:
        if write.abort(reason):
            await self._tell_aborted(write)

    async def _tell_aborted(self, write: ClusterWrite) -> None:
        _log.warning("Write %s of %s v%d ends: %s", write.write_id, write.model, write.version, write.reason)
        message = AbortWrite(write_id=write.write_id, reason=write.reason)
        up = [node for node in write.nodes if node in serving(self.cluster.view)]
        await asyncio.gather(
            *(self.cluster.ask(node, "abort", message, Done) for node in up), return_exceptions=True
        )
