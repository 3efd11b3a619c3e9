"""Where the bytes of a node's shard, or of a whole model, lie in a region. Pure.

A shard has one box per tensor, whole rows of it, packed one after another; the whole model is the shard of
a group of one. Both sides of a transfer work this out for themselves from the view, so that no offset
travels.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shared.contracts.gps import PoolTensor
from shared.layout.regions import intersect
from shared.layout.replication import form_groups, shard_over
from shared.layout.spans import Spans, box_spans
from shared.layout.tensor_layout import Box, TensorSpec, region_problem, whole
from shared.weights.host_pool import lay_out


@dataclass(frozen=True)
class Packing:
    """`tensors[i]` is the piece of its tensor that begins at row `first_rows[i]`; `nbytes` of the region.

    A tensor of which nothing is here does not appear.
    """

    specs: Mapping[str, TensorSpec]
    tensors: tuple[PoolTensor, ...]
    boxes: Mapping[str, Box]
    nbytes: int

    @cached_property
    def by_name(self) -> Mapping[str, PoolTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def is_whole(self) -> bool:
        """Whether every tensor is here, whole."""
        return all(self.boxes.get(name) == whole(s) for name, s in self.specs.items() if s.numel)

    def common(self, tensor: str, box: Box) -> Box | None:
        """What of `box` is here."""
        return intersect(self.boxes[tensor], box) if tensor in self.boxes else None

    def spans(self, tensor: str, box: Box) -> Spans:
        """Bytes of `box`, which is here, in the region."""
        held, entry = self.boxes[tensor], self.by_name[tensor]
        near = Box(tuple(a - b for a, b in zip(box.start, held.start, strict=True)), box.shape)
        assert not region_problem(TensorSpec(tensor, entry.dtype, 1, entry.shape), near), (tensor, box, held)
        return box_spans(entry.shape, near, self.specs[tensor].itemsize, entry.offset_bytes)

    def spans_of(self, slices: Sequence[tuple[str, Box]]) -> Spans:
        """The spans of many boxes, one after another."""
        if not slices:
            return np.empty((0, 2), np.int64)
        return np.concatenate([self.spans(tensor, box) for tensor, box in slices])

    def view_of(self, memory: NDArray[np.uint8], tensor: str, box: Box) -> NDArray[np.uint8]:
        """`box` of the tensor in `memory`, shape (*box.shape, itemsize), not copied."""
        held, entry, itemsize = self.boxes[tensor], self.by_name[tensor], self.specs[tensor].itemsize
        size = int(np.prod(entry.shape, dtype=np.int64)) * itemsize
        raw = memory[entry.offset_bytes : entry.offset_bytes + size].reshape((*entry.shape, itemsize))
        at = tuple(slice(a - b, a - b + n) for a, b, n in zip(box.start, held.start, box.shape, strict=True))
        return raw[at]


def pack(specs: Mapping[str, TensorSpec], boxes: Mapping[str, Box]) -> Packing:
    """Pieces in the order of `specs`, each aligned."""
    here = [(name, spec.dtype, boxes[name].shape) for name, spec in specs.items() if name in boxes]
    tensors, nbytes = lay_out(here)
    return Packing(specs, tensors, {name: boxes[name] for name, _, _ in here}, nbytes)


def pack_whole(specs: Mapping[str, TensorSpec]) -> Packing:
    """The canonical layout: what engines and ranks map."""
    return pack(specs, {name: whole(spec) for name, spec in specs.items()})


def pack_member(specs: Mapping[str, TensorSpec], group: Sequence[int], node: int) -> Packing:
    """The shard of `node` in its group; a group of one has the canonical layout."""
    if len(group) == 1:
        return pack_whole(specs)
    names, boxes = [str(member) for member in group], {}
    for turn, spec in enumerate(specs.values()):
        for region, holder in shard_over(spec, turn, names):
            if holder == str(node):
                assert isinstance(region, Box), "shards are boxes"
                boxes[spec.name] = region
    return pack(specs, boxes)


def specs_digest(models: Mapping[str, Mapping[str, TensorSpec]]) -> str:
    """16 hex digits, equal where two nodes mean the same tensors in the same order."""
    state = hashlib.blake2b(digest_size=8)
    for name in sorted(models):
        state.update(repr((name, list(models[name].values()))).encode())
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
            sum(buffers * pack_member(specs, members, node).nbytes for specs, buffers in models)
            for node in members
        )
        if largest <= node_bytes:
            return size
    raise ValueError(f"a share of {largest} bytes on each of {num_nodes} nodes exceeds {node_bytes} bytes")
