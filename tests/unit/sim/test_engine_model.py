"""The engine model against a decoder that takes one step after another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.throughput import ThroughputModel
from shared.sim.cluster import Engine, EngineModel

THROUGHPUT = ThroughputModel(3.3e-8, 6.3e-3, 1.2e-4, 2.8e-3)


def model(capacity=1_000_000, prefill=0.0):
    return EngineModel(THROUGHPUT, prefill, capacity, 1, 1.3e-4)


def play(engine):
    """(time, sequence, tokens) of every finish."""
    done = []
    while engine.num_sequences:
        engine.advance(engine.next_event_s())
        done += [(engine.now_s, sequence, total) for sequence, _, total in engine.settle()]
    return done


def step_by_step(sequences):
    """Every sequence as (length, remaining): when each finishes, one decode step at a time."""
    now, steps, ends = 0.0, 0, []
    alive = dict(enumerate(sequences))
    while alive:
        tok = sum(length + steps for length, _ in alive.values())
        now += THROUGHPUT.latency_s(len(alive), tok)
        steps += 1
        for i in [i for i, (_, remaining) in alive.items() if remaining == steps]:
            del alive[i]
            ends.append((now, i))
    return ends


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 300)), min_size=1, max_size=12))
def test_finish_times_are_those_of_single_steps(sequences):
    engine = Engine(model(), 0.0)
    for i, (length, remaining) in enumerate(sequences):
        engine.run(str(i), 0, length, 0, remaining)
    done = play(engine)
    expected = step_by_step(sequences)
    assert sorted(i for _, i, _ in done) == sorted(str(i) for _, i in expected)
    for (at, _, _), (expected_at, _) in zip(done, expected, strict=True):
        assert at == pytest.approx(expected_at, rel=1e-3)
    assert {int(i): total for _, i, total in done} == {i: r for i, (_, r) in enumerate(sequences)}


@given(st.integers(1, 200), st.floats(0.001, 3.0))
def test_an_interruption_changes_nothing(remaining, pause):
    whole, halved = Engine(model(), 0.0), Engine(model(), 0.0)
    for engine in (whole, halved):
        engine.run("a", 0, 100, 0, remaining)
        engine.run("b", 0, 500, 0, remaining + 50)
    halved.advance(min(pause, halved.next_event_s()))
    assert [t for t, _, _ in play(whole)] == pytest.approx([t for t, _, _ in play(halved)], rel=1e-9)


def test_an_aborted_sequence_keeps_its_tokens_and_is_prefilled_again_elsewhere():
    engine = Engine(model(), 0.0)
    engine.run("a", 0, 100, 0, 400)
    engine.advance(1.0)
    attempt, generated = engine.abort("a")
    assert attempt == 0
    assert 100 < generated < 400
    other = Engine(model(prefill=1e-3), 1.0)
    other.run("a", 1, 100 + generated, generated, 400 - generated)
    ((_, _, total),) = play(other)
    assert total == 400
    assert other.usage.prefill_s == pytest.approx((100 + generated) * 1e-3)


def test_a_full_cache_preempts_the_youngest_and_all_finish():
    engine = Engine(model(capacity=3_000), 0.0)
    for name in "abcd":
        engine.run(name, 0, 500, 0, 600)
    done = play(engine)
    assert engine.usage.num_preemptions > 0
    assert sorted(name for _, name, _ in done) == list("abcd")
    assert all(total == 600 for _, _, total in done)
    assert done[0][1] == "a"


def test_reading_new_weights_holds_generation_up():
    engine = Engine(model(), 0.0)
    engine.run("a", 0, 100, 0, 100)
    due = engine.next_event_s()
    engine.refresh(2.0)
    assert engine.next_event_s() == pytest.approx(due + 2.0)
    play(engine)
    assert engine.usage.refresh_s == pytest.approx(2.0)


def test_the_account_adds_up():
    engine = Engine(model(prefill=1e-4), 0.0)
    engine.advance(5.0)
    engine.run("a", 0, 1000, 0, 100)
    play(engine)
    usage = engine.usage
    assert usage.idle_s == 5.0
    assert usage.idle_s + usage.prefill_s + usage.decode_s == pytest.approx(engine.now_s)
    assert usage.tokens == pytest.approx(100)
    assert 0 < usage.underfilled_s < usage.decode_s
