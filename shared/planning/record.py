"""Decisions as lines of a run's journal, and back: all that is needed to decide again (format 2).

    Started            settings, cluster, allocation: the first line, and after every restart of the planner
    WorkloadObserved   while a decision can be made: the state, and the decision with every candidate
                       else, while a shift is under way or the policy is paused: only how many sequences
    any other event    as it is

Every line has `now_s`; an observation also has `measured`, tokens/s of each role as its replicas report.
Values are written by their type's fields, defaults left out: a new field with a default needs no new format.
Ascending lengths are written as differences. Pure: plain data in and out.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from math import inf
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from shared.errors import InvalidRequest
from shared.ids import Role
from shared.planning import plan as plans
from shared.planning.cluster import Allocation, ClusterSpec
from shared.planning.config import PlannerConfig
from shared.planning.plan import CandidateRecord, PlannerEvent, PlanRecord, ShiftPlan
from shared.planning.workload import WorkloadState
from shared.scheduling.sequence import ReplicaLoad

FORMAT = 2
Plain = Any
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Started:
    """The planner begins to decide, from this allocation."""

    config: PlannerConfig
    cluster: ClusterSpec
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """A candidate without the names of its replicas."""

    num_up: int
    num_down: int
    training_down: bool
    penalty_tokens: float
    rollout_tokens_per_s: float
    reward_tokens_per_s: float
    tokens_per_s: float
    benefit_tokens: float
    is_chosen: bool = False
    refusal: str = ""

    @classmethod
    def of(cls, record: CandidateRecord) -> "CandidateFigures":
        named = {f.name: getattr(record, f.name) for f in fields(cls) if not f.name.startswith("num_")}
        return cls(num_up=len(record.up_replicas), num_down=len(record.down_replicas), **named)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision as it is kept: the plan in full, candidates in figures."""

    reason: str
    up_role: Role | None = None
    plan: ShiftPlan | None = None
    current_tokens_per_s: float = 0.0
    candidates: tuple[CandidateFigures, ...] = ()

    @classmethod
    def of(cls, record: PlanRecord) -> "Decided":
        figures = tuple(CandidateFigures.of(candidate) for candidate in record.candidates)
        return cls(record.reason, record.up_role, record.plan, record.current_tokens_per_s, figures)

    @property
    def chosen(self) -> CandidateFigures | None:
        return next((candidate for candidate in self.candidates if candidate.is_chosen), None)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `event` is None for an observation on which nothing could be decided."""

    now_s: float
    event: Started | PlannerEvent | None
    decided: Decided | None = None
    num_sequences: Mapping[str, int] = field(default_factory=dict)
    """Running and waiting, by role."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """tokens/s, by role."""


EVENTS: dict[str, type[Any]] = {event.__name__: event for event in (Started, *get_args(plans.PlannerEvent))}


def to_line(entry: Entry) -> dict[str, Plain]:
    """Plain data of one line."""
    line: dict[str, Plain] = {"now_s": entry.now_s}
    if isinstance(entry.event, Started):
        line["format"] = FORMAT
    line["event"] = "WorkloadObserved" if entry.event is None else type(entry.event).__name__
    if entry.event is not None:
        line["values"] = _plain(entry.event)
    if entry.decided is not None:
        line["decided"] = _plain(entry.decided)
    if entry.num_sequences:
        line["num_sequences"] = dict(entry.num_sequences)
    if entry.measured:
        line["measured"] = {role: round(rate, 1) for role, rate in entry.measured.items()}
    return line


def from_line(line: Mapping[str, Plain]) -> Entry:
    """The entry of one line.

    Raises:
        InvalidRequest: `decisions`: another format, or a line that is none.
    """
    try:
        name = line["event"]
        if "effects" in line or (name == "Started" and line.get("format") != FORMAT):
            raise InvalidRequest(
                "decisions",
                f"format {line.get('format', 1)}, but format {FORMAT} can be replayed",
                "Record the run again with this version",
            )
        values = line.get("values")
        return Entry(
            float(line["now_s"]),
            None if values is None and name == "WorkloadObserved" else _typed(EVENTS[name], values or {}),
            _typed(Decided, line["decided"]) if "decided" in line else None,
            line.get("num_sequences", {}),
            line.get("measured", {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            "decisions", f"a line cannot be read ({type(error).__name__}: {error})", "Is the journal whole?"
        ) from error


def observed(state: WorkloadState) -> dict[str, int]:
    """Sequences of each role."""
    return {role.value: state.of(role).num_sequences for role in (Role.ROLLOUT, Role.REWARD)}


# Values by type


def _plain(value: Any) -> Plain:
    if isinstance(value, ReplicaLoad):
        return _plain_load(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in fields(value)
            if f.init and not _is_default(f, getattr(value, f.name))
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {":".join(k) if isinstance(k, tuple) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, frozenset):
        return [_plain(v) for v in sorted(value)]
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and abs(value) == inf else value


def _is_default(f: Any, value: Any) -> bool:
    if f.default is not MISSING:
        return bool(value == f.default and type(value) is type(f.default))
    return f.default_factory is not MISSING and bool(value == f.default_factory())


def _plain_load(load: ReplicaLoad) -> Plain:
    values = {"replica": load.replica, "kv_capacity_tokens": load.kv_capacity_tokens}
    values["steps"] = [b - a for a, b in zip((0, *load.lengths), load.lengths, strict=False)]
    if load.num_sequences != len(load.lengths) or load.num_tokens != sum(load.lengths):
        values |= {"num_sequences": load.num_sequences, "num_tokens": load.num_tokens}
    return values


def _typed_load(values: Mapping[str, Plain]) -> ReplicaLoad:
    lengths, length = [], 0
    for step in values["steps"]:
        length += step
        lengths.append(length)
    return ReplicaLoad(
        values["replica"],
        values.get("num_sequences", len(lengths)),
        values.get("num_tokens", sum(lengths)),
        values["kv_capacity_tokens"],
        tuple(lengths),
    )


def _typed(kind: Any, value: Plain) -> Any:
    """The value of type `kind` that `_plain` wrote. Fields that this version does not have are dropped."""
    if isinstance(kind, NewType):
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _typed(next(a for a in args if a is not types.NoneType), value)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_typed(args[0], v) for v in value)
        return tuple(_typed(a, v) for a, v in zip(args, value, strict=True))
    if origin is frozenset:
        return frozenset(_typed(args[0], v) for v in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_typed_key(args[0], k): _typed(args[1], v) for k, v in value.items()}
    if origin is Literal:
        return value
    if kind is ReplicaLoad:
        return _typed_load(value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: _typed(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return float(value) if kind is float else value


def _typed_key(kind: Any, key: str) -> Any:
    return tuple(_typed(a, part) for a, part in zip(get_args(kind), key.split(":"), strict=True))


__all__ = ["FORMAT", "CandidateFigures", "Decided", "Entry", "Started", "from_line", "observed", "to_line"]
