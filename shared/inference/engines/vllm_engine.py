"""vLLM as an `Engine`: one in-process `LLMEngine`, stepped by its caller.

It starts with dummy weights and falls asleep; weights only ever come from a Read. Requests are token ids in
and token ids out. What must hold:
  - async scheduling is off: every token that `step` returns was drawn with the weights held at that moment,
    so its version stamp is exact, and an abort loses no token inside the engine;
  - the prefix cache is salted with the policy version: a sequence never reuses keys and values of other
    weights, although running sequences keep theirs across a refresh;
  - end-of-sequence ids are ignored unless named in `sampling.stop_token_ids`: the role decides what ends a
    sequence. The stop token itself is returned.

Greedy decoding resumes exactly. Sampled decoding resumes with the seed `mix(seed, tokens generated so far)`:
the same interruption repeats exactly, but differs from the uninterrupted run after the point of resumption.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, Literal

from shared.contracts.gps import PoolTensor, PoolView, TensorBox
from shared.contracts.replica import SequenceSpec, TokenDelta
from shared.errors import EngineError, InvalidRequest
from shared.inference.engines.vllm_config import VllmEngineConfig
from shared.inference.engines.vllm_requests import (
    RunningRequest,
    engine_errors,
    finish_reason_of,
    request_id,
    resume_seed,
)
from shared.inference.engines.worker_answers import values_of
from shared.inference.ports import NO_VERSION, LoadSnapshot, ReadReport, SequenceKey

WORKER_EXTENSION = "shared.inference.engines.vllm_worker.PivotWorkerExtension"
SLEEP_LEVEL = 2
"""vLLM's word for a sleep that keeps no copy of the weights."""


