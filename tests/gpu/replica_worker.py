"""One replica on real hardware: what its shifts cost, and that no token changes because of them.

    python tests/gpu/replica_worker.py                          # a random 1.5B-shape Qwen2 on the first GPU
    python tests/gpu/replica_worker.py --shape 7b --out out.json
    python tests/gpu/replica_worker.py --model FOLDER --tp 2    # a Hugging Face folder with its safetensors
    python tests/gpu/replica_worker.py --tp 2 --sliced          # pools stored in slices for two GPUs
    python tests/gpu/replica_worker.py --shape tiny --device cpu --dtype float32 --sliced 2

Starts the engine on dummy weights, wakes it from a pool file in shared memory, generates greedily, interrupts
and resumes, sleeps, fails to wake, wakes again, refreshes to other weights under a running sequence. Prints
figures as JSON and writes them to --out. Exits with 1 when a check fails.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from services.gps.layouts import Usage
from shared.contracts.gps import PoolView, ReadGrant
from shared.contracts.replica import (
    AbortSequences,
    RefreshReplica,
    ReplicaTelemetry,
    RunSequences,
    SamplingSpec,
    SequenceProgress,
    SequenceSpec,
    SleepReplica,
    TokenDelta,
    WakeReplica,
)
from shared.errors import PivotError
from shared.ids import ReplicaId, Role
from shared.inference.engines.vllm_config import VllmEngineConfig
from shared.inference.engines.vllm_engine import VllmEngine
from shared.inference.replica import ReplicaWorker
from tests.support.stored_pools import store_for
from tests.support.tiny_model import TinySpec, write_pool, write_random_pool

SHAPES = {
    "tiny": TinySpec(family="qwen2", tie_word_embeddings=True),
    "1.5b": TinySpec("qwen2", 151_936, 1536, 8960, 28, 12, 2, True, "bfloat16"),
    "7b": TinySpec("qwen2", 152_064, 3584, 18_944, 28, 28, 4, False, "bfloat16"),
}
GONE = 3
"""A version whose pool file does not exist."""
NUM_WRITERS = 2
"""Training ranks whose ZeRO shards cut the slices too."""
PROMPT = tuple(100 + i % 50 for i in range(200))


class Pools:
    """Versions 1 and 2 of the model, in pool files: a stand-in for GPS."""

    def __init__(self, views: dict[int, PoolView]) -> None:
        self.views = views

    @asynccontextmanager
    async def read(self, min_version: int) -> AsyncIterator[ReadGrant]:
        view = self.views[max(min_version, 1)]
        yield ReadGrant(
            model="m",
            version=max(min_version, 1),
            lease_id="lease",
            view=view,
            plan_id="plan",
            nbytes=view.nbytes,
        )


class Run:
    """The worker, what it said, and the figures."""

    def __init__(self, engine: VllmEngine, views: dict[int, PoolView]) -> None:
        self.deltas: list[TokenDelta] = []
        self.arrived = asyncio.Condition()
        self.figures: dict[str, Any] = {}
        self.checks: dict[str, bool] = {}
        self.worker = ReplicaWorker(
            replica_id=ReplicaId("rollout-0"),
            role=Role.ROLLOUT,
            devices=(0,),
            engine=engine,
            weights=Pools(views),
            publish_progress=self._on_progress,
            publish_telemetry=self._on_telemetry,
            incarnation="gpu-check",
        )

    async def _on_progress(self, message: SequenceProgress) -> None:
        async with self.arrived:
            self.deltas += message.deltas
            self.arrived.notify_all()

    async def _on_telemetry(self, message: ReplicaTelemetry) -> None:
        print(message.summary(), file=sys.stderr, flush=True)

    def tokens(self, sequence_id: str, attempt: int = 0, start: int = 0) -> tuple[list[int], list[int]]:
        """Tokens and the version of each; a gap or a repetition fails the check `seamless`."""
        tokens: list[int] = []
        versions: list[int] = []
        for delta in self.deltas:
            if (delta.sequence_id, delta.attempt) == (sequence_id, attempt):
                self.checks["seamless"] = self.checks.get("seamless", True) and (
                    delta.start == start + len(tokens)
                )
                tokens += delta.token_ids
                versions += [version for version, count in delta.versions for _ in range(count)]
        return tokens, versions

    async def submit(self, name: str, length: int, attempt: int = 0, done: tuple[int, ...] = ()) -> None:
        spec = SequenceSpec(
            sequence_id=name,
            attempt=attempt,
            prompt_token_ids=PROMPT,
            generated_token_ids=done,
            sampling=SamplingSpec(max_new_tokens=length, temperature=0.0),
        )
        await self.worker.run(RunSequences(sequences=(spec,)))

    async def ends(self, names: set[str], attempt: int = 0) -> None:
        def have_ended() -> bool:
            ended = {d.sequence_id for d in self.deltas if d.finish_reason and d.attempt == attempt}
            return names <= ended

        async with asyncio.timeout(300), self.arrived:
            await self.arrived.wait_for(have_ended)

    async def generate(self, name: str, length: int = 64) -> list[int]:
        await self.submit(name, length)
        await self.ends({name})
        return self.tokens(name)[0]

    async def wake(self, name: str, version: int) -> None:
        woke = await self.worker.wake(WakeReplica(min_version=version))
        self.figures[name] = {
            "duration_s": woke.duration_s,
            "read_s": woke.read_s,
            "read_bytes": woke.read_bytes,
            "read_gb_per_s": woke.read_bytes / woke.read_s / 1e9,
            "resident_bytes": self.worker.telemetry().resident_bytes,
        }

    async def sleep(self, name: str) -> None:
        slept = await self.worker.sleep(SleepReplica())
        self.figures[name] = slept.model_dump()

    async def speed(self, name: str, count: int, length: int) -> None:
        names = {f"{name}-{i}" for i in range(count)}
        begin = time.perf_counter()
        for sequence_id in sorted(names):
            await self.submit(sequence_id, length)
        await self.ends(names)
        self.figures.setdefault("tokens_per_s", {})[count] = count * length / (time.perf_counter() - begin)

    async def interrupt_and_resume(self, length: int) -> None:
        """In bfloat16 a prefill rounds unlike decode steps: only what came before must agree."""
        await self.submit("cut", length)
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.tokens("cut")[0]) > 8)
        begin = time.perf_counter()
        answer = await self.worker.abort(AbortSequences(sequences=(("cut", 0),)))
        self.figures["abort_s"] = time.perf_counter() - begin
        self.deltas += answer.deltas
        done, _ = self.tokens("cut")
        await self.submit("cut", length, attempt=1, done=tuple(done))
        await self.ends({"cut"}, attempt=1)
        rest, _ = self.tokens("cut", attempt=1, start=len(done))
        whole = await self.generate("whole", length)
        joined = [*done, *rest]
        same = next((i for i, (a, b) in enumerate(zip(joined, whole, strict=True)) if a != b), length)
        self.figures["resume"] = {"interrupted_at": len(done), "first_difference_at": same, "length": length}
        self.checks["resumed to the full length"] = len(joined) == length
        self.checks["equal up to the interruption"] = same >= len(done)

    async def fail_to_wake(self) -> None:
        """A wake whose pool file is gone has mapped the weights already: it must give them back."""
        asleep = self.worker.telemetry().resident_bytes
        try:
            await self.worker.wake(WakeReplica(min_version=GONE))
        except PivotError as error:
            self.figures["failed_wake"] = error.message
        after = self.worker.telemetry().resident_bytes
        self.figures["failed_wake_left_bytes"] = after - asleep
        self.checks["a failed wake leaves nothing behind"] = (
            "failed_wake" in self.figures and after - asleep < 64 << 20 and self.worker.state == "asleep"
        )

    async def refresh_under_load(self, length: int) -> None:
        await self.submit("live", length)
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.tokens("live")[0]) > 8)
        refreshed = await self.worker.refresh(RefreshReplica(min_version=2))
        self.figures["refresh"] = refreshed.model_dump()
        await self.ends({"live"})
        tokens, versions = self.tokens("live")
        self.checks["kept through the refresh"] = len(tokens) == length
        self.checks["stamped in order"] = versions == sorted(versions) and set(versions) == {1, 2}

    async def scenario(self) -> None:
        life = asyncio.ensure_future(self.worker.run_forever())
        begin = time.perf_counter()
        ready = asyncio.ensure_future(self.worker.ready.wait())
        await asyncio.wait({ready, life}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        self.figures["start_s"] = time.perf_counter() - begin
        await self.wake("wake_first", 1)
        before = await self.generate("before")
        for count in (1, 16, 64):
            await self.speed("speed", count, 64)
        await self.interrupt_and_resume(length=400)
        await self.sleep("sleep_first")
        await self.fail_to_wake()
        await self.wake("wake_second", 1)
        self.checks["equal after sleep and wake"] = await self.generate("after") == before
        await self.refresh_under_load(length=1000)
        refreshed = await self.generate("refreshed")
        self.checks["other weights, other tokens"] = refreshed != before
        await self.sleep("sleep_second")
        await self.wake("wake_on_version_2", 2)
        self.checks["a refresh equals a wake"] = await self.generate("woken on 2") == refreshed
        for cycle in range(3):
            await self.sleep(f"cycle_{cycle}_sleep")
            await self.wake(f"cycle_{cycle}_wake", 1)
        self.checks["equal after three cycles"] = await self.generate("cycled") == before
        await self.sleep("sleep_last")
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await self.worker.close()


def prepare(options: argparse.Namespace, folder: Path, shm: Path) -> tuple[str, dict[int, PoolView]]:
    """The model folder and two versions of it as pool files."""
    paths = shm / "version-1.pool", shm / "version-2.pool"
    if options.model:
        model = options.model
        first, second = (write_pool(Path(model), path) for path in paths)
        _halve(second)
    else:
        spec, model = SHAPES[options.shape], str(folder)
        (folder / "config.json").write_text(json.dumps(spec.config()))
        first, second = (
            write_random_pool(replace(spec, seed=spec.seed + i), path) for i, path in enumerate(paths)
        )
    if options.sliced:
        usage = Usage(options.sliced, NUM_WRITERS)
        first, second = (_sliced(usage, view) for view in (first, second))
    return model, {1: first, 2: second, GONE: _gone(first)}


def _sliced(usage: Usage, view: PoolView) -> PoolView:
    """The pool stored for `usage`, in place of the one that is not."""
    stored = store_for(usage, view, Path(f"{view.path}.sliced"))
    Path(view.path).unlink()
    return stored


def _gone(view: PoolView) -> PoolView:
    return view.model_copy(update={"path": f"{view.path}.gone"})


def _halve(view: PoolView) -> None:
    """Other weights of the same shapes: the down projections halved, in the file."""
    import torch

    pool = torch.from_file(view.path, shared=True, size=view.nbytes, dtype=torch.uint8)
    for tensor in view.tensors:
        if tensor.name.endswith("down_proj.weight"):
            dtype = getattr(torch, tensor.dtype)
            nbytes = tensor.shape[0] * tensor.shape[1] * dtype.itemsize
            pool[tensor.offset_bytes : tensor.offset_bytes + nbytes].view(dtype).mul_(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder with safetensors")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b", help="of the random model without --model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--sliced",
        type=int,
        nargs="?",
        const=0,
        metavar="DEVICES",
        help="pools stored in slices for engines of so many devices, by default --tp",
    )
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs: a faster start")
    parser.add_argument("--out", default="replica_worker.json", help="where the JSON goes")
    options = parser.parse_args()
    if options.sliced == 0:
        options.sliced = options.tp
    if options.sliced == 1:
        parser.error("--sliced needs 2 devices or more: what one device reads is never cut")
    kv_bytes = options.kv_bytes or (24 << 30 if options.device == "cuda" else 64 << 20)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        model, views = prepare(options, Path(folder), Path(shm))
        engine = VllmEngine(
            VllmEngineConfig(
                model=model,
                kv_cache_memory_bytes=kv_bytes,
                max_model_len=2048,
                max_num_seqs=64,
                device=options.device,
                tensor_parallel_size=options.tp,
                dtype=options.dtype,
                enforce_eager=options.eager,
            )
        )

        async def run() -> Run:
            run = Run(engine, views)
            await run.scenario()
            return run

        finished = asyncio.run(run())
    report = {
        "options": vars(options),
        "kv_bytes": kv_bytes,
        "weight_bytes": views[1].nbytes,
        "sliced_tensors": sum(len(entry.tensors) for entry in views[1].sliced),
        "checks": finished.checks,
        "figures": finished.figures,
    }
    text = json.dumps(report, indent=2)
    print(text)
    Path(options.out).write_text(text)
    return 0 if all(finished.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
