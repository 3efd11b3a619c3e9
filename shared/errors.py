"""The one error tree.

    PivotError                      code, message, data
    ├── UserError                   the caller's fault; HTTP 4xx
    │   ├── ConfigError             field, value, remedy; before anything starts
    │   ├── InvalidRequest          field, remedy
    │   ├── NotFound
    │   └── Conflict                a lease, version or state that moved on
    ├── DeadlineExceeded            role, peer, phase, deadline_s
    │   └── NoResponder             the peer is not there at all
    ├── WireError                   undecodable or oversized message
    │   └── MessageTooLarge
    ├── BusError                    broker gone, stream missing
    ├── EngineError                 the inference engine refused or died
    ├── TransportError              a parameter transfer failed
    ├── LayoutError                 a parameter cannot be mapped by pure views and copies
    └── ShiftFailed                 a shift transaction was rolled back

Every error carries `code` (stable, snake case) and survives the bus: `to_wire` on the failing side,
`from_wire` on the caller's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class PivotError(Exception):
    """Base of every error raised on purpose."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, Any] = data

    def to_wire(self) -> dict[str, Any]:
        """`{"code", "message", "data"}`, plain values only."""
        return {"code": self.code, "message": self.message, "data": self.data}


class UserError(PivotError):
    code = "user_error"


class ConfigError(UserError):
    """A setting that cannot work. `field`, `value` and `remedy` say what, and what to do."""

    code = "config"

    def __init__(self, field: str, value: object, problem: str, remedy: str, **data: Any) -> None:
        shown = "" if value is None else f" = {value!r}"
        super().__init__(f"{field}{shown}: {problem}. {remedy}", field=field, remedy=remedy, **data)
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


class InvalidRequest(UserError):
    """A request that names a bad `field`."""

    code = "invalid_request"

    def __init__(self, field: str, problem: str, remedy: str = "", **data: Any) -> None:
        if remedy:
            data["remedy"] = remedy
        super().__init__(f"{field}: {problem}." + (f" {remedy}" if remedy else ""), field=field, **data)
        self.field = field


class NotFound(UserError):
    code = "not_found"


class Conflict(UserError):
    code = "conflict"


def told(field: str, problem: str, remedy: str, **data: Any) -> dict[str, Any]:
    """Keyword arguments of an error that names a `field` and a `remedy`, as `InvalidRequest` does.

    >>> told("version", "3 is not newer than 4", "Write a version after 4")["message"]
    'version: 3 is not newer than 4. Write a version after 4'
    """
    return {"message": f"{field}: {problem}. {remedy}", "field": field, "remedy": remedy, **data}


class DeadlineExceeded(PivotError):
    """A wait ended without its answer. Names role, peer and phase."""

    code = "deadline_exceeded"

    def __init__(self, *, role: str, peer: str, phase: str, deadline_s: float) -> None:
        super().__init__(
            f"{role}: no answer from {peer} in phase {phase!r} within {deadline_s:g} s",
            role=role,
            peer=peer,
            phase=phase,
            deadline_s=deadline_s,
        )


class NoResponder(DeadlineExceeded):
    """Nobody serves the subject: the peer's process is not there."""

    code = "no_responder"


class WireError(PivotError):
    code = "wire"


class MessageTooLarge(WireError):
    code = "message_too_large"


class BusError(PivotError):
    code = "bus"


class EngineError(PivotError):
    code = "engine"


class TransportError(PivotError):
    code = "transport"


class LayoutError(PivotError):
    code = "layout"


class ShiftFailed(PivotError):
    code = "shift_failed"


class RemoteError(PivotError):
    """A peer failed with a code this side does not know."""

    code = "remote"


def _tree(root: type[PivotError]) -> dict[str, type[PivotError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_wire(wire: Mapping[str, Any]) -> PivotError:
    """The error a peer reported, as its own class, so that `except Conflict` works across the bus."""
    cls = _tree(PivotError).get(str(wire.get("code")), RemoteError)
    error = cls.__new__(cls)
    PivotError.__init__(error, str(wire.get("message", "")), **dict(wire.get("data") or {}))
    return error
