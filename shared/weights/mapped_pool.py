"""A mapped region of the host pool, as readers and writers of it see one: arrays and tensors, none copied.

A mapping stays valid after the file is removed, until the last array of it is gone.
"""

import contextlib
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PoolTensor, PoolView
from shared.errors import InvalidRequest, LayoutError, NotFound
from shared.layout.sliced_storage import SlicedStorage
from shared.layout.tensor_layout import FlatRange, Region
from shared.weights.dtypes import itemsize_of, numpy_dtype
from shared.weights.stored_parts import paired_parts, storages_of

PREFIX = "pivotrl-"
SHM_FOLDER = Path("/dev/shm")
Bytes = NDArray[np.uint8]


def map_pages(fd: int, nbytes: int, *, writable: bool) -> Bytes:
    """Map all pages at once: a first copy through single page faults runs at a fifth of the speed."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection), np.uint8)


class MappedPool:
    """A mapped `PoolView`. `memory` has shape (nbytes,)."""

    def __init__(self, view: PoolView, memory: Bytes, *, writable: bool) -> None:
        self.view, self.memory, self.writable = view, memory, writable
        self._tensors = {tensor.name: tensor for tensor in view.tensors}
        self._storages = storages_of(view)
        self._flat: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def address(self) -> int:
        """Where the mapping begins, for pinning it in a GPU process."""
        return int(self.memory.ctypes.data)

    def tensor(self, name: str) -> PoolTensor:
        """The entry of tensor `name`. Raises NotFound."""
        if name not in self._tensors:
            raise NotFound(f"no tensor {name} in {self.view.path}", tensor=name)
        return self._tensors[name]

    def storage(self, name: str) -> SlicedStorage | None:
        """How tensor `name` is stored; None is row-major."""
        return self._storages.get(name)

    @property
    def storages(self) -> Mapping[str, SlicedStorage]:
        """Storage of the tensors that are not row-major."""
        return self._storages

    def raw(self, name: str) -> Bytes:
        """Bytes of tensor `name` as they are stored, shape (nbytes,)."""
        tensor = self.tensor(name)
        return self.memory[tensor.offset_bytes : tensor.offset_bytes + tensor_nbytes(tensor)]

    def array(self, name: str) -> NDArray[Any]:
        """Tensor `name` in its shape. What numpy has no type for (bfloat16) comes as unsigned integers.

        Raises LayoutError if it is stored in slices: then there is no such array, only `copy_out`.
        """
        tensor = self._row_major(name)
        return self.raw(name).view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def _row_major(self, name: str) -> PoolTensor:
        if name in self._storages:
            problem = f"{name} is stored in {len(self._storages[name].boxes)} slices: copy it out"
            raise LayoutError(problem, tensor=name)
        return self.tensor(name)

    def copy_out(self, name: str, region: Region, target: NDArray[Any]) -> None:
        """Copy `region` of tensor `name` into contiguous `target`, of its number of bytes, row-major."""
        self._copy(name, region, target, is_out=True)

    def copy_in(self, name: str, region: Region, source: NDArray[Any]) -> None:
        """Copy contiguous `source` into `region` of tensor `name`."""
        self._copy(name, region, source, is_out=False)

    def _copy(self, name: str, region: Region, dense: NDArray[Any], *, is_out: bool) -> None:
        tensor = self.tensor(name)
        elements = self.raw(name).view(f"u{itemsize_of(tensor.dtype)}")
        flat = dense.reshape(-1).view(elements.dtype)
        assert flat.size == region.numel, f"{name}: {flat.size} elements for a region of {region.numel}"
        for stored, row_major in paired_parts(tensor.shape, self.storage(name), region, elements, flat):
            np.copyto(*((row_major, stored) if is_out else (stored, row_major)))

    def torch(self, name: str) -> Any:
        """Tensor `name` as a CPU torch tensor over the same memory. Writing to a reader's tensor faults.

        Raises LayoutError if it is stored in slices.
        """
        return self._torch(self._row_major(name))

    def _torch(self, tensor: PoolTensor) -> Any:
        import torch

        dtype = getattr(torch, tensor.dtype)
        if tensor_nbytes(tensor) == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        if self._flat is None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable.*")
                self._flat = torch.frombuffer(self.memory.data, dtype=torch.uint8)
        at = tensor.offset_bytes
        return self._flat[at : at + tensor_nbytes(tensor)].view(dtype).view(tensor.shape)

    def stored(self, name: str) -> Any:
        """The elements of tensor `name` as they are stored: a torch tensor of one dimension."""
        tensor = self.tensor(name)
        numel = int(np.prod(tensor.shape, dtype=np.int64))
        return self._torch(tensor.model_copy(update={"shape": (numel,)}))

    def flat(self, name: str, start: int, count: int) -> Any:
        """Elements `[start, start + count)` of tensor `name` in row-major order, a torch tensor of one
        dimension: over the same memory, or a copy if the tensor is stored in slices."""
        if self.storage(name) is None:
            return self.torch(name).reshape(-1)[start : start + count]
        import torch

        dense = torch.empty(count, dtype=getattr(torch, self.tensor(name).dtype))
        self.read_flat(name, start, dense)
        return dense

    def read_flat(self, name: str, start: int, target: Any) -> None:
        """Fill `target`, a contiguous torch tensor of any device, with elements of tensor `name` in row-major
        order, from `start` on. They are there on return.

        What is stored in slices crosses to a device slice by slice, each as it is stored, and is put in order
        there: host memory is read once, and the device holds one slice more for a while. A pinned mapping
        makes it as fast as the bus.
        """
        self._copy_flat(name, start, target, is_out=True)

    def write_flat(self, name: str, start: int, source: Any) -> None:
        """The way back: write a contiguous torch tensor, of any device, over the row-major elements from
        `start` on. They are in the pool on return."""
        self._copy_flat(name, start, source, is_out=False)

    def _copy_flat(self, name: str, start: int, tensor: Any, *, is_out: bool) -> None:
        from shared.weights.strided import as_numpy, copy_into, wait_for_copies

        dense, spec = tensor.detach().view(-1), self.tensor(name)
        region = FlatRange(start, dense.numel())
        if region.count and dense.is_cpu and str(dense.dtype) == f"torch.{spec.dtype}":
            self._copy(name, region, as_numpy(dense), is_out=is_out)
            return
        for stored, row_major in paired_parts(
            spec.shape, self.storage(name), region, self.stored(name), dense
        ):
            copy_into(*((row_major, stored) if is_out else (stored, row_major)))
        wait_for_copies(dense)

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Every tensor by name, made when it is asked for: as `torch` gives it, or a `SlicedTensor`."""
        return _Tensors(self)

    def close(self) -> None:
        """Drop this object's hold; the pages go with the last array made of it."""
        self.memory, self._flat = np.empty(0, np.uint8), None


