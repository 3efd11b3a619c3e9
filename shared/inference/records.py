"""The token contents of a role's sequences; the scheduler knows only their counts.

Deltas may come late, twice, or out of order: each says where it starts, so a record can tell what is new.
Invariant: tokens only grow while an attempt lives, and a record never has a gap.
"""

from dataclasses import dataclass, field
from typing import Any

from shared.contracts.replica import SamplingSpec, SequenceSpec, TokenDelta


@dataclass(slots=True)
class SequenceRecord:
    """One sequence from submission to its end. `versions` is a run-length list over `token_ids`."""

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec
    attempt: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    resumed_from: dict[str, int] = field(default_factory=dict)
    """`num_attempts` and `num_resumed_tokens`, for whoever asks how a sequence fared."""
    context: Any = None
    """What the owner wants back with the finished sequence."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def spec(self, attempt: int) -> SequenceSpec:
        """What a replica needs to run it from here."""
        return SequenceSpec(
            sequence_id=self.sequence_id,
            attempt=attempt,
            prompt_token_ids=self.prompt_token_ids,
            generated_token_ids=tuple(self.token_ids),
            sampling=self.sampling,
        )

    def has_gap_before(self, delta: TokenDelta) -> bool:
        return delta.start > self.num_tokens

    def extend(self, delta: TokenDelta) -> int:
        """Takes what `delta` has beyond the tokens here; returns how many. It must not leave a gap."""
        assert not self.has_gap_before(delta), (self.sequence_id, self.num_tokens, delta.start)
        known = self.num_tokens - delta.start
        fresh = len(delta.token_ids) - known
        if fresh > 0:
            self.token_ids += delta.token_ids[known:]
            self.logprobs += delta.logprobs[known:]
            for version in _unrolled(delta.versions)[known:]:
                self._stamp(version)
        if delta.finish_reason is not None and known <= len(delta.token_ids):
            self.finish_reason = delta.finish_reason
        return max(0, fresh)

    def restore(self, delta: TokenDelta) -> None:
        """As `extend`, for a delta read back from the stream after a restart: a later attempt overrules an
        earlier one from where it starts, and what would leave a gap is dropped (it is generated again)."""
        if delta.attempt > self.attempt:
            self.attempt = delta.attempt
            self._truncate(delta.start)
        if delta.attempt == self.attempt and not self.has_gap_before(delta):
            self.extend(delta)

    def _truncate(self, num_tokens: int) -> None:
        if num_tokens >= self.num_tokens:
            return
        versions = _unrolled(tuple(self.versions))[:num_tokens]
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.versions, self.finish_reason = [], None
        for version in versions:
            self._stamp(version)

    def _stamp(self, version: int) -> None:
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))


def _unrolled(versions: tuple[tuple[int, int], ...]) -> list[int]:
    return [version for version, count in versions for _ in range(count)]
