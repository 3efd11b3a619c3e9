"""Dispatch and migration against a literal transcription of the pseudocode."""

import random
from math import fsum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import Role, replica_id
from shared.scheduling.loads import kernels
from shared.scheduling.migration import (
    WAITING,
    Heaps,
    ReplicaLoads,
    Sequences,
    dispatch,
    moves_worth_making,
    shift_down,
    shift_up,
    tie_order,
    warm_up,
)
from shared.scheduling.throughput import H20_7B_TP1, H200_30B_A3B_TP1, UNIT
from tests.support import migration_reference as reference

MODELS = st.sampled_from([H20_7B_TP1, H200_30B_A3B_TP1, UNIT])
LENGTHS = st.integers(1, 6_000)
GROWTH = 100


@st.composite
def clusters(draw, most_replicas=6, most_running=25, models=MODELS):
    """A role mid-run: as the reference sees it, as loads and sequences, and the replicas to start."""
    model = draw(models)
    capacities = draw(st.lists(st.integers(2_000, 40_000), min_size=2, max_size=most_replicas))
    lengths = draw(st.lists(LENGTHS, max_size=most_running))
    waiting = draw(st.lists(LENGTHS, max_size=8))
    homes = draw(st.lists(st.integers(0, len(capacities) - 1), min_size=len(lengths), max_size=len(lengths)))
    first_new = len(capacities) - draw(st.integers(1, len(capacities) - 1))
    return case(model, capacities, lengths, homes, waiting, first_new)


def case(model, capacities, lengths, homes, waiting, first_new):
    role = reference.RoleState(model, capacities, [[] for _ in capacities])
    role.active = set(range(first_new))
    for number, (length, home) in enumerate(zip(lengths, homes, strict=True)):
        s = reference.Seq(length, number, length + GROWTH)
        at = home % first_new
        fits = sum(x.need for x in role.on[at]) + s.need <= capacities[at]
        (role.on[at] if fits else role.queue).append(s)
    role.queue += [reference.Seq(n, len(lengths) + i, n + GROWTH) for i, n in enumerate(waiting)]
    ids = [replica_id(Role.ROLLOUT, i) for i in range(len(capacities))]
    loads = ReplicaLoads(model, dict(zip(ids, capacities, strict=True)))
    everything = sorted(
        [(s.number, s, i) for i, on in enumerate(role.on) for s in on]
        + [(s.number, s, WAITING) for s in role.queue]
    )
    sequences = Sequences(
        np.array([s.length for _, s, _ in everything], np.int64),
        np.array([s.need for _, s, _ in everything], np.int64),
        np.array([home for *_, home in everything], np.int64),
    )
    loads.add_all(*sequences)
    new = list(range(first_new, len(ids)))
    loads.set_open(new, False)
    return role, loads, sequences, new


def same(role, loads):
    for i, on in enumerate(role.on):
        assert loads.num_sequences(i) == len(on)
        assert loads.num_tokens(i) == sum(s.length for s in on)
        assert loads.room_tokens(i) == role.capacities[i] - sum(s.need for s in on)
        assert loads.tokens_per_s(i) == role.throughput(i)
    assert loads.total_tokens_per_s == role.total()


@settings(max_examples=150)
@given(clusters())
def test_dispatch_decides_as_the_pseudocode(state):
    role, loads, _, _ = state
    queue = list(role.queue)
    placed = dispatch(loads, [(s.length, s.need) for s in queue])
    assert placed == [at for _, at in reference.dispatch(role, role.active)]
    assert role.queue == queue[len(placed) :]
    same(role, loads)


@settings(max_examples=150)
@given(clusters())
def test_shift_up_decides_as_the_pseudocode(state):
    role, loads, sequences, new = state
    before = loads.total_tokens_per_s
    moves = shift_up(loads, sequences, Heaps.of(sequences, len(loads.ids)), new)
    assert moves.tolist() == [[s.number, source, at] for s, source, at in reference.shift_up(role, new)]
    same(role, loads)
    assert loads.total_tokens_per_s >= before * (1 - 1e-12) or role.queue


@settings(max_examples=100)
@given(clusters())
def test_shift_down_decides_as_the_pseudocode(state):
    role, loads, sequences, new = state
    leaving = range(min(len(new), len(role.active)))
    waiting = shift_down(loads, sequences, list(leaving))
    reference.shift_down(role, leaving)
    assert waiting.tolist() == [s.number for s in role.queue]
    same(role, loads)


