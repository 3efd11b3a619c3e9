"""vLLM on CPU keeps the engine contract, and reads weights exactly as vLLM itself loads them."""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.gps import PoolView, ReadGrant
from shared.contracts.replica import (
    AbortSequences,
    RefreshReplica,
    ReplicaTelemetry,
    RunSequences,
    SequenceProgress,
    SleepReplica,
    WakeReplica,
)
from shared.errors import ConfigError
from shared.ids import ReplicaId, Role
from shared.inference.engines.vllm_config import VllmEngineConfig
from shared.inference.engines.vllm_engine import VllmEngine
from shared.inference.replica import ReplicaWorker
from tests.support import engine_contract as contract
from tests.support.tiny_model import TinySpec, write_model, write_pool

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KV_BYTES = 64 << 20
FIRST, SECOND = TinySpec(seed=1), TinySpec(seed=2)
TIED = TinySpec(family="qwen2", tie_word_embeddings=True, dtype="bfloat16", seed=3)
TIED_OTHER = TinySpec(family="qwen2", tie_word_embeddings=True, dtype="bfloat16", seed=4)
EXPERTS = TinySpec(family="qwen3_moe", num_layers=2, dtype="bfloat16", seed=5)
EXPERTS_OTHER = TinySpec(family="qwen3_moe", num_layers=2, dtype="bfloat16", seed=6)


def core() -> str:
    return str(max(os.sched_getaffinity(0)))


def engine_for(folder: Path, dtype: str = "float32") -> VllmEngine:
    config = VllmEngineConfig(
        model=str(folder),
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=512,
        max_num_seqs=8,
        dtype=dtype,
        cpu_cores=core(),
    )
    return VllmEngine(config)


def fresh_engine_tokens(models: list[tuple[str, str]]) -> list[list[int]]:
    """What plain vLLM engines generate that load `(folder, dtype)` themselves, in turn: the oracle."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": core()}
    import torch._dynamo
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    torch._dynamo.config.disable = True
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    found = []
    for folder, dtype in models:
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=KV_BYTES,
            max_model_len=512,
            max_num_seqs=8,
        )
        (output,) = llm.generate({"prompt_token_ids": list(contract.PROMPT)}, sampling, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    return found


InChild = Callable[..., Any]


@pytest.fixture(scope="module")
def in_child() -> Iterator[InChild]:
    """Calls a function in a process of its own, where it may build one engine after another."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=250)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def first(models: Path) -> PoolView:
    return write_pool(write_model(FIRST, models), models / "first.pool")


@pytest.fixture(scope="module")
def second(models: Path) -> PoolView:
    return write_pool(write_model(SECOND, models), models / "second.pool")


@pytest.fixture(scope="module")
def oracle(models: Path, in_child: InChild) -> dict[TinySpec, list[int]]:
    specs = (FIRST, SECOND, TIED_OTHER, EXPERTS_OTHER)
    tokens = in_child(fresh_engine_tokens, [(str(write_model(spec, models)), spec.dtype) for spec in specs])
    return dict(zip(specs, tokens, strict=True))


@pytest.fixture(scope="module")
def engine(oracle: dict[TinySpec, list[int]], models: Path, first: PoolView) -> Iterator[VllmEngine]:
    engine = engine_for(write_model(FIRST, models))
    engine.start()
    engine.wake(first, 1)
    yield engine
    engine.close()


def test_generates(engine: VllmEngine) -> None:
    contract.check_generates(engine)


def test_stops_at_a_stop_token(engine: VllmEngine) -> None:
    contract.check_stops_at_a_stop_token(engine)


def test_abort_and_resume_is_seamless(engine: VllmEngine) -> None:
    contract.check_abort_and_resume_is_seamless(engine)


def test_resuming_a_finished_sequence_ends_at_once(engine: VllmEngine) -> None:
    contract.check_resuming_a_finished_sequence_ends_at_once(engine)


def test_refuses_what_cannot_run(engine: VllmEngine) -> None:
    contract.check_refuses_what_cannot_run(engine)


