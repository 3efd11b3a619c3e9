"""The bus on NATS with JetStream (nats-py)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    ConsumerConfig,
    DeliverPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.kv import KeyValue

from shared.bus.ports import CommandHandler, EventHandler, Stored, Subscription
from shared.contracts import codec
from shared.contracts.base import Failure, Message
from shared.contracts.subjects import StreamSpec
from shared.errors import BusError, Conflict, DeadlineExceeded, NoResponder, PivotError
from shared.runtime.logs import current_trace, trace_scope

M = TypeVar("M", bound=Message)
log = logging.getLogger("pivotrl.bus")


async def connect(
    url: str, *, token: str | None = None, name: str = "pivotrl", timeout_s: float = 10.0
) -> "NatsBus":
    """A connected bus.

    Raises:
        BusError: nothing answers at `url` within `timeout_s`, or the token is refused.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    await _wait_for_port(url, deadline)
    client = Client()

    async def on_error(error: Exception) -> None:
        log.warning("nats: %s", error or type(error).__name__)

    try:
        await client.connect(
            url,
            token=token,
            name=name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,
            connect_timeout=5,
            error_cb=on_error,
            allow_reconnect=True,
            pending_size=64 << 20,
        )
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise BusError(f"cannot use the NATS server at {url}: {error}", url=url) from error
    return NatsBus(client)


