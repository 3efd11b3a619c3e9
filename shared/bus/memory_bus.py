"""The bus inside one process: for tests and simulations of whole services. Every message still goes through
the codec, so what would not survive the wire does not survive here either."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.bus.ports import CommandHandler, EventHandler, Stored, Subscription
from shared.contracts import codec
from shared.contracts.base import Failure, Message
from shared.contracts.subjects import StreamSpec
from shared.errors import BusError, Conflict, DeadlineExceeded, NoResponder, PivotError

M = TypeVar("M", bound=Message)
log = logging.getLogger("pivotrl.bus")


@dataclass(slots=True)
class _Stream:
    spec: StreamSpec
    last_seq: int = 0
    stored: dict[int, tuple[str, codec.Encoded]] = field(default_factory=dict)
    dedupe: dict[str, int] = field(default_factory=dict)
    grew: asyncio.Condition = field(default_factory=asyncio.Condition)


class MemoryBus:
    def __init__(self, max_bytes: int = codec.DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._listeners: list[tuple[str, asyncio.Queue[Message]]] = []
        self._servers: dict[str, CommandHandler] = {}
        self._streams: dict[str, _Stream] = {}
        self._buckets: dict[str, dict[str, tuple[codec.Encoded, int]]] = defaultdict(dict)
        self._watchers: dict[tuple[str, str], list[asyncio.Queue[codec.Encoded]]] = defaultdict(list)
        self._revision = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.handler_errors = 0

    async def publish(self, subject: str, message: Message) -> None:
        copy = self._wire(message)
        for pattern, queue in self._listeners:
            if subject_matches(pattern, subject):
                queue.put_nowait(copy)

    async def subscribe(self, subject: str, handler: EventHandler) -> Subscription:
        queue: asyncio.Queue[Message] = asyncio.Queue()
        entry = (subject, queue)
        self._listeners.append(entry)
        task = self._spawn(self._pump(queue, handler, subject))
        return _Closing(task, lambda: self._listeners.remove(entry))

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
        handler = self._servers.get(subject)
        late = DeadlineExceeded(role=role, peer=peer, phase=phase, deadline_s=deadline_s)
        copy = self._wire(message)
        if handler is None:
            raise NoResponder(role=role, peer=peer, phase=phase, deadline_s=deadline_s)
        # As over a network: the peer does not learn that its caller gave up.
        answering = asyncio.ensure_future(_answer(handler, copy))
        self._tasks.add(answering)
        answering.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(deadline_s):
                answer = await asyncio.shield(answering)
        except TimeoutError:
            raise late from None
        encoded = self._encode(answer)
        return codec.decode_as(reply, encoded.headers, encoded.payload)

    async def serve(self, subject: str, handler: CommandHandler) -> Subscription:
        self._servers[subject] = handler
        return _Closing(None, lambda: self._servers.pop(subject, None))

    async def ensure_stream(self, spec: StreamSpec) -> None:
        self._streams.setdefault(spec.name, _Stream(spec))

    async def append(self, subject: str, message: Message, *, dedupe_id: str | None = None) -> int:
        for stream in self._streams.values():
            if any(subject_matches(pattern, subject) for pattern in stream.spec.subjects):
                break
        else:
            raise BusError(f"no stream holds {subject}")
        encoded = self._encode(message)
        if dedupe_id is not None and dedupe_id in stream.dedupe:
            return stream.dedupe[dedupe_id]
        async with stream.grew:
            stream.last_seq += 1
            stream.stored[stream.last_seq] = (subject, encoded)
            if dedupe_id is not None:
                stream.dedupe[dedupe_id] = stream.last_seq
            stream.grew.notify_all()
            return stream.last_seq

    async def replay(self, spec: StreamSpec, subject: str, kind: type[M]) -> list[Stored[M]]:
        stream = self._stream(spec)
        return [
            Stored(seq, codec.decode_as(kind, encoded.headers, encoded.payload))
            for seq, (at, encoded) in sorted(stream.stored.items())
            if subject_matches(subject, at)
        ]

    async def follow(
        self, spec: StreamSpec, subject: str, kind: type[M], *, after_seq: int = 0
    ) -> AsyncIterator[Stored[M]]:
        stream = self._stream(spec)
        while True:
            async with stream.grew:
                while stream.last_seq <= after_seq:
                    await stream.grew.wait()
            for seq in range(after_seq + 1, stream.last_seq + 1):
                after_seq = seq
                entry = stream.stored.get(seq)
                if entry is not None and subject_matches(subject, entry[0]):
                    yield Stored(seq, codec.decode_as(kind, entry[1].headers, entry[1].payload))

    async def discard(self, spec: StreamSpec, seq: int) -> None:
        self._stream(spec).stored.pop(seq, None)

    async def ensure_bucket(self, bucket: str) -> None:
        self._buckets.setdefault(bucket, {})

    async def kv_get(self, bucket: str, key: str, kind: type[M]) -> tuple[M, int] | None:
        entry = self._buckets[bucket].get(key)
        if entry is None:
            return None
        return codec.decode_as(kind, entry[0].headers, entry[0].payload), entry[1]

    async def kv_put(self, bucket: str, key: str, message: Message) -> int:
        encoded = self._encode(message)
        self._revision += 1
        self._buckets[bucket][key] = (encoded, self._revision)
        for queue in self._watchers[bucket, key]:
            queue.put_nowait(encoded)
        return self._revision

    async def kv_swap(self, bucket: str, key: str, message: Message, revision: int) -> int:
        entry = self._buckets[bucket].get(key)
        if (entry[1] if entry else 0) != revision:
            raise Conflict(f"{bucket}/{key} is no longer at revision {revision}", key=key)
        return await self.kv_put(bucket, key, message)

    async def kv_watch(
        self, bucket: str, key: str, kind: type[M], handler: Callable[[M], Awaitable[None]]
    ) -> Subscription:
        queue: asyncio.Queue[codec.Encoded] = asyncio.Queue()
        entry = self._buckets[bucket].get(key)
        if entry is not None:
            queue.put_nowait(entry[0])
        self._watchers[bucket, key].append(queue)

        async def watch() -> None:
            while True:
                encoded = await queue.get()
                try:
                    await handler(codec.decode_as(kind, encoded.headers, encoded.payload))
                except Exception:
                    self.handler_errors += 1
                    log.exception("watch handler failed on %s/%s", bucket, key)

        return _Closing(self._spawn(watch()), lambda: self._watchers[bucket, key].remove(queue))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stream(self, spec: StreamSpec) -> _Stream:
        try:
            return self._streams[spec.name]
        except KeyError:
            raise BusError(f"no stream {spec.name}") from None

    def _encode(self, message: Message) -> codec.Encoded:
        return codec.encode(message, max_bytes=self._max_bytes)

    def _wire(self, message: Message) -> Message:
        encoded = self._encode(message)
        return codec.decode(encoded.headers, encoded.payload)

    async def _pump(self, queue: asyncio.Queue[Message], handler: EventHandler, subject: str) -> None:
        while True:
            message = await queue.get()
            try:
                await handler(message)
            except Exception:
                self.handler_errors += 1
                log.exception("event handler failed on %s", subject)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Closing:
    def __init__(self, task: asyncio.Task[None] | None, stop: Callable[[], object]) -> None:
        self._task, self._stop = task, stop

    async def close(self) -> None:
        self._stop()
        if self._task is not None:
            self._task.cancel()


async def _answer(handler: CommandHandler, message: Message) -> Message:
    try:
        return await handler(message)
    except PivotError as error:
        return Failure(**error.to_wire())
    except Exception as error:
        log.exception("command handler failed")
        return Failure(code="internal", message=f"{type(error).__name__}: {error}")


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` one token, a last `>` one or more.

    >>> subject_matches("a.*.c", "a.b.c"), subject_matches("a.>", "a.b.c"), subject_matches("a.>", "a")
    (True, True, False)
    """
    wanted, got = pattern.split("."), subject.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(got) > i
        if i >= len(got) or token not in ("*", got[i]):
            return False
    return len(wanted) == len(got)
