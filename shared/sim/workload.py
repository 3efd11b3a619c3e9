"""What there is to generate: lengths of prompts, responses and verdicts, by (seed, batch), equal for all
modes.

Lengths are lognormal with caps, or replayed from a recorded trace. They may drift over the run: a scale on
the median as a function of the share of the run that is over.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shared.errors import ConfigError

DriftShape = Literal["none", "linear", "jump"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal with a cap, in tokens. `sigma` is the deviation of the logarithm."""

    median: float
    sigma: float
    cap: int

    def __post_init__(self) -> None:
        if self.median <= 0 or self.sigma < 0 or self.cap < 1:
            raise ConfigError(
                "lengths", (self.median, self.sigma, self.cap), "cannot be", "median, sigma, cap > 0"
            )

    def draw(self, rng: random.Random, scale: float = 1.0) -> int:
        """One length of at least 1."""
        return max(1, min(self.cap, int(self.median * scale * rng.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class Drift:
    """A scale on a median: 1 at the start, `factor` at the end (linear) or from the middle on (jump)."""

    shape: DriftShape = "none"
    factor: float = 1.0

    def scale(self, share: float) -> float:
        """`share` of the run that is over, 0..1.

        >>> Drift("linear", 4.0).scale(0.5)
        2.5
        """
        if self.shape == "none":
            return 1.0
        if self.shape == "jump":
            return self.factor if share >= 0.5 else 1.0
        return 1.0 + (self.factor - 1.0) * min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True)
class Sample:
    """One response and its verdict, in tokens."""

    prompt: int
    response: int
    verdict: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All samples of a run, batch by batch."""

    prompts_per_step: int
    samples_per_prompt: int
    prompt: Lengths
    response: Lengths
    verdict: Lengths
    template_tokens: int = 300
    """What the generative reward's prompt adds to question and response."""
    response_drift: Drift = Drift()
    verdict_drift: Drift = Drift()
    trace: tuple[Sample, ...] = ()
    """Recorded samples, replayed in turn in place of the distributions; prompts of a group must be equal."""

    @property
    def batch_samples(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def times(self, factor: int) -> "Workload":
        """The same with `factor` times as many prompts a step."""
        return replace(self, prompts_per_step=factor * self.prompts_per_step)

    def batch(self, seed: int, index: int, num_steps: int) -> Sequence[Sample]:
        """The samples of batch `index` of a run of `num_steps`, group by group."""
        size = self.batch_samples
        if self.trace:
            return [self.trace[(index * size + i) % len(self.trace)] for i in range(size)]
        rng = random.Random(f"{seed}/{index}")
        share = index / max(1, num_steps - 1)
        of_response, of_verdict = self.response_drift.scale(share), self.verdict_drift.scale(share)
        samples = []
        for _ in range(self.prompts_per_step):
            prompt = self.prompt.draw(rng)
            samples += [
                Sample(prompt, self.response.draw(rng, of_response), self.verdict.draw(rng, of_verdict))
                for _ in range(self.samples_per_prompt)
            ]
        return samples
