"""Samples as rollout and reward hand them on."""

from shared.contracts.reward import ScoredSample
from shared.contracts.rollout import Trajectory
from shared.ids import sample_id


def scored_sample(
    prompt: int, sample: int, reward: float | None = 1.0, *, group_size: int, num_tokens: int = 3
) -> ScoredSample:
    """Sample `sample` of a prompt; without a reward it is unscored, without tokens it has no version."""
    trajectory = Trajectory(
        sample_id=sample_id(prompt, sample),
        prompt_index=prompt,
        group_size=group_size,
        prompt_token_ids=(1, 2),
        response_token_ids=tuple(range(num_tokens)),
        logprobs=(-1.0,) * num_tokens,
        versions=((0, num_tokens),) if num_tokens else (),
        finish_reason="stop",
        prompt_text="",
        response_text="",
        task={},
    )
    return ScoredSample(
        trajectory=trajectory,
        reward=reward,
        verifiable_reward=reward,
        genrm_reward=None,
        genrm_attempts=1,
        genrm_tokens=5,
        unscored_reason=None if reward is not None else "no verdict",
    )
