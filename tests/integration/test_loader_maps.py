"""The loader map of every architecture we name equals vLLM's own checkpoint loading, value by value."""

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.layout.sliced_storage import slice_storage
from shared.layout.tensor_layout import Box, FlatRange, Region
from shared.weights.mapped_pool import MappedPool, map_view
from shared.weights.stored_parts import sliced_tensors
from tests.support.tiny_families import EXPERTS, FAMILIES, write_family
from tests.support.tiny_model import write_pool
from tests.support.vllm_ranks import as_rank, config_of, make_groups

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def child(folder: Path) -> Iterator[ProcessPoolExecutor]:
    """A process with vLLM's parallel groups, each of one; that of experts is made for such a model only."""
    context = multiprocessing.get_context("spawn")
    model = str(write_family(EXPERTS[0], folder))
    with ProcessPoolExecutor(1, context, start_child, (model,)) as pool:
        yield pool


def start_child(model: str) -> None:
    make_groups(config_of(model))


def differences(model: str, expert_parallel: bool) -> dict[str, list[str]]:
    """For each rank, the parameters where a Read and vLLM's own loading differ, and what else is wrong."""
    import torch
    from safetensors.torch import load_file

    from shared.inference.engines.vllm_model import build_model
    from shared.weights.loader_map import LoaderMap

    config = config_of(model)
    config.parallel_config.enable_expert_parallel = expert_parallel
    pool_path = Path(model) / "map.pool"
    view = write_pool(Path(model), pool_path)
    pool = map_view(view, folder=None)
    weights = load_file(Path(model) / "model.safetensors")
    has_experts = any("experts" in name for name in weights)
    found: dict[str, list[str]] = {}
    for size in SIZES:
        ranks = []
        for rank in range(size):
            with as_rank(config, rank, size, has_experts=has_experts):
                loaded = build_model(config, "cpu")
                loaded.load_weights(iter(weights.items()))
                recorded = LoaderMap.record(build_model(config, "meta"), view.tensors)
            ranks.append((recorded, dict(loaded.named_parameters(remove_duplicate=False))))
        sliced, read_bytes = sliced_pool(pool, [recorded for recorded, _ in ranks]), 0
        for rank, (recorded, expected) in enumerate(ranks):
            case = found[f"rank {rank} of {size}"] = []
            for source, stage in ((pool, None), (sliced, None), (sliced, torch.clone), (pool, torch.clone)):
                got = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
                nbytes = recorded.apply(source.tensors, got, stage=stage)
                aliases = {a: n for n, spec in recorded.parameters.items() for a in spec.aliases}
                case += [n for n, v in expected.items() if not torch.equal(v, got[aliases.get(n, n)])]
            read_bytes += nbytes
            num_experts = sum(".experts." in box.tensor for box in recorded.boxes())
            every = sum(".experts." in name for name in weights)
            if expert_parallel and num_experts * size != every:
                case.append(f"reads {num_experts} of {every} expert tensors")
        if read_bytes < sum(w.nbytes for w in weights.values()):
            found[f"size {size}"] = [f"all ranks together read only {read_bytes} bytes"]
    pool_path.unlink()
    return found


def sliced_pool(pool: MappedPool, maps: list[Any]) -> MappedPool:
    """A copy of `pool` that is stored for what these ranks read."""
    view = pool.view
    regions: dict[str, list[list[Region]]] = {tensor.name: [[] for _ in maps] for tensor in view.tensors}
    for rank, recorded in enumerate(maps):
        for box in recorded.boxes():
            is_flat = box.flat_start is not None
            part = FlatRange(box.flat_start, box.flat_count) if is_flat else Box(box.start, box.shape)
            regions[box.tensor][rank].append(part)
    storages = {tensor.name: slice_storage(tensor.shape, regions[tensor.name]) for tensor in view.tensors}
    cut = sliced_tensors({name: storage for name, storage in storages.items() if storage is not None})
    copy = MappedPool(view.model_copy(update={"sliced": cut}), np.zeros(view.nbytes, np.uint8), writable=True)
    assert (len(maps) > 1) == bool(cut)
    for tensor in view.tensors:
        copy.copy_in(tensor.name, FlatRange(0, int(np.prod(tensor.shape))), pool.raw(tensor.name))
    return copy


CASES = [(family, False) for family in FAMILIES] + [(family, True) for family in EXPERTS]


@pytest.mark.parametrize(("family", "expert_parallel"), CASES)
def test_a_read_equals_vllms_own_loading(
    family: str, expert_parallel: bool, folder: Path, child: ProcessPoolExecutor
) -> None:
    model = write_family(family, folder)
    found = child.submit(differences, str(model), expert_parallel).result(timeout=200)
    assert len(found) == sum(SIZES)
    assert {rank: names for rank, names in found.items() if names} == {}


def refusal(model: str) -> str:
    """What recording says to a loader that does more than viewing and copying."""
    from shared.errors import LayoutError
    from shared.inference.engines.vllm_model import build_model
    from shared.weights.loader_map import LoaderMap

    config = config_of(model)
    view = write_pool(Path(model), Path(model) / "map.pool")
    with as_rank(config, 0, 1):
        try:
            LoaderMap.record(build_model(config, "meta"), view.tensors)
        except LayoutError as error:
            return error.message
    return "recorded"


REFUSED = {
    "falcon": "query_key_value.weight: the loader applies .*, which is neither a view nor a copy",
    "bloom": "BloomForCausalLM cannot be built without memory",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_more_than_views_and_copies_is_refused(
    family: str, folder: Path, child: ProcessPoolExecutor
) -> None:
    """Falcon's checkpoint has q, k and v interleaved by head, and vLLM concatenates them in another order;
    BLOOM reads the slopes of its attention while it is built."""
    message = child.submit(refusal, str(write_family(family, folder))).result(timeout=200)
    assert re.search(REFUSED[family], message), message
