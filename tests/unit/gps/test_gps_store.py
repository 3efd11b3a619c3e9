"""Versions, leases and Writes of the store, with a state machine over all interleavings."""

import itertools
import os
from collections.abc import Iterator
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gps.store import Store
from services.gps.versions import Seal, Verification, version_checksum
from shared.contracts.gps import ReadRequest, TensorBox, WriteCommit, WriteGrant, WriteRequest, WriteStatus
from shared.errors import ConfigError, Conflict, InvalidRequest, NotFound, PivotError
from shared.layout.tensor_layout import FlatRange, zero_range
from shared.weights.checksum import checksum_bytes, checksum_region
from shared.weights.host_pool import HostPool, MappedPool, lay_out, map_view

SPECS = [("a", "float32", (6, 4)), ("b", "bfloat16", (5,)), ("scale", "float32", ())]


def zero_boxes(rank: int, world: int) -> tuple[TensorBox, ...]:
    boxes = []
    for name, _, shape in SPECS:
        part = zero_range(int(np.prod(shape, dtype=int)), rank, world)
        boxes.append(TensorBox(tensor=name, flat_start=part.start, flat_count=part.count))
    return tuple(boxes)


def fill(pool: MappedPool, boxes: tuple[TensorBox, ...], value: int) -> tuple[str, ...]:
    """Write `value` into every byte of `boxes`; their checksums."""
    checksums = []
    for box in boxes:
        tensor = pool.tensor(box.tensor)
        width = pool.array(box.tensor).itemsize
        assert box.flat_start is not None
        start, stop = box.flat_start * width, (box.flat_start + box.flat_count) * width
        pool.raw(box.tensor)[start:stop] = value % 256
        region = FlatRange(box.flat_start, box.flat_count)
        checksums.append(checksum_region(pool.raw(box.tensor), tensor.shape, width, region))
    return tuple(checksums)


class Made:
    """A store with a model "policy" at version 0 (all bytes 0) and a frozen "genrm"."""

    def __init__(self) -> None:
        self.pool = HostPool(run=f"store{os.getpid()}-{uuid4().hex[:8]}", node=0, budget_bytes=1 << 22)
        ids = itertools.count()
        self.store = Store(self.pool, new_id=lambda: f"id{next(ids)}", max_lease_s=200)
        tensors, nbytes = lay_out(SPECS)
        for name, is_frozen in (("policy", False), ("genrm", True)):
            region = self.store.add_model(name, tensors, nbytes, is_frozen=is_frozen)
            self.store.publish_seed(name, 0, version_checksum(tensors, region.memory))

    def request(self, version: int, rank: int = 0, world: int = 1, **more: object) -> WriteRequest:
        writers = tuple(f"rank-{r}" for r in range(world))
        values: dict[str, object] = {
            "model": "policy",
            "version": version,
            "writer": writers[rank],
            "writers": writers,
            "boxes": zero_boxes(rank, world),
        }
        return WriteRequest.model_validate(values | more)

    def commit(self, grant: WriteGrant, rank: int, world: int, value: int) -> WriteStatus:
        pool = map_view(grant.view, writable=True)
        checksums = fill(pool, zero_boxes(rank, world), value)
        done = self.store.start_commit(
            grant.write_id, WriteCommit(writer=f"rank-{rank}", checksums=checksums)
        )
        assert isinstance(done, Verification)
        outcome = self.store.finish_commit(done, done.problem())
        return self.store.finish_seal(outcome, outcome.checksum()) if isinstance(outcome, Seal) else outcome

    def write(self, version: int, value: int, now_s: float = 0.0) -> WriteStatus:
        return self.commit(self.store.begin_write(self.request(version), now_s), 0, 1, value)

    def read(self, now_s: float = 0.0, **more: object) -> tuple[str, MappedPool]:
        request = ReadRequest.model_validate({"model": "policy", "receiver": "r"} | more)
        granted = self.store.read(request, now_s)
        return granted.lease.lease_id, map_view(granted.view)


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    made.pool.close()


def bytes_of(pool: MappedPool) -> set[int]:
    return {int(b) for name in pool.names for b in pool.raw(name)}


def test_committed_write_is_what_reads_get(made: Made) -> None:
    before = made.store.status("policy", 0).checksum
    status = made.write(1, 7)
    assert status.committed
    _, pool = made.read()
    assert bytes_of(pool) == {7}
    model = made.store.status("policy", 0)
    assert (model.version, model.open_write) == (1, None)
    assert model.checksum != before


