"""Requests that cannot be carried out, refused before anything changes. Each error names field and remedy."""

from collections.abc import Iterable, Mapping, Sequence

from services.gps.boxes import Part, check_cover, parts_of
from shared.contracts.gps import TensorBox
from shared.errors import InvalidRequest
from shared.layout.tensor_layout import TensorSpec

_REMEDIES = {
    "tensor": "Use the names that GET /v1/models/{model} and a grant's view list",
    "shape": "Cut the box to the tensor's shape",
    "flat_start": "Cut the range to the tensor's number of elements",
}


def checked_parts(specs: Mapping[str, TensorSpec], boxes: Sequence[TensorBox]) -> tuple[Part, ...]:
    """The regions that `boxes` name. Raises InvalidRequest naming the box, its field and what to do."""
    for index, box in enumerate(boxes):
        spec = specs.get(box.tensor)
        if spec is not None and box.dtype and box.dtype != spec.dtype:
            raise InvalidRequest(
                f"boxes[{index}].dtype",
                f"{box.tensor} is {spec.dtype}, not {box.dtype}",
                f"Convert to {spec.dtype} before the Write, or after the Read",
                tensor=box.tensor,
            )
    try:
        return parts_of(specs, boxes)
    except InvalidRequest as error:
        raise with_remedy(error, _REMEDIES.get(error.field.rpartition(".")[2], "Mend the boxes")) from error


def checked_cover(specs: Mapping[str, TensorSpec], parts: Iterable[Part]) -> None:
    """Raises InvalidRequest unless `parts` have every element of every tensor exactly once."""
    try:
        check_cover(specs, parts)
    except InvalidRequest as error:
        raise with_remedy(error, "Cut every tensor over the writers without holes or overlaps") from error


def with_remedy(error: InvalidRequest, remedy: str) -> InvalidRequest:
    """`error`, which says what is wrong, with what to do about it."""
    if "remedy" in error.data:
        return error
    said = error.message if error.message.endswith(".") else error.message + "."
    told = InvalidRequest(error.field, "", remedy, **{k: v for k, v in error.data.items() if k != "field"})
    told.args = (f"{said} {remedy}",)
    told.message = f"{said} {remedy}"
    return told
