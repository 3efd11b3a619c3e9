"""Several GPS nodes in one process, and what a network test cannot bring about at will: a broker that fails
at one very moment, a byte that changes on its way, a coordinator that was replaced."""

import asyncio
import ctypes
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from shared.contracts.base import Done, Message
from shared.contracts.gps import PolicyVersion, ReadRequest, TensorBox, WriteCommit, WriteRequest
from shared.contracts.gps_cluster import LeaseVersion, ReleaseVersion, VersionCommit, VersionLeased
from shared.contracts.subjects import POLICY_VERSION_KEY
from shared.errors import (
    BusError,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PivotError,
    TransportError,
)
from shared.weights.mapped_pool import map_view
from shared.weights.memory_transport import MemoryTransport
from shared.weights.ports import Operation
from tests.support.gps_cluster import (
    MODEL_BYTES,
    columns,
    copied_out,
    copy_version,
    cut_out,
    flat,
    values,
    write_checkpoint,
)
from tests.support.memory_cluster import MemoryCluster, memory_cluster

M = TypeVar("M", bound=Message)
HALF = 2 * MODEL_BYTES


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[MemoryCluster]:
    """One group of two."""
    async with memory_cluster(tmp_path, 2, node_bytes=HALF) as cluster:
        yield cluster


async def write(
    cluster: MemoryCluster,
    version: int,
    *,
    node: int = 0,
    writer: str = "a",
    writers: tuple[str, ...] = ("a",),
    boxes: tuple[TensorBox, ...] = columns(0, 1),
    attempt: str = "",
    wait_s: float = 2.0,
) -> bool:
    client = cluster.clients[node]
    request = WriteRequest(
        model="policy", version=version, writer=writer, writers=writers, boxes=boxes, attempt=attempt,
        wait_s=wait_s,
    )  # fmt: skip
    grant = await client.begin_write(request)
    checksums = copy_version(grant, version, boxes)
    status = await client.commit_write(grant.write_id, WriteCommit(writer=writer, checksums=checksums))
    return status.committed


async def read(cluster: MemoryCluster, node: int, boxes: tuple[TensorBox, ...] = ()) -> int:
    """The version, every byte of which was compared."""
    request = ReadRequest(model="policy", receiver="r", boxes=boxes)
    async with cluster.clients[node].read(request) as grant:
        pool = map_view(grant.view)
        for part in boxes or columns(0, 1):
            assert copied_out(pool, part) == cut_out(values(part.tensor, grant.version), part)
        return grant.version


async def until(cluster: MemoryCluster, version: int) -> None:
    """Every node reads `version`."""
    async with asyncio.timeout(10):
        while True:
            if {await read(cluster, node) for node in cluster.clients} == {version}:
                return
            await asyncio.sleep(0.02)


async def published(cluster: MemoryCluster) -> int:
    context = cluster.services[0].holder.cluster
    async with asyncio.timeout(10):
        while True:
            found = await context.bus.kv_get(
                context.subjects.policy_bucket, POLICY_VERSION_KEY, PolicyVersion
            )
            if found is not None:
                return found[0].version
            await asyncio.sleep(0.02)


async def test_leader_publishes_the_seed_and_every_commit(two: MemoryCluster) -> None:
    assert await published(two) == 0
    assert await write(two, 3, node=1)
    assert await published(two) == 3


async def test_writers_of_one_node_join_in_any_order(two: MemoryCluster) -> None:
    writers = ("a", "b", "c")
    done = await asyncio.gather(
        *(
            write(two, 1, node=rank % 2, writer=name, writers=writers, boxes=flat(rank, 3), attempt="x")
            for rank, name in enumerate(writers)
        )
    )
    assert any(done)
    await until(two, 1)


class FailingSwap:
    """The broker goes away at the commit: before, or after, the record was written."""

    def __init__(self, cluster: MemoryCluster, *, is_written: bool) -> None:
        self._members, self._is_written = cluster.services[0].members, is_written
        self._swap = self._members.swap_commit

    async def __call__(self, commit: VersionCommit, revision: int) -> int:
        if not commit.next_write and commit.version > 0:
            if self._is_written:
                await self._swap(commit, revision)
            raise BusError("the broker is gone")
        return await self._swap(commit, revision)


@pytest.mark.parametrize("is_written", [True, False])
async def test_commit_in_doubt_is_what_the_record_says(two: MemoryCluster, is_written: bool) -> None:
    leads = two.services[0].leads
    kept, leads.swap_commit = leads.swap_commit, FailingSwap(two, is_written=is_written)
    with pytest.raises(BusError, match="the broker is gone"):
        await write(two, 1)
    leads.swap_commit = kept
    if is_written:
        await until(two, 1)
    else:
        await asyncio.sleep(0.2)
        assert {await read(two, node) for node in (0, 1)} == {0}
    assert await write(two, 2, node=1)
    await until(two, 2)