def test_version_checksum_does_not_depend_on_the_layout_that_wrote_it(made: Made) -> None:
    whole = tuple(TensorBox(tensor=n, start=(0,) * len(s), shape=s) for n, _, s in SPECS)
    made.write(1, 7)
    first = made.store.status("policy", 0).checksum
    grant = made.store.begin_write(made.request(2, boxes=whole), 0)
    pool = map_view(grant.view, writable=True)
    pool.memory[:] = 7
    commit = WriteCommit(
        writer="rank-0", checksums=tuple(checksum_bytes(pool.raw(b.tensor).data) for b in whole)
    )
    done = made.store.start_commit(grant.write_id, commit)
    assert isinstance(done, Verification)
    seal = made.store.finish_commit(done, done.problem())
    assert isinstance(seal, Seal)
    assert set(seal.known) == {"a", "b", "scale"}
    made.store.finish_seal(seal, seal.checksum())
    assert made.store.status("policy", 0).checksum == first


def test_version_flips_only_when_the_last_writer_has_committed(made: Made) -> None:
    grants = [made.store.begin_write(made.request(1, rank, 3), 0) for rank in range(3)]
    assert len({grant.write_id for grant in grants}) == 1
    for rank in (2, 0):
        status = made.commit(grants[rank], rank, 3, 9)
        assert not status.committed
        assert bytes_of(made.read()[1]) == {0}
    assert status.pending_writers == ("rank-1",)
    assert made.commit(grants[1], 1, 3, 9).committed
    assert bytes_of(made.read()[1]) == {9}


def test_stale_version_is_a_conflict_that_names_both(made: Made) -> None:
    made.write(5, 1)
    with pytest.raises(Conflict, match=r"version 5 .* version 5") as caught:
        made.store.begin_write(made.request(5), 0)
    assert caught.value.data.items() >= {"version": 5, "asked": 5, "field": "version"}.items()
    assert made.write(9, 2).committed


def test_readers_of_the_spare_hold_the_next_write_and_are_named(made: Made) -> None:
    lease, pool = made.read(lease_s=50)
    made.write(1, 1)
    with pytest.raises(Conflict, match="readers hold the spare buffer of policy: r") as caught:
        made.store.begin_write(made.request(2), 10)
    assert caught.value.data["holders"] == ["r"]
    assert bytes_of(pool) == {0}
    made.store.release(lease, 20)
    assert made.write(2, 2, now_s=20).committed


def test_lease_that_ran_out_frees_the_spare_and_its_release_fails(made: Made) -> None:
    lease, _ = made.read(lease_s=50)
    made.write(1, 1)
    assert made.store.readers_leave_s("policy", 10) == 50
    assert made.write(2, 2, now_s=50).committed
    with pytest.raises(NotFound, match="ran out"):
        made.store.release(lease, 51)


def test_wrong_checksum_is_refused_and_the_writer_may_try_again(made: Made) -> None:
    grant = made.store.begin_write(made.request(1), 0)
    commit = WriteCommit(writer="rank-0", checksums=("0" * 16,) * 3)
    done = made.store.start_commit(grant.write_id, commit)
    assert isinstance(done, Verification)
    with pytest.raises(InvalidRequest, match=r"checksums\[0\]: a: the buffer has"):
        made.store.finish_commit(done, done.problem())
    assert bytes_of(made.read()[1]) == {0}
    assert made.commit(grant, 0, 1, 3).committed


def test_dead_writer_leaves_the_version_and_restarted_ones_replace_the_torn_write(made: Made) -> None:
    torn = [made.store.begin_write(made.request(1, rank, 2, attempt="one"), 0) for rank in range(2)]
    made.commit(torn[0], 0, 2, 66)
    zombie = map_view(torn[1].view, writable=True)
    fresh = [made.store.begin_write(made.request(1, rank, 2, attempt="two"), 0) for rank in range(2)]
    assert fresh[0].write_id != torn[0].write_id
    zombie.memory[:] = 99
    with pytest.raises(NotFound, match="replaced"):
        made.store.start_commit(torn[0].write_id, WriteCommit(writer="rank-1", checksums=("", "", "")))
    made.commit(fresh[0], 0, 2, 5)
    zombie.memory[:] = 99
    assert made.commit(fresh[1], 1, 2, 5).committed
    zombie.memory[:] = 99
    assert bytes_of(made.read()[1]) == {5}


def test_repeated_begin_of_one_attempt_gets_the_same_grant(made: Made) -> None:
    request = made.request(1, attempt="one")
    assert made.store.begin_write(request, 0) == made.store.begin_write(request, 0)
    with pytest.raises(InvalidRequest, match="boxes: differ"):
        made.store.begin_write(made.request(1, attempt="one", boxes=()), 0)
    without = made.request(1)
    assert made.store.begin_write(without, 0).write_id != made.store.begin_write(without, 0).write_id


