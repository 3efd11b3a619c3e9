"""A node's life among the others: heartbeats, the view, and what follows when it changes.

    every `heartbeat_s`    read the view and the commit records; take the lost out; join if the view does not
                           know this life; begin to fill what is not current; serve once all is

One task does all of it, in this order, so that nothing happens twice at a time; the heartbeat itself and a
refill run beside it. What fails because the broker or a peer is away is logged once and tried again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.gps.membership import Silence, first_view, group_of, join, lose, member_of, serve
from services.gps.peers import Cluster
from services.gps.refill import Refill
from shared.contracts.base import Message
from shared.contracts.gps_cluster import ClusterView, NodeHeartbeat, VersionCommit
from shared.errors import Conflict, PivotError
from shared.runtime.clock import Clock

VIEW_KEY = "view"
_ATTEMPTS = 20
_GOODBYE_S = 3.0
"""A process that is told to stop has ten seconds."""
_log = logging.getLogger("pivotrl.gps")


def commit_key(model: str) -> str:
    return f"commit.{model}"


@dataclass(slots=True)
class Members:
    """`view_changed(old, new)` and `commit_seen(commit)` are told what moved, `beaten` the end of a beat."""

    cluster: Cluster
    silence: Silence
    clock: Clock
    group_size: int
    view_changed: Callable[[ClusterView, ClusterView], Awaitable[None]]
    commit_seen: Callable[[VersionCommit], Awaitable[None]]
    beaten: Callable[[], Awaitable[None]]
    refill: Refill | None = None
    waits_for: str | None = "the cluster's view"
    is_leaving: bool = False
    _said: str = ""
    _revision: int = 0
    _filling: asyncio.Task[None] | None = None
    _beat: asyncio.Event = field(default_factory=asyncio.Event)

    # the record

    async def change(self, step: Callable[[ClusterView], ClusterView]) -> ClusterView:
        """Apply `step` to the view that stands, by compare-and-set. Raises BusError."""
        bus, bucket = self.cluster.bus, self.cluster.subjects.gps_bucket
        for _ in range(_ATTEMPTS):
            found = await bus.kv_get(bucket, VIEW_KEY, ClusterView)
            nodes = range(len(self.cluster.config.nodes))
            view, revision = found or (first_view(nodes, self.group_size), 0)
            wanted = step(view)
            if wanted != view or found is None:
                try:
                    revision = await bus.kv_swap(bucket, VIEW_KEY, wanted, revision)
                except Conflict:
                    continue
            await self._take(wanted, revision)
            return wanted
        raise Conflict(f"the view changed {_ATTEMPTS} times while {self.cluster.name} tried to change it")

    async def _take(self, view: ClusterView, revision: int) -> None:
        if revision <= self._revision:  # read before, arrived after a newer one
            return
        self._revision = revision
        old, self.cluster.view = self.cluster.view, view
        if old != view:
            _log.info("%s", view.summary())
            await self.view_changed(old, view)

    async def read_commit(self, model: str) -> tuple[VersionCommit, int]:
        """The record that stands, and its revision. Raises Conflict if the model has no version yet."""
        bucket = self.cluster.subjects.gps_bucket
        found = await self.cluster.bus.kv_get(bucket, commit_key(model), VersionCommit)
        if found is None:
            raise Conflict(f"{model} is still being seeded", model=model, field="model", remedy="wait")
        await self.see(found[0])
        return found

    async def swap_commit(self, commit: VersionCommit, revision: int) -> int:
        """Raises Conflict if another record stands; BusError if it is not known."""
        bucket = self.cluster.subjects.gps_bucket
        return await self.cluster.bus.kv_swap(bucket, commit_key(commit.model), commit, revision)

    async def propose(self, commit: VersionCommit) -> VersionCommit:
        """Record a version that came from a folder, unless another was recorded; the one that stands."""
        bucket = self.cluster.subjects.gps_bucket
        found = await self.cluster.bus.kv_get(bucket, commit_key(commit.model), VersionCommit)
        standing, revision = found or (None, 0)
        if standing is None or standing.lineage < commit.lineage:
            try:
                await self.swap_commit(commit, revision)
                standing = commit
            except Conflict:
                standing = (await self.read_commit(commit.model))[0]
        await self.see(standing)
        return standing

    async def see(self, commit: VersionCommit) -> None:
        """This record stands. An older one than is known, late on the wire, is ignored."""
        known = self.cluster.commits.get(commit.model)
        if known is not None and (known.lineage, known.version) > (commit.lineage, commit.version):
            return
        self.cluster.commits[commit.model] = commit
        if known is None or (known.write_id, known.lineage) != (commit.write_id, commit.lineage):
            await self.commit_seen(commit)

    async def refresh(self) -> None:
        """Read what stands. Raises BusError."""
        bus, bucket = self.cluster.bus, self.cluster.subjects.gps_bucket
        if found := await bus.kv_get(bucket, VIEW_KEY, ClusterView):
            await self._take(*found)
        for model in self.cluster.specs:
            if commit := await bus.kv_get(bucket, commit_key(model), VersionCommit):
                await self.see(commit[0])

    # the beat

    async def hear(self, message: Message) -> None:
        if isinstance(message, NodeHeartbeat):
            if message.node == self.cluster.node and message.incarnation != self.cluster.incarnation:
                self._say(f"another process is node {message.node} too, or was until a moment ago")
                return
            self.silence.hear(message, self.clock.now_s())
            if message.leaving:
                self._beat.set()

    async def live(self) -> None:
        """For ever: a task of the process."""
        while True:
            try:
                await self._once()
                if self.waits_for is None:  # while a refill is tried again and again, once is enough to say
                    self._say("")
            except PivotError as error:
                self._say(error.message)
            self._beat.clear()
            try:
                async with asyncio.timeout(self.cluster.config.heartbeat_s):
                    await self._beat.wait()
            except TimeoutError:
                pass

    def _say(self, problem: str) -> None:
        if problem and problem != self._said:
            _log.warning("%s: %s", self.cluster.name, problem)
        self._said = problem

    async def heartbeat(self) -> None:
        """For ever: a task of its own, so that a long refill does not look like death."""
        while True:
            try:
                await self.cluster.bus.publish(self.cluster.subjects.gps_heartbeat, self._heartbeat())
            except PivotError as error:
                self._say(error.message)
            await asyncio.sleep(self.cluster.config.heartbeat_s)

    def _heartbeat(self, *, leaving: bool = False) -> NodeHeartbeat:
        return NodeHeartbeat(node=self.cluster.node, incarnation=self.cluster.incarnation, leaving=leaving)

    async def enter(self) -> None:
        """Join the view. Raises BusError."""
        node, life = self.cluster.node, self.cluster.incarnation
        await self.change(lambda view: join(view, node, life))
        await self.refresh()

    async def _once(self) -> None:
        node, life = self.cluster.node, self.cluster.incarnation
        await self.refresh()
        lost = self.silence.lost(self.cluster.view, self.clock.now_s())
        if lost and self.silence.should_tell(self.cluster.view, self.clock.now_s()):
            for member in lost:
                _log.warning("node %d is silent or left: out of the view", member.node)
                gone = member
                await self.change(lambda view, gone=gone: lose(view, gone.node, gone.incarnation))  # type: ignore[misc]
        mine = member_of(self.cluster.view, node)
        if mine is None or mine.state == "gone" or mine.incarnation != life:
            await self.change(lambda view: join(view, node, life))
        if not group_of(self.cluster.view, node):
            self.waits_for = f"{self.group_size} nodes for a new group"
            return
        if not self._is_full():
            if self._filling is None:  # beside the beat: a long refill must not keep others from being seen
                self._filling = asyncio.create_task(self._fill())
                self._filling.add_done_callback(lambda _: self._beat.set())
            if not self._filling.done():
                return
            filled, self._filling = self._filling, None
            filled.result()
        if self._is_full():
            await self.change(lambda view: serve(view, node, life))
            self.waits_for = None
        await self.beaten()

    def _is_full(self) -> bool:
        assert self.refill is not None
        refill = self.refill
        return all(refill.holder.store.has(m) and refill.is_current(m) for m in self.cluster.specs)

    async def _fill(self) -> None:
        assert self.refill is not None
        for model in self.cluster.specs:
            if not self.refill.holder.store.has(model):
                await asyncio.to_thread(self.refill.reserve, model)
                await self.refill.record(model)  # what was found in the pool may be stored anew
                await self.refill.holder.register()
        for model in self.cluster.specs:
            if not self.refill.is_current(model):
                if self.waits_for is not None:
                    self.waits_for = f"{model} to be filled"
                await self.refill.fill(model)

    async def leave(self) -> None:
        """Say goodbye, so that nobody waits for the deadline. What fails is left to the deadline."""
        node, life = self.cluster.node, self.cluster.incarnation
        heartbeat = self._heartbeat(leaving=True)
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self.cluster.bus.publish(self.cluster.subjects.gps_heartbeat, heartbeat)
                await self.change(lambda view: lose(view, node, life))
        except (PivotError, TimeoutError) as error:
            _log.warning("%s could not say goodbye: %s", self.cluster.name, error or "no answer")
