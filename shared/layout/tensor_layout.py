"""Where every byte of a model is: canonical tensors, and layouts that place parts of them on holders.

A *canonical tensor* has the name, dtype and shape of the Hugging Face checkpoint. A *layout* is a list of
placements (tensor, region, holder). A region is an n-dimensional `Box` (tensor parallelism: rows, columns,
experts) or a row-major `FlatRange` (a ZeRO shard); a layer range (pipeline parallelism) is just which
tensors a holder has. One region on several holders is replication. Paper §5.1 and Appendix B.1.

Example, a 10×4 bfloat16 weight (80 bytes) under ZeRO with W = 4 (p = ceil(40/4) = 10 elements)::

    rank 0  flat [ 0, 10)   rows 0-1 whole, row 2 columns 0-1
    rank 1  flat [10, 20)   row 2 columns 2-3, rows 3-4 whole
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A canonical tensor. `dtype` as torch names it ("bfloat16"); `itemsize` in bytes; `shape` in
    elements."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `start[d] <= i[d] < start[d] + shape[d]` in every dimension d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements `start <= i < start + count` of the row-major flattened tensor."""

    start: int
    count: int

    @property
    def numel(self) -> int:
        return self.count


Region = Box | FlatRange


@dataclass(frozen=True, slots=True)
class Placement:
    """`holder` has `region` of the tensor named `tensor`."""

    tensor: str
    region: Region
    holder: str


def whole(spec: TensorSpec) -> Box:
    """The box of all of `spec`."""
    return Box((0,) * len(spec.shape), spec.shape)


def region_problem(spec: TensorSpec, region: Region) -> str | None:
    """Why `region` is not a part of `spec`, or None if it is one."""
    if isinstance(region, FlatRange):
        if region.start < 0 or region.count < 0 or region.start + region.count > spec.numel:
            stop = region.start + region.count
            return f"flat range [{region.start}, {stop}) is outside {spec.name} of {spec.numel} elements"
        return None
    if len(region.start) != len(spec.shape) or len(region.shape) != len(spec.shape):
        return f"a box of {len(region.shape)} dimensions in {spec.name} of shape {spec.shape}"
    for dim, (start, length, size) in enumerate(zip(region.start, region.shape, spec.shape, strict=True)):
        if start < 0 or length < 0 or start + length > size:
            span = f"[{start}, {start + length})"
            return f"{span} is outside dimension {dim} of {spec.name} of shape {spec.shape}"
    return None


@dataclass(frozen=True)
class Layout:
    """Placements of some or all parts of a model's tensors. Raises ValueError on a region outside its
    tensor."""

    tensors: Mapping[str, TensorSpec]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for placement in self.placements:
            if placement.tensor not in self.tensors:
                raise ValueError(f"{placement.holder} holds unknown tensor {placement.tensor}")
            if problem := region_problem(self.tensors[placement.tensor], placement.region):
                raise ValueError(f"{placement.holder}: {problem}")

    @cached_property
    def holders(self) -> tuple[str, ...]:
        """Everyone who holds something, sorted."""
        return tuple(sorted({p.holder for p in self.placements}))

    @cached_property
    def by_tensor(self) -> Mapping[str, tuple[tuple[Region, str], ...]]:
        """Tensor → its (region, holder) pairs, in placement order; empty regions are left out."""
        found: dict[str, list[tuple[Region, str]]] = {}
        for p in self.placements:
            if p.region.numel:
                found.setdefault(p.tensor, []).append((p.region, p.holder))
        return {name: tuple(pairs) for name, pairs in found.items()}

    def nbytes_of(self, holder: str) -> int:
        """Bytes that `holder` has."""
        mine = (p for p in self.placements if p.holder == holder)
        return sum(self.tensors[p.tensor].itemsize * p.region.numel for p in mine)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that are equal for equal layouts: the P of a plan's cache key."""
        state = hashlib.blake2b(digest_size=8)
        for p in self.placements:
            spec = self.tensors[p.tensor]
            state.update(repr((p.tensor, spec.dtype, spec.shape, p.region, p.holder)).encode())
        return state.hexdigest()