def test_repeated_commit_of_a_committed_write_says_so(made: Made) -> None:
    grant = made.store.begin_write(made.request(1), 0)
    made.commit(grant, 0, 1, 1)
    again = made.store.start_commit(grant.write_id, WriteCommit(writer="rank-0", checksums=()))
    assert isinstance(again, WriteStatus)
    assert again.committed


def test_write_replaced_while_it_is_sealed_never_becomes_a_version(made: Made) -> None:
    grant = made.store.begin_write(made.request(1), 0)
    pool = map_view(grant.view, writable=True)
    commit = WriteCommit(writer="rank-0", checksums=fill(pool, zero_boxes(0, 1), 4))
    done = made.store.start_commit(grant.write_id, commit)
    assert isinstance(done, Verification)
    seal = made.store.finish_commit(done, done.problem())
    assert isinstance(seal, Seal)
    made.store.begin_write(made.request(1), 0)
    with pytest.raises(NotFound):
        made.store.finish_seal(seal, seal.checksum())
    assert bytes_of(made.read()[1]) == {0}


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"model": "nope"}, NotFound, "no model 'nope'"),
        ({"model": "genrm"}, Conflict, "frozen"),
        ({"writer": "rank-9"}, InvalidRequest, "writer: 'rank-9' is none of"),
        ({"writers": ("rank-0", "rank-0")}, InvalidRequest, "every writer once"),
        ({"boxes": (TensorBox(tensor="zz"),)}, InvalidRequest, r"boxes\[0\].tensor"),
        ({"boxes": (TensorBox(tensor="a", start=(0,), shape=(1,)),)}, InvalidRequest, r"boxes\[0\].shape"),
        (
            {"boxes": (TensorBox(tensor="a", start=(5, 0), shape=(2, 4)),)},
            InvalidRequest,
            "outside dimension 0",
        ),
        ({"boxes": (TensorBox(tensor="a", flat_start=20, flat_count=5),)}, InvalidRequest, "flat_start"),
        ({"boxes": zero_boxes(0, 2)}, InvalidRequest, "together are not the model: a: 12 of 24"),
        ({"boxes": (*zero_boxes(0, 1), *zero_boxes(0, 1))}, InvalidRequest, "in two parts"),
    ],
)
def test_bad_write_is_refused_by_field(
    made: Made, more: dict[str, object], error: type[PivotError], match: str
) -> None:
    with pytest.raises(error, match=match):
        made.store.begin_write(made.request(1, **more), 0)
    assert made.write(1, 1).committed


def test_commit_by_a_stranger_or_before_begin_is_refused(made: Made) -> None:
    grant = made.store.begin_write(made.request(1, 0, 2), 0)
    with pytest.raises(InvalidRequest, match="none of the writers"):
        made.store.start_commit(grant.write_id, WriteCommit(writer="x", checksums=()))
    with pytest.raises(Conflict, match="did not begin"):
        made.store.start_commit(grant.write_id, WriteCommit(writer="rank-1", checksums=()))
    with pytest.raises(InvalidRequest, match="1 checksums for 3 boxes"):
        made.store.start_commit(grant.write_id, WriteCommit(writer="rank-0", checksums=("",)))
    with pytest.raises(NotFound):
        made.store.start_commit("nope", WriteCommit(writer="rank-0", checksums=()))


def test_bad_reads_are_refused(made: Made) -> None:
    with pytest.raises(Conflict, match="version 0, version 3 was asked"):
        made.read(min_version=3)
    with pytest.raises(InvalidRequest, match="lease_s"):
        made.read(lease_s=201)
    with pytest.raises(NotFound):
        made.store.release("nope", 0)


def test_abandoned_write_leaves_the_version_and_the_next_gets_a_fresh_buffer(made: Made) -> None:
    grant = made.store.begin_write(made.request(1), 0)
    made.store.abandon(grant.write_id)
    with pytest.raises(NotFound):
        made.store.write_status(grant.write_id)
    assert made.store.begin_write(made.request(1), 0).view.path != grant.view.path


def test_buffers_that_do_not_fit_are_refused_before_any_is_made() -> None:
    pool = HostPool(run=f"store{os.getpid()}", node=0, budget_bytes=3000)
    store = Store(pool, new_id=lambda: "x")
    tensors, nbytes = lay_out([("a", "float32", (500,))])
    with pytest.raises(ConfigError, match="needs 4096 bytes, 3000 of the budget are free"):
        store.add_model("policy", tensors, nbytes, is_frozen=False)
    assert pool.used_bytes == 0
    pool.close()


