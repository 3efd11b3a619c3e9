"""Token deltas on their way out: merged per sequence, cut into messages the bus takes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from shared.contracts.replica import SequenceSpec, TokenDelta
from shared.errors import PivotError
from shared.inference.ports import SequenceKey

FLUSH_INTERVAL_S = 0.1
MAX_TOKENS_PER_MESSAGE = 50_000
"""About 1 MB encoded: an id and a float64 logprob take up to 14 bytes."""

Publish = Callable[[tuple[TokenDelta, ...]], Awaitable[None]]

log = logging.getLogger(__name__)


def merge(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """One delta for two of the same sequence, the second right after the first.

    >>> a = TokenDelta(
    ...     sequence_id="s", attempt=0, start=0, token_ids=(1,), logprobs=(-1.0,), versions=((3, 1),)
    ... )
    >>> b = a.model_copy(update={"start": 1, "token_ids": (2,), "finish_reason": "stop"})
    >>> merge(a, b).versions, merge(a, b).token_ids
    (((3, 2),), (1, 2))
    """
    assert key_of(first) == key_of(second)
    assert second.start == first.start + len(first.token_ids), (first, second)
    versions = list(first.versions)
    for version, count in second.versions:
        if versions and versions[-1][0] == version:
            versions[-1] = (version, versions[-1][1] + count)
        else:
            versions.append((version, count))
    return first.model_copy(
        update={
            "token_ids": first.token_ids + second.token_ids,
            "logprobs": first.logprobs + second.logprobs,
            "versions": tuple(versions),
            "finish_reason": second.finish_reason,
            "error": second.error,
        }
    )


def key_of(delta: TokenDelta) -> SequenceKey:
    return delta.sequence_id, delta.attempt


def refusal(spec: SequenceSpec, error: PivotError) -> TokenDelta:
    """What is reported of a sequence that cannot run."""
    return TokenDelta(
        sequence_id=spec.sequence_id,
        attempt=spec.attempt,
        start=len(spec.generated_token_ids),
        token_ids=(),
        logprobs=(),
        versions=(),
        error=error.message,
    )


class ProgressBuffer:
    """What has not been sent: each token is in here, in one message, or in the answer to one abort.

    Deltas of a sequence are collected and merged when they are taken: adding is cheap at every step.
    """

    def __init__(self) -> None:
        self._pending: dict[SequenceKey, list[TokenDelta]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, delta: TokenDelta) -> None:
        self._pending.setdefault(key_of(delta), []).append(delta)

    def take(self, max_tokens: int = MAX_TOKENS_PER_MESSAGE) -> tuple[TokenDelta, ...]:
        """Whole sequences' worth of deltas, oldest first, at least one and up to about `max_tokens`."""
        taken: list[TokenDelta] = []
        size = 0
        while self._pending and (not taken or size < max_tokens):
            delta = self.withdraw(next(iter(self._pending)))
            assert delta is not None
            taken.append(delta)
            size += len(delta.token_ids)
        return tuple(taken)

    def put_back(self, deltas: tuple[TokenDelta, ...]) -> None:
        """Undo a `take` whose message was not accepted: these come before anything added meanwhile."""
        rest = self._pending
        self._pending = {key_of(delta): [delta] for delta in deltas}
        for key, later in rest.items():
            self._pending.setdefault(key, []).extend(later)

    def withdraw(self, key: SequenceKey) -> TokenDelta | None:
        """Everything pending of one sequence as one delta."""
        parts = self._pending.pop(key, None)
        if parts is None:
            return None
        return _join(parts)


def is_final(delta: TokenDelta) -> bool:
    return delta.finish_reason is not None or delta.error is not None


def _join(parts: list[TokenDelta]) -> TokenDelta:
    """`merge` over many, in n log n."""
    while len(parts) > 1:
        parts = [
            merge(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)
        ]
    return parts[0]


class ProgressOutbox:
    """The buffer and its way to the bus: every `FLUSH_INTERVAL_S`, or at once when a sequence ends."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._buffer = ProgressBuffer()
        self._has_final = asyncio.Event()
        self._publishing = asyncio.Lock()

    def add(self, delta: TokenDelta) -> None:
        self._buffer.add(delta)
        if is_final(delta):
            self._has_final.set()

    async def withdraw(self, stopped: Iterable[TokenDelta]) -> tuple[TokenDelta, ...]:
        """The last deltas of stopped sequences, each preceded by what was not sent of it.

        Waits for a message under way, so that what it carries has arrived, or is back in the buffer.
        """
        async with self._publishing:
            earlier = [(self._buffer.withdraw(key_of(rest)), rest) for rest in stopped]
        return tuple(rest if before is None else merge(before, rest) for before, rest in earlier)

    async def flush(self) -> None:
        """Send everything. What the bus does not accept stays, and is logged."""
        async with self._publishing:
            while self._buffer:
                deltas = self._buffer.take()
                try:
                    await self._publish(deltas)
                except PivotError as error:
                    self._buffer.put_back(deltas)
                    log.warning("progress of %d sequences not sent, kept: %s", len(deltas), error)
                    return
                except BaseException:
                    self._buffer.put_back(deltas)
                    raise

    async def flush_forever(self) -> None:
        while True:
            with suppress(TimeoutError):  # not wait_for: before Python 3.12 it can swallow a cancellation
                async with asyncio.timeout(FLUSH_INTERVAL_S):
                    await self._has_final.wait()
            self._has_final.clear()
            await self.flush()
