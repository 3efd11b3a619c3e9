"""A version of a model in shared memory, mapped into an engine's process; and the memory of that process."""

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from shared.errors import TransportError

WireTensor = tuple[str, str, tuple[int, ...], int]
"""A `PoolTensor` as plain values: name, dtype, shape, offset in bytes."""

_CUDA_HOST_REGISTER_DEFAULT = 0


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trim_heap() -> None:
    """Hand freed heap pages back to the system, where the C library can."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc: large blocks were returned when they were freed
        return


class MappedPool:
    """A shared-memory file mapped into this process, and its tensors without a copy."""

    def __init__(self, path: str, nbytes: int, pin: bool) -> None:
        with open(path, "r+b" if pin else "rb") as file:
            status = os.fstat(file.fileno())
            access = mmap.ACCESS_WRITE if pin else mmap.ACCESS_COPY
            self._map = mmap.mmap(file.fileno(), nbytes, access=access)
        self.identity = (path, status.st_dev, status.st_ino, nbytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._is_pinned = pin
        if pin:
            code = torch.cuda.cudart().cudaHostRegister(
                self._bytes.data_ptr(), nbytes, _CUDA_HOST_REGISTER_DEFAULT
            )
            if int(code) != 0:
                raise TransportError(f"cannot pin {path} ({nbytes} bytes): CUDA error {int(code)}", path=path)

    @staticmethod
    def identify(path: str, nbytes: int) -> tuple[str, int, int, int]:
        """Changes when the file at `path` is another one, so that a stale mapping is never read."""
        status = os.stat(path)
        return path, status.st_dev, status.st_ino, nbytes

    def tensors(self, wire: Sequence[WireTensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, dtype_name, shape, offset in wire:
            dtype = getattr(torch, dtype_name)
            numel = 1
            for size in shape:
                numel *= size
            raw = self._bytes[offset : offset + numel * dtype.itemsize]
            found[name] = raw.view(dtype).view(shape)
        return found

    def close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        del self._bytes
        try:
            self._map.close()
        except BufferError:  # a tensor of a failed Read is still alive: unmapped when that goes
            return
