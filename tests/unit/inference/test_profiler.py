"""Profiling an engine whose speed is known finds that speed, and leaves the engine as it was."""

import random

import pytest

from shared.contracts.gps import PoolView
from shared.errors import EngineError
from shared.inference.engines.simulated_engine import SimulatedEngine, SimulatedEngineConfig
from shared.inference.profiler import growth_tokens, measure
from shared.planning.profile import profile_of, sweep
from shared.scheduling.throughput import H20_7B_TP1, H200_30B_A3B_TP1, ThroughputModel
from tests.support.virtual_time import VirtualTime


def awake(model: ThroughputModel, time: VirtualTime, jitter: float = 0.0, **config: int) -> SimulatedEngine:
    rng = random.Random(1)

    def latency(n: int, tok: int) -> float:
        return model.latency_s(n, tok) * (1.0 + jitter * rng.random())

    engine = SimulatedEngine(latency, SimulatedEngineConfig(**config), clock=time.clock, wait=time.wait)
    engine.start()
    engine.wake(PoolView(path="/dev/shm/none", nbytes=0, tensors=()), 1)
    return engine


POINTS = sweep(256, 8_000, 1 << 20, growth_tokens(1 << 20))
GROWTH = growth_tokens(1 << 20)


ATTENTION_BOUND = ThroughputModel(1e-5, 1e-4, 1e-6, 1e-4)
"""Whoever counts resident tokens wrong sees it here."""


@pytest.mark.parametrize("model", [H20_7B_TP1, H200_30B_A3B_TP1, ATTENTION_BOUND])
def test_constants_of_a_known_engine_are_found(model: ThroughputModel) -> None:
    time = VirtualTime()
    engine = awake(model, time, kv_capacity_tokens=1 << 20)
    measured = measure(engine, POINTS, growth=GROWTH, vocab_size=1_000, clock=time.clock)
    assert {step.n for step in measured.steps} == {n for n, _ in POINTS}
    for step in measured.steps:
        assert step.latency_s == pytest.approx(model.latency_s(step.n, step.tok), rel=0.01)
    found = profile_of(
        measured.steps,
        measured.prefill_s_per_token,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
    )
    assert found.held_out_worst < 0.02
    for n, tok in ((1, 100), (20, 40_000), (200, 500_000)):
        assert found.model.latency_s(n, tok) == pytest.approx(model.latency_s(n, tok), rel=0.03)
    assert not engine.has_work()


def test_a_step_that_was_interrupted_does_not_count() -> None:
    time = VirtualTime()
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        return time.now_s + (5.0 if calls % 11 == 0 else 0.0)  # now and then something else takes 5 s

    engine = awake(H20_7B_TP1, time)
    points = sweep(4, 500, 100_000, 200)
    measured = measure(engine, points, growth=200, vocab_size=1_000, clock=clock)
    for step in measured.steps:
        assert step.latency_s == pytest.approx(H20_7B_TP1.latency_s(step.n, step.tok), rel=0.05)


def test_errors_of_a_noisy_engine_are_those_of_steps_not_fitted() -> None:
    time = VirtualTime()
    engine = awake(H20_7B_TP1, time, jitter=0.4)
    measured = measure(engine, POINTS, growth=GROWTH, vocab_size=1_000, clock=time.clock)
    found = profile_of(measured.steps, 0.0)
    assert 0.0 < found.held_out_median < 0.2
    assert found.held_out_median <= found.held_out_worst


def test_sequences_that_end_too_early_are_an_error_and_leave_nothing_running() -> None:
    time = VirtualTime()
    engine = awake(H20_7B_TP1, time, max_model_len=105)
    with pytest.raises(EngineError, match="one ended"):
        measure(engine, sweep(4, 100, 10_000, 50), growth=50, vocab_size=1_000, clock=time.clock)
    assert not engine.has_work()
