"""One sequence as vLLM knows it, the way back from its outputs to token deltas, and its errors as ours."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shared.contracts.replica import FinishReason, SequenceSpec, TokenDelta
from shared.errors import EngineError, PivotError
from shared.inference.ports import SequenceKey


class RunningRequest:
    """One request inside vLLM. `done` counts generated tokens, resumed ones included."""

    __slots__ = ("done", "prompt", "spec")

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.prompt = len(spec.prompt_token_ids)
        self.done = len(spec.generated_token_ids)

    @property
    def key(self) -> SequenceKey:
        return self.spec.sequence_id, self.spec.attempt

    def delta(
        self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, reason: FinishReason | None
    ) -> TokenDelta:
        start = self.done
        self.done += len(token_ids)
        return TokenDelta(
            sequence_id=self.spec.sequence_id,
            attempt=self.spec.attempt,
            start=start,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            versions=((version, len(token_ids)),) if token_ids else (),
            finish_reason=reason,
        )


def request_id(key: SequenceKey) -> str:
    return f"{key[0]}:{key[1]}"


def resume_seed(seed: int | None, done: int) -> int | None:
    """A fresh sampling start `seed` itself uses, and an unrelated one for every point of resumption."""
    if seed is None or done == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{done}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def finish_reason_of(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise EngineError(f"vLLM finished a sequence with {reason!r}")


@contextmanager
def engine_errors(phase: str) -> Iterator[None]:
    """vLLM's exceptions as `EngineError`, ours as they are."""
    try:
        yield
    except PivotError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM failed in {phase}: {type(error).__name__}: {error}", phase=phase) from error
