"""A version of a model out of the host pool as a Hugging Face folder."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np

from shared.contracts.gps import PoolTensor, PoolView
from shared.layout.tensor_layout import Box
from shared.weights.dtypes import SAFETENSORS_DTYPES
from shared.weights.mapped_pool import Bytes, MappedPool, map_view, tensor_nbytes

_STORED_AS = {ours: theirs for theirs, ours in SAFETENSORS_DTYPES.items()}
_SKIPPED = (".safetensors", ".index.json", ".bin", ".gguf", ".pt")


async def export_model(view: PoolView, source: Path, out: Path) -> int:
    """Writes the tensors of `view` beside config and tokenizer of `source`; returns bytes written."""
    return await asyncio.to_thread(_export, view, source, out)


def _export(view: PoolView, source: Path, out: Path) -> int:
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_SKIPPED):
            shutil.copy2(file, temporary / file.name)
    nbytes = write_safetensors(view, temporary / "model.safetensors")
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)
    return nbytes


def write_safetensors(view: PoolView, path: Path) -> int:
    """The format: 8 bytes little-endian header length, a JSON header, the tensors' bytes."""
    pool = map_view(view)
    try:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in view.tensors:
            nbytes = pool.raw(tensor.name).nbytes
            header[tensor.name] = {
                "dtype": _STORED_AS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + nbytes],
            }
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for tensor in view.tensors:
                file.write(_row_major(pool, tensor).data)
        return at
    finally:
        pool.close()


def _row_major(pool: MappedPool, tensor: PoolTensor) -> Bytes:
    """Bytes of a tensor; a copy only where it is stored in slices."""
    if pool.storage(tensor.name) is None:
        return pool.raw(tensor.name)
    dense = np.empty(tensor_nbytes(tensor), np.uint8)
    pool.copy_out(tensor.name, Box((0,) * len(tensor.shape), tensor.shape), dense)
    return dense
