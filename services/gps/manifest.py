"""What GPS had readable, on disk: a restarted GPS finds its versions in the pool instead of going back to 0.

Shared memory outlives the process. The file names each model's readable region, its version and checksum;
whoever adopts a region first checks that its bytes still have that checksum.
"""

import os
from pathlib import Path

from pydantic import ValidationError

from services.gps.versions import Model
from shared.contracts.base import Message
from shared.contracts.gps import PoolTensor, SlicedTensors


class ManifestEntry(Message):
    """The readable version of one model. `num_regions` were made of it so far: names are not used twice."""

    model: str
    path: str
    nbytes: int
    version: int
    checksum: str
    num_regions: int
    tensors: tuple[PoolTensor, ...]
    lineage: int = 0
    sliced: tuple[SlicedTensors, ...] = ()
    """How the region is stored, as in `PoolView`; a file from before there were slices has none."""


class ManifestFile(Message):
    entries: tuple[ManifestEntry, ...] = ()


class Manifest:
    """The file at `path`; a missing or torn one is an empty one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            read = ManifestFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            read = ManifestFile()
        self._entries = {entry.model: entry for entry in read.entries}

    def entry(self, model: str) -> ManifestEntry | None:
        return self._entries.get(model)

    def put(self, entry: ManifestEntry) -> None:
        """Replace the entry of its model; on disk when this returns."""
        self._entries[entry.model] = entry
        text = ManifestFile(entries=tuple(self._entries.values())).model_dump_json()
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def paths(self) -> frozenset[Path]:
        """Regions that may be adopted: not leftovers to remove."""
        return frozenset(Path(entry.path) for entry in self._entries.values())


def entry_of(model: Model) -> ManifestEntry:
    """The readable version of `model` on a node that holds all of it."""
    return ManifestEntry(
        model=model.name,
        path=model.readable.view.path,
        nbytes=model.nbytes,
        version=model.version,
        checksum=model.checksum,
        num_regions=model.num_regions,
        tensors=model.tensors,
        sliced=model.readable.view.sliced,
    )
