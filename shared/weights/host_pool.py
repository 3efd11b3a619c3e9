"""The host pool of a node: big shared-memory regions, one per model and version buffer (paper §5.1).

A region is a file `pivotrl-<run>-n<node>-<model>-<buffer>` in /dev/shm. Its owner holds a lock on it, so a
file that can be locked is a leftover of a dead run. Whether it fits is checked *before* it is made: a full
/dev/shm kills with SIGBUS, not with an error.

Readers and writers map a region by its `PoolView` and get arrays without a copy. A mapping stays valid after
the file is removed, until the last array of it is gone.
"""

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PoolTensor, PoolView
from shared.errors import ConfigError, InvalidRequest, NotFound
from shared.weights.dtypes import itemsize_of, numpy_dtype

PREFIX = "pivotrl-"
SHM_FOLDER = Path("/dev/shm")
ALIGNMENT_BYTES = 256
"""Every tensor begins at a multiple of this: a whole number of cache lines and of GPU sectors."""

_PART = re.compile(r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+)*")
Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class PoolRegion:
    """A region that this process owns. `memory` has shape (nbytes,)."""

    path: Path
    nbytes: int
    memory: Bytes
    lock_fd: int


def _map(fd: int, nbytes: int, *, writable: bool) -> Bytes:
    """Map all pages at once: a first copy through single page faults runs at a fifth of the speed."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection), np.uint8)


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
            memory = _map(fd, max(nbytes, 1), writable=True)[:nbytes]
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
        memory = _map(fd, max(nbytes, 1), writable=True)[:nbytes]
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


class MappedPool:
    """A mapped `PoolView`: arrays and tensors of it, none copied."""

    def __init__(self, view: PoolView, memory: Bytes, *, writable: bool) -> None:
        self.view, self.memory, self.writable = view, memory, writable
        self._tensors = {tensor.name: tensor for tensor in view.tensors}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def address(self) -> int:
        """Where the mapping begins, for pinning it in a GPU process."""
        return int(self.memory.ctypes.data)

    def tensor(self, name: str) -> PoolTensor:
        """The entry of tensor `name`. Raises NotFound."""
        if name not in self._tensors:
            raise NotFound(f"no tensor {name} in {self.view.path}", tensor=name)
        return self._tensors[name]

    def raw(self, name: str) -> Bytes:
        """Bytes of tensor `name`, shape (nbytes,)."""
        tensor = self.tensor(name)
        return self.memory[tensor.offset_bytes : tensor.offset_bytes + tensor_nbytes(tensor)]

    def array(self, name: str) -> NDArray[Any]:
        """Tensor `name` in its shape. What numpy has no type for (bfloat16) comes as unsigned integers."""
        tensor = self.tensor(name)
        return self.raw(name).view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def torch(self, name: str) -> Any:
        """Tensor `name` as a CPU torch tensor over the same memory. Writing to a reader's tensor faults."""
        import warnings

        import torch

        tensor = self.tensor(name)
        dtype = getattr(torch, tensor.dtype)
        if tensor_nbytes(tensor) == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            flat = torch.frombuffer(self.raw(name).data, dtype=torch.uint8)
        return flat.view(dtype).reshape(tensor.shape)

    def close(self) -> None:
        """Drop this object's hold; the pages go with the last array made of it."""
        self.memory = np.empty(0, np.uint8)


def tensor_nbytes(tensor: PoolTensor) -> int:
    """Bytes of a pool tensor."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * itemsize_of(tensor.dtype)


def map_view(view: PoolView, *, writable: bool = False, folder: Path = SHM_FOLDER) -> MappedPool:
    """Map a region of the pool; `writable` for a writer of the spare buffer only.

    Raises:
        InvalidRequest: the path is not a pool file directly in `folder`, or a tensor lies outside the region.
        NotFound: the region is gone (its owner stopped, or replaced a torn Write).
    """
    path = Path(view.path)
    if path.parent != folder or not path.name.startswith(PREFIX):
        raise InvalidRequest("view.path", f"{view.path!r} is not a pool file in {folder}")
    for tensor in view.tensors:
        if tensor.offset_bytes < 0 or tensor.offset_bytes + tensor_nbytes(tensor) > view.nbytes:
            raise InvalidRequest(
                "view.tensors", f"{tensor.name} lies outside the region of {view.nbytes} bytes"
            )
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as error:
        raise NotFound(f"pool region {view.path} is gone", path=view.path) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        size = os.fstat(fd).st_size
        if size < view.nbytes:
            raise InvalidRequest("view.nbytes", f"{view.path} has {size} bytes, not {view.nbytes}")
        memory = _map(fd, max(view.nbytes, 1), writable=writable)[: view.nbytes]
    return MappedPool(view, memory, writable=writable)


def lay_out(specs: list[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[PoolTensor, ...], int]:
    """(name, dtype, shape) one after another, each aligned; the tensors and the region's bytes."""
    tensors, at = [], 0
    for name, dtype, shape in specs:
        tensor = PoolTensor(name=name, dtype=dtype, shape=shape, offset_bytes=at)
        tensors.append(tensor)
        at += -(-tensor_nbytes(tensor) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(tensors), at
