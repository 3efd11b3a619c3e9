"""Mappings of the host pool kept between Reads and Writes.

Mapping a region costs about 30 ms per GiB, pinning it in a GPU process far more; a model has two or three
regions that alternate for ever. So whoever Reads often keeps a `PoolReader` and asks it for each grant's
view.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.gps import PoolView
from shared.weights.mapped_pool import SHM_FOLDER, Bytes, MappedPool, map_view
from shared.weights.pinning import pin, unpin


@dataclass(frozen=True, slots=True)
class _Mapping:
    """`file` tells a region from another one that later has the same path."""

    file: tuple[int, int]
    memory: Bytes
    is_pinned: bool


class PoolReader:
    """Maps each region once, and lets go of those whose file is gone. Not thread-safe.

    `folder` as in `map_view`. With `is_pinning`, mappings are pinned for CUDA (and so mapped writable).
    """

    def __init__(self, folder: Path | None = SHM_FOLDER, *, is_pinning: bool = False) -> None:
        self._folder, self._is_pinning = folder, is_pinning
        self._mapped: dict[tuple[str, bool], _Mapping] = {}

    def map(self, view: PoolView, *, writable: bool = False) -> MappedPool:
        """As `map_view`, which says what is raised; TransportError if it cannot be pinned."""
        self._drop_gone()
        key = (view.path, writable)
        kept = self._mapped.get(key)
        if kept is not None and kept.memory.nbytes == view.nbytes:
            return MappedPool(view, kept.memory, writable=writable)
        mapped = map_view(view, writable=writable or self._is_pinning, folder=self._folder)
        if kept is not None:
            self._drop(key)
        if (file := _file(view.path)) is not None:
            if self._is_pinning:
                pin(mapped.address, view.nbytes, view.path)
            self._mapped[key] = _Mapping(file, mapped.memory, self._is_pinning)
        return MappedPool(view, mapped.memory, writable=writable)

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def _drop_gone(self) -> None:
        for key in [key for key, kept in self._mapped.items() if _file(key[0]) != kept.file]:
            self._drop(key)

    def _drop(self, key: tuple[str, bool]) -> None:
        kept = self._mapped.pop(key)
        if kept.is_pinned:
            unpin(kept.memory.ctypes.data)

    def close(self) -> None:
        """Drop every mapping; the pages go with the last array made of them."""
        for key in list(self._mapped):
            self._drop(key)


def _file(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None