class NatsBus:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=10)
        self._tasks: set[asyncio.Task[None]] = set()
        self._buckets: dict[str, KeyValue] = {}
        self.handler_errors = 0

    @property
    def max_bytes(self) -> int:
        return min(codec.DEFAULT_MAX_BYTES, int(self._client.max_payload) - 4096)

    # events

    async def publish(self, subject: str, message: Message) -> None:
        encoded = self._encode(message)
        with _translated("publish"):
            await self._client.publish(subject, encoded.payload, headers=encoded.headers)

    async def subscribe(self, subject: str, handler: EventHandler) -> Subscription:
        async def on_message(msg: Msg) -> None:
            await self._deliver(msg, handler)

        with _translated("subscribe"):
            subscription = await self._client.subscribe(subject, cb=on_message)
            await self._client.flush()
        return _Closing(subscription.unsubscribe)

    async def _deliver(self, msg: Msg, handler: EventHandler) -> None:
        try:
            message = codec.decode(msg.headers, msg.data)
            with trace_scope((msg.headers or {}).get(codec.TRACE_HEADER, "")):
                await handler(message)
        except asyncio.CancelledError:
            raise
        except Exception:
            self.handler_errors += 1
            log.exception("event handler failed on %s", msg.subject)

    # commands

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
        encoded = self._encode(message)
        try:
            msg = await self._client.request(
                subject, encoded.payload, timeout=deadline_s, headers=encoded.headers
            )
        except nats.errors.NoRespondersError as error:
            raise NoResponder(role=role, peer=peer, phase=phase, deadline_s=deadline_s) from error
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise DeadlineExceeded(role=role, peer=peer, phase=phase, deadline_s=deadline_s) from error
        except nats.errors.Error as error:
            raise BusError(f"{role}: request to {peer} in phase {phase!r} failed: {error}") from error
        return codec.decode_as(reply, msg.headers, msg.data)

    async def serve(self, subject: str, handler: CommandHandler) -> Subscription:
        async def answer(msg: Msg) -> None:
            try:
                message = codec.decode(msg.headers, msg.data)
                with trace_scope((msg.headers or {}).get(codec.TRACE_HEADER, "")):
                    result = await handler(message)
            except PivotError as error:
                result = Failure(**error.to_wire())
            except Exception as error:
                log.exception("command handler failed on %s", msg.subject)
                self.handler_errors += 1
                result = Failure(code="internal", message=f"{type(error).__name__}: {error}")
            try:
                encoded = self._encode(result)
            except PivotError as error:
                encoded = self._encode(Failure(**error.to_wire()))
            with contextlib.suppress(nats.errors.Error):  # the caller's deadline speaks for a lost reply
                await self._client.publish(msg.reply, encoded.payload, headers=encoded.headers)

        async def on_message(msg: Msg) -> None:
            self._spawn(answer(msg))

        with _translated("serve"):
            subscription = await self._client.subscribe(subject, cb=on_message)
            await self._client.flush()
        return _Closing(subscription.unsubscribe)

    # streams

    async def ensure_stream(self, spec: StreamSpec) -> None:
        config = StreamConfig(
            name=spec.name,
            subjects=list(spec.subjects),
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE if spec.file else StorageType.MEMORY,
            max_bytes=spec.max_bytes,
            duplicate_window=spec.dedupe_s,
        )
        with _translated(f"create stream {spec.name}"):
            try:
                await self._js.stream_info(spec.name)
            except nats.js.errors.NotFoundError:
                await self._js.add_stream(config)

    async def append(self, subject: str, message: Message, *, dedupe_id: str | None = None) -> int:
        encoded = self._encode(message)
        headers: dict[str, Any] = dict(encoded.headers)
        if dedupe_id is not None:
            headers["Nats-Msg-Id"] = dedupe_id
        with _translated(f"append to {subject}"):
            ack = await self._js.publish(subject, encoded.payload, headers=headers, timeout=10)
        return int(ack.seq)

    async def replay(self, spec: StreamSpec, subject: str, kind: type[M]) -> list[Stored[M]]:
        with _translated(f"replay {spec.name}"):
            state = (await self._js.stream_info(spec.name)).state
            if state.messages == 0:
                return []
            subscription = await self._js.subscribe(
                subject, stream=spec.name, ordered_consumer=True, deliver_policy=DeliverPolicy.ALL
            )
            stored: list[Stored[M]] = []
            try:
                while True:
                    try:
                        msg = await subscription.next_msg(timeout=1.0)
                    except (nats.errors.TimeoutError, TimeoutError):
                        break  # nothing of this subject is left
                    meta = msg.metadata
                    stored.append(Stored(meta.sequence.stream, codec.decode_as(kind, msg.headers, msg.data)))
                    if meta.num_pending == 0:
                        break
            finally:
                await subscription.unsubscribe()
        return stored

    async def follow(
        self, spec: StreamSpec, subject: str, kind: type[M], *, after_seq: int = 0
    ) -> AsyncIterator[Stored[M]]:
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after_seq + 1)
        with _translated(f"follow {spec.name}"):
            subscription = await self._js.subscribe(
                subject, stream=spec.name, ordered_consumer=True, config=config
            )
        try:
            while True:
                try:
                    msg = await subscription.next_msg(timeout=5.0)
                except (nats.errors.TimeoutError, TimeoutError):
                    continue
                yield Stored(msg.metadata.sequence.stream, codec.decode_as(kind, msg.headers, msg.data))
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def discard(self, spec: StreamSpec, seq: int) -> None:
        with _translated(f"discard from {spec.name}"), contextlib.suppress(nats.js.errors.NotFoundError):
            try:
                await self._js.delete_msg(spec.name, seq)
            except nats.js.errors.ServerError as error:
                if "no message found" not in str(error).lower():
                    raise

    # key-value

    async def ensure_bucket(self, bucket: str) -> None:
        with _translated(f"create bucket {bucket}"):
            try:
                self._buckets[bucket] = await self._js.key_value(bucket)
            except nats.js.errors.NotFoundError:
                config = KeyValueConfig(bucket=bucket, history=5, storage=StorageType.FILE)
                self._buckets[bucket] = await self._js.create_key_value(config)

    async def _bucket(self, bucket: str) -> KeyValue:
        if bucket not in self._buckets:
            await self.ensure_bucket(bucket)
        return self._buckets[bucket]

    async def kv_get(self, bucket: str, key: str, kind: type[M]) -> tuple[M, int] | None:
        kv = await self._bucket(bucket)
        with _translated(f"get {bucket}/{key}"):
            try:
                entry = await kv.get(key)
            except (nats.js.errors.KeyNotFoundError, nats.js.errors.NotFoundError):
                return None
        return _kv_value(kind, entry.value or b""), int(entry.revision or 0)

    async def kv_put(self, bucket: str, key: str, message: Message) -> int:
        kv = await self._bucket(bucket)
        with _translated(f"put {bucket}/{key}"):
            return int(await kv.put(key, self._encode(message).payload))

    async def kv_swap(self, bucket: str, key: str, message: Message, revision: int) -> int:
        kv = await self._bucket(bucket)
        with _translated(f"swap {bucket}/{key}"):
            try:
                payload = self._encode(message).payload
                if revision == 0:
                    return int(await kv.create(key, payload))
                return int(await kv.update(key, payload, last=revision))
            except nats.js.errors.KeyWrongLastSequenceError as error:
                raise Conflict(f"{bucket}/{key} is no longer at revision {revision}", key=key) from error

    async def kv_watch(
        self, bucket: str, key: str, kind: type[M], handler: Callable[[M], Awaitable[None]]
    ) -> Subscription:
        kv = await self._bucket(bucket)
        with _translated(f"watch {bucket}/{key}"):
            watcher = await kv.watch(key)

        async def watch() -> None:
            async for entry in watcher:
                if entry is None or not entry.value:
                    continue
                try:
                    await handler(_kv_value(kind, entry.value))
                except asyncio.CancelledError:
                    raise
                except Exception:
                    self.handler_errors += 1
                    log.exception("watch handler failed on %s/%s", bucket, key)

        task = self._spawn(watch())

        async def stop() -> None:
            task.cancel()
            with contextlib.suppress(nats.errors.Error):
                await watcher.stop()

        return _Closing(stop)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._client.close()

    # plumbing

    def _encode(self, message: Message) -> codec.Encoded:
        return codec.encode(message, trace=current_trace(), max_bytes=self.max_bytes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Closing:
    def __init__(self, stop: Callable[[], Awaitable[None]]) -> None:
        self._stop = stop

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self._stop()


def _kv_value(kind: type[M], payload: bytes) -> M:
    return codec.decode_as(kind, {codec.TYPE_HEADER: kind.__name__}, payload)


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """nats-py's errors as ours."""
    try:
        yield
    except PivotError:
        raise
    except (nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError) as error:
        raise BusError(f"NATS: cannot {doing}: {error or type(error).__name__}") from error


async def _wait_for_port(url: str, deadline: float) -> None:
    """Polls until the server listens: nats-py's own retry would wait two seconds."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    while True:
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port or 4222)
        except OSError as error:
            if loop.time() >= deadline:
                raise BusError(f"no NATS server answers at {url}: {error}", url=url) from error
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
