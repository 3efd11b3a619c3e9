"""Versions of a model that come from a folder of the run: the newest one, and loading one as a Write."""

import asyncio
from pathlib import Path
from typing import Protocol

from services.gps.versions import tensor_checksum
from shared.contracts.gps import ModelStatus, TensorBox, WriteCommit, WriteGrant, WriteRequest, WriteStatus
from shared.errors import ConfigError, InvalidRequest, PivotError
from shared.runtime.run_folder import RunFolder
from shared.weights.host_pool import map_view
from shared.weights.seed import SeedPlan, load_seed, plan_seed

LOADER = "loader"


class Writable(Protocol):
    """What loading needs of GPS: the Write that ranks use too."""

    def model(self, name: str) -> ModelStatus: ...

    async def begin_write(self, request: WriteRequest) -> WriteGrant: ...

    async def commit_write(self, write_id: str, commit: WriteCommit) -> WriteStatus: ...

    async def abandon(self, write_id: str) -> None: ...


def newest_model_folder(folder: RunFolder, seed: Path, dtype: str) -> Path:
    """The folder with the newest weights: `seed`, or one under the run folder (checkpoints, exports) that
    holds a model of the same tensors."""
    wanted = {(t.name, t.shape) for t in plan_seed(seed, dtype).tensors}
    best, best_s = seed, float("-inf")
    candidates = [path.parent for path in folder.checkpoints.glob("**/*.safetensors")]
    candidates += [path.parent for path in folder.path.glob("export*/*.safetensors")]
    for path in sorted(set(candidates)):
        try:
            plan = plan_seed(path, dtype)
        except PivotError:
            continue
        made_s = max(file.stat().st_mtime for file in path.glob("*.safetensors"))
        if {(t.name, t.shape) for t in plan.tensors} == wanted and made_s > best_s:
            best, best_s = path, made_s
    return best


async def load_version(gps: Writable, folder: RunFolder, model: str, path: str, dtype: str) -> WriteStatus:
    """Make the next version of `model` from a Hugging Face folder under the run folder.

    Raises NotFound; InvalidRequest for a path outside, or a folder of other tensors; ConfigError for one that
    is no checkpoint; and what a Write raises.
    """
    status = gps.model(model)
    try:
        source = folder.inside(path)
    except ConfigError as error:
        raise InvalidRequest("path", f"{path!r} lies outside the run folder", error.remedy) from error
    try:
        plan = await asyncio.to_thread(plan_seed, source, dtype)
    except ConfigError as error:
        raise InvalidRequest("path", f"{path!r} is no checkpoint: {error.problem}", error.remedy) from error
    boxes = tuple(
        TensorBox(tensor=t.name, start=(0,) * len(t.shape), shape=t.shape, dtype=t.dtype)
        for t in plan.tensors
    )
    request = WriteRequest(
        model=model, version=status.version + 1, writer=LOADER, writers=(LOADER,), boxes=boxes
    )
    grant = await gps.begin_write(request)
    try:
        checksums = await asyncio.to_thread(_fill, grant, plan)
        return await gps.commit_write(grant.write_id, WriteCommit(writer=LOADER, checksums=checksums))
    except BaseException:
        await gps.abandon(grant.write_id)
        raise


def _fill(grant: WriteGrant, plan: SeedPlan) -> tuple[str, ...]:
    pool = map_view(grant.view, writable=True)
    try:
        ours = tuple(pool.tensor(tensor.name) for tensor in plan.tensors)
        load_seed(SeedPlan(plan.sources, ours, grant.view.nbytes), pool.memory, pool.storages)
        return tuple(tensor_checksum(pool.memory, tensor, pool.storage(tensor.name)) for tensor in ours)
    finally:
        pool.close()