def index_specs(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Name → spec. Raises ValueError when a name comes twice."""
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in found:
            raise ValueError(f"tensor {spec.name} comes twice")
        found[spec.name] = spec
    return found


def full_layout(specs: Sequence[TensorSpec], holders: Sequence[str]) -> Layout:
    """Every holder has the whole model."""
    placements = tuple(Placement(s.name, whole(s), h) for h in holders for s in specs)
    return Layout(index_specs(specs), placements)


def zero_range(numel: int, rank: int, world: int) -> FlatRange:
    """ZeRO shard of `rank`: [r*p, min((r+1)*p, numel)) with p = ceil(numel / world); empty past the end.

    >>> [zero_range(10, r, 4).count for r in range(4)]
    [3, 3, 3, 1]
    """
    per_rank = -(-numel // world)
    start = min(rank * per_rank, numel)
    return FlatRange(start, min(start + per_rank, numel) - start)


def zero_layout(specs: Sequence[TensorSpec], ranks: Sequence[str]) -> Layout:
    """Every tensor flat-sharded over `ranks`, as ZeRO-3 does."""
    placements = tuple(
        Placement(spec.name, zero_range(spec.numel, r, len(ranks)), name)
        for r, name in enumerate(ranks)
        for spec in specs
    )
    return Layout(index_specs(specs), placements)


def split_box(spec: TensorSpec, dim: int, part: int, parts: int, padded_size: int | None = None) -> Box:
    """Part `part` of `parts` equal cuts along `dim`, of `padded_size` (default: the size) clipped to the
    tensor.

    A vocabulary of 10 rows padded to 12 on 4 ranks: rows [0,3) [3,6) [6,9) [9,10).
    Raises ValueError if the (padded) size does not divide.
    """
    size = spec.shape[dim] if padded_size is None else padded_size
    if size % parts or size < spec.shape[dim]:
        raise ValueError(f"{spec.name}: size {size} of dimension {dim} cannot be cut into {parts} parts")
    start = min(part * (size // parts), spec.shape[dim])
    stop = min((part + 1) * (size // parts), spec.shape[dim])
    return narrow(spec, dim, start, stop - start)


def narrow(spec: TensorSpec, dim: int, start: int, length: int) -> Box:
    """The box with `[start, start + length)` along `dim` and everything else whole: experts, rows,
    columns."""
    starts, shape = [0] * len(spec.shape), list(spec.shape)
    starts[dim], shape[dim] = start, length
    return Box(tuple(starts), tuple(shape))


def split_fused(spec: TensorSpec, dim: int, sizes: Sequence[int], part: int, parts: int) -> tuple[Box, ...]:
    """Part `part` of each fused region (q|k|v, gate|up) of the given `sizes` along `dim`: one box per region.

    A gate-up weight of 8 rows fused as (4, 4), part 1 of 2: rows [2,4) and [6,8).
    """
    if sum(sizes) != spec.shape[dim] or any(size % parts for size in sizes):
        raise ValueError(f"{spec.name}: fused sizes {tuple(sizes)} do not fit {spec.shape} in {parts} parts")
    boxes, offset = [], 0
    for size in sizes:
        boxes.append(narrow(spec, dim, offset + part * (size // parts), size // parts))
        offset += size
    return tuple(boxes)


def layer_of(name: str, marker: str = "layers") -> int | None:
    """Layer number in a tensor name, or None for embeddings, final norm and head.

    >>> layer_of("model.layers.12.mlp.up_proj.weight")
    12
    """
    parts = name.split(".")
    for left, right in pairwise(parts):
        if left == marker and right.isdigit():
            return int(right)
    return None


def stage_tensors(
    specs: Sequence[TensorSpec], first_layer: int, last_layer: int, *, with_input: bool, with_output: bool
) -> tuple[TensorSpec, ...]:
    """Tensors of a pipeline stage of layers `[first_layer, last_layer)`.

    A tensor outside the layers belongs to the input end if its name contains "embed", else to the output
    end. With tied embeddings the last stage needs the input embedding as well: the caller adds it.
    """
    chosen = []
    for spec in specs:
        layer = layer_of(spec.name)
        if layer is None:
            is_input = "embed" in spec.name
            keep = with_input if is_input else with_output
        else:
            keep = first_layer <= layer < last_layer
        if keep:
            chosen.append(spec)
    return tuple(chosen)


def merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """All placements of several layouts of one model, for example one per pipeline stage."""
    tensors: dict[str, TensorSpec] = {}
    for layout in layouts:
        for name, spec in layout.tensors.items():
            if tensors.setdefault(name, spec) != spec:
                raise ValueError(f"tensor {name} differs between layouts")
    return Layout(tensors, tuple(p for layout in layouts for p in layout.placements))
