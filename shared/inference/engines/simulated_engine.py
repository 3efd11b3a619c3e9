"""An engine without a model: it takes the time a throughput model says and draws tokens from a seed.

For tests, rehearsals and load runs of everything around an engine. Token `i` of a sequence depends only on
the seed, the sequence id and `i`: a run that is aborted and resumed yields the tokens of one that is not.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.contracts.gps import PoolView, TensorBox
from shared.contracts.replica import FinishReason, SequenceSpec, TokenDelta
from shared.errors import EngineError, InvalidRequest
from shared.inference.ports import NO_VERSION, LoadSnapshot, ReadReport, SequenceKey


@dataclass(frozen=True, slots=True)
class SimulatedEngineConfig:
    """Sizes of the pretended engine. Bytes count as resident while it is awake."""

    kv_capacity_tokens: int = 100_000
    max_model_len: int = 32_768
    weight_bytes: int = 1 << 30
    kv_bytes: int = 1 << 30
    preserved_bytes: int = 1 << 28
    read_bytes_per_s: float = 50e9
    vocab_size: int = 32_000
    seed: int = 0


class _Running:
    __slots__ = ("done", "length", "spec")

    def __init__(self, spec: SequenceSpec, length: int) -> None:
        self.spec = spec
        self.done = len(spec.generated_token_ids)
        self.length = length

    @property
    def resident(self) -> int:
        return len(self.spec.prompt_token_ids) + self.done


class SimulatedEngine:
    """See `Engine`.

    `latency(n, tokens)` is the seconds of one decode step of n sequences with `tokens` resident tokens in
    all (paper §6.1). `length(rng)` draws how many tokens a sequence generates before it stops by itself.
    `clock` and `wait` are the time it lives in: a test hands in virtual ones.
    """

    def __init__(
        self,
        latency: Callable[[int, int], float],
        config: SimulatedEngineConfig | None = None,
        *,
        length: Callable[[random.Random], int] = lambda rng: 1 << 30,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config or SimulatedEngineConfig()
        self._latency, self._length, self._clock, self._wait = latency, length, clock, wait
        self._running: dict[SequenceKey, _Running] = {}
        self._version = NO_VERSION
        self._is_started = False
        self._has_memory = False
        self._step_latency_s = 0.0

    @property
    def policy_version(self) -> int:
        return self._version

    def start(self) -> None:
        self._is_started = True

    def close(self) -> None:
        self._is_started = False
        self._has_memory = False
        self._version = NO_VERSION
        self._running.clear()

    def submit(self, spec: SequenceSpec) -> None:
        key = (spec.sequence_id, spec.attempt)
        if self._version == NO_VERSION:
            raise EngineError("asleep: no weights to run with")
        if key in self._running:
            raise InvalidRequest("sequence_id", f"{key} already runs here")
        resident = len(spec.prompt_token_ids) + len(spec.generated_token_ids)
        if not 0 < resident < self.config.max_model_len:
            raise InvalidRequest("prompt_token_ids", f"{resident} tokens do not fit the context")
        rng = random.Random(f"{self.config.seed}:{spec.sequence_id}")
        self._running[key] = _Running(spec, self._length(rng))

    def abort(self, keys: Sequence[SequenceKey]) -> list[TokenDelta]:
        return [self._delta(self._running.pop(key), (), None) for key in keys if key in self._running]

    def step(self) -> list[TokenDelta]:
        if not self._running:
            return []
        begin = self._clock()
        tokens = sum(running.resident for running in self._running.values())
        self._wait(self._latency(len(self._running), tokens))
        deltas = []
        for key, running in list(self._running.items()):
            limit = min(running.spec.sampling.max_new_tokens, running.length)
            room = self.config.max_model_len - len(running.spec.prompt_token_ids)
            drawn = (self._token(running),) if running.done < min(limit, room) else ()
            position = running.done + len(drawn)
            reason: FinishReason | None = None
            if drawn and drawn[0] in running.spec.sampling.stop_token_ids:
                reason = "stop"
            elif position >= min(limit, room):
                reason = "stop" if position >= running.length else "length"
            deltas.append(self._delta(running, drawn, reason))
            if reason is not None:
                del self._running[key]
        self._step_latency_s = self._clock() - begin
        return deltas

    def _token(self, running: _Running) -> int:
        rng = random.Random(f"{self.config.seed}:{running.spec.sequence_id}:{running.done}")
        return rng.randrange(self.config.vocab_size)

    def _delta(self, running: _Running, tokens: tuple[int, ...], reason: FinishReason | None) -> TokenDelta:
        start = running.done
        running.done += len(tokens)
        return TokenDelta(
            sequence_id=running.spec.sequence_id,
            attempt=running.spec.attempt,
            start=start,
            token_ids=tokens,
            logprobs=(-math.log(self.config.vocab_size),) * len(tokens),
            versions=((self._version, len(tokens)),) if tokens else (),
            finish_reason=reason,
        )

    def has_work(self) -> bool:
        return bool(self._running)

    def sleep(self) -> int:
        if self._running:
            raise EngineError(f"{len(self._running)} sequences run: stop them before sleep")
        before = self._resident_bytes()
        self._version = NO_VERSION
        self._has_memory = False
        return before - self._resident_bytes()

    def wake(self, view: PoolView, version: int) -> ReadReport:
        if not self._is_started or self._has_memory:
            raise EngineError("awake already" if self._is_started else "not started")
        self._has_memory = True
        return self._read(view, version)

    def refresh(self, view: PoolView, version: int) -> ReadReport:
        if self._version == NO_VERSION:
            raise EngineError("asleep: nothing to refresh")
        return self._read(view, version)

    def _read(self, view: PoolView, version: int) -> ReadReport:
        self._version = NO_VERSION
        seconds = view.nbytes / self.config.read_bytes_per_s
        self._wait(seconds)
        self._version = version
        return ReadReport(read_bytes=view.nbytes, read_s=seconds)

    def _resident_bytes(self) -> int:
        awake = self.config.weight_bytes + self.config.kv_bytes if self._has_memory else 0
        return self.config.preserved_bytes + awake

    def load_snapshot(self) -> LoadSnapshot:
        return LoadSnapshot(
            num_running=len(self._running),
            lengths=tuple(running.resident for running in self._running.values()),
            kv_capacity_tokens=self.config.kv_capacity_tokens,
            step_latency_s=self._step_latency_s,
            resident_bytes=self._resident_bytes(),
        )

    def layout(self) -> tuple[TensorBox, ...]:
        return ()