def test_sleep_frees_and_wake_restores(engine: VllmEngine, first: PoolView, second: PoolView) -> None:
    engine.load_snapshot()
    contract.check_sleep_frees_and_wake_restores(engine, first, second, (KV_BYTES + first.nbytes) * 3 // 4)


def test_refresh_keeps_running_sequences(engine: VllmEngine, first: PoolView, second: PoolView) -> None:
    contract.check_refresh_keeps_running_sequences(engine, first, second)


def test_wrong_states_raise(engine: VllmEngine, first: PoolView) -> None:
    contract.check_wrong_states_raise(engine, first)


def test_reads_give_the_tokens_of_an_engine_that_loads_the_checkpoint_itself(
    engine: VllmEngine, oracle: dict[TinySpec, list[int]], first: PoolView, second: PoolView
) -> None:
    assert contract.generate(engine, "read") == oracle[FIRST]
    engine.sleep()
    engine.wake(second, 2)
    assert contract.generate(engine, "read") == oracle[SECOND]
    engine.refresh(first, 1)
    assert contract.generate(engine, "read") == oracle[FIRST]


def test_layout_names_every_tensor_whole(engine: VllmEngine, first: PoolView) -> None:
    shapes = {tensor.name: tensor.shape for tensor in first.tensors}
    assert {box.tensor: box.shape for box in engine.layout()} == shapes
    assert all(set(box.start) == {0} for box in engine.layout())


def test_logprobs_are_those_of_the_distribution_drawn_from(engine: VllmEngine) -> None:
    """At a low temperature the same tokens are much more probable than the raw model says."""
    spec = contract.spec("cold", temperature=0.05, seed=11)
    engine.submit(spec)
    cold = [logprob for delta in contract.drain(engine) for logprob in delta.logprobs]
    engine.submit(contract.spec("warm", temperature=1.0, seed=11))
    warm = [logprob for delta in contract.drain(engine) for logprob in delta.logprobs]
    assert sum(cold) / len(cold) > -1.0 > sum(warm) / len(warm)


def test_replica_worker_serves_over_it(engine: VllmEngine, first: PoolView, second: PoolView) -> None:
    """The asyncio worker on a real engine: wake, run, abort, resume, refresh, sleep."""

    class Started:
        """The engine of this module, which has started already."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def start(self) -> None:
            engine.sleep()

    class Source:
        @asynccontextmanager
        async def read(self, min_version: int) -> AsyncIterator[ReadGrant]:
            view = first if min_version <= 1 else second
            yield ReadGrant(
                model="m",
                version=max(min_version, 1),
                lease_id="l",
                view=view,
                plan_id="p",
                nbytes=view.nbytes,
            )

    async def scenario() -> None:
        progress: list[SequenceProgress] = []
        telemetry: list[ReplicaTelemetry] = []
        has_progress, has_finished = asyncio.Event(), asyncio.Event()

        async def on_progress(message: SequenceProgress) -> None:
            progress.append(message)
            has_progress.set()
            if any(delta.finish_reason for delta in message.deltas):
                has_finished.set()

        async def on_telemetry(message: ReplicaTelemetry) -> None:
            telemetry.append(message)

        worker = ReplicaWorker(
            replica_id=ReplicaId("rollout-0"),
            role=Role.ROLLOUT,
            devices=(0,),
            engine=Started(),  # type: ignore[arg-type]
            weights=Source(),
            publish_progress=on_progress,
            publish_telemetry=on_telemetry,
            incarnation="i",
        )
        life = asyncio.ensure_future(worker.run_forever())
        await asyncio.wait_for(worker.ready.wait(), 10)
        woke = await worker.wake(WakeReplica(min_version=1))
        assert woke.version == 1
        await worker.run(RunSequences(sequences=(contract.spec("s", max_new_tokens=200),)))
        await asyncio.wait_for(has_progress.wait(), 30)
        assert (await worker.refresh(RefreshReplica(min_version=2))).version == 2
        stopped = await worker.abort(AbortSequences(sequences=None))
        deltas = [delta for message in progress for delta in message.deltas] + list(stopped.deltas)
        parts = contract.tokens_of(deltas, "s")
        resumed = contract.spec("s", attempt=1, generated=tuple(parts), max_new_tokens=200)
        await worker.run(RunSequences(sequences=(resumed,)))
        await asyncio.wait_for(has_finished.wait(), 30)
        deltas = [d for message in progress for d in message.deltas if d.attempt == 1]
        assert len(contract.tokens_of(deltas, "s", start=len(parts))) + len(parts) == 200
        slept = await worker.sleep(SleepReplica())
        assert slept.freed_bytes > KV_BYTES // 2
        assert {message.state for message in telemetry} >= {"awake"}
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await worker._thread.stop()

    asyncio.run(scenario())
    engine.wake(first, 1)


def tokens_after_reads(families: list[tuple[str, str, list[PoolView]]]) -> list[list[list[int]]]:
    """For each model, one engine after another: tokens after a wake on each view and a refresh back."""
    found = []
    for folder, dtype, views in families:
        engine = engine_for(Path(folder), dtype)
        engine.start()
        tokens = []
        for version, view in enumerate(views):
            engine.wake(view, version)
            tokens.append(contract.generate(engine, "read"))
            engine.sleep()
        engine.wake(views[-1], 7)
        engine.refresh(views[0], 8)
        tokens.append(contract.generate(engine, "read"))
        engine.close()
        found.append(tokens)
    return found


def test_packed_weights_are_never_stale(
    models: Path, oracle: dict[TinySpec, list[int]], in_child: InChild
) -> None:
    """vLLM packs tied embeddings a second time for the head, and experts in a form of their own."""
    pairs = [(TIED, TIED_OTHER), (EXPERTS, EXPERTS_OTHER)]
    families = []
    for pair in pairs:
        folders = [write_model(spec, models) for spec in pair]
        views = [write_pool(folder, models / f"{folder.name}.pool") for folder in folders]
        families.append((str(folders[0]), pair[0].dtype, views))
    for pair, (first, other, back) in zip(pairs, in_child(tokens_after_reads, families), strict=True):
        assert other == oracle[pair[1]]
        assert back == first != other
        assert len(set(first)) > 5


def test_config_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        VllmEngineConfig(model="m", kv_cache_memory_bytes=1, max_model_len=0)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        VllmEngineConfig(model="m", kv_cache_memory_bytes=1, max_model_len=8, tensor_parallel_size=2)
