"""The dynamic program against brute force over all ways to take from each pair."""

from itertools import product
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import DeviceId, ReplicaId
from shared.planning.candidates import candidates
from shared.planning.pairs import ShiftPair


def pair(i, num_up, penalty, training=False):
    return ShiftPair(
        tuple(ReplicaId(f"reward-{10 * i + j}") for j in range(num_up)),
        () if training else (ReplicaId(f"rollout-{i}"),),
        training,
        penalty,
        DeviceId(10 * i),
    )


@st.composite
def pair_lists(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=5))
    return sorted(
        (pair(i, r, float(penalty), i == 0) for i, (r, penalty) in enumerate(shapes)),
        key=lambda p: (p.penalty_tokens, p.lowest_device),
    )


@settings(max_examples=200)
@given(pair_lists(), st.integers(1, 12))
def test_the_least_penalty_of_every_count_equals_brute_force(pairs, max_up):
    least = {}
    for taken in product(*(range(len(p.up_replicas) + 1) for p in pairs)):
        penalty = sum(p.penalty_tokens for p, e in zip(pairs, taken, strict=True) if e)
        k = sum(taken)
        least[k] = min(least.get(k, inf), penalty)
    found = candidates(pairs, max_up)
    assert [(c.num_up, c.penalty_tokens) for c in found] == [
        (k, least[k]) for k in range(1, max_up + 1) if k in least
    ]
    for candidate in found:
        used = [p for p in pairs if set(p.up_replicas) & set(candidate.up_replicas)]
        assert candidate.penalty_tokens == sum(p.penalty_tokens for p in used)
        assert candidate.down_replicas == tuple(r for p in used for r in p.down_replicas)
        assert candidate.training_down == any(p.training_down for p in used)
        for p in used:
            num = len(set(p.up_replicas) & set(candidate.up_replicas))
            assert set(p.up_replicas[:num]) <= set(candidate.up_replicas), "taken from the front"


def test_the_worked_example_of_the_paper():
    """One training pair of eight devices and two rollout pairs of four; reward replicas hold four devices."""
    pairs = [pair(0, 2, 0.0, training=True), pair(1, 1, 706.0), pair(2, 1, 1843.0)]
    found = candidates(pairs, 4)
    assert [c.penalty_tokens for c in found] == [0.0, 0.0, 706.0, 2549.0]
    assert [c.down_replicas for c in found] == [(), (), ("rollout-1",), ("rollout-1", "rollout-2")]
    assert all(c.training_down for c in found)


def test_on_equal_penalty_the_later_candidate_in_traversal_order_stays():
    first, second = pair(1, 1, 5.0), pair(2, 1, 5.0)
    (one, _two) = candidates([first, second], 2)
    assert one.up_replicas == second.up_replicas


def test_nothing_to_take_gives_no_candidate():
    assert list(candidates([], 3)) == []
    assert [c.num_up for c in candidates([pair(0, 4, 1.0)], 2)] == [1, 2]
