"""Where the bytes of a node's shard, or of a whole model, lie in a region. Pure.

A shard has one box per tensor, whole rows of it, packed one after another; the whole model is the shard of
a group of one. What the layouts of the run cut by columns is stored slice by slice, a shard's part of it too
(`SlicedStorage.part`), so that equal shards are equal bytes in every group. Both sides of a transfer work
all this out for themselves from the view and the run's layouts, so that no offset travels.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PoolTensor, PoolView, SlicedTensors
from shared.layout.held_parts import Held, joined, paired_spans
from shared.layout.regions import intersect
from shared.layout.replication import form_groups, shard_over
from shared.layout.sliced_storage import SlicedStorage
from shared.layout.spans import Spans
from shared.layout.tensor_layout import Box, TensorSpec, whole
from shared.weights.host_pool import lay_out, tensor_nbytes
from shared.weights.stored_parts import sliced_tensors

Storages = Mapping[str, SlicedStorage]
"""Of the tensors that are not row-major."""


@dataclass(frozen=True)
class Packing:
    """`tensors[i]` is the piece `boxes[name]` of its tensor, in `storages[name]` of that piece or row-major;
    `nbytes` of the region.

    A tensor of which nothing is here does not appear.
    """

    specs: Mapping[str, TensorSpec]
    tensors: tuple[PoolTensor, ...]
    boxes: Mapping[str, Box]
    storages: Storages
    nbytes: int

    @cached_property
    def by_name(self) -> Mapping[str, PoolTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def sliced(self) -> tuple[SlicedTensors, ...]:
        """`storages` on the wire."""
        return sliced_tensors(self.storages)

    def view(self, path: str) -> PoolView:
        """A region of this layout at `path`, for whoever maps it."""
        return PoolView(path=path, nbytes=self.nbytes, tensors=self.tensors, sliced=self.sliced)

    @property
    def is_whole(self) -> bool:
        """Whether every tensor is here, whole."""
        return all(self.boxes.get(name) == whole(s) for name, s in self.specs.items() if s.numel)

    def common(self, tensor: str, box: Box) -> Box | None:
        """What of `box` is here."""
        return intersect(self.boxes[tensor], box) if tensor in self.boxes else None

    def held(self, tensor: str) -> Held:
        """What is here of a tensor, and how it is stored."""
        return Held(self.boxes[tensor], self.storages.get(tensor))

    def raw(self, memory: NDArray[np.uint8], tensor: str) -> NDArray[np.uint8]:
        """The bytes of a tensor's piece in `memory`, as they are stored."""
        entry = self.by_name[tensor]
        return memory[entry.offset_bytes : entry.offset_bytes + tensor_nbytes(entry)]


def spans_between(left: Packing, right: Packing, slices: Sequence[tuple[str, Box]]) -> tuple[Spans, Spans]:
    """Bytes of `slices`, which both have, in a region of each: row i of both are the two ends of one copy.

    Slices of tensors that are cut and stored alike are worked out once.
    """
    known: dict[tuple[object, ...], tuple[Spans, Spans]] = {}

    def ends(tensor: str, box: Box) -> tuple[Spans, Spans]:
        ours, theirs, itemsize = left.held(tensor), right.held(tensor), left.specs[tensor].itemsize
        key = (ours.box, id(ours.storage), theirs.box, id(theirs.storage), box, itemsize)
        if key not in known:
            known[key] = paired_spans(ours, theirs, box, itemsize)
        near, far = known[key]
        bases = (np.array([side.by_name[tensor].offset_bytes, 0], np.int64) for side in (left, right))
        return near + next(bases), far + next(bases)

    return joined(ends(tensor, box) for tensor, box in slices)


def pack(specs: Mapping[str, TensorSpec], boxes: Mapping[str, Box], storages: Storages) -> Packing:
    """Pieces in the order of `specs`, each aligned, in their part of the whole tensors' `storages`."""
    here = [(name, spec.dtype, boxes[name].shape) for name, spec in specs.items() if name in boxes]
    tensors, nbytes = lay_out(here)
    held = {name: boxes[name] for name, _, _ in here}
    parts: dict[tuple[int, Box], SlicedStorage | None] = {}  # tensors that are alike keep one object
    found = {}
    for name, box in held.items():
        if (storage := storages.get(name)) is None:
            continue
        key = (id(storage), box)
        if key not in parts:
            parts[key] = storage.part(box)
        if (part := parts[key]) is not None:
            found[name] = part
    return Packing(specs, tensors, held, found, nbytes)


def pack_whole(specs: Mapping[str, TensorSpec], storages: Storages) -> Packing:
    """The canonical layout: what engines and ranks map."""
    return pack(specs, {name: whole(spec) for name, spec in specs.items()}, storages)


def pack_member(
    specs: Mapping[str, TensorSpec], storages: Storages, group: Sequence[int], node: int
) -> Packing:
    """The shard of `node` in its group; a group of one has the canonical layout."""
    if len(group) == 1:
        return pack_whole(specs, storages)
    names, boxes = [str(member) for member in group], {}
    for turn, spec in enumerate(specs.values()):
        for region, holder in shard_over(spec, turn, names):
            if holder == str(node):
                assert isinstance(region, Box), "shards are boxes"
                boxes[spec.name] = region
    return pack(specs, boxes, storages)


def models_digest(models: Mapping[str, Mapping[str, TensorSpec]], storages: Mapping[str, Storages]) -> str:
    """16 hex digits, equal where two nodes mean the same tensors in the same order, stored alike."""
    state = hashlib.blake2b(digest_size=8)
    for name in sorted(models):
        state.update(repr((name, list(models[name].values()), sliced_tensors(storages[name]))).encode())
    return state.hexdigest()


def group_size_for(
    models: Sequence[tuple[Mapping[str, TensorSpec], int]], num_nodes: int, node_bytes: int
) -> int:
    """The smallest k whose largest shard of every model, times its number of buffers, fits `node_bytes`.

    `models` are (tensors, buffers). Raises ValueError, naming the bytes, if even one group of all nodes does
    not fit.
    """
    largest = 0
    for size in range(1, num_nodes + 1):
        smallest_group = min(form_groups([str(n) for n in range(num_nodes)], size), key=len)
        members = [int(name) for name in smallest_group]
        largest = max(
            sum(buffers * pack_member(specs, {}, members, node).nbytes for specs, buffers in models)
            for node in members
        )
        if largest <= node_bytes:
            return size
    raise ValueError(f"a share of {largest} bytes on each of {num_nodes} nodes exceeds {node_bytes} bytes")
