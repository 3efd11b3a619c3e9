"""The pieces of the store: buffers, leases, a Write in progress, and the checks that run outside of it."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from services.gps.boxes import Part
from shared.contracts.gps import ModelStatus, PoolTensor, PoolView, WriteRequest, WriteStatus
from shared.layout.sliced_storage import SlicedStorage
from shared.layout.tensor_layout import Box, FlatRange, TensorSpec, whole
from shared.weights.checksum import checksum_bytes, checksum_region, combine
from shared.weights.dtypes import itemsize_of
from shared.weights.host_pool import PoolRegion, tensor_nbytes
from shared.weights.stored_parts import sliced_tensors

Bytes = NDArray[np.uint8]
In = TypeVar("In")
MAX_HASH_THREADS = 8
"""Past this, host memory bandwidth is the limit."""


@dataclass(frozen=True, slots=True)
class Lease:
    """`receiver` may read version `version` until `expires_s`."""

    lease_id: str
    receiver: str
    version: int
    expires_s: float


@dataclass(slots=True)
class Buffer:
    """A region and what it holds. `version` is None while it holds nothing whole; `is_dirty` once a writer
    got it."""

    region: PoolRegion
    view: PoolView
    version: int | None = None
    is_dirty: bool = False
    leases: dict[str, Lease] = field(default_factory=dict)


@dataclass(slots=True)
class WriterPart:
    """What one writer holds, and its checksums once they were found in the buffer."""

    parts: tuple[Part, ...]
    checksums: tuple[str, ...] | None = None


@dataclass(slots=True)
class OpenWrite:
    """A Write in progress. Compared by identity: a replaced one never becomes a version."""

    write_id: str
    model: str
    version: int
    attempt: str
    writers: tuple[str, ...]
    joined: dict[str, WriterPart] = field(default_factory=dict)
    is_sealing: bool = False

    @property
    def pending(self) -> tuple[str, ...]:
        """Writers that have not committed, in the order of `writers`."""
        return tuple(w for w in self.writers if w not in self.joined or self.joined[w].checksums is None)

    def is_of(self, request: WriteRequest) -> bool:
        """Whether `request` is about this very Write."""
        return (self.version, self.attempt, self.writers) == (
            request.version,
            request.attempt,
            request.writers,
        )

    def whole_checksums(self, specs: Mapping[str, TensorSpec]) -> dict[str, str]:
        """Of tensors that one box of one writer had as a whole. Everybody has committed."""
        return {
            name: checksum
            for part in self.joined.values()
            for (name, region), checksum in zip(part.parts, part.checksums or (), strict=True)
            if region in (whole(specs[name]), FlatRange(0, specs[name].numel))
        }

    def status(self) -> WriteStatus:
        return WriteStatus(
            write_id=self.write_id, version=self.version, committed=False, pending_writers=self.pending
        )


@dataclass(slots=True)
class Model:
    """A model of the pool. `buffers[current]` is readable; a frozen model has that one only."""

    name: str
    tensors: tuple[PoolTensor, ...]
    nbytes: int
    is_frozen: bool
    buffers: list[Buffer]
    specs: dict[str, TensorSpec]
    by_name: dict[str, PoolTensor]
    storages: Mapping[str, SlicedStorage] = field(default_factory=dict)
    """Tensors that its buffers store slice by slice; the others are row-major."""
    current: int = 0
    version: int = -1
    """-1 until it was seeded."""
    checksum: str = ""
    write: OpenWrite | None = None
    last_committed: WriteStatus | None = None
    num_regions: int = 0

    @property
    def readable(self) -> Buffer:
        return self.buffers[self.current]

    @property
    def spare(self) -> Buffer:
        return self.buffers[1 - self.current]

    def view_of(self, region: PoolRegion) -> PoolView:
        """How `region` is read as a buffer of this model."""
        cut = sliced_tensors(self.storages)
        return PoolView(path=str(region.path), nbytes=self.nbytes, tensors=self.tensors, sliced=cut)

    def status(self) -> ModelStatus:
        leases = [lease for buffer in self.buffers for lease in buffer.leases.values()]
        return ModelStatus(
            model=self.name,
            version=self.version,
            checksum=self.checksum,
            dtype=self.tensors[0].dtype if self.tensors else "",
            nbytes=self.nbytes,
            num_tensors=len(self.tensors),
            is_frozen=self.is_frozen,
            leases=tuple(f"{lease.receiver}: version {lease.version}" for lease in leases),
            open_write=self.write.status() if self.write else None,
        )


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease, and the buffer it holds."""

    lease: Lease
    view: PoolView
    model: Model


