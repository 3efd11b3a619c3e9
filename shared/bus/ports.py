"""The bus as the services see it: events, commands with a deadline, durable streams, key-value with CAS.

A caller need not know the broker. Two implementations pass one contract suite: `nats_bus` and `memory_bus`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.contracts.base import Message
from shared.contracts.subjects import StreamSpec

M = TypeVar("M", bound=Message)
MessageT_co = TypeVar("MessageT_co", bound=Message, covariant=True)

EventHandler = Callable[[Message], Awaitable[None]]
CommandHandler = Callable[[Message], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Stored(Generic[MessageT_co]):
    """A message of a stream and its sequence number there."""

    seq: int
    message: MessageT_co


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """Raises `BusError` when the broker is gone, `MessageTooLarge` before sending what cannot be sent."""

    async def publish(self, subject: str, message: Message) -> None:
        """At most once, to whoever listens now."""

    async def subscribe(self, subject: str, handler: EventHandler) -> Subscription:
        """Calls `handler` for every event on `subject` (wildcards `*`, `>`), one at a time and in order.
        A handler that raises is logged and counted; the subscription lives."""

    async def request(
        self,
        subject: str,
        message: Message,
        reply: type[M],
        *,
        deadline_s: float,
        role: str,
        peer: str,
        phase: str,
    ) -> M:
        """A command. The peer's error is raised here as its own class.

        Raises:
            DeadlineExceeded: no answer in time; names role, peer and phase. As NoResponder: nobody is there.
        """

    async def serve(self, subject: str, handler: CommandHandler) -> Subscription:
        """Answers commands on `subject`, concurrently. What the handler raises goes back to the caller."""

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Creates the stream if it is not there."""

    async def append(self, subject: str, message: Message, *, dedupe_id: str | None = None) -> int:
        """Stores `message` in the stream that holds `subject`; returns its sequence number once it is safe.
        Within the stream's window a repeated `dedupe_id` is stored once."""

    async def replay(self, spec: StreamSpec, subject: str, kind: type[M]) -> list[Stored[M]]:
        """What the stream holds of `subject` now, oldest first."""

    def follow(
        self, spec: StreamSpec, subject: str, kind: type[M], *, after_seq: int = 0
    ) -> AsyncIterator[Stored[M]]:
        """Everything stored after `after_seq`, then what comes, for ever. Gaps and reconnects are healed."""

    async def discard(self, spec: StreamSpec, seq: int) -> None:
        """Deletes one stored message; already gone is fine."""

    async def ensure_bucket(self, bucket: str) -> None: ...

    async def kv_get(self, bucket: str, key: str, kind: type[M]) -> tuple[M, int] | None:
        """The value and its revision, or None."""

    async def kv_put(self, bucket: str, key: str, message: Message) -> int:
        """Sets the value whatever was there; returns its revision."""

    async def kv_swap(self, bucket: str, key: str, message: Message, revision: int) -> int:
        """Sets the value if its revision is still `revision` (0: absent); returns the new one.

        Raises:
            Conflict: somebody else wrote first.
        """

    async def kv_watch(
        self, bucket: str, key: str, kind: type[M], handler: Callable[[M], Awaitable[None]]
    ) -> Subscription:
        """Calls `handler` with the present value, if any, and with every later one."""

    async def close(self) -> None: ...
