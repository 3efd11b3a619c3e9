"""Produced by the rollout service."""

from typing import Any

from shared.contracts.base import Message


class Trajectory(Message):
    """rollout → reward: one finished response, token ids end to end.

    `versions` is a run-length list `(policy version, count)` over `response_token_ids`; `logprobs` are the
    behaviour policy's, one per response token. `task` is what the verifier needs (dataset name, entry,
    answer)."""

    sample_id: str
    prompt_index: int
    group_size: int
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str
    prompt_text: str
    response_text: str
    task: dict[str, Any]
    epoch: int = 0

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)

    def summary(self) -> str:
        return f"sample {self.sample_id}: {len(self.response_token_ids)} tokens, {self.finish_reason}"
