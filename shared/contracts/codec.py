"""MessagePack payloads and the four headers. The one place that turns messages into bytes and back."""

from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from shared.contracts.base import Failure, Message
from shared.contracts.registry import MESSAGE_TYPES
from shared.errors import MessageTooLarge, WireError, from_wire

M = TypeVar("M", bound=Message)

TYPE_HEADER = "Pivot-Type"
SCHEMA_HEADER = "Pivot-Schema"
TRACE_HEADER = "Pivot-Trace"
SUMMARY_HEADER = "Pivot-Summary"

DEFAULT_MAX_BYTES = 8 << 20
"""Equals the broker's `max_payload` that the embedded server is started with."""


@dataclass(frozen=True, slots=True)
class Encoded:
    headers: dict[str, str]
    payload: bytes


def encode(message: Message, *, trace: str = "", max_bytes: int = DEFAULT_MAX_BYTES) -> Encoded:
    """Bytes and headers of `message`.

    Raises:
        MessageTooLarge: over `max_bytes`; the remedy is to send it in parts.
    """
    kind = type(message).__name__
    payload = msgpack.packb(message.model_dump(mode="python"), use_bin_type=True)
    if len(payload) > max_bytes:
        raise MessageTooLarge(
            f"{kind} has {len(payload)} bytes, over the limit of {max_bytes}: send it in parts",
            type=kind,
            nbytes=len(payload),
            max_bytes=max_bytes,
        )
    headers = {
        TYPE_HEADER: kind,
        SCHEMA_HEADER: str(type(message).schema_version),
        SUMMARY_HEADER: _header_text(message.summary()),
    }
    if trace:
        headers[TRACE_HEADER] = trace
    return Encoded(headers, payload)


def decode(headers: dict[str, str] | None, payload: bytes) -> Message:
    """The message in `payload`.

    Raises:
        WireError: no or unknown type header, a newer schema, bytes that are not the type's MessagePack.
    """
    kind = (headers or {}).get(TYPE_HEADER, "")
    cls = MESSAGE_TYPES.get(kind)
    if cls is None:
        raise WireError(f"unknown message type {kind!r}", type=kind)
    schema = (headers or {}).get(SCHEMA_HEADER, "1")
    if schema != str(cls.schema_version):
        raise WireError(
            f"{kind}: schema {schema} is not the {cls.schema_version} this process reads", type=kind
        )
    return _validated(cls, _unpack(payload, kind))


def decode_as(cls: type[M], headers: dict[str, str] | None, payload: bytes) -> M:
    """As `decode`, and refuses any other type; a `Failure` raises the error it carries."""
    message = decode(headers, payload)
    if isinstance(message, Failure):
        raise from_wire(message.model_dump())
    if not isinstance(message, cls):
        raise WireError(f"expected {cls.__name__}, got {type(message).__name__}", type=type(message).__name__)
    return message


def unpack_untyped(payload: bytes) -> Any:
    """Plain values of a payload, for people (`pivotrl decode`)."""
    return _unpack(payload, "message")


def _unpack(payload: bytes, kind: str) -> Any:
    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"{kind}: not MessagePack ({error})", type=kind) from error


def _validated(cls: type[Message], values: Any) -> Message:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise WireError(f"{cls.__name__}.{field}: {first['msg']}", type=cls.__name__, field=field) from error


def _header_text(text: str) -> str:
    """Headers are lines of ASCII: what a person reads there must survive every client."""
    plain = text.replace("→", "->").replace("\n", " ").replace("\r", " ")
    return plain.encode("ascii", "replace").decode()[:300]
