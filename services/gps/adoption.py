"""A region that an earlier life of this process left in shared memory: whether it is what the manifest says,
and brought into the storage of now."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.gps.manifest import ManifestEntry
from services.gps.packing import Storages
from services.gps.versions import Bytes, version_checksum
from shared.contracts.gps import PoolTensor, PoolView
from shared.errors import InvalidRequest
from shared.layout.tensor_layout import Box
from shared.weights.host_pool import HostPool, PoolRegion
from shared.weights.mapped_pool import MappedPool
from shared.weights.stored_parts import sliced_tensors

_log = logging.getLogger("pivotrl.gps")


def adopt_region(
    pool: HostPool, entry: ManifestEntry, tensors: Sequence[PoolTensor], nbytes: int, storages: Storages
) -> PoolRegion | None:
    """The region of `entry`, stored as `storages` say; None if it is gone, of other `tensors`, or damaged
    (then it is removed). Blocking.

    A run that goes on with other replicas or ranks has other slices; its version is kept all the same.
    """
    if entry.nbytes != nbytes or entry.tensors != tuple(tensors):
        return None
    region = pool.adopt(Path(entry.path), nbytes)
    if region is not None and not _brought_into(storages, entry, region.memory):
        _log.warning("%s version %d in %s is damaged", entry.model, entry.version, entry.path)
        pool.remove(region)
        return None
    return region


def _brought_into(storages: Storages, entry: ManifestEntry, memory: Bytes) -> bool:
    """Whether `memory` was what `entry` says; then it is stored as `storages` say now."""
    view = PoolView(path=entry.path, nbytes=entry.nbytes, tensors=entry.tensors, sliced=entry.sliced)
    try:
        left = MappedPool(view, memory, writable=True)
    except InvalidRequest:  # its slices are not its tensors
        return False
    if version_checksum(entry.tensors, memory, left.storages) != entry.checksum:
        return False
    wanted = view.model_copy(update={"sliced": sliced_tensors(storages)})
    if wanted.sliced != entry.sliced:
        _log.info("%s version %d was stored for other layouts: it is stored anew", entry.model, entry.version)
        _store_anew(left, MappedPool(wanted, memory, writable=True), entry.tensors)
    return True


def _store_anew(left: MappedPool, wanted: MappedPool, tensors: Sequence[PoolTensor]) -> None:
    """Both are over the same memory, where a tensor has the same bytes' room either way. Dying inside leaves
    a region of another checksum than the manifest's: it is filled again then."""
    for tensor in tensors:
        if left.storage(tensor.name) is wanted.storage(tensor.name):  # row-major before and after
            continue
        everything = Box((0,) * len(tensor.shape), tensor.shape)
        dense = np.empty(left.raw(tensor.name).nbytes, np.uint8)
        left.copy_out(tensor.name, everything, dense)
        wanted.copy_in(tensor.name, everything, dense)
