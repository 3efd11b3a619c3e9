"""Mappings of the host pool kept between Reads and Writes.

Mapping a region costs about 30 ms per GiB, pinning it in a GPU process far more; a model has two or three
regions that alternate for ever. So whoever Reads often keeps a `PoolReader` and asks it for each grant's
view.
"""

import contextlib
import os
from pathlib import Path

from shared.contracts.gps import PoolView
from shared.weights.host_pool import SHM_FOLDER, Bytes, MappedPool, map_view


class PoolReader:
    """Maps each region once, and lets go of those whose file is gone. Not thread-safe."""

    def __init__(self, folder: Path = SHM_FOLDER) -> None:
        self._folder = folder
        self._mapped: dict[tuple[str, bool], tuple[int, Bytes]] = {}

    def map(self, view: PoolView, *, writable: bool = False) -> MappedPool:
        """As `map_view`, which says what is raised."""
        self._drop_gone()
        key = (view.path, writable)
        if key in self._mapped and self._mapped[key][1].nbytes == view.nbytes:
            return MappedPool(view, self._mapped[key][1], writable=writable)
        mapped = map_view(view, writable=writable, folder=self._folder)
        if (inode := _inode(view.path)) is not None:
            self._mapped[key] = (inode, mapped.memory)
        return mapped

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def _drop_gone(self) -> None:
        for key in [key for key, (inode, _) in self._mapped.items() if _inode(key[0]) != inode]:
            del self._mapped[key]

    def close(self) -> None:
        """Drop every mapping; the pages go with the last array made of them."""
        self._mapped.clear()


def _inode(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return None
