"""Produced by the trainer service."""

from typing import Literal

from shared.contracts.base import Message

TrainingActivity = Literal["starting", "idle", "active", "done"]


class TrainingTelemetry(Message):
    """trainer → monitor, on change and 1 Hz.

    `done` means: no step is running and the ranks still hold the devices. `collected` of `needed` samples of
    the next batch are here, those of parts that are trained included. `batch_ready`: training may begin, or
    go on, with what is there.
    """

    activity: TrainingActivity
    batch_ready: bool
    holds_devices: bool
    step: int
    policy_version: int
    collected: int
    needed: int
    tokens_total: int
    finished: bool = False
    phase: str = ""

    def summary(self) -> str:
        samples = f"{self.collected}/{self.needed} samples"
        return f"training {self.activity}: step {self.step}, {samples}, v{self.policy_version}"


class StepCompleted(Message):
    """trainer → anyone (stream `TRAINING`): one row of the run's table."""

    step: int
    policy_version: int
    num_samples: int
    num_trained: int
    num_unscored: int
    reward_mean: float | None
    verifiable_reward_mean: float | None
    genrm_reward_mean: float | None
    staleness_max: int
    staleness_mean: float
    response_tokens_mean: float
    loss: float
    grad_norm: float
    logprob_gap_mean: float
    logprob_gap_max: float
    importance_ratio_max: float
    clip_fraction: float
    train_s: float
    write_s: float
    tokens: int
    num_parts: int = 1
    """Parts in which the batch was trained: more than one with streaming."""

    def summary(self) -> str:
        reward = "-" if self.reward_mean is None else f"{self.reward_mean:.3f}"
        samples = f"{self.num_trained} trained, {self.num_unscored} unscored"
        return f"step {self.step}: reward {reward}, {samples}, loss {self.loss:.4f}"
