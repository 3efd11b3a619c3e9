"""Dispatch and migration against a literal transcription of the pseudocode."""

from math import fsum

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import Role, replica_id
from shared.scheduling.migration import (
    Movable,
    ReplicaLoads,
    dispatch,
    moves_worth_making,
    shift_down,
    shift_up,
    tie_order,
)
from shared.scheduling.throughput import H20_7B_TP1, H200_30B_A3B_TP1, UNIT

MODELS = st.sampled_from([H20_7B_TP1, H200_30B_A3B_TP1, UNIT])
LENGTHS = st.integers(1, 6_000)
GROWTH = 100


class Oracle:
    """Replicas as lists of sequences; every quantity recomputed from scratch."""

    def __init__(self, model, capacities):
        self.model, self.capacities = model, capacities
        self.on = {i: [] for i in range(len(capacities))}

    def throughput(self, i):
        return self.model.tokens_per_s(len(self.on[i]), sum(s.length for s in self.on[i]))

    def dispatch(self, queue, replicas):
        queue.sort(key=lambda s: s.rank)
        placed = []
        while queue:
            s = queue[0]
            best = None
            for i in sorted(replicas):
                if sum(x.need for x in self.on[i]) + s.need > self.capacities[i]:
                    continue
                gain = self.model.gain(len(self.on[i]), sum(x.length for x in self.on[i]), s.length)
                if best is None or gain > best[0]:
                    best = (gain, i)
            if best is None:
                break
            queue.pop(0)
            self.on[best[1]].append(s)
            placed.append(best[1])
        return placed

    def shift_down(self, queue, leaving):
        for i in leaving:
            queue += self.on[i]
            self.on[i] = []
        self.dispatch(queue, set(self.on) - set(leaving))

    def shift_up(self, queue, new):
        self.dispatch(queue, new)
        moves = []
        while not queue:
            before = [self.throughput(i) for i in self.on]
            source = max(self.on, key=lambda i: (self.throughput(i), -i))
            if not self.on[source]:
                break
            undo = {i: list(on) for i, on in self.on.items()}
            shortest = min(self.on[source])
            self.on[source].remove(shortest)
            target = self.dispatch([shortest], self.on)[0]
            after = [self.throughput(i) for i in self.on]
            if fsum([*after, *(-t for t in before)]) <= 0:
                self.on = undo
                break
            moves.append((shortest, source, target))
        return moves


@st.composite
def clusters(draw):
    """A role mid-run: its oracle, the same state as loads, the running lists and a queue."""
    model = draw(MODELS)
    capacities = draw(st.lists(st.integers(2_000, 40_000), min_size=2, max_size=6))
    lengths = draw(st.lists(LENGTHS, max_size=25))
    waiting = draw(st.lists(LENGTHS, max_size=8))
    homes = draw(st.lists(st.integers(0, len(capacities) - 1), min_size=len(lengths), max_size=len(lengths)))
    new = draw(st.integers(1, len(capacities) - 1))
    oracle = Oracle(model, capacities)
    ids = [replica_id(Role.ROLLOUT, i) for i in range(len(capacities))]
    loads = ReplicaLoads(model, dict(zip(ids, capacities, strict=True)))
    running = [[] for _ in ids]
    first_new = len(ids) - new
    for rank, (length, home) in enumerate(zip(lengths, homes, strict=True)):
        s = Movable(length, rank, length + GROWTH)
        at = home % first_new
        if sum(x.need for x in oracle.on[at]) + s.need > capacities[at]:
            continue
        oracle.on[at].append(s)
        running[at].append(s)
        loads.change(at, 1, s.length, s.need)
    for on in running:
        on.sort()
    queue = [Movable(n, len(lengths) + i, n + GROWTH) for i, n in enumerate(waiting)]
    return oracle, loads, running, queue, list(range(first_new, len(ids)))


def same(oracle, loads, running=None):
    for i in oracle.on:
        assert loads.num_sequences(i) == len(oracle.on[i])
        assert loads.num_tokens(i) == sum(s.length for s in oracle.on[i])
        assert loads.room_tokens(i) == oracle.capacities[i] - sum(s.need for s in oracle.on[i])
        assert loads.tokens_per_s(i) == oracle.throughput(i)
        if running is not None:
            assert sorted(running[i]) == sorted(oracle.on[i])
    assert loads.total_tokens_per_s == fsum(oracle.throughput(i) for i in oracle.on)


@settings(max_examples=150)
@given(clusters())
def test_dispatch_decides_as_the_pseudocode(state):
    oracle, loads, _, queue, _ = state
    placed = dispatch(loads, queue)
    left = list(queue)
    assert placed == oracle.dispatch(left, set(oracle.on))
    assert left == queue[len(placed) :]
    same(oracle, loads)


@settings(max_examples=150)
@given(clusters())
def test_shift_up_decides_as_the_pseudocode(state):
    oracle, loads, running, queue, new = state
    for i in new:
        loads.set_open(i, False)
    before = loads.total_tokens_per_s
    moves = shift_up(loads, running, queue, new)
    assert [tuple(move) for move in moves] == oracle.shift_up(list(queue), new)
    same(oracle, loads, running)
    assert loads.total_tokens_per_s >= before * (1 - 1e-12) or queue


@settings(max_examples=100)
@given(clusters())
def test_shift_down_decides_as_the_pseudocode(state):
    oracle, loads, running, queue, leaving = state
    # Leave from the busy end.
    leaving = [i - min(leaving) for i in leaving]
    waiting = list(queue)
    oracle.shift_down(waiting, leaving)
    assert shift_down(loads, running, queue, leaving) == waiting
    same(oracle, loads)


@settings(max_examples=100)
@given(clusters())
def test_every_move_raises_throughput_and_none_is_left_undone(state):
    _, loads, running, _, _ = state
    total = loads.total_tokens_per_s
    tried = loads.copy()
    for move in moves_worth_making(loads, running):
        tried.change(move.source, -1, -move.movable.length, -move.movable.need)
        tried.change(move.target, 1, move.movable.length, move.movable.need)
        assert tried.total_tokens_per_s >= total
        total = tried.total_tokens_per_s
    assert loads.total_tokens_per_s == total
    assert all(loads.room_tokens(i) >= 0 for i in range(len(loads.ids)))


@given(clusters())
def test_a_copy_is_independent(state):
    oracle, loads, running, queue, new = state
    twin, lists = loads.copy(), running.copy()
    for i in new:
        twin.set_open(i, False)
    shift_up(twin, lists, queue, new)
    same(oracle, loads, running)


def test_replicas_tie_by_slot_number():
    ids = [replica_id(Role.ROLLOUT, i) for i in (10, 2, 0)]
    assert sorted(ids, key=tie_order) == ["rollout-0", "rollout-2", "rollout-10"]
    loads = ReplicaLoads(H20_7B_TP1, dict.fromkeys(ids, 1_000))
    assert loads.ids[loads.best(10, 10)] == "rollout-0"


def test_a_closed_replica_takes_nothing():
    loads = ReplicaLoads(H20_7B_TP1, dict.fromkeys([replica_id(Role.REWARD, i) for i in range(2)], 1_000))
    loads.set_open(0, False)
    assert loads.best(10, 10) == 1
    loads.set_open(1, False)
    assert loads.best(10, 10) is None
    loads.set_open(0, True)
    assert loads.best(10, 1_000) == 0
    assert loads.best(10, 1_001) is None
