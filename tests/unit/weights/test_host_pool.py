"""The pool's regions: sizes are checked first, leftovers are found, paths are confined, nothing is copied."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from shared.contracts.gps import PoolTensor, PoolView
from shared.errors import ConfigError, InvalidRequest, NotFound
from shared.weights import pool_reader
from shared.weights.host_pool import (
    SHM_FOLDER,
    HostPool,
    find_leftovers,
    lay_out,
    map_view,
    remove_leftovers,
)
from shared.weights.pool_reader import PoolReader


@pytest.fixture
def run() -> str:
    return f"pool{uuid4().hex[:8]}"


@pytest.fixture
def pool(run: str) -> Iterator[HostPool]:
    made = HostPool(run=run, node=3, budget_bytes=1 << 20)
    yield made
    made.close()


def test_region_is_a_file_named_after_run_node_model_and_buffer(pool: HostPool, run: str) -> None:
    region = pool.create("policy", "b0", 5000)
    assert region.path == SHM_FOLDER / f"pivotrl-{run}-n3-policy-b0"
    assert region.path.stat().st_size == 5000
    assert region.path.stat().st_mode & 0o777 == 0o600
    assert pool.used_bytes == 5000
    pool.close()
    pool.close()
    assert not region.path.exists()


def test_what_one_maps_is_what_the_other_wrote_without_a_copy(pool: HostPool) -> None:
    tensors, nbytes = lay_out([("w", "float32", (3, 4)), ("b", "bfloat16", (5,)), ("s", "int64", ())])
    region = pool.create("policy", "b0", nbytes)
    view = PoolView(path=str(region.path), nbytes=nbytes, tensors=tensors)
    writer, reader = map_view(view, writable=True), map_view(view)
    writer.array("w")[:] = np.arange(12).reshape(3, 4)
    assert np.array_equal(reader.array("w"), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert reader.array("b").dtype == np.uint16
    assert reader.array("s").shape == ()
    assert all(tensor.offset_bytes % 256 == 0 for tensor in tensors)
    with pytest.raises(ValueError, match="read-only"):
        reader.array("w")[:] = 0
    kept = reader.array("w")
    reader.close()
    pool.remove(region)
    assert kept[2, 3] == 11


def test_torch_tensors_share_the_memory(pool: HostPool) -> None:
    torch = pytest.importorskip("torch")
    tensors, nbytes = lay_out([("w", "bfloat16", (2, 3)), ("none", "float32", (0, 4)), ("s", "float32", ())])
    region = pool.create("policy", "b0", nbytes)
    view = PoolView(path=str(region.path), nbytes=nbytes, tensors=tensors)
    writer = map_view(view, writable=True)
    writer.torch("w").copy_(torch.arange(6).reshape(2, 3))
    reader = map_view(view)
    assert reader.torch("w").dtype == torch.bfloat16
    assert reader.torch("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert reader.torch("w").data_ptr() == reader.address + tensors[0].offset_bytes
    assert reader.torch("none").shape == (0, 4)
    assert reader.torch("s").shape == ()


def test_region_over_the_budget_is_refused_with_both_figures(pool: HostPool) -> None:
    pool.create("policy", "b0", 1 << 19)
    with pytest.raises(ConfigError, match=r"needs 524289 bytes, 524288 of the budget are free") as caught:
        pool.create("policy", "b1", (1 << 19) + 1)
    assert caught.value.data["needed_bytes"] == 524289
    assert caught.value.data["free_bytes"] == 524288
    assert caught.value.remedy


def test_region_over_the_free_shared_memory_is_refused_before_it_is_made(run: str) -> None:
    pool = HostPool(run=run, node=0, budget_bytes=1 << 60)
    free = os.statvfs(SHM_FOLDER).f_bavail * os.statvfs(SHM_FOLDER).f_frsize
    with pytest.raises(ConfigError, match=r"of shared memory, \d+ are free"):
        pool.create("policy", "b0", free + (1 << 30))
    assert not list(SHM_FOLDER.glob(f"pivotrl-{run}*"))


@pytest.mark.parametrize("name", ["../x", "", "a/b", "a b", "-a"])
def test_run_name_that_would_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        HostPool(run=name, node=0, budget_bytes=1)


CHILD = """
import os, sys
from shared.weights.host_pool import HostPool
pool = HostPool(run=sys.argv[1], node=0, budget_bytes=1 << 20)
region = pool.create("policy", "b0", 4096)
region.memory[:] = 77
print(region.path, flush=True)
os.kill(os.getpid(), 9)
"""


def leave_behind(run: str) -> Path:
    """A region whose owner was killed."""
    done = subprocess.run([sys.executable, "-c", CHILD, run], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    return Path(done.stdout.strip())


def test_leftovers_of_a_killed_owner_are_found_and_removed_but_live_regions_stay(
    pool: HostPool, run: str
) -> None:
    live = pool.create("policy", "b0", 4096)
    dead, other = leave_behind(run), leave_behind(f"{run}x")
    assert find_leftovers(run=run) == [dead]
    assert find_leftovers(run=run, node=3) == []
    assert remove_leftovers(run=run, keep={dead}) == []
    assert remove_leftovers(run=run) == [dead]
    assert not dead.exists()
    assert live.path.exists()
    assert other.exists()
    assert other in find_leftovers()
    assert remove_leftovers(run=f"{run}x") == [other]


def test_region_of_a_dead_process_can_be_adopted_with_its_bytes(run: str) -> None:
    dead = leave_behind(run)
    pool = HostPool(run=run, node=0, budget_bytes=1 << 20)
    try:
        assert pool.adopt(dead, 4095) is None
        assert pool.adopt(Path("/etc/passwd"), 10) is None
        region = pool.adopt(dead, 4096)
        assert region is not None
        assert (region.memory == 77).all()
        assert HostPool(run=run, node=0, budget_bytes=1 << 20).adopt(dead, 4096) is None, "its owner lives"
        assert pool.used_bytes == 4096
    finally:
        pool.close()
    assert not dead.exists()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/shm/other", "/dev/shm/pivotrl-../../etc/passwd", "pivotrl-x"]
)
def test_view_of_a_path_outside_the_pool_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="not a pool file"):
        map_view(PoolView(path=path, nbytes=10, tensors=()))


def test_view_through_a_link_is_refused(run: str) -> None:
    link = SHM_FOLDER / f"pivotrl-{run}-link"
    link.symlink_to("/etc/passwd")
    try:
        with pytest.raises(OSError, match="symbolic links"):
            map_view(PoolView(path=str(link), nbytes=10, tensors=()))
    finally:
        link.unlink()


def test_view_that_does_not_fit_its_region_is_refused(pool: HostPool) -> None:
    region = pool.create("policy", "b0", 4096)
    path = str(region.path)
    with pytest.raises(InvalidRequest, match="has 4096 bytes, not 8192"):
        map_view(PoolView(path=path, nbytes=8192, tensors=()))
    outside = PoolTensor(name="w", dtype="float32", shape=(1024,), offset_bytes=256)
    with pytest.raises(InvalidRequest, match="lies outside"):
        map_view(PoolView(path=path, nbytes=4096, tensors=(outside,)))
    pool.remove(region)
    with pytest.raises(NotFound, match="is gone"):
        map_view(PoolView(path=path, nbytes=4096, tensors=()))


def test_reader_maps_a_region_once_and_forgets_one_that_was_made_again(pool: HostPool) -> None:
    reader = PoolReader()
    region = pool.create("policy", "b0", 4096)
    view = PoolView(path=str(region.path), nbytes=4096, tensors=())
    first = reader.map(view)
    assert reader.map(view).address == first.address
    assert reader.map(view, writable=True).address != first.address
    pool.remove(region)
    region = pool.create("policy", "b0", 4096)
    region.memory[:] = 5
    assert (reader.map(view).memory == 5).all()
    assert reader.num_mapped == 1
    pool.remove(region)
    with pytest.raises(NotFound):
        reader.map(view)
    assert reader.num_mapped == 0
    reader.close()


def test_reader_pins_each_mapping_once_and_unpins_what_is_gone(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(pool_reader, "pin", lambda address, nbytes, what: calls.append(("pin", address)))
    monkeypatch.setattr(pool_reader, "unpin", lambda address: calls.append(("unpin", address)))
    regions = [pool.create("policy", name, 4096) for name in ("b0", "b1")]
    views = [PoolView(path=str(region.path), nbytes=4096, tensors=()) for region in regions]
    reader = PoolReader(is_pinning=True)
    first = reader.map(views[0]).address
    assert reader.map(views[0]).address == first
    second = reader.map(views[1]).address
    pool.remove(regions[0])
    reader.map(views[1])
    assert calls == [("pin", first), ("pin", second), ("unpin", first)]
    reader.close()
    assert calls[-1] == ("unpin", second)


def test_path_is_confined_unless_the_caller_vouches_for_it(tmp_path: Path) -> None:
    path = tmp_path / "version.pool"
    path.write_bytes(bytes(512))
    view = PoolView(path=str(path), nbytes=512, tensors=())
    with pytest.raises(InvalidRequest, match="not a pool file"):
        map_view(view)
    assert map_view(view, folder=None).memory.nbytes == 512