class VllmEngine:
    """See `Engine`. Heavy imports happen in `start`."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self.config = config
        self._llm: Any = None
        self._running: dict[str, RunningRequest] = {}
        self._ready: list[TokenDelta] = []
        self._version = NO_VERSION
        self._boxes: tuple[TensorBox, ...] = ()
        self._memory: Literal["none", "partial", "whole"] = "none"
        self._kv_capacity_tokens = 0
        self._step_latency_s = 0.0
        self._resident_bytes = 0

    @property
    def policy_version(self) -> int:
        return self._version

    def start(self) -> None:
        config, is_cpu = self.config, self.config.device == "cpu"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if is_cpu and config.cpu_cores:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.cpu_cores
        with engine_errors("start"):
            if is_cpu:
                import torch._dynamo

                # eager anyway; vLLM's sampler would still compile a helper for 20 s at the first token
                torch._dynamo.config.disable = True
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            arguments = EngineArgs(
                model=config.model,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=config.dtype,
                seed=config.seed,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_size,
                kv_cache_memory_bytes=config.kv_cache_memory_bytes,
                enforce_eager=config.enforce_eager or is_cpu,
                enable_prefix_caching=True,
                # A prompt cut in chunks makes vLLM rewind the request's generator, which torch cannot on CPU.
                enable_chunked_prefill=False if is_cpu else None,
                max_num_batched_tokens=max(2048, config.max_model_len) if is_cpu else None,
                enable_sleep_mode=not is_cpu,
                async_scheduling=False,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                worker_extension_cls=WORKER_EXTENSION,
                disable_log_stats=True,
            )
            self._llm = LLMEngine.from_engine_args(arguments)
            cache = self._llm.vllm_config.cache_config
            self._kv_capacity_tokens = int(cache.num_gpu_blocks) * int(cache.block_size)
            self._memory = "whole"
        self.sleep()

    def close(self) -> None:
        llm, self._llm = self._llm, None
        self._running.clear()
        self._version = NO_VERSION
        if llm is not None:
            with engine_errors("close"):
                from vllm.distributed import cleanup_dist_env_and_memory

                llm.engine_core.shutdown()
                del llm
                cleanup_dist_env_and_memory()

    def submit(self, spec: SequenceSpec) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._version == NO_VERSION:
            raise EngineError("asleep: no weights to run with")
        running = RunningRequest(spec)
        identity = request_id(running.key)
        if identity in self._running:
            raise InvalidRequest("sequence_id", f"{identity} already runs here")
        tokens = [*spec.prompt_token_ids, *spec.generated_token_ids]
        remaining = spec.sampling.max_new_tokens - running.done
        if spec.generated_token_ids and spec.generated_token_ids[-1] in spec.sampling.stop_token_ids:
            self._ready.append(running.delta((), (), self._version, "stop"))
            return
        if remaining <= 0 or (running.done and len(tokens) >= self.config.max_model_len):
            self._ready.append(running.delta((), (), self._version, "length"))
            return
        if not tokens or len(tokens) >= self.config.max_model_len:
            raise InvalidRequest(
                "prompt_token_ids",
                f"{len(tokens)} tokens, between 1 and {self.config.max_model_len - 1} are possible",
            )
        sampling = SamplingParams(
            max_tokens=remaining,
            temperature=spec.sampling.temperature,
            top_p=spec.sampling.top_p,
            seed=resume_seed(spec.sampling.seed, running.done),
            stop_token_ids=list(spec.sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"version-{self._version}"}
        with engine_errors(f"submit {identity}"):
            self._llm.add_request(identity, prompt, sampling)
        self._running[identity] = running

    def abort(self, keys: Sequence[SequenceKey]) -> list[TokenDelta]:
        wanted = {request_id(key): key for key in keys}
        running = [identity for identity in wanted if identity in self._running]
        with engine_errors("abort"):
            self._llm.abort_request(running)
        stopped = [self._running.pop(identity).delta((), (), self._version, None) for identity in running]
        finished = set(wanted.values()) - {(d.sequence_id, d.attempt) for d in stopped}
        waiting = [d for d in self._ready if (d.sequence_id, d.attempt) in finished]
        self._ready = [d for d in self._ready if (d.sequence_id, d.attempt) not in finished]
        return stopped + waiting

    def step(self) -> list[TokenDelta]:
        deltas, self._ready = self._ready, []
        if not self._running:
            return deltas
        begin = time.perf_counter()
        with engine_errors("step"):
            outputs = self._llm.step()
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            completion = output.outputs[0]
            tokens = [int(token) for token in completion.token_ids]
            logprobs = [float(at[t].logprob) for at, t in zip(completion.logprobs or (), tokens, strict=True)]
            reason = finish_reason_of(completion.finish_reason)
            if tokens or reason is not None:
                deltas.append(running.delta(tokens, logprobs, self._version, reason))
            if reason is not None:
                del self._running[output.request_id]
        self._step_latency_s = time.perf_counter() - begin
        return deltas

    def has_work(self) -> bool:
        return bool(self._running or self._ready)

    def sleep(self) -> int:
        if self.has_work():
            raise EngineError(f"{len(self._running)} sequences run: stop them before sleep")
        self._version = NO_VERSION
        with engine_errors("sleep"):
            if self.config.device == "cpu":
                self._llm.reset_prefix_cache()
                measured = self._rpc("pivot_sleep_cpu")
                self._resident_bytes = sum(after for _, after in measured)
                freed = sum(before - after for before, after in measured)
            else:
                freed = self._sleep_on_device()
        self._memory = "none"
        return int(freed)

    def _sleep_on_device(self) -> int:
        before = sum(self._rpc("pivot_resident"))
        if self._memory == "whole":
            self._memory = "partial"  # should the workers fail half way
            self._rpc("sleep", SLEEP_LEVEL)
        elif self._memory == "partial":  # vLLM itself can only put to sleep what is wholly awake
            self._rpc("pivot_unmap")
        self._resident_bytes = sum(self._rpc("pivot_resident"))
        return int(before) - self._resident_bytes

    def wake(self, view: PoolView, version: int) -> ReadReport:
        if self._memory != "none":
            raise EngineError("awake already")
        self._memory = "partial"
        with engine_errors("wake"):
            if self.config.device == "cpu":
                report = self._read(view)
                self._rpc("pivot_wake_kv_cpu")
            else:
                self._rpc("wake_up", ["weights"])
                report = self._read(view)
                self._rpc("wake_up", ["kv_cache"])
            self._memory = "whole"
            self._llm.reset_prefix_cache()
            self._resident_bytes = sum(self._rpc("pivot_resident"))
        self._version = version
        return report

    def refresh(self, view: PoolView, version: int) -> ReadReport:
        if self._version == NO_VERSION:
            raise EngineError("asleep: nothing to refresh")
        with engine_errors("refresh"):
            self.map_layout(view)  # anything that cannot be mapped fails here, before a parameter is touched
            self._version = NO_VERSION
            report = self._read(view)
            if not self._running:
                self._llm.reset_prefix_cache()
        self._version = version
        return report

    def map_layout(self, view: PoolView) -> None:
        """Record how the checkpoint in `view` maps on the parameters, without a Read. Cheap when known."""
        boxes = {
            TensorBox(**box): None for rank in self._rpc("pivot_boxes", _wire(view.tensors)) for box in rank
        }
        self._boxes = tuple(boxes)

    def _read(self, view: PoolView) -> ReadReport:
        if not self._boxes:
            self.map_layout(view)
        sliced = [(entry.tensors, entry.starts, entry.shapes) for entry in view.sliced]
        results = self._rpc("pivot_read", view.path, view.nbytes, _wire(view.tensors), sliced)
        return ReadReport(
            read_bytes=sum(copied for copied, _ in results), read_s=max(seconds for _, seconds in results)
        )

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of all workers and return their values by rank. Raises as `values_of` does; the
        workers are in step afterwards.

        vLLM's own `sleep` and `wake_up` may fail at one rank alone (no memory to map, or memory in use that
        grew meanwhile), and their collective calls in vLLM raise there, like any. So the workers' methods are
        called this way too, and vLLM's executor and scheduler never learn of a sleep: whether there are
        weights to run with is this engine's knowledge, and it clears the prefix cache itself.
        """
        return values_of(self._llm.collective_rpc("pivot_call", args=(method, args)), method)

    def load_snapshot(self) -> LoadSnapshot:
        if self.config.device == "cpu":
            from shared.inference.engines.process_memory import resident_bytes

            self._resident_bytes = resident_bytes()
        return LoadSnapshot(
            num_running=len(self._running),
            lengths=tuple(running.prompt + running.done for running in self._running.values()),
            kv_capacity_tokens=self._kv_capacity_tokens,
            step_latency_s=self._step_latency_s,
            resident_bytes=self._resident_bytes,
        )

    def layout(self) -> tuple[TensorBox, ...]:
        return self._boxes


def _wire(tensors: Sequence[PoolTensor]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(tensor.name, tensor.dtype, tensor.shape, tensor.offset_bytes) for tensor in tensors]