async def test_coordinator_that_was_replaced_cannot_commit(two: MemoryCluster) -> None:
    members = two.services[1].members
    began = asyncio.create_task(write(two, 1, writers=("a", "late"), boxes=flat(0, 2), attempt="x"))
    assert not await began
    commit, revision = await members.read_commit("policy")
    await members.swap_commit(commit.model_copy(update={"next_write": "of another leader"}), revision)
    with pytest.raises(Conflict):
        await write(two, 1, writer="late", writers=("a", "late"), boxes=flat(1, 2), attempt="x")
    assert {await read(two, node) for node in (0, 1)} == {0}
    assert await write(two, 1)
    await until(two, 1)


class Corrupting(MemoryTransport):
    """Changes one byte of what arrives, once it is told to."""

    is_on = False

    def poll(self, operation: Operation) -> bool:
        done = super().poll(operation)
        if Corrupting.is_on and operation.nbytes:
            Corrupting.is_on = False
            target = operation.target  # type: ignore[attr-defined]
            at = target.address + int(target.spans[0, 0])
            view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(at))  # type: ignore[attr-defined]
            view[0] ^= 1
        return done


async def test_byte_that_changes_on_its_way_ends_the_write(tmp_path: Path) -> None:
    async with memory_cluster(tmp_path, 2, node_bytes=HALF, make=Corrupting) as cluster:
        Corrupting.is_on = True
        with pytest.raises(TransportError, match="has checksum"):
            await write(cluster, 1)
        assert not Corrupting.is_on
        assert {await read(cluster, node) for node in (0, 1)} == {0}
        assert await write(cluster, 1)
        await until(cluster, 1)


class Late(MemoryTransport):
    """While it is slow no copy ends. What is given up arrives all the same, later, as other bytes."""

    is_slow = False
    given_up: ClassVar[list[Operation]] = []
    num_late = 0

    def poll(self, operation: Operation) -> bool:
        return not (Late.is_slow and operation.nbytes) and super().poll(operation)

    def cancel(self, operation: Operation) -> None:
        Late.given_up.append(operation)

    def progress(self) -> None:
        for operation in [] if Late.is_slow else Late.given_up:
            target = operation.target  # type: ignore[attr-defined]
            for at, nbytes in target.spans.tolist():
                ctypes.memset(target.address + at, 0xEE, nbytes)
            Late.num_late += 1


async def test_bytes_of_a_copy_that_was_given_up_show_in_no_read(tmp_path: Path) -> None:
    deadlines = {"copy_deadline_s": 0.3, "control_deadline_s": 2.0}
    async with memory_cluster(tmp_path, 2, node_bytes=HALF, make=Late, **deadlines) as cluster:
        assert await read(cluster, 1, columns(0, 2)) == 0
        Late.is_slow = True
        with pytest.raises(DeadlineExceeded, match="phase 'copy'"):
            await read(cluster, 1)
        assert Late.given_up
        Late.is_slow = False
        for boxes in (columns(0, 1), columns(0, 2), columns(0, 1)):
            assert await read(cluster, 1, boxes) == 0
            count = Late.num_late
            async with asyncio.timeout(10):
                while Late.num_late < count + 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert await read(cluster, 1, boxes) == 0, "kept, and still whole"
        assert await write(cluster, 1)
        await until(cluster, 1)
        Late.given_up.clear()


async def test_lease_of_a_reader_elsewhere_keeps_its_version_from_the_next_but_one_write(
    two: MemoryCluster,
) -> None:
    cluster = two.services[0].holder.cluster
    question = LeaseVersion(
        model="policy", version=0, lineage=0, receiver="r", lease_s=60, digest=cluster.digest
    )
    leased = await cluster.ask(1, "lease", question, VersionLeased)
    assert await write(two, 1)
    with pytest.raises(Conflict, match="readers hold the spare buffer"):
        await write(two, 2, wait_s=0.1)
    await cluster.ask(1, "release", ReleaseVersion(lease_id=leased.lease_id), Done)
    assert await write(two, 2)
    with pytest.raises(Conflict, match="has version 2 of policy, not 0"):
        await cluster.ask(1, "lease", question, VersionLeased)
    with pytest.raises(NotFound):
        await cluster.ask(1, "release", ReleaseVersion(lease_id=leased.lease_id), Done)


