"""Requests that cannot be carried out, refused before anything changes. Each error names field and remedy."""

from collections.abc import Iterable, Mapping, Sequence

from services.gps.boxes import Part, check_cover, count_bytes, parts_of
from services.gps.versions import Model, WriterPart
from shared.contracts.gps import ReadRequest, TensorBox, WriteCommit, WriteRequest
from shared.errors import Conflict, InvalidRequest, told
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


def asked_bytes(specs: Mapping[str, TensorSpec], parts: Sequence[Part]) -> int:
    """Bytes of what a Read names; no parts are the whole model."""
    return count_bytes(specs, parts) if parts else sum(spec.nbytes for spec in specs.values())


def check_read(model: Model, request: ReadRequest, max_lease_s: float) -> None:
    """Raises Conflict if `min_version` is not there, or nothing yet; InvalidRequest for an endless lease."""
    if model.version < 0:
        problem = f"{model.name} is still being seeded"
        raise Conflict(**told("model", problem, "Wait until /readyz is ready", model=model.name))
    if not 0 < request.lease_s <= max_lease_s:
        problem = f"{request.lease_s} is not in (0, {max_lease_s}] seconds"
        raise InvalidRequest("lease_s", problem, f"Ask for at most {max_lease_s:g}")
    if request.min_version > model.version:
        problem = f"{model.name} is at version {model.version}, version {request.min_version} was asked for"
        remedy = "Read with a longer wait_s, or after it was committed"
        versions = {"version": model.version, "min_version": request.min_version}
        raise Conflict(**told("min_version", problem, remedy, **versions))


def check_write(model: Model, request: WriteRequest) -> WriterPart:
    """What the writer holds. Raises what no waiting can mend: InvalidRequest, Conflict on the version."""
    if model.is_frozen:
        problem = f"{model.name} is frozen: nobody writes it"
        raise Conflict(**told("model", problem, "Write the policy", model=model.name))
    if request.version <= model.version:
        problem = f"version {request.version} of {model.name} is not newer than version {model.version}"
        remedy = f"Write a version after {model.version}"
        raise Conflict(**told("version", problem, remedy, version=model.version, asked=request.version))
    if not request.writers or len(set(request.writers)) != len(request.writers):
        remedy = "List each writer of this version, once"
        raise InvalidRequest("writers", "must name every writer once", remedy, writers=list(request.writers))
    if request.writer not in request.writers:
        problem = f"{request.writer!r} is none of {list(request.writers)}"
        raise InvalidRequest("writer", problem, "Name it among the writers")
    return WriterPart(checked_parts(model.specs, request.boxes))


def check_commit(
    write_id: str, commit: WriteCommit, writers: Sequence[str], joined: Mapping[str, WriterPart]
) -> WriterPart:
    """What the writer holds. Raises InvalidRequest for a stranger, or not one checksum per box; Conflict for
    a writer that did not begin."""
    if commit.writer not in writers:
        problem = f"{commit.writer!r} is none of the writers {list(writers)}"
        raise InvalidRequest("writer", problem, "Commit as the writer that began the Write")
    if commit.writer not in joined:
        problem = f"{commit.writer} did not begin Write {write_id} here"
        raise Conflict(**told("writer", problem, "Begin the Write first", write_id=write_id))
    part = joined[commit.writer]
    if len(commit.checksums) != len(part.parts):
        problem = f"{len(commit.checksums)} checksums for {len(part.parts)} boxes"
        raise InvalidRequest("checksums", problem, "Send one per box, in the order of the boxes")
    return part


def wrong_checksum(problem: tuple[int, str]) -> InvalidRequest:
    """The box at an index does not have the checksum that its writer named."""
    return InvalidRequest(f"checksums[{problem[0]}]", problem[1], "Copy the box again, then commit again")


def with_remedy(error: InvalidRequest, remedy: str) -> InvalidRequest:
    """`error`, which says what is wrong, with what to do about it."""
    if "remedy" in error.data:
        return error
    said = error.message if error.message.endswith(".") else error.message + "."
    told = InvalidRequest(error.field, "", remedy, **{k: v for k, v in error.data.items() if k != "field"})
    told.args = (f"{said} {remedy}",)
    told.message = f"{said} {remedy}"
    return told
