"""One node's shards: what the other nodes ask of it. Bytes in its buffers come from here only.

    open_spare    the spare buffer is emptied, once its readers have left      (Write, and refill)
    fetch         slices come from a node into the spare, their checksums are compared
    seal          the whole shard is checksummed; from now on the Write can only be committed or forgotten
    flip          the sealed shard becomes readable
    lease         a reader on another node keeps one version of the shard

Invariants
    - A buffer that can be leased is never written: bytes go to the spare buffer, and it is emptied only when
      no lease holds it.
    - Only what was sealed under a write id is made readable, and only for the commit of that id.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.gps.packing import Packing, spans_between
from services.gps.peers import Cluster
from services.gps.regions import Regions
from services.gps.slices import Slices, copy_slices, hash_slices, slice_box, slices_key
from services.gps.store import Store
from services.gps.versions import Buffer, Lease, Model, version_checksum
from shared.contracts.gps_cluster import MAX_SLICES, HashSlices, SlicesHashed, VersionCommit
from shared.errors import Conflict, InvalidRequest, NotFound, TransportError, told
from shared.layout.tensor_layout import Box
from shared.weights.landing import Landing, make_landing
from shared.weights.peer_links import Pull

_log = logging.getLogger("pivotrl.gps")


@dataclass(slots=True)
class OpenShard:
    """The Write (or refill) that the spare buffer is open for. `checksum` once it is sealed."""

    write_id: str
    version: int
    checksum: str | None = None


@dataclass(slots=True)
class Holder:
    """The shards of `cluster.node` in `store`; `changed` is called when something became readable or free."""

    cluster: Cluster
    store: Store
    run: str
    now_s: Callable[[], float]
    changed: Callable[[], None]
    regions: Regions
    check_transport: Callable[[], None]
    """Raises TransportError if UCX chose what the configuration does not allow."""
    receivers: dict[tuple[str, str], Landing] = field(default_factory=dict)
    """Landing buffers by (receiver, model)."""
    open: dict[str, OpenShard] = field(default_factory=dict)
    lineages: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    """Of the readable shards."""
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _staging: dict[str, Landing] = field(default_factory=dict)
    _torn_staging: set[str] = field(default_factory=set)

    def lock(self, model: str) -> asyncio.Lock:
        """Whoever fills the spare buffer of `model` holds this."""
        return self._locks.setdefault(model, asyncio.Lock())

    def packing(self, model: str) -> Packing:
        return self.cluster.packing(model, self.cluster.node)

    # regions

    async def register(self) -> None:
        """Make the transport know exactly the regions there are."""
        await self.regions.follow(
            lambda: (
                {str(b.region.path): b.region.memory for m in self._models() for b in m.buffers}
                | {str(landing.path): landing.memory for landing in self.landings()}
            )
        )

    def landings(self) -> list[Landing]:
        """Landing buffers of receivers and writers."""
        return [*self._staging.values(), *self.receivers.values()]

    def _models(self) -> list[Model]:
        return [self.store.model(name) for name in self.cluster.specs if self.store.has(name)]

    def memory(self, model: str, region: str, *, is_staging: bool) -> tuple[NDArray[np.uint8], Packing]:
        """A region of `model` by name, and its layout. Raises NotFound."""
        if is_staging and (found := self._staging.get(model)) and found.region == region:
            return found.memory, self.cluster.canonical(model)
        for buffer in self.store.model(model).buffers:
            if buffer.region.path.name == region:
                return buffer.region.memory, self.packing(model)
        raise NotFound(f"{self.cluster.name} has no region {region}: it was replaced", region=region)

    # Write

    async def open_spare(self, model: str, version: int, write_id: str, wait_s: float) -> tuple[str, str]:
        """Empty the spare buffer for `write_id`; its region's name, and that where writers put theirs.

        Raises Conflict if readers stay for `wait_s`, or the version is not newer than the readable one.
        """
        found = self.store.model(model)
        async with self.lock(model):
            if version <= found.version:
                problem = (
                    f"{self.cluster.name} has version {found.version} of {model}, not older than {version}"
                )
                raise Conflict(**told("version", problem, f"Write a version after {found.version}"))
            await self.empty(found, wait_s)
            self.open[model] = OpenShard(write_id, version)
            staging = await self._stage(model, found.spare)
            await self.register()
            return found.spare.region.path.name, staging

    async def empty(self, model: Model, wait_s: float) -> None:
        """Wait for readers of the spare buffer, then make it ready to be filled. Raises Conflict if they
        stay."""
        self.open.pop(model.name, None)
        end_s = self.now_s() + wait_s
        # a lease ends by a release here, by one from another node, or by running out
        while self.store.readers_leave_s(model.name, self.now_s()) and self.now_s() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.store.empty_spare(model, self.now_s())

    async def _stage(self, model: str, spare: Buffer) -> str:
        if self.packing(model).is_whole:
            return spare.region.path.name
        if model in self._torn_staging and (old := self._staging.pop(model, None)):
            old.remove()  # a writer of the torn Write may still scribble on it
        if model not in self._staging:
            name = f"{model}-staging.{self.store.new_id()}"
            nbytes = self.cluster.canonical(model).nbytes
            self._staging[model] = make_landing(
                self.run,
                self.cluster.node,
                name,
                nbytes,
                filled_bytes=nbytes,
                folder=self.store.pool.folder,
            )
        self._torn_staging.add(model)
        return self._staging[model].region

    def staging(self, model: str, write_id: str) -> tuple[str, NDArray[np.uint8]]:
        """Where writers of this node put their bytes: path and memory, in the canonical layout."""
        self._opened(write_id)
        if model in self._staging:
            landing = self._staging[model]
            return str(landing.path), landing.memory
        spare = self.store.model(model).spare.region
        return str(spare.path), spare.memory

    def has_open(self, write_id: str) -> bool:
        return any(shard.write_id == write_id for shard in self.open.values())

    def _opened(self, write_id: str) -> str:
        for model, shard in self.open.items():
            if shard.write_id == write_id:
                return model
        raise self._not_open(write_id)

    def _not_open(self, write_id: str) -> NotFound:
        problem = f"{self.cluster.name} has no open Write {write_id}: it was replaced or given up"
        return NotFound(**told("write_id", problem, "Begin the Write again", write_id=write_id))

    async def fetch(
        self, write_id: str, sender: int, region: str, slices: Slices, *, is_staging: bool
    ) -> None:
        """Copy `slices` out of `region` of `sender` into the spare buffer, and prove that they arrived."""
        model = self._opened(write_id)
        if self.open[model].checksum is not None:
            raise Conflict(f"Write {write_id} is sealed", write_id=write_id)
        if sender == self.cluster.node:
            memory, packing = self.memory(model, region, is_staging=is_staging)
            into = self.store.model(model).spare.region.memory
            if memory is not into:
                await asyncio.to_thread(copy_slices, packing, memory, self.packing(model), into, slices)
            return
        packing = self.cluster.canonical(model) if is_staging else self.cluster.packing(model, sender)
        spare = self.store.model(model).spare.region
        theirs, ours = await asyncio.to_thread(spans_between, packing, self.packing(model), slices)
        pull = Pull(
            peer=await self.cluster.info(sender, region),
            remote_region=region,
            theirs=theirs,
            local_region=spare.path.name,
            ours=ours,
            key=slices_key(slices),
        )
        await self.cluster.links.pull([pull], self.cluster.config.copy_deadline_s)
        self.check_transport()
        await self.compare(model, sender, region, slices, spare.memory, self.packing(model), is_staging)

    async def compare(
        self,
        model: str,
        sender: int,
        region: str,
        slices: Slices,
        memory: NDArray[np.uint8],
        packing: Packing,
        is_staging: bool,
    ) -> None:
        """Raises TransportError if a slice in `memory` is not what `sender` has in its `region`."""
        for first in range(0, len(slices), MAX_SLICES):
            part = slices[first : first + MAX_SLICES]
            question = HashSlices(
                model=model, region=region, is_staging=is_staging, slices=tuple(map(slice_box, part))
            )
            theirs, ours = await asyncio.gather(
                self.cluster.ask(
                    sender, "hash", question, SlicesHashed, deadline_s=self.cluster.config.copy_deadline_s
                ),
                asyncio.to_thread(hash_slices, packing, memory, part),
            )
            for (tensor, box), sent, got in zip(part, theirs.checksums, ours, strict=True):
                if sent != got:
                    raise TransportError(
                        f"{tensor} at {box.start} of shape {box.shape} from gps-{sender} has checksum {got} "
                        f"here, {sent} there",
                        peer=f"gps-{sender}",
                    )

    async def hashes(self, question: HashSlices) -> SlicesHashed:
        """Checksums of boxes of an own region. Raises InvalidRequest for one that is not here."""
        memory, packing = self.memory(question.model, question.region, is_staging=question.is_staging)
        slices = [(s.tensor, Box(s.start, s.shape)) for s in question.slices]
        for index, (tensor, box) in enumerate(slices):
            if packing.common(tensor, box) != box:
                raise InvalidRequest(
                    f"slices[{index}]", f"{self.cluster.name} does not hold it", "Plan again"
                )
        return SlicesHashed(checksums=tuple(await asyncio.to_thread(hash_slices, packing, memory, slices)))

    async def seal(self, write_id: str) -> str:
        """Checksum of the whole shard in the spare buffer."""
        model = self._opened(write_id)
        shard = self.open[model]
        found = self.store.model(model)
        checksum = await asyncio.to_thread(
            version_checksum, found.tensors, found.spare.region.memory, found.storages
        )
        if self.open.get(model) is not shard:
            raise self._not_open(write_id)
        shard.checksum = checksum
        return checksum

    def flip(self, commit: VersionCommit) -> bool:
        """Make the sealed shard of this commit readable; False if this node has none such."""
        shard = self.open.get(commit.model)
        if shard is None or shard.write_id != commit.write_id or shard.checksum is None:
            return False
        model = self.store.model(commit.model)
        model.spare.is_dirty, model.spare.version = False, commit.version
        model.current = 1 - model.current
        self.became(model, commit, shard.checksum)
        del self.open[commit.model]
        self._torn_staging.discard(commit.model)
        return True

    def became(self, model: Model, commit: VersionCommit, checksum: str) -> None:
        """The readable buffer of `model` holds this commit."""
        model.version, model.readable.version = commit.version, commit.version
        model.checksum = commit.checksum or checksum
        self.lineages[model.name], self.checksums[model.name] = commit.lineage, checksum
        self.changed()

    def forget_write(self, write_id: str) -> None:
        """A Write that ended without a version: the spare is emptied by the next one."""
        for model, shard in list(self.open.items()):
            if shard.write_id == write_id:
                del self.open[model]

    # Read

    def lease(self, model: str, version: int, lineage: int, receiver: str, lease_s: float) -> tuple[str, str]:
        """Keep exactly this version of the shard: lease and region. Raises Conflict if it is not here."""
        found = self.store.model(model)
        self.store.expire(found, self.now_s())
        buffer = next((b for b in found.buffers if b.version == version and not b.is_dirty), None)
        if buffer is None or self.lineages.get(model) != lineage:
            problem = f"{self.cluster.name} has version {found.version} of {model}, not {version}"
            raise Conflict(**told("version", problem, "Read again", version=found.version))
        lease = Lease(self.store.new_id(), receiver, version, self.now_s() + lease_s)
        buffer.leases[lease.lease_id] = lease
        return lease.lease_id, buffer.region.path.name

    def close(self) -> None:
        for landing in self.landings():
            landing.remove()
