"""The simulated engine keeps the engine contract, in no time at all."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.contracts.gps import PoolView
from shared.inference.engines.simulated_engine import SimulatedEngine, SimulatedEngineConfig
from tests.support import engine_contract as contract
from tests.support.virtual_time import VirtualTime

FIRST = PoolView(path="/nowhere/first", nbytes=1 << 20, tensors=())
SECOND = PoolView(path="/nowhere/second", nbytes=1 << 20, tensors=())


def latency(n: int, tokens: int) -> float:
    """The 7B constants of an H20-class GPU."""
    return 3.35e-8 * tokens + max(6.4e-3, 1.231e-4 * n) + 2.8e-3


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
def engine(time: VirtualTime) -> Iterator[SimulatedEngine]:
    engine = SimulatedEngine(latency, clock=time.clock, wait=time.wait)
    engine.start()
    engine.wake(FIRST, 1)
    yield engine
    engine.close()


def test_generates(engine: SimulatedEngine) -> None:
    contract.check_generates(engine)


def test_stops_at_a_stop_token(engine: SimulatedEngine) -> None:
    contract.check_stops_at_a_stop_token(engine)


def test_abort_and_resume_is_seamless(engine: SimulatedEngine) -> None:
    contract.check_abort_and_resume_is_seamless(engine)


def test_resuming_a_finished_sequence_ends_at_once(engine: SimulatedEngine) -> None:
    contract.check_resuming_a_finished_sequence_ends_at_once(engine)


def test_refuses_what_cannot_run(engine: SimulatedEngine) -> None:
    contract.check_refuses_what_cannot_run(engine)


def test_sleep_frees_and_wake_restores(engine: SimulatedEngine) -> None:
    contract.check_sleep_frees_and_wake_restores(engine, FIRST, SECOND, 2 << 30)


def test_refresh_keeps_running_sequences(engine: SimulatedEngine) -> None:
    contract.check_refresh_keeps_running_sequences(engine, FIRST, SECOND)


def test_wrong_states_raise(engine: SimulatedEngine) -> None:
    contract.check_wrong_states_raise(engine, FIRST)


def test_takes_the_time_of_its_throughput_model(engine: SimulatedEngine, time: VirtualTime) -> None:
    begin = time.now_s
    contract.generate(engine, "timed", max_new_tokens=10)
    expected = sum(latency(1, len(contract.PROMPT) + done) for done in range(10))
    assert time.now_s - begin == pytest.approx(expected)
    assert engine.load_snapshot().step_latency_s == pytest.approx(latency(1, 29))


def test_lengths_are_drawn_per_sequence_and_do_not_depend_on_company() -> None:
    def make() -> SimulatedEngine:
        time = VirtualTime()
        config = SimulatedEngineConfig(seed=3)
        engine = SimulatedEngine(
            latency, config, length=lambda rng: rng.randrange(5, 50), clock=time.clock, wait=time.wait
        )
        engine.start()
        engine.wake(FIRST, 1)
        return engine

    alone = {name: contract.generate(make(), name, max_new_tokens=100) for name in "abc"}
    engine = make()
    for name in "abc":
        engine.submit(contract.spec(name, max_new_tokens=100))
    deltas = contract.drain(engine)
    assert {name: contract.tokens_of(deltas, name) for name in "abc"} == alone
    assert len({len(tokens) for tokens in alone.values()}) == 3
    assert {delta.finish_reason for delta in deltas} == {None, "stop"}


def test_the_factory_makes_what_the_config_says_and_loads_no_engine_library() -> None:
    script = (
        "import sys; import shared.inference.replica; from shared.inference.engines import *; "
        "vllm = VllmEngineConfig(model='m', kv_cache_memory_bytes=1, max_model_len=8); "
        "print(*(type(create_engine(c)).__name__ for c in (vllm, SimulatedEngineConfig()))); "
        "print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ["VllmEngine SimulatedEngine", "set()"]
