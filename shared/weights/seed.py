"""A Hugging Face folder's safetensors → one region of the host pool, without torch where dtypes agree.

The file format: 8 bytes little-endian header length, a JSON header `name → {dtype, shape, data_offsets}`,
the data. Bytes are read straight into shared memory; only a checkpoint in another float type goes through a
conversion, a few MiB at a time. Tied embeddings stay as the checkpoint has them: a head that is not there is
not made up.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PoolTensor
from shared.errors import ConfigError
from shared.layout.sliced_storage import SlicedStorage
from shared.layout.tensor_layout import Box
from shared.weights.dtypes import SAFETENSORS_DTYPES, WIDE_FLOATS, itemsize_of
from shared.weights.host_pool import lay_out
from shared.weights.mapped_pool import tensor_nbytes
from shared.weights.stored_parts import paired_parts

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20
_CHUNK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: `nbytes` at `offset_bytes` of `file`, in `dtype` (a torch name)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """What goes where: `sources[i]` into `tensors[i]`; `nbytes` is the region's size."""

    sources: tuple[StoredTensor, ...]
    tensors: tuple[PoolTensor, ...]
    nbytes: int


def _bad(path: Path, problem: str) -> ConfigError:
    return ConfigError(str(path), None, problem, "Download or save the checkpoint again as safetensors")


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, in file order. Raises ConfigError naming the file and what is
    wrong."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise _bad(path, f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise _bad(path, f"cannot be read as safetensors ({error})") from error
    if not isinstance(header, dict):
        raise _bad(path, "cannot be read as safetensors (its header is no mapping)")
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            start, stop = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(path, f"tensor {name} has an entry that cannot be understood ({error!r})") from error
        nbytes = math.prod(shape) * itemsize_of(dtype)
        if start < 0 or stop - start != nbytes or 8 + length + stop > size:
            raise _bad(path, f"tensor {name} of {nbytes} bytes is at [{start}, {stop}) of a file of {size}")
        found.append(StoredTensor(name, dtype, shape, path, 8 + length + start, nbytes))
    found.sort(key=lambda tensor: tensor.offset_bytes)
    return found


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or single. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError("models", str(folder), "is not a folder", "Name a Hugging Face model folder")
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _bad(index, f"is not an index ({error!r})") from error
        if any(Path(name).name != name for name in names):
            raise _bad(index, "names a file outside its folder")
        files = [folder / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise _bad(index, f"names files that are missing: {', '.join(missing[:3])}")
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    remedy = "Convert it with transformers' save_pretrained, which writes model.safetensors"
    raise ConfigError("models", str(folder), "has no .safetensors file", remedy)


def plan_seed(folder: Path, dtype: str) -> SeedPlan:
    """What seeding `folder` in `dtype` will take; reads headers only.

    Wide floats become `dtype`; quantised and integer tensors keep theirs. Raises ConfigError.
    """
    sources: list[StoredTensor] = []
    where: dict[str, Path] = {}
    for file in find_files(folder):
        for tensor in read_header(file):
            if tensor.name in where:
                raise _bad(file, f"tensor {tensor.name} is also in {where[tensor.name].name}")
            where[tensor.name] = file
            sources.append(tensor)
    if not sources:
        raise _bad(folder, "holds no tensors")
    kept = [(s.name, dtype if s.dtype in WIDE_FLOATS else s.dtype, s.shape) for s in sources]
    tensors, nbytes = lay_out(kept)
    return SeedPlan(tuple(sources), tensors, nbytes)


def load_seed(
    plan: SeedPlan, memory: NDArray[np.uint8], storages: Mapping[str, SlicedStorage] | None = None
) -> int:
    """Fill a region of `plan.nbytes` (uint8, shape (nbytes,)); returns the bytes read. Blocking, for minutes
    on a cold disk: run it in a thread.

    `storages` names the tensors that the region stores in slices.
    """
    total = 0
    for path in dict.fromkeys(source.file for source in plan.sources):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for source, tensor in zip(plan.sources, plan.tensors, strict=True):
                if source.file != path:
                    continue
                stored = memory[tensor.offset_bytes : tensor.offset_bytes + tensor_nbytes(tensor)]
                storage = storages.get(tensor.name) if storages else None
                target = stored if storage is None else np.empty_like(stored)
                file.seek(source.offset_bytes)
                if source.dtype == tensor.dtype:
                    _read_into(file, target, path)
                else:
                    _read_converted(file, source, tensor.dtype, target)
                if storage is not None:
                    _cut(target, stored, storage, itemsize_of(tensor.dtype))
                total += source.nbytes
    return total


def _cut(dense: NDArray[np.uint8], stored: NDArray[np.uint8], storage: SlicedStorage, itemsize: int) -> None:
    whole, element = Box((0,) * len(storage.shape), storage.shape), np.dtype(f"V{itemsize}")
    parts = paired_parts(storage.shape, storage, whole, stored.view(element), dense.view(element))
    for place, part in parts:
        np.copyto(place, part)


def _read_into(file: Any, target: NDArray[np.uint8], path: Path) -> None:
    view, at = target.data, 0
    while at < len(view):
        got = file.readinto(view[at:])
        if not got:
            raise _bad(path, "ends too early")
        at += got


def _read_converted(file: Any, source: StoredTensor, dtype: str, target: NDArray[np.uint8]) -> None:
    import torch

    wide, narrow = itemsize_of(source.dtype), itemsize_of(dtype)
    from_dtype, to_dtype = getattr(torch, source.dtype), getattr(torch, dtype)
    numel = source.nbytes // wide
    buffer = np.empty(min(_CHUNK_ELEMENTS, numel) * wide, np.uint8)
    for first in range(0, numel, _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, numel - first)
        piece = buffer[: count * wide]
        _read_into(file, piece, source.file)
        tensor = torch.from_numpy(piece).view(from_dtype).to(to_dtype)
        target[first * narrow : (first + count) * narrow] = tensor.view(torch.uint8).numpy()
