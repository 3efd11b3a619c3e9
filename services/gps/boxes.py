"""Boxes on the wire ↔ regions of canonical tensors, checked."""

from collections.abc import Iterable, Mapping, Sequence

from shared.contracts.gps import PoolTensor, TensorBox
from shared.errors import InvalidRequest
from shared.layout.regions import cover_problem
from shared.layout.tensor_layout import Box, FlatRange, Region, TensorSpec, region_problem
from shared.weights.dtypes import itemsize_of

Part = tuple[str, Region]
"""Tensor name and a region of it."""


def spec_of(tensor: PoolTensor) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.dtype, itemsize_of(tensor.dtype), tensor.shape)


def parts_of(specs: Mapping[str, TensorSpec], boxes: Sequence[TensorBox]) -> tuple[Part, ...]:
    """The regions that `boxes` name. Raises InvalidRequest naming the box and its field."""
    parts = []
    for index, box in enumerate(boxes):
        spec = specs.get(box.tensor)
        if spec is None:
            raise InvalidRequest(f"boxes[{index}].tensor", f"the model has no tensor {box.tensor!r}")
        region: Region
        if box.flat_start is None:
            region, field = Box(box.start, box.shape), "shape"
        else:
            region, field = FlatRange(box.flat_start, box.flat_count), "flat_start"
        if problem := region_problem(spec, region):
            raise InvalidRequest(f"boxes[{index}].{field}", problem, tensor=box.tensor)
        parts.append((box.tensor, region))
    return tuple(parts)


def check_cover(specs: Mapping[str, TensorSpec], parts: Iterable[Part]) -> None:
    """Raises InvalidRequest unless `parts` have every element of every tensor exactly once."""
    regions: dict[str, list[Region]] = {name: [] for name in specs}
    for name, region in parts:
        regions[name].append(region)
    for name, held in regions.items():
        if problem := cover_problem(specs[name], held):
            raise InvalidRequest(
                "boxes", f"the writers' boxes together are not the model: {problem}", tensor=name
            )


def count_bytes(specs: Mapping[str, TensorSpec], parts: Iterable[Part]) -> int:
    """Bytes of `parts`."""
    return sum(specs[name].itemsize * region.numel for name, region in parts)
