"""Who is in the view: tables, and invariants over random lives of nodes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gps.membership import (
    Silence,
    complete_groups,
    first_view,
    group_of,
    join,
    leader,
    lose,
    member_of,
    serve,
    serving,
)
from shared.contracts.gps_cluster import ClusterView, NodeHeartbeat


def view_of(num_nodes: int, group_size: int, *up: int) -> ClusterView:
    view = first_view(range(num_nodes), group_size)
    for node in up:
        view = serve(join(view, node, "a"), node, "a")
    return view


def test_groups_are_formed_once_from_the_configured_nodes() -> None:
    assert first_view(range(5), 2).groups == ((0, 1, 2), (3, 4))
    assert first_view(range(3), 1).groups == ((0,), (1,), (2,))
    assert leader(first_view(range(3), 1)) is None


def test_lowest_serving_node_leads_and_groups_are_complete_with_all_members() -> None:
    view = view_of(4, 2, 1, 2, 3)
    assert (serving(view), leader(view), complete_groups(view)) == ((1, 2, 3), 1, ((2, 3),))
    view = serve(join(view, 0, "x"), 0, "x")
    assert (leader(view), complete_groups(view)) == (0, ((0, 1), (2, 3)))


def test_joining_moves_no_transfer_but_serving_and_losing_do() -> None:
    view = view_of(2, 1, 0)
    joined = join(view, 1, "a")
    assert joined.epoch == view.epoch
    served = serve(joined, 1, "a")
    assert served.epoch == view.epoch + 1
    assert lose(served, 1, "a").epoch == served.epoch + 1
    assert lose(joined, 1, "a").epoch == joined.epoch


def test_what_an_earlier_life_said_is_ignored() -> None:
    view = view_of(2, 1, 0, 1)
    again = join(view, 1, "b")
    assert member_of(again, 1) is not None
    assert serving(again) == (0,)
    assert serve(again, 1, "a") == again
    assert lose(again, 1, "a") == again
    assert serving(serve(again, 1, "b")) == (0, 1)


def test_bigger_cluster_adds_groups_and_moves_nobody() -> None:
    view = view_of(2, 2, 0, 1)
    waiting = join(view, 2, "a")
    assert group_of(waiting, 2) == ()
    grown = join(waiting, 3, "a")
    assert grown.groups == ((0, 1), (2, 3))
    assert grown.epoch > view.epoch


ACTIONS = st.tuples(
    st.sampled_from(["join", "serve", "lose"]), st.integers(0, 6), st.sampled_from(["a", "b", "c"])
)


@given(num_nodes=st.integers(1, 5), size=st.integers(1, 3), actions=st.lists(ACTIONS, max_size=40))
@settings(max_examples=100, deadline=None)
def test_epochs_grow_and_groups_stay(num_nodes: int, size: int, actions: list[tuple[str, int, str]]) -> None:
    view = first_view(range(num_nodes), min(size, num_nodes))
    for action, node, life in actions:
        step = {"join": join, "serve": serve, "lose": lose}[action]
        new = step(view, node, life)
        assert new.epoch >= view.epoch
        assert new.groups[: len(view.groups)] == view.groups
        seats = [member for group in new.groups for member in group]
        assert len(seats) == len(set(seats))
        if serving(new) != serving(view) or new.groups != view.groups:
            assert new.epoch > view.epoch, (action, node, life)
        assert step(new, node, life) == new, "saying it twice changes nothing"
        view = new


def heartbeat(node: int, life: str = "a", *, leaving: bool = False) -> NodeHeartbeat:
    return NodeHeartbeat(node=node, incarnation=life, leaving=leaving)


def watch(view: ClusterView, until_s: float, *speaking: int) -> Silence:
    """Node 0 listens from 0 to `until_s`, every second, to itself and to `speaking`."""
    silence = Silence(0, dead_after_s=5.0)
    second = 0.0
    while second <= until_s:
        for node in (0, *speaking):
            silence.hear(heartbeat(node), second)
        silence.lost(view, second)
        second += 1.0
    return silence


def test_silent_node_is_lost_after_its_term_and_a_speaking_one_never() -> None:
    view = view_of(3, 1, 0, 1, 2)
    assert watch(view, 5.0, 1).lost(view, 5.0) == []
    lost = watch(view, 6.0, 1).lost(view, 6.0)
    assert [member.node for member in lost] == [2]


def test_node_that_says_goodbye_is_lost_at_once() -> None:
    view = view_of(2, 1, 0, 1)
    silence = watch(view, 1.0, 1)
    silence.hear(heartbeat(1, leaving=True), 1.5)
    assert [member.node for member in silence.lost(view, 1.5)] == [1]


def test_who_does_not_hear_itself_calls_nobody_silent_and_gives_a_full_term_after() -> None:
    view = view_of(3, 1, 0, 1, 2)
    silence = watch(view, 2.0, 1, 2)
    assert silence.is_cut_off(60.0)
    assert silence.lost(view, 60.0) == []
    silence.hear(heartbeat(0), 61.0)
    assert silence.lost(view, 61.0) == []
    for second in (62.0, 63.0, 64.0, 65.0, 66.5):
        silence.hear(heartbeat(0), second)
        silence.hear(heartbeat(1), second)
    assert [member.node for member in silence.lost(view, 66.5)] == [2]


def test_new_life_in_the_view_gets_a_full_term_before_it_was_heard() -> None:
    view = view_of(2, 1, 0, 1)
    silence = watch(view, 20.0, 1)
    restarted = join(view, 1, "b")
    assert silence.lost(restarted, 20.5) == []
    for second in (21.0, 23.0, 25.0, 25.4):
        silence.hear(heartbeat(0), second)
        assert silence.lost(restarted, second) == []


def test_new_life_that_speaks_ends_the_old_one() -> None:
    view = view_of(2, 1, 0, 1)
    silence = watch(view, 3.0, 1)
    silence.hear(heartbeat(1, "b"), 3.5)
    assert [member.incarnation for member in silence.lost(view, 3.5)] == ["a"]


def test_lowest_live_node_changes_the_view() -> None:
    view = view_of(3, 1, 0, 1, 2)
    assert watch(view, 9.0, 1, 2).should_tell(view, 9.0)
    second = Silence(1, dead_after_s=5.0)
    for at_s in (0.0, 3.0, 6.0):
        for node in (0, 1, 2):
            second.hear(heartbeat(node), at_s)
        second.lost(view, at_s)
    assert not second.should_tell(view, 6.0)
    for at_s in (8.0, 10.0, 12.0):
        second.hear(heartbeat(1), at_s)
        second.hear(heartbeat(2), at_s)
    assert second.should_tell(view, 12.0)


@pytest.mark.parametrize("state", ["joining", "gone"])
def test_nobody_leads_where_nobody_serves(state: str) -> None:
    view = join(first_view(range(2), 1), 0, "a")
    view = view if state == "joining" else lose(view, 0, "a")
    assert leader(view) is None
    assert complete_groups(view) == ()
