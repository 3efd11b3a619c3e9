"""A Write over several nodes as a state machine: tables, and invariants over random histories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gps.cluster_write import ClusterWrite, JoinedWriter, shard_problem
from services.gps.packing import pack_member
from shared.contracts.gps import WriteRequest
from shared.errors import Conflict, InvalidRequest, PivotError
from shared.layout.tensor_layout import FlatRange, TensorSpec

SPECS = {"w": TensorSpec("w", "bfloat16", 2, (8, 4))}
WRITERS = ("rank-0", "rank-1")


def open_write() -> ClusterWrite:
    return ClusterWrite("id", "policy", 5, "a", WRITERS, (0, 1, 2), ((0,), (1,), (2,)))


def request(writer: str, attempt: str = "a", version: int = 5) -> WriteRequest:
    return WriteRequest(
        model="policy", version=version, writer=writer, writers=WRITERS, boxes=(), attempt=attempt
    )


def half(rank: int, node: int) -> JoinedWriter:
    return JoinedWriter(node, (("w", FlatRange(rank * 16, 16)),))


def joined() -> ClusterWrite:
    write = open_write()
    for rank, name in enumerate(WRITERS):
        write.join(request(name), half(rank, rank), SPECS)
    return write


def test_last_writer_makes_it_move_and_only_the_record_commits_it() -> None:
    write = joined()
    assert not write.finish("rank-0", 0)
    assert write.status().pending_writers == ("rank-1",)
    assert write.finish("rank-1", 1)
    assert not write.finish("rank-1", 1), "said twice, moves once"
    assert not write.status().committed
    write.start_commit()
    assert not write.abort("too late")
    assert not write.lose([0])
    write.commit()
    assert write.status().committed
    assert not write.finish("rank-0", 0)


def test_lost_node_ends_an_open_or_moving_write() -> None:
    write = joined()
    assert not write.lose([0, 1, 2, 3])
    assert write.lose([0, 2])
    assert "node 1 was lost" in write.reason
    with pytest.raises(Conflict, match="node 1 was lost"):
        write.finish("rank-0", 0)
    assert not write.lose([0]), "it ends once"


def test_record_that_somebody_else_moved_refuses_the_write() -> None:
    write = joined()
    write.finish("rank-0", 0)
    write.finish("rank-1", 1)
    write.start_commit()
    write.refuse("another leader was first")
    assert (write.phase, write.status().committed) == ("aborted", False)


def test_writer_commits_where_it_began() -> None:
    write = joined()
    with pytest.raises(Conflict, match="did not begin Write id at node 2"):
        write.finish("rank-0", 2)
    with pytest.raises(Conflict, match="stranger did not begin"):
        write.finish("stranger", 0)
    assert write.done == set()


def test_joining_again_is_the_same_and_other_boxes_are_refused() -> None:
    write = joined()
    assert write.takes(request("rank-0"))
    write.join(request("rank-0"), half(0, 0), SPECS)
    with pytest.raises(InvalidRequest, match="differ from those"):
        write.join(request("rank-0"), half(1, 0), SPECS)
    assert not write.takes(request("rank-0", attempt="b")), "restarted writers begin another Write"
    assert not write.takes(request("rank-0", version=6))


def test_boxes_that_are_not_the_model_leave_the_write_as_it_was() -> None:
    write = open_write()
    write.join(request("rank-0"), half(0, 0), SPECS)
    with pytest.raises(InvalidRequest, match="together are not the model"):
        write.join(request("rank-1"), half(0, 1), SPECS)
    assert list(write.joined) == ["rank-0"]
    write.join(request("rank-1"), half(1, 1), SPECS)


def test_equal_shards_must_have_equal_checksums() -> None:
    groups = ((0, 1), (2, 3))
    packings = {node: pack_member(SPECS, {}, group, node) for group in groups for node in group}
    assert shard_problem(packings, {0: "x", 1: "y", 2: "x", 3: "y"}) is None
    problem = shard_problem(packings, {0: "x", 1: "y", 2: "z", 3: "y"})
    assert problem == "node 0 has checksum x, node 2 has z"


STEPS = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 1)),
    st.tuples(st.just("finish"), st.integers(0, 1)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["start", "commit", "refuse", "abort"]), st.just(0)),
)


@given(steps=st.lists(STEPS, max_size=30))
@settings(max_examples=200, deadline=None)
def test_what_is_over_stays_over_and_nothing_commits_unmoved(steps: list[tuple[str, int]]) -> None:
    write, moves = open_write(), 0
    for what, which in steps:
        before = write.phase
        try:
            match what:
                case "join" if write.takes(request(WRITERS[which])):
                    write.join(request(WRITERS[which]), half(which, which), SPECS)
                case "finish":
                    moves += write.finish(WRITERS[which], which)
                case "lose":
                    write.lose({0, 1, 2} - {which})
                case "start" if write.phase == "moving":
                    write.start_commit()
                case "commit" if write.phase == "committing":
                    write.commit()
                case "refuse" if write.phase == "committing":
                    write.refuse("first")
                case "abort":
                    write.abort("x")
        except PivotError:
            pass
        if before in ("committed", "aborted"):
            assert write.phase == before
        if before == "committing":
            assert write.phase in ("committing", "committed", "aborted")
        if write.phase in ("moving", "committing", "committed"):
            assert write.done == set(WRITERS)
            assert set(write.joined) == set(WRITERS)
        assert moves <= 1
