"""Writers of this node: their bytes are put here, and whoever coordinates the Write is asked and told."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from services.gps.boxes import Part
from services.gps.checks import check_commit, checked_cover, wrong_checksum
from services.gps.holder import Holder
from services.gps.membership import leader
from services.gps.versions import OpenWrite, Verification, WriterPart
from shared.contracts.base import Done, Message
from shared.contracts.gps import WriteCommit, WriteGrant, WriteRequest, WriteStatus
from shared.contracts.gps_cluster import AbortWrite, BeginWrite, QueryWrite, WriteBegun, WriterDone
from shared.errors import Conflict, NotFound, told

R = TypeVar("R", bound=Message)


@dataclass(slots=True)
class _LocalWrite:
    """Writers of an open Write that copy to this node."""

    request: WriteRequest
    leader: int
    parts: dict[str, WriterPart] = field(default_factory=dict)


@dataclass(slots=True)
class LocalWrites:
    """`refresh` reads the view that stands."""

    holder: Holder
    refresh: Callable[[], Awaitable[None]]
    _writes: dict[str, _LocalWrite] = field(default_factory=dict)

    def writers_of(self, write_id: str) -> tuple[str, ...]:
        """Writers of an open Write, if some copy to this node."""
        mine = self._writes.get(write_id)
        return mine.request.writers if mine else ()

    async def begin(self, request: WriteRequest) -> WriteGrant:
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
        path, _ = holder.staging(request.model, begun.write_id)
        for old in [write_id for write_id in self._writes if not holder.has_open(write_id)]:
            del self._writes[old]
        mine = self._writes.setdefault(begun.write_id, _LocalWrite(request, coordinator))
        mine.parts[request.writer] = part
        view = cluster.canonical(request.model).view(path)
        return WriteGrant(write_id=begun.write_id, model=request.model, version=begun.version, view=view)

    async def commit(self, write_id: str, commit: WriteCommit) -> WriteStatus:
        """Raises NotFound, InvalidRequest naming the checksum that differs, Conflict; and what a Write over
        several nodes can end with."""
        if status := self._committed(write_id):
            return status
        mine = self._writes.get(write_id)
        if mine is None or not self.holder.has_open(write_id):
            raise self._gone(write_id)
        config, request = self.holder.cluster.config, mine.request
        part = check_commit(write_id, commit, request.writers, mine.parts)
        await self._verify(write_id, mine, commit, part.parts)
        return await self._of_coordinator(
            write_id,
            "done",
            WriterDone(write_id=write_id, writer=commit.writer, node=self.holder.cluster.node),
            WriteStatus,
            4 * config.copy_deadline_s,
        )

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
            canonical.storages,
        )
        problem = await asyncio.to_thread(verification.problem)
        if problem is not None:
            raise wrong_checksum(problem)

    async def status(self, write_id: str) -> WriteStatus:
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
                await self.refresh()
        raise AssertionError
