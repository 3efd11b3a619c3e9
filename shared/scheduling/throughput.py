"""How fast a replica generates: one decode step as a function of its load (paper §6.1, Appendix A).

    latency(n, tok) = A·tok + max(B, C·n) + D + E·(1 − (1 − k/X)^n)     seconds for one step
    T(n, tok)       = n / latency(n, tok)                               tokens/s, and T(0, ·) = 0

    n    sequences decoding on the replica       A  attention, s per resident token
    tok  tokens resident in its KV cache         B  streaming the weights once, s (floor while few sequences
    run) X    experts of a layer                      C  computing one sequence, s k    experts each token
    is routed to         D  what every step costs, s
                                                 E  streaming all experts once, s; 0 for a dense model

The expert term is not in the paper. A mixture of experts reads more weights as more sequences touch more
experts, so its step gets slower from the first sequences on, and the four-constant form is off by a quarter
of the step time. With E = 0, T is concave along a constant tok/n: adding a sequence to a busy replica gains
less than to an idle one.

Constants belong to one (model, parallelism, device kind). `shared.planning.throughput` fits them.
"""

from dataclasses import dataclass, fields

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ThroughputModel:
    """The constants of the module docstring.

    >>> ThroughputModel(3.35e-8, 6.4e-3, 1.231e-4, 2.8e-3).tokens_per_s(n=64, tok=64_000) > 5000
    True
    """

    attention_s_per_token: float
    """A."""
    weights_s: float
    """B."""
    compute_s_per_sequence: float
    """C."""
    fixed_s: float
    """D."""
    experts_s: float = 0.0
    """E."""
    num_experts: int = 0
    """X; 0 for a dense model."""
    experts_per_token: int = 0
    """k."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    field.name, value, "must be finite and not negative", "Profile the model again"
                )
        if self.weights_s + self.compute_s_per_sequence + self.fixed_s + self.experts_s == 0:
            raise ConfigError(
                "weights_s", 0.0, "a step would cost no time", "Give weights_s, fixed_s or both"
            )
        if self.experts_s > 0 and not 0 < self.experts_per_token <= self.num_experts:
            raise ConfigError(
                "experts_per_token",
                self.experts_per_token,
                f"must be between 1 and num_experts = {self.num_experts} when experts_s is set",
                "Copy both from the model's configuration",
            )

    def overhead_s(self, n: int) -> float:
        """The part of a step that does not depend on resident tokens, with `n` sequences."""
        step_s = max(self.weights_s, self.compute_s_per_sequence * n) + self.fixed_s
        if self.experts_s == 0.0:
            return step_s
        return step_s + self.experts_s * touched_experts(n, self.num_experts, self.experts_per_token)

    def latency_s(self, n: int, tok: float) -> float:
        """Seconds of one decode step of `n` sequences with `tok` tokens resident."""
        return self.attention_s_per_token * tok + self.overhead_s(n)

    def tokens_per_s(self, n: int, tok: float) -> float:
        """Generation throughput T; 0 for an idle replica."""
        return n / self.latency_s(n, tok) if n else 0.0

    def gain(self, n: int, tok: float, length: int) -> float:
        """ΔT, tokens/s gained by adding a sequence of `length` tokens."""
        return self.tokens_per_s(n + 1, tok + length) - self.tokens_per_s(n, tok)


def touched_experts(n: int, num_experts: int, experts_per_token: int) -> float:
    """Expected share of the experts that `n` independently routed tokens use.

    >>> round(touched_experts(8, 128, 8), 3)
    0.403
    """
    return 1.0 - (1.0 - experts_per_token / num_experts) ** n


UNIT = ThroughputModel(0.0, 0.0, 1.0, 1e-6)
"""The ablation without a throughput model: a replica counts 1 if it runs anything.

The last millionth sends a sequence to the replica with the fewest, where otherwise all would tie."""

H20_7B_TP1 = ThroughputModel(3.35e-8, 6.4e-3, 1.231e-4, 2.8e-3)
"""A dense 7B model on one 96 GB H20-class GPU."""

H200_7B_TP1 = ThroughputModel(1.39e-8, 2.49e-3, 2.42e-5, 2.39e-3)
"""A dense 7B model on one H200, CUDA graphs."""

H200_30B_A3B_TP1 = ThroughputModel(2.27e-8, 0.0, 1.46e-5, 3.39e-3, 1.36e-2, 128, 8)
"""A 30B mixture of experts (8 of 128 experts, 3B active) on one H200, CUDA graphs."""

CPU_SMOLLM2_135M = ThroughputModel(1.0e-6, 0.0, 4.5e-4, 1.61e-2)
"""SmolLM2-135M in bf16 on one CPU core: 60, 643 and 950 tokens/s for 1, 16 and 32 sequences of 100 tokens."""