class StoreMachine(RuleBasedStateMachine):
    """Reads, Writes, commits, deaths and lease ends in any order, against a plain model of what must hold.

    Version v's bytes are all `v + 1`, so one glance tells a torn version; zombies scribble 255.
    """

    WORLD = 2

    @initialize()
    def start(self) -> None:
        self.made = Made()
        self.now_s = 0.0
        self.version, self.highest_asked = 0, 0
        self.leases: dict[str, tuple[float, int, MappedPool]] = {}
        self.grants: dict[tuple[str, int], WriteGrant] = {}
        self.zombies: list[MappedPool] = []
        self.writable: list[MappedPool] = []
        self.attempt = 0
        self.seal: tuple[Seal, int] | None = None

    def teardown(self) -> None:
        if hasattr(self, "made"):
            self.made.pool.close()

    def live_leases(self) -> dict[str, tuple[float, int, MappedPool]]:
        return {k: v for k, v in self.leases.items() if v[0] > self.now_s}

    @rule(lease_s=st.sampled_from([1.0, 5.0, 50.0]))
    def read(self, lease_s: float) -> None:
        lease, pool = self.made.read(self.now_s, lease_s=lease_s)
        self.leases[lease] = (self.now_s + lease_s, self.version, pool)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        is_live = self.leases.pop(lease)[0] > self.now_s
        try:
            self.made.store.release(lease, self.now_s)
            assert is_live
        except NotFound:
            assert not is_live

    @rule(seconds=st.sampled_from([0.5, 4.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        rank=st.integers(0, 1), ahead=st.sampled_from([0, 0, 0, -1, 2]), restarts=st.sampled_from([0, 0, 1])
    )
    def begin(self, rank: int, ahead: int, restarts: int) -> None:
        self.attempt += restarts
        version = self.version + 1 + ahead
        attempt = f"{self.attempt}-{version}"
        held = any(v != self.version for _, v, _ in self.live_leases().values())
        had = dict(self.grants)
        try:
            grant = self.made.store.begin_write(
                self.made.request(version, rank, self.WORLD, attempt=attempt), self.now_s
            )
        except Conflict:
            assert version <= self.version or held
            return
        assert version > self.version
        if any(other.write_id != grant.write_id for other in had.values()):
            self.zombies += self.writable
            self.writable = []
            self.grants = {}
        self.grants[(grant.write_id, rank)] = grant
        self.writable.append(map_view(grant.view, writable=True))

    @rule(num_ranks=st.integers(1, 2))
    def whole_world_writes(self, num_ranks: int) -> None:
        for rank in range(self.WORLD):
            self.begin(rank, 0, 0)
        for key in sorted(self.grants)[:num_ranks]:
            self.copy_and_commit(key)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def some_rank_commits(self, data: st.DataObject) -> None:
        self.copy_and_commit(data.draw(st.sampled_from(sorted(self.grants))))

    def copy_and_commit(self, key: tuple[str, int]) -> None:
        grant = self.grants[key]
        value = grant.version + 1
        try:
            pool = map_view(grant.view, writable=True)
        except NotFound:
            return
        boxes = zero_boxes(key[1], self.WORLD)
        commit = WriteCommit(writer=f"rank-{key[1]}", checksums=fill(pool, boxes, value))
        try:
            done = self.made.store.start_commit(grant.write_id, commit)
            assert isinstance(done, Verification)
            outcome = self.made.store.finish_commit(done, done.problem())
        except NotFound:
            return
        if isinstance(outcome, Seal):
            self.seal = (outcome, grant.version)

    @rule()
    def seal_ends(self) -> None:
        if self.seal is None:
            return
        seal, version = self.seal
        self.seal = None
        try:
            status = self.made.store.finish_seal(seal, seal.checksum())
        except NotFound:
            return
        assert status.committed
        assert version > self.version
        self.version, self.grants, self.writable = version, {}, []
        self.zombies_scribble()

    @precondition(lambda self: len(self.grants) > 1)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.grants)))
        try:
            self.made.store.abandon(key[0])
        except NotFound:
            return
        self.zombies += self.writable
        self.grants, self.writable = {}, []

    def zombies_scribble(self) -> None:
        for pool in self.zombies:
            pool.memory[:] = 255

    @invariant()
    def readable_version_is_whole_and_only_grows(self) -> None:
        if not hasattr(self, "made"):
            return
        model = self.made.store.model("policy")
        assert model.version == self.version
        expected = {self.version + 1} if self.version else {0}
        assert bytes_of(map_view(model.readable.view)) == expected
        assert model.checksum == version_checksum(model.tensors, model.readable.region.memory)

    @invariant()
    def bytes_under_a_lease_do_not_change(self) -> None:
        if not hasattr(self, "made"):
            return
        for _, version, pool in self.live_leases().values():
            assert bytes_of(pool) == ({version + 1} if version else {0})

    @invariant()
    def pool_has_three_regions(self) -> None:
        if hasattr(self, "made"):
            assert self.made.pool.used_bytes == 3 * self.made.store.model("policy").nbytes


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