@dataclass(frozen=True, slots=True)
class Verification:
    """One writer's commit, to be checked in a thread: `problem()` reads only the buffer it was given."""

    write: OpenWrite
    writer: str
    parts: tuple[Part, ...]
    checksums: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    tensors: Mapping[str, PoolTensor]
    memory: Bytes
    storages: Mapping[str, SlicedStorage] = field(default_factory=dict)

    def problem(self) -> tuple[int, str] | None:
        """Index of the first box whose bytes differ from its checksum, and how; None if all agree."""

        def checksum(part: Part) -> str:
            name, region = part
            spec = self.specs[name]
            raw = raw_of(self.memory, self.tensors[name])
            return checksum_region(raw, spec.shape, spec.itemsize, region, self.storages.get(name))

        found = in_threads(checksum, self.parts)
        for index, (part, claimed, there) in enumerate(zip(self.parts, self.checksums, found, strict=True)):
            if there != claimed:
                return index, f"{part[0]}: the buffer has {there}, the writer says {claimed}"
        return None


@dataclass(frozen=True, slots=True)
class Seal:
    """A whole version, to be checksummed in a thread before it flips."""

    write: OpenWrite
    tensors: tuple[PoolTensor, ...]
    memory: Bytes
    known: Mapping[str, str]
    """Checksums of tensors that one box of one writer had as a whole: not computed twice."""
    storages: Mapping[str, SlicedStorage]

    def checksum(self) -> str:
        return version_checksum(self.tensors, self.memory, self.storages, self.known)


def raw_of(memory: Bytes, tensor: PoolTensor) -> Bytes:
    """Bytes of `tensor` in a region."""
    return memory[tensor.offset_bytes : tensor.offset_bytes + tensor_nbytes(tensor)]


def tensor_checksum(memory: Bytes, tensor: PoolTensor, storage: SlicedStorage | None = None) -> str:
    """xxh3_64 of `tensor` in a region, over its values in row-major order. 16 hex digits."""
    raw = raw_of(memory, tensor)
    if storage is None:
        return checksum_bytes(raw.data)
    everything = Box((0,) * len(tensor.shape), tensor.shape)
    return checksum_region(raw, tensor.shape, itemsize_of(tensor.dtype), everything, storage)


def version_checksum(
    tensors: tuple[PoolTensor, ...],
    memory: Bytes,
    storages: Mapping[str, SlicedStorage] | None = None,
    known: Mapping[str, str] | None = None,
) -> str:
    """Checksum of a version: the same for the same values, whatever layout wrote them and however they are
    stored. 16 hex digits."""
    storages, known = storages or {}, known or {}

    def checksum(tensor: PoolTensor) -> str:
        return known.get(tensor.name) or tensor_checksum(memory, tensor, storages.get(tensor.name))

    return combine(zip((tensor.name for tensor in tensors), in_threads(checksum, tensors), strict=True))


def in_threads(work: Callable[[In], str], items: Sequence[In]) -> list[str]:
    """`work` of each item, in order, on half of the cores: hashing runs without the interpreter lock."""
    num_threads = min(MAX_HASH_THREADS, (os.cpu_count() or 1) // 2, len(items))
    if num_threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))
