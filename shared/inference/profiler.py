"""Measures an engine: decode steps over a sweep, and prefill.

Sequences are random tokens, so that no prefix is shared. Those of one context begin together; once all
decode, steps are timed, then some leave and the next, smaller number is timed. What a step takes is the
median of some, because now and then one is interrupted by something else.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Self

from shared.contracts.replica import SamplingSpec, SequenceSpec
from shared.errors import EngineError
from shared.inference.ports import Engine
from shared.planning.profile import SweepPoint
from shared.planning.throughput import StepTime

WARM_STEPS, TIMED_STEPS = 2, 8
_LEAST_STEP_TOKENS = 2048
"""Engines prefill at least so many tokens a step."""
_MOST_STEPS = 10_000
"""Until all sequences of a context have begun."""
OnPoint = Callable[[int, int, SweepPoint], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """Decode steps, and seconds of prefill for each prompt token."""

    steps: list[StepTime]
    prefill_s_per_token: float


def growth_tokens(kv_capacity_tokens: int) -> int:
    """More than a sequence generates until the last point of its context: also while later ones, at most a
    full cache, are prefilled."""
    return 128 + kv_capacity_tokens // _LEAST_STEP_TOKENS


def measure(
    engine: Engine,
    points: Sequence[SweepPoint],
    *,
    growth: int,
    vocab_size: int,
    clock: Callable[[], float],
    on_point: OnPoint = lambda done, total, point: None,
) -> Measured:
    """Runs every point of a `sweep` on an engine that is awake and idle, and leaves it so. A sequence may
    generate `growth` tokens.

    Raises EngineError if sequences do not get on side by side.
    """
    rng = random.Random(0)

    def batch(point: SweepPoint) -> "_Batch":
        prompts = [
            tuple(rng.randrange(vocab_size) for _ in range(point.context)) for _ in range(point.num_sequences)
        ]
        return _Batch(engine, prompts, f"profile-{rng.getrandbits(48):012x}", growth, clock)

    steps: list[StepTime] = []
    prefills: list[float] = []
    done = 0
    for context, group in groupby(points, key=lambda point: point.context):
        for _ in range(2):  # the first time something may be compiled or allocated
            with batch(SweepPoint(1, context)) as alone:
                first_token_s = alone.begin()
                prefills.append(max(0.0, first_token_s - alone.step().latency_s) / context)
        numbers = [point.num_sequences for point in group]
        with batch(SweepPoint(numbers[0], context)) as together:
            together.begin()
            for number in numbers:
                on_point(done, len(points), SweepPoint(number, context))
                together.keep(number)
                steps.append(together.step())
                done += 1
    return Measured(steps, prefills[-1])


class _Batch:
    """Sequences that begin together. At the end of its context all have left."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        name: str,
        growth: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._growth, self._clock = engine, growth, clock
        self._prompts = {f"{name}.{i:04d}": prompt for i, prompt in enumerate(prompts)}
        self._generated = dict.fromkeys(self._prompts, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)

    def begin(self) -> float:
        """Seconds until every sequence has its first token."""
        begin_s = self._clock()
        for name, prompt in self._prompts.items():
            sampling = SamplingSpec(max_new_tokens=self._growth, seed=0)
            spec = SequenceSpec(sequence_id=name, attempt=0, prompt_token_ids=prompt, sampling=sampling)
            self._engine.submit(spec)
        for _ in range(_MOST_STEPS):
            self._take()
            if min(self._generated.values()) > 0:
                return self._clock() - begin_s
        raise EngineError(f"{self} do not all begin")

    def keep(self, number: int) -> None:
        """The others leave."""
        leaving = list(self._prompts)[number:]
        self._engine.abort([(name, 0) for name in leaving])
        for name in leaving:
            del self._prompts[name], self._generated[name]

    def step(self) -> StepTime:
        """A decode step of all of them."""
        seconds, resident = [], []
        for _ in range(WARM_STEPS + TIMED_STEPS):
            resident.append(sum(map(len, self._prompts.values())) + sum(self._generated.values()))
            begin_s = self._clock()
            num_tokens = self._take()
            seconds.append(self._clock() - begin_s)
            if num_tokens != len(self._prompts):
                raise EngineError(f"{self} do not decode side by side: a step made {num_tokens} tokens")
        tok = round(median(resident[WARM_STEPS:]))
        return StepTime(len(self._prompts), tok, median(seconds[WARM_STEPS:]))

    def _take(self) -> int:
        """One step of the engine: tokens it made."""
        total = 0
        for delta in self._engine.step():
            if delta.finish_reason is not None:
                raise EngineError(f"{self}: one ended ({delta.finish_reason}) before it was measured")
            self._generated[delta.sequence_id] += len(delta.token_ids)
            total += len(delta.token_ids)
        return total

    def __str__(self) -> str:
        return f"{len(self._prompts)} sequences of {len(next(iter(self._prompts.values()), ()))} tokens"
