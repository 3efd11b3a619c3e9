"""The host pool of a node: big shared-memory regions, one per model and version buffer (paper §5.1).

A region is a file `pivotrl-<run>-n<node>-<model>-<buffer>` in /dev/shm. Its owner holds a lock on it, so a
file that can be locked is a leftover of a dead run. Whether it fits is checked *before* it is made: a full
/dev/shm kills with SIGBUS, not with an error.

Readers and writers map a region by its `PoolView`: `shared.weights.mapped_pool`.
"""

import fcntl
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.contracts.gps import PoolTensor
from shared.errors import ConfigError
from shared.weights.mapped_pool import PREFIX, Bytes, map_pages
from shared.weights.mapped_pool import SHM_FOLDER as SHM_FOLDER
from shared.weights.mapped_pool import MappedPool as MappedPool
from shared.weights.mapped_pool import map_view as map_view
from shared.weights.mapped_pool import tensor_nbytes as tensor_nbytes

ALIGNMENT_BYTES = 256
"""Every tensor begins at a multiple of this: a whole number of cache lines and of GPU sectors."""

_PART = re.compile(r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+)*")


@dataclass(slots=True)
class PoolRegion:
    """A region that this process owns. `memory` has shape (nbytes,)."""

    path: Path
    nbytes: int
    memory: Bytes
    lock_fd: int


class HostPool:
    """Regions of one node of one run, within `budget_bytes`.

    Raises ConfigError where a region cannot fit, naming needed and free bytes.
    """

    def __init__(self, *, run: str, node: int, budget_bytes: int, folder: Path = SHM_FOLDER) -> None:
        if not _PART.fullmatch(run):
            raise ConfigError(
                "run.name", run, "is not letters, digits, '_', '.' and '-'", "Choose another name"
            )
        self._folder, self._budget_bytes = folder, budget_bytes
        self._prefix = f"{PREFIX}{run}-n{node}-"
        self._regions: dict[str, PoolRegion] = {}

    @property
    def used_bytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())

    @property
    def folder(self) -> Path:
        return self._folder

    def check_room(self, nbytes: int, what: str) -> None:
        """Raises ConfigError if `nbytes` more do not fit the budget or the free shared memory."""
        if self.used_bytes + nbytes > self._budget_bytes:
            raise ConfigError(
                "cluster.host_pool_bytes",
                self._budget_bytes,
                f"{what} needs {nbytes} bytes, {self._budget_bytes - self.used_bytes} of the budget are free",
                "Raise the budget, use a smaller model, or more nodes",
                needed_bytes=nbytes,
                free_bytes=self._budget_bytes - self.used_bytes,
            )
        status = os.statvfs(self._folder)
        free = status.f_bavail * status.f_frsize
        if nbytes > free:
            raise ConfigError(
                str(self._folder),
                None,
                f"{what} needs {nbytes} bytes of shared memory, {free} are free",
                f"Mount it larger (docker --shm-size), or remove {PREFIX}* files of dead runs",
                needed_bytes=nbytes,
                free_bytes=free,
            )

    def create(self, model: str, buffer: str, nbytes: int) -> PoolRegion:
        """A new zeroed region, its pages reserved. An old file of the same name goes."""
        name = f"{self._prefix}{model}-{buffer}"
        assert _PART.fullmatch(model), model
        assert _PART.fullmatch(buffer), buffer
        assert name not in self._regions, f"{name} exists"
        path = self._folder / name
        path.unlink(missing_ok=True)
        self.check_room(nbytes, f"buffer {buffer} of {model}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            memory = map_pages(fd, max(nbytes, 1), writable=True)[:nbytes]
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            problem = f"{nbytes} bytes of shared memory could not be reserved ({error.strerror})"
            raise ConfigError(str(self._folder), None, problem, "Free some, or mount it larger") from error
        region = PoolRegion(path, nbytes, memory, fd)
        self._regions[name] = region
        return region

    def adopt(self, path: Path, nbytes: int) -> PoolRegion | None:
        """A region that an earlier, dead process of this node left, with what it holds; None if there is
        none such."""
        if (
            path.parent != self._folder
            or not path.name.startswith(self._prefix)
            or path.name in self._regions
        ):
            return None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_size != max(nbytes, 1) or self.used_bytes + nbytes > self._budget_bytes:
                os.close(fd)
                return None
        except OSError:  # its owner lives
            os.close(fd)
            return None
        memory = map_pages(fd, max(nbytes, 1), writable=True)[:nbytes]
        region = PoolRegion(path, nbytes, memory, fd)
        self._regions[path.name] = region
        return region

    def remove(self, region: PoolRegion) -> None:
        """Remove the file; one that was removed before is left alone. Who has it mapped keeps the pages."""
        if self._regions.pop(region.path.name, None) is None:
            return
        region.path.unlink(missing_ok=True)
        os.close(region.lock_fd)
        region.memory = np.empty(0, np.uint8)

    def close(self) -> None:
        """Remove every region. A second call does nothing."""
        for region in list(self._regions.values()):
            self.remove(region)


def find_leftovers(
    folder: Path = SHM_FOLDER, *, run: str | None = None, node: int | None = None
) -> list[Path]:
    """Regions (of `run`, of its `node`, or of any) whose owner is dead, sorted."""
    prefix = PREFIX
    if run is not None:
        prefix += f"{run}-n" if node is None else f"{run}-n{node}-"
    found = (path for path in sorted(folder.iterdir()) if path.name.startswith(prefix))
    return [path for path in found if _is_dead(path)]


def remove_leftovers(
    folder: Path = SHM_FOLDER,
    *,
    run: str | None = None,
    node: int | None = None,
    keep: Collection[Path] = (),
) -> list[Path]:
    """Remove them, but for those to `keep`; returns which."""
    found = [path for path in find_leftovers(folder, run=run, node=node) if path not in keep]
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone, a link, or another user's: not ours to remove
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def lay_out(specs: list[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[PoolTensor, ...], int]:
    """(name, dtype, shape) one after another, each aligned; the tensors and the region's bytes."""
    tensors, at = [], 0
    for name, dtype, shape in specs:
        tensor = PoolTensor(name=name, dtype=dtype, shape=shape, offset_bytes=at)
        tensors.append(tensor)
        at += -(-tensor_nbytes(tensor) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(tensors), at
