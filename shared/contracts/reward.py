"""Produced by the reward service."""

from shared.contracts.base import Message
from shared.contracts.rollout import Trajectory


class ScoredSample(Message):
    """reward → trainer. `reward` is R = R_verifiable + R_GenRM, or None when the sample is *unscored*:
    it is then masked out of the loss and counted, never taken as 0. `unscored_reason` says why."""

    trajectory: Trajectory
    reward: float | None
    verifiable_reward: float | None
    genrm_reward: float | None
    genrm_attempts: int
    genrm_tokens: int
    unscored_reason: str | None = None

    def summary(self) -> str:
        sample = self.trajectory.sample_id
        if self.reward is None:
            return f"sample {sample}: unscored ({self.unscored_reason})"
        return f"sample {sample}: reward {self.reward:.2f} = {self.verifiable_reward} + {self.genrm_reward}"
