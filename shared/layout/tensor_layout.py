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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


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


Pattern = tuple[tuple[Region, str], ...]
"""(region, holder) pairs of one tensor. Layers look alike, so many tensors share one pattern object."""


class Layout:
    """Placements of some or all parts of a model's tensors. Raises ValueError on a region outside its
    tensor.

    A mixture of experts has tens of thousands of tensors, each on a hundred holders: what is worked out per
    *pattern* is worked out once, whether it was built from patterns or found equal among placements.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], placements: Iterable[Placement] = ()) -> None:
        found: dict[str, list[tuple[Region, str]]] = {}
        for p in placements:
            if p.tensor not in tensors:
                raise ValueError(f"{p.holder} holds unknown tensor {p.tensor}")
            if problem := region_problem(tensors[p.tensor], p.region):
                raise ValueError(f"{p.holder}: {problem}")
            if p.region.numel:
                found.setdefault(p.tensor, []).append((p.region, p.holder))
        known: dict[Pattern, Pattern] = {}
        self.tensors = tensors
        self.by_tensor: Mapping[str, Pattern] = {
            name: known.setdefault(pattern, pattern)
            for name, pattern in zip(found, map(tuple, found.values()), strict=True)
        }

    @classmethod
    def of_patterns(cls, tensors: Mapping[str, TensorSpec], patterns: Mapping[str, Pattern]) -> "Layout":
        """A layout of patterns that share objects; regions may not be empty. Raises ValueError as above."""
        checked: set[tuple[int, tuple[int, ...]]] = set()
        for name, pattern in patterns.items():
            key = (id(pattern), tensors[name].shape)
            if key in checked:
                continue
            checked.add(key)
            for region, holder in pattern:
                if problem := region_problem(tensors[name], region):
                    raise ValueError(f"{holder}: {problem}")
                assert region.numel, f"{holder} has an empty part of {name}"
        layout = cls(tensors)
        layout.by_tensor = patterns
        return layout

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Every part that is not empty, tensor by tensor."""
        return tuple(Placement(name, r, h) for name, pairs in self.by_tensor.items() for r, h in pairs)

    @cached_property
    def holders(self) -> tuple[str, ...]:
        """Everyone who holds something, sorted."""
        distinct = {id(pattern): pattern for pattern in self.by_tensor.values()}
        return tuple(sorted({holder for pattern in distinct.values() for _, holder in pattern}))

    @cached_property
    def nbytes_by_holder(self) -> Mapping[str, int]:
        """Bytes that each holder has."""
        uses: dict[tuple[int, int], list[Pattern]] = {}
        for name, pattern in self.by_tensor.items():
            uses.setdefault((id(pattern), self.tensors[name].itemsize), []).append(pattern)
        found = dict.fromkeys(self.holders, 0)
        for (_, itemsize), same in uses.items():
            for region, holder in same[0]:
                found[holder] += region.numel * itemsize * len(same)
        return found

    def nbytes_of(self, holder: str) -> int:
        """Bytes that `holder` has."""
        return self.nbytes_by_holder.get(holder, 0)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that are equal for equal layouts: the P of a plan's cache key."""
        state = hashlib.blake2b(digest_size=8)
        seen: dict[int, bytes] = {}
        for name, pattern in self.by_tensor.items():
            spec = self.tensors[name]
            if id(pattern) not in seen:
                seen[id(pattern)] = hashlib.blake2b(repr(pattern).encode(), digest_size=8).digest()
            state.update(repr((name, spec.dtype, spec.shape)).encode() + seen[id(pattern)])
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

    def pattern(spec: TensorSpec) -> Pattern:
        return tuple((whole(spec), h) for h in holders) if spec.numel else ()

    return layout_by(specs, lambda spec: spec.shape, pattern)


def layout_by(
    specs: Sequence[TensorSpec],
    kind_of: Callable[[TensorSpec], object],
    pattern: Callable[[TensorSpec], Pattern],
) -> Layout:
    """`pattern` of every tensor, worked out once per kind; what nobody holds is left out."""
    known: dict[object, Pattern] = {}
    patterns = {}
    for spec in specs:
        kind = kind_of(spec)
        if kind not in known:
            known[kind] = pattern(spec)
        if known[kind]:
            patterns[spec.name] = known[kind]
    return Layout.of_patterns(index_specs(specs), patterns)


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

    def pattern(spec: TensorSpec) -> Pattern:
        parts = [(zero_range(spec.numel, r, len(ranks)), name) for r, name in enumerate(ranks)]
        return tuple((region, name) for region, name in parts if region.count)

    return layout_by(specs, lambda spec: spec.numel, pattern)


def narrow(spec: TensorSpec, dim: int, start: int, length: int) -> Box:
    """The box with `[start, start + length)` along `dim` and everything else whole: experts, rows,
    columns."""
    starts, shape = [0] * len(spec.shape), list(spec.shape)
    starts[dim], shape[dim] = start, length
    return Box(tuple(starts), tuple(shape))


def merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """All parts of several layouts of one model, for example one per pipeline stage."""
    tensors: dict[str, TensorSpec] = {}
    joined: dict[str, list[Pattern]] = {}
    for layout in layouts:
        for name, spec in layout.tensors.items():
            if tensors.setdefault(name, spec) != spec:
                raise ValueError(f"tensor {name} differs between layouts")
        for name, pattern in layout.by_tensor.items():
            joined.setdefault(name, []).append(pattern)
    known: dict[tuple[int, ...], Pattern] = {}
    patterns = {}
    for name, parts in joined.items():
        key = tuple(id(part) for part in parts)
        if key not in known:
            known[key] = tuple(pair for part in parts for pair in part)
        patterns[name] = known[key]
    return Layout.of_patterns(tensors, patterns)