async def test_wrong_checksum_of_a_writer_leaves_the_write_open(two: MemoryCluster) -> None:
    request = WriteRequest(model="policy", version=1, writer="a", writers=("a",), boxes=columns(0, 1))
    grant = await two.clients[1].begin_write(request)
    with pytest.raises(InvalidRequest, match=r"checksums\[0\].*the writer says 0"):
        await two.clients[1].commit_write(grant.write_id, WriteCommit(writer="a", checksums=("0",) * 3))
    assert not (await two.clients[0].write_status(grant.write_id)).committed
    await two.clients[0].abandon_write(grant.write_id)
    with pytest.raises(PivotError):
        await two.clients[1].write_status(grant.write_id)
    assert await write(two, 1)


async def test_stale_and_other_attempts_do_not_disturb_an_open_write(two: MemoryCluster) -> None:
    assert await write(two, 4)
    writers = ("a", "b")
    assert not await write(two, 5, writers=writers, boxes=flat(0, 2), attempt="x")
    with pytest.raises(Conflict, match="not newer"):
        await write(two, 4, node=1)
    assert await write(two, 5, node=1, writer="b", writers=writers, boxes=flat(1, 2), attempt="x")
    await until(two, 5)


async def test_version_is_loaded_from_a_folder_of_the_run(two: MemoryCluster) -> None:
    write_checkpoint(two.folder.path / "export", version=1)
    answer = await two.http[1].post("/v1/models/policy/load", json={"path": "export"})
    assert answer.json()["committed"], answer.text
    await until(two, 1)


async def test_reader_that_keeps_its_version_is_not_pulled_again(two: MemoryCluster) -> None:
    reads = two.services[1].receivers.reads
    await read(two, 1, columns(0, 2))
    pulled = reads.num_pulled_bytes
    assert pulled > 0
    await read(two, 1, columns(0, 2))
    assert reads.num_pulled_bytes == pulled
    assert await write(two, 1)
    await until(two, 1)
    assert reads.num_pulled_bytes > pulled


async def test_one_receiver_has_one_read_at_a_time(two: MemoryCluster) -> None:
    request = ReadRequest(model="policy", receiver="r")
    async with two.clients[0].read(request):
        with pytest.raises(Conflict, match="reading already"):
            async with two.clients[0].read(request):
                pass
    assert await read(two, 0) == 0


async def test_status_names_nodes_groups_and_the_leader(two: MemoryCluster) -> None:
    status = (await two.http[1].get("/v1/nodes")).json()
    assert (status["group_size"], status["leader"], status["is_cut_off"]) == (2, 0, False)
    assert [(n["node"], n["state"], n["group"]) for n in status["nodes"]] == [
        (0, "serving", 0),
        (1, "serving", 0),
    ]
    await read(two, 1)
    plans = (await two.http[1].get("/v1/transfer-plans")).json()
    assert {p["receivers"][0] for p in plans} == {"r"}


async def test_plans_that_a_lost_node_takes_part_in_are_dropped_and_reads_go_elsewhere(
    tmp_path: Path,
) -> None:
    async with memory_cluster(tmp_path, 4, node_bytes=HALF) as cluster:
        service = cluster.services[0]
        await service.members.refresh()
        assert await write(cluster, 1)
        assert await read(cluster, 0) == 1
        (before,) = [plan for _, plan in service.plans.cache.plans()]
        senders = {transfer.sender for transfer in before.transfers}
        assert senders == {"node-1", "node-3"}, "balanced over both groups"
        epoch = service.plans.layout_epoch
        await cluster.stop(3)
        await service.members.refresh()
        assert service.plans.layout_epoch > epoch
        assert service.plans.cache.plans() == ()
        assert await write(cluster, 2)
        assert await read(cluster, 0) == 2
        (after,) = [plan for _, plan in service.plans.cache.plans()]
        assert {transfer.sender for transfer in after.transfers} == {"node-1"}
        assert {await read(cluster, node) for node in (1, 2)} == {2}, "node 2 has lost its partner"


async def test_two_more_nodes_make_another_group_and_move_nobody(two: MemoryCluster) -> None:
    assert await write(two, 1)
    await two.start(2, 4)
    async with asyncio.timeout(5):
        while two.services[2].waits_for() != "2 nodes for a new group":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await write(two, 2)
    await two.start(3, 4)
    await two.until_serving()
    await until(two, 2)
    status = two.services[3].nodes()
    assert [(n.node, n.group) for n in status.nodes] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert await write(two, 3, node=3)
    await until(two, 3)
    await two.stop(0)
    assert two.services[1].nodes().leader == 1
    assert await write(two, 4, node=3)
    assert {await read(two, node) for node in (1, 2, 3)} == {4}
