"""An engine of two workers: what one of them cannot do is told as it is, and no later call reads of it."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from shared.contracts.gps import PoolView
from shared.errors import EngineError, LayoutError, NotFound, PivotError
from shared.inference.engines.vllm_config import VllmEngineConfig
from shared.inference.engines.vllm_engine import VllmEngine
from shared.inference.engines.worker_answers import answer_of, values_of

pytest.importorskip("torch")

from shared.inference.engines.vllm_worker import PivotWorkerExtension

VIEW = PoolView(path="/nowhere/pool", nbytes=64, tensors=())


class Worker(PivotWorkerExtension):
    """A worker that holds no model. `fails` are errors of its methods, each raised once."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls, self.is_awake = rank, 0, False
        self.fails: dict[str, Exception] = {}

    def _do(self, method: str) -> None:
        self.calls += 1
        if method in self.fails:
            raise self.fails.pop(method)

    def sleep(self, level: int) -> None:
        assert level == 2
        self._do("sleep")
        self.is_awake = False

    def wake_up(self, tags: list[str]) -> None:
        self._do(f"wake_up {tags[0]}")
        self.is_awake = True

    def pivot_unmap(self) -> None:
        self._do("pivot_unmap")
        self.is_awake = False

    def pivot_resident(self) -> int:
        self._do("pivot_resident")
        return 100 if self.is_awake else 10

    def pivot_boxes(self, tensors: Any) -> list[dict[str, Any]]:
        self._do("pivot_boxes")
        return [{"tensor": f"of rank {self.rank}", "flat_start": 0, "flat_count": 1}]

    def pivot_read(self, *_: Any) -> tuple[int, float]:
        self._do("pivot_read")
        return 10 + self.rank, 0.5 - self.rank / 10


class Executor:
    """vLLM's way with several workers: each queues its answer, and the call ends at the first failure."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self._answers: list[deque[tuple[bool, Any]]] = [deque() for _ in workers]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        for worker, queue in zip(self.workers, self._answers, strict=True):
            try:
                queue.append((True, getattr(worker, method)(*args)))
            except Exception as error:
                queue.append((False, str(error)))
        values = []
        for queue in self._answers:
            worked, value = queue.popleft()
            if not worked:
                raise RuntimeError(f"Worker failed with error '{value}'")
            values.append(value)
        return values

    def reset_prefix_cache(self) -> None:
        pass


@pytest.fixture
def workers() -> list[Worker]:
    return [Worker(0), Worker(1)]


@pytest.fixture
def engine(workers: list[Worker]) -> VllmEngine:
    engine = VllmEngine(
        VllmEngineConfig(
            model="m",
            kv_cache_memory_bytes=1,
            max_model_len=8,
            device="cuda",
            tensor_parallel_size=2,
        )
    )
    engine._llm = Executor(workers)
    return engine


def gone() -> NotFound:
    return NotFound("pool region /nowhere/pool is gone", path="/nowhere/pool")


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    "method", ["wake_up weights", "pivot_boxes", "pivot_read", "wake_up kv_cache", "pivot_resident"]
)
def test_after_a_failed_wake_the_engine_sleeps_and_wakes(
    engine: VllmEngine, workers: list[Worker], method: str, ranks: tuple[int, ...]
) -> None:
    for rank in ranks:
        workers[rank].fails[method] = gone()
    with pytest.raises(NotFound) as failed:
        engine.wake(VIEW, 1)
    assert failed.value.data == {
        "path": "/nowhere/pool",
        "rank": ranks[0],
        "phase": method.split(" ", maxsplit=1)[0],
    }
    assert len(failed.value.__notes__) == len(ranks)
    engine.sleep()
    assert not any(worker.is_awake for worker in workers)
    report = engine.wake(VIEW, 2)
    assert (report.read_bytes, report.read_s) == (21, 0.5)
    assert [box.tensor for box in engine.layout()] == ["of rank 0", "of rank 1"]
    assert engine.load_snapshot().resident_bytes == 200
    assert workers[0].calls == workers[1].calls


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_error_of_ours_names_rank_and_phase(
    engine: VllmEngine, workers: list[Worker], rank: int
) -> None:
    workers[rank].fails["pivot_read"] = RuntimeError("out of memory")
    with pytest.raises(EngineError, match=rf"rank {rank} failed in pivot_read: RuntimeError: out of memory"):
        engine.wake(VIEW, 1)


def test_a_sleep_that_one_worker_refused_is_tried_again(engine: VllmEngine, workers: list[Worker]) -> None:
    engine.wake(VIEW, 1)
    workers[0].fails["sleep"] = AssertionError("Memory usage increased after sleeping.")
    with pytest.raises(EngineError, match="rank 0 failed in sleep: AssertionError: Memory usage increased"):
        engine.sleep()
    assert engine.sleep() == 100 + 10 - 20
    assert not any(worker.is_awake for worker in workers)


def test_the_error_of_the_lowest_rank_is_raised_and_the_others_are_noted() -> None:
    def fails_with(error: Exception) -> Callable[[], Any]:
        def call() -> Any:
            raise error

        return call

    answers = [
        answer_of(lambda: 5),
        answer_of(fails_with(LayoutError("parameter p: is odd", parameter="p"))),
        answer_of(fails_with(KeyError("q"))),
    ]
    with pytest.raises(PivotError) as failed:
        values_of(answers, "pivot_boxes")
    assert type(failed.value) is LayoutError
    assert failed.value.data["parameter"] == "p"
    first, second = failed.value.__notes__
    assert first.startswith("rank 1 in pivot_boxes:\n")
    assert "KeyError: 'q'" in second
    assert values_of([answer_of(lambda: None)], "sleep") == [None]


def test_an_interruption_is_no_answer() -> None:
    def interrupted() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        answer_of(interrupted)