class _Tensors(Mapping[str, Any]):
    def __init__(self, pool: MappedPool) -> None:
        self._pool = pool

    def __getitem__(self, name: str) -> Any:
        if name not in self._pool:
            raise KeyError(name)
        storage = self._pool.storage(name)
        if storage is None:
            return self._pool.torch(name)
        from shared.weights.sliced_tensor import SlicedTensor

        return SlicedTensor(self._pool.stored(name), storage)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pool.names)

    def __len__(self) -> int:
        return len(self._pool.names)


def tensor_nbytes(tensor: PoolTensor) -> int:
    """Bytes of a pool tensor."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * itemsize_of(tensor.dtype)


def map_view(view: PoolView, *, writable: bool = False, folder: Path | None = SHM_FOLDER) -> MappedPool:
    """Map a region of the pool; `writable` for a writer of the spare buffer only.

    `folder` confines the path, which came over the network; None where the caller vouches for it.

    Raises:
        InvalidRequest: the path is not a pool file directly in `folder`, or a tensor lies outside the region.
        NotFound: the region is gone (its owner stopped, or replaced a torn Write).
    """
    path = Path(view.path)
    if folder is not None and (path.parent != folder or not path.name.startswith(PREFIX)):
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
        memory = map_pages(fd, max(view.nbytes, 1), writable=writable)[: view.nbytes]
    return MappedPool(view, memory, writable=writable)
