"""The commands that one GPS node answers for the others, and which part of it carries each out."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.gps.cluster import ClusterService
from services.gps.peers import Cluster
from shared.contracts.base import Done, Message
from shared.contracts.gps import PeerInfo, WriteStatus
from shared.contracts.gps_cluster import (
    AbortWrite,
    BeginWrite,
    DescribePeer,
    FetchSlices,
    FlipVersion,
    HashSlices,
    LeaseVersion,
    OpenSpare,
    QueryWrite,
    ReleaseVersion,
    SealShard,
    ShardSealed,
    SlicesHashed,
    SpareOpened,
    VersionLeased,
    WriteBegun,
    WriterDone,
)
from shared.errors import Conflict, WireError
from shared.layout.tensor_layout import Box

M = TypeVar("M", bound=Message)


class NodeCommands:
    """Commands over `service`."""

    def __init__(self, service: ClusterService) -> None:
        self._service, self._holder = service, service.holder
        self._cluster: Cluster = service.holder.cluster

    async def serve(self) -> None:
        """Answer on the bus until it closes."""
        await self._on("describe", DescribePeer, self._describe)
        await self._on("lease", LeaseVersion, self._lease)
        await self._on("release", ReleaseVersion, self._release)
        await self._on("hash", HashSlices, self._hash)
        await self._on("open", OpenSpare, self._open)
        await self._on("fetch", FetchSlices, self._fetch)
        await self._on("seal", SealShard, self._seal)
        await self._on("flip", FlipVersion, self._flip)
        await self._on("abort", AbortWrite, self._abort)
        await self._on("begin", BeginWrite, self._begin)
        await self._on("done", WriterDone, self._done)
        await self._on("status", QueryWrite, self._status)
        await self._on("abandon", AbortWrite, self._abandon)

    async def _on(self, command: str, kind: type[M], handler: Callable[[M], Awaitable[Message]]) -> None:
        async def call(message: Message) -> Message:
            if not isinstance(message, kind):
                raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
            return await handler(message)

        await self._cluster.bus.serve(self._cluster.subjects.gps_node(self._cluster.node, command), call)

    async def _describe(self, message: DescribePeer) -> PeerInfo:
        self._cluster.check_digest(f"gps-{message.node}", message.digest)
        return await self._cluster.links.describe()

    async def _lease(self, message: LeaseVersion) -> VersionLeased:
        self._cluster.check_digest(message.receiver, message.digest)
        lease_id, region = self._holder.lease(
            message.model, message.version, message.lineage, message.receiver, message.lease_s
        )
        return VersionLeased(lease_id=lease_id, region=region)

    async def _release(self, message: ReleaseVersion) -> Done:
        self._holder.store.release(message.lease_id, self._holder.now_s())
        self._service.changed()
        return Done()

    async def _hash(self, message: HashSlices) -> SlicesHashed:
        return await self._holder.hashes(message)

    async def _open(self, message: OpenSpare) -> SpareOpened:
        end_s = self._holder.now_s() + message.wait_s
        await self._service.members.see(message.after)
        while not self._service.refill.is_current(message.model):
            if self._holder.now_s() >= end_s:
                raise Conflict(
                    f"{self._cluster.name} has not caught up with version {message.after.version} of "
                    f"{message.model} within {message.wait_s:g} s",
                    field="wait_s",
                    remedy="wait longer, or until the node has refilled",
                )
            await asyncio.sleep(0.02)
        left_s = max(end_s - self._holder.now_s(), 0.0)
        spare, staging = await self._holder.open_spare(
            message.model, message.version, message.write_id, left_s
        )
        return SpareOpened(spare=spare, staging=staging)

    async def _fetch(self, message: FetchSlices) -> Done:
        slices = [(s.tensor, Box(s.start, s.shape)) for s in message.slices]
        await self._holder.fetch(
            message.write_id, message.sender, message.region, slices, is_staging=message.is_staging
        )
        return Done()

    async def _seal(self, message: SealShard) -> ShardSealed:
        return ShardSealed(checksum=await self._holder.seal(message.write_id))

    async def _flip(self, message: FlipVersion) -> Done:
        await self._service.members.see(message.commit)
        return Done()

    async def _abort(self, message: AbortWrite) -> Done:
        self._holder.forget_write(message.write_id)
        return Done()

    async def _begin(self, message: BeginWrite) -> WriteBegun:
        return await self._service.leads.begin(message)

    async def _done(self, message: WriterDone) -> WriteStatus:
        return await self._service.leads.done(message)

    async def _status(self, message: QueryWrite) -> WriteStatus:
        return self._service.leads.status(message.write_id)

    async def _abandon(self, message: AbortWrite) -> Done:
        await self._service.leads.abandon(message.write_id, message.reason)
        return Done()
