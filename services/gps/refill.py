"""How a node comes to hold the committed version: found in its pool, pulled from peers, or begun again.

    manifest      its own shared memory still has it (the process died, the node did not)
    peers         every slice of its shard comes from a serving node that holds this very version
    folder        nobody holds it: if that lasts `reseed_after_s`, one node records a new *lineage* of the
                  model that begins from the newest folder, and all nodes load their shards from it

The first two end with the checksum that the commit record names for the shard, if it names one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.gps.adoption import adopt_region
from services.gps.holder import Holder
from services.gps.manifest import Manifest, ManifestEntry
from services.gps.packing import Packing
from services.gps.remote_reads import RemoteReads, Target
from services.gps.versions import Buffer, version_checksum
from services.gps.view_plans import without_repeats
from shared.contracts.gps_cluster import VersionCommit
from shared.errors import ConfigError, Conflict, PivotError, TransportError
from shared.weights.host_pool import PoolRegion
from shared.weights.seed import SeedPlan, load_seed

SEED = "seed"
"""Write ids of versions that came from a folder begin so."""
_log = logging.getLogger("pivotrl.gps")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model begins from. Nobody writes a frozen one."""

    model: str
    plan: SeedPlan
    folder: Path
    is_frozen: bool


@dataclass(slots=True)
class Refill:
    """`propose(commit)` records a commit if nobody recorded another meanwhile; the one that then stands.
    `newest_folder(model)` is where to begin again."""

    holder: Holder
    reads: RemoteReads
    manifest: Manifest
    sources: Mapping[str, ModelSource]
    propose: Callable[[VersionCommit], Awaitable[VersionCommit]]
    newest_folder: Callable[[str], Path]
    read_plan: Callable[[Path], SeedPlan]
    reseeded: dict[str, str] = field(default_factory=dict)
    """Model → why and from where it began again; for the status."""
    _missing: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Model → since when, and when last, no serving node held a part of what is committed."""

    def reserve(self, model: str) -> None:
        """Buffers for this node's shard; what an earlier life left is taken over if it is whole. Blocking."""
        holder, source = self.holder, self.sources[model]
        packing, commit = holder.packing(model), holder.cluster.commits.get(model)
        entry = self.manifest.entry(model)
        region = self._adopted(model, entry, commit) if entry and commit else None
        holder.store.add_model(
            model,
            packing.tensors,
            packing.nbytes,
            is_frozen=source.is_frozen,
            adopted=region,
            num_regions=entry.num_regions if entry and region is not None else 0,
            specs=holder.cluster.specs[model],
            storages=packing.storages,
        )
        if region is not None and entry is not None and commit is not None:
            _log.info("%s version %d found in the pool", model, commit.version)
            holder.became(holder.store.model(model), commit, entry.checksum)

    def _adopted(self, model: str, entry: ManifestEntry, commit: VersionCommit) -> PoolRegion | None:
        """The region of an earlier life, if it holds the commit, undamaged."""
        if (entry.version, entry.lineage) != (commit.version, commit.lineage):
            return None
        packing = self.holder.packing(model)
        return adopt_region(self.holder.store.pool, entry, packing.tensors, packing.nbytes, packing.storages)

    def is_current(self, model: str) -> bool:
        """Whether this node holds what is committed."""
        commit = self.holder.cluster.commits.get(model)
        held = (self.holder.store.model(model).version, self.holder.lineages.get(model))
        return commit is not None and held == (commit.version, commit.lineage)

    async def fill(self, model: str) -> None:
        """Hold what is committed, if that can be had now.

        Raises PivotError on what may pass: try again.
        """
        commit = self.holder.cluster.commits.get(model)
        if self.is_current(model):
            return
        if commit is not None and self.holder.flip(commit):
            await self.record(model)
            return
        async with self.holder.lock(model):
            if commit is None:
                await self._load(model, self._beginning(model, 0, self.sources[model].folder), is_new=True)
            elif not (commit.write_id.startswith(SEED) and await self._loads(model, commit)):
                await self._pull(model, commit)
        await self.record(model)

    def _beginning(self, model: str, lineage: int, folder: Path) -> VersionCommit:
        write_id = f"{SEED}-{self.holder.store.new_id()}"
        return VersionCommit(
            model=model, version=0, write_id=write_id, checksum="", lineage=lineage, source=str(folder)
        )

    async def _loads(self, model: str, commit: VersionCommit) -> bool:
        """Whether the folder of the commit is here too, with the same values."""
        try:
            await self._load(model, commit, is_new=False)
        except PivotError as error:
            _log.info("%s comes from peers, not from %s: %s", model, commit.source, error)
            return False
        return True

    async def _load(self, model: str, commit: VersionCommit, *, is_new: bool) -> None:
        """Fill the shard from the commit's folder, and record the commit if it `is_new`."""
        packing = self.holder.packing(model)
        whole_plan = await asyncio.to_thread(self.read_plan, Path(commit.source))
        plan = shard_plan(whole_plan, packing)
        buffer = await self._buffer(model)
        memory = buffer.region.memory
        await asyncio.to_thread(load_seed, plan, memory, packing.storages)
        checksum = await asyncio.to_thread(version_checksum, packing.tensors, memory, packing.storages)
        if is_new:
            mine = {str(self.holder.cluster.node): checksum}
            whole = checksum if packing.is_whole else ""
            wanted = commit.model_copy(update={"holders": mine, "checksum": whole})
            commit = await self.propose(wanted)
            if commit.write_id != wanted.write_id and not commit.write_id.startswith(SEED):
                raise Conflict(f"{model} moved on while it was loaded", model=model)
        self._check(model, commit, checksum)
        self._became(model, buffer, commit, checksum)

    def _check(self, model: str, commit: VersionCommit, checksum: str) -> None:
        """Raises TransportError if the shard is not what the record says."""
        said = commit.holders.get(str(self.holder.cluster.node))
        if said is None and self.holder.packing(model).is_whole and commit.checksum:
            said = commit.checksum
        if said is not None and said != checksum:
            raise TransportError(
                f"{model} version {commit.version} has checksum {checksum} here, {said} on record",
                model=model,
            )

    async def _buffer(self, model: str) -> Buffer:
        """An empty buffer: the readable one before the first version, else the spare."""
        found = self.holder.store.model(model)
        if found.version < 0:
            if found.readable.is_dirty:
                self.holder.store.replace(found, found.readable)
                await self.holder.register()
            return found.readable
        if found.is_frozen:
            raise Conflict(f"{model} is frozen and has no spare buffer", model=model)
        await self.holder.empty(found, self.holder.cluster.config.control_deadline_s)
        await self.holder.register()
        return found.spare

    def _became(self, model: str, buffer: Buffer, commit: VersionCommit, checksum: str) -> None:
        found = self.holder.store.model(model)
        if buffer is not found.readable:
            found.spare.is_dirty = False
            found.current = 1 - found.current
        self.holder.became(found, commit, checksum)

    async def _pull(self, model: str, commit: VersionCommit) -> None:
        config = self.holder.cluster.config
        packing = self.holder.packing(model)
        boxes = without_repeats(list(packing.boxes.items()))
        receiver = self.holder.cluster.name
        try:
            await self.reads.plans.for_boxes(model, receiver, boxes)
        except Conflict as error:
            await self._begin_again(model, commit, error)
            return
        self._missing.pop(model, None)
        buffer = await self._buffer(model)
        await self.holder.register()
        into = Target(buffer.region.path.name, buffer.region.memory, packing)

        async def target() -> Target:
            nonlocal buffer, into
            if into.is_torn:
                buffer.is_dirty = True
                buffer = await self._buffer(model)
                into = Target(buffer.region.path.name, buffer.region.memory, packing)
            return into

        try:
            await self.reads.pull(
                model,
                commit.version,
                commit.lineage,
                receiver,
                boxes,
                target,
                config.copy_deadline_s,
                has_proof=True,
            )
        except PivotError:
            buffer.is_dirty = True  # late bytes may still come
            raise
        checksum = await asyncio.to_thread(
            version_checksum, packing.tensors, buffer.region.memory, packing.storages
        )
        self._check(model, commit, checksum)
        buffer.is_dirty = False
        self._became(model, buffer, commit, checksum)
        _log.info("%s version %d refilled from peers", model, commit.version)

    async def _begin_again(self, model: str, commit: VersionCommit, error: Conflict) -> None:
        """Nobody holds a part of what is committed: begin again once that has lasted. Raises `error` till
        then."""
        now_s, term_s = self.holder.now_s(), self.holder.cluster.config.reseed_after_s
        since_s, last_s = self._missing.get(model, (now_s, now_s))
        if now_s - last_s > term_s / 2:  # an earlier time: what is missing now is missing since now
            since_s = now_s
        self._missing[model] = (since_s, now_s)
        if now_s - since_s < term_s:
            raise error
        del self._missing[model]
        folder = await asyncio.to_thread(self.newest_folder, model)
        said = f"no copy of version {commit.version} was left: began again from {folder}"
        _log.error("%s: %s", model, said)
        await self._load(model, self._beginning(model, commit.lineage + 1, folder), is_new=True)
        self.reseeded[model] = said

    async def record(self, model: str) -> None:
        """What a restarted process of this node looks for in the pool."""
        found = self.holder.store.model(model)
        if found.version < 0:
            return
        entry = ManifestEntry(
            model=model,
            path=found.readable.view.path,
            nbytes=found.nbytes,
            version=found.version,
            checksum=self.holder.checksums[model],
            num_regions=found.num_regions,
            tensors=found.tensors,
            lineage=self.holder.lineages.get(model, 0),
            sliced=found.readable.view.sliced,
        )
        try:
            await asyncio.to_thread(self.manifest.put, entry)
        except OSError as error:  # the version is readable all the same
            _log.error("a restarted GPS will not find %s: %s", model, error)


def shard_plan(plan: SeedPlan, packing: Packing) -> SeedPlan:
    """The part of a checkpoint that a shard is: whole rows of its tensors, so one range of each.

    Raises ConfigError if the checkpoint is not of these tensors.
    """
    sources = []
    by_name = {source.name: source for source in plan.sources}
    for tensor in packing.tensors:
        source, box = by_name.get(tensor.name), packing.boxes[tensor.name]
        if source is None or source.shape != packing.specs[tensor.name].shape:
            remedy = "Name a folder of the same model"
            raise ConfigError("models", tensor.name, "is not in the folder, or has another shape", remedy)
        row_bytes = source.nbytes // source.shape[0] if source.shape and source.shape[0] else source.nbytes
        first = box.start[0] if box.start else 0
        rows = box.shape[0] if box.shape else 1
        sources.append(
            replace(
                source,
                shape=box.shape,
                offset_bytes=source.offset_bytes + first * row_bytes,
                nbytes=rows * row_bytes if source.nbytes else 0,
            )
        )
    return SeedPlan(tuple(sources), packing.tensors, packing.nbytes)