@pytest.mark.parametrize("model", [H20_7B_TP1, H200_30B_A3B_TP1, UNIT])
@pytest.mark.parametrize("has_room", [True, False])
def test_many_replicas_decide_as_few(model, has_room):
    """Where there are many, gains are bounded by blocks; what is decided must not depend on it."""
    rng = random.Random(f"{model}{has_room}")
    num = rng.randrange(420, 470)
    capacities = [rng.randrange(6_000, 40_000) * (20 if has_room else 1) for _ in range(num)]
    lengths = [min(9_000, int(rng.lognormvariate(6.5, 1.0)) + 1) for _ in range(num * 7)]
    homes = [rng.randrange(num) for _ in lengths]
    role, loads, sequences, new = case(model, capacities, lengths, homes, lengths[:90], num - 25)
    moves = shift_up(loads, sequences, Heaps.of(sequences, len(loads.ids)), new)
    assert moves.tolist() == [[s.number, source, at] for s, source, at in reference.shift_up(role, new)]
    assert len(moves) > 20 or not has_room
    same(role, loads)
    role, loads, sequences, new = case(model, capacities, lengths, homes, lengths[:50], num - 1)
    leaving = rng.sample(range(num - 1), 30)
    shift_down(loads, sequences, leaving)
    reference.shift_down(role, leaving)
    same(role, loads)


@settings(max_examples=100)
@given(clusters())
def test_every_move_raises_throughput_and_none_is_left_undone(state):
    _, loads, sequences, _ = state
    total = loads.total_tokens_per_s
    tried = loads.copy()
    for s, source, target in moves_worth_making(loads, sequences, Heaps.of(sequences, len(loads.ids))):
        length, need = int(sequences.lengths[s]), int(sequences.needs[s])
        tried.change(source, -1, -length, -need)
        tried.change(target, 1, length, need)
        assert tried.total_tokens_per_s >= total
        total = tried.total_tokens_per_s
    assert loads.total_tokens_per_s == total
    assert all(loads.room_tokens(i) >= 0 for i in range(len(loads.ids)))


@given(clusters())
def test_a_copy_is_independent(state):
    role, loads, sequences, new = state
    heaps = Heaps.of(sequences, len(loads.ids))
    first, second = loads.copy(), loads.copy()
    moves = shift_up(first, sequences, heaps.copy(), new)
    same(role, loads)
    assert shift_up(second, sequences, heaps.copy(), new).tolist() == moves.tolist()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), st.floats(-1e-9, 1e-9), st.booleans())
def test_sums_are_compared_exactly(parts, change, swaps):
    a, b = parts
    four = (a, b, -a, -b + change) if swaps else (a + change, -b, -a, b)
    assert kernels().is_sum_positive(*four) == (fsum(four) > 0)


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


def test_what_was_compiled_of_other_sources_is_not_used(monkeypatch, tmp_path):
    from shared.scheduling import compiled as module

    folder = Path(module.__file__).parent
    sources = {name: (folder / name).read_bytes() for name in module._SOURCES}
    compiled = {path.name for path in folder.glob("*.py") if "\n@kernel\n" in path.read_text()}
    assert compiled | {"compiled.py", "rows.py"} == set(sources), "what compiled loops use, and no other"
    monkeypatch.setattr(module.numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    assert module.cache_folder().parent == tmp_path / "kept"
    monkeypatch.setattr(module, "__file__", str(tmp_path / "compiled.py"))
    folders = set()
    for changed in (None, *sources):
        for name, text in sources.items():
            (tmp_path / name).write_bytes(text + (b"\n" if name == changed else b""))
        folders.add(module.cache_folder())
    assert len(folders) == 1 + len(sources)


def test_without_a_folder_for_compiled_loops_they_are_compiled_each_time(monkeypatch):
    from shared.scheduling import compiled as module

    asked = []

    def njit(**options):
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("no locator available for file")
        return lambda function: function

    monkeypatch.setattr(module.numba, "njit", njit)
    assert module.kernel(len) is len
    assert asked == [True, False]


def test_warming_up_compiles_all_that_decisions_call():
    from shared.scheduling import kernels as module
    from shared.scheduling import placement

    warm_up()
    called = ("change", "best", "place", "add_all", "take_off", "build_heaps", "push_all")
    assert all(getattr(module, name).signatures for name in called)
    assert placement.place_all.signatures
    assert placement.moves.signatures
    before = {name: len(getattr(module, name).signatures) for name in called}
    _, loads, sequences, new = case(H20_7B_TP1, [9_000] * 70, [50] * 200, range(200), [60] * 9, 60)
    shift_up(loads, sequences, Heaps.of(sequences, 70), new)
    shift_down(loads, sequences, [0, 1])
    loads.place(10, 20)
    assert {name: len(getattr(module, name).signatures) for name in called} == before, (
        "none is compiled later"
    )
    assert len(placement.place_all.signatures) == len(placement.moves.signatures) == 1
