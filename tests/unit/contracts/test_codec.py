"""Bytes on the wire: golden ones, and what is refused."""

import hashlib
import json
from pathlib import Path

import pytest

from shared.contracts import codec
from shared.contracts.base import Failure, Message
from shared.contracts.planner import DeviceLease, ShiftEvent
from shared.contracts.registry import MESSAGE_TYPES
from shared.contracts.subjects import StreamSpec, Subjects
from shared.errors import Conflict, MessageTooLarge, WireError
from shared.ids import Role
from tests.support.messages import EXAMPLES

GOLDEN = Path(__file__).parent / "golden.json"


def test_every_registered_message_has_an_example() -> None:
    assert {type(example).__name__ for example in EXAMPLES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)
def test_bytes_are_golden(example: Message) -> None:
    """An old record must stay readable. A message changed on purpose gets its new digest written here."""
    golden = json.loads(GOLDEN.read_text())
    digest = hashlib.sha256(codec.encode(example).payload).hexdigest()[:16]
    assert golden[type(example).__name__] == digest


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)
def test_decode_gives_the_message_back(example: Message) -> None:
    encoded = codec.encode(example)
    assert codec.decode(encoded.headers, encoded.payload) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)
def test_the_summary_header_is_one_line_of_ascii(example: Message) -> None:
    summary = codec.encode(example).headers[codec.SUMMARY_HEADER]
    assert summary
    assert summary.isascii()
    assert "\n" not in summary


def test_unknown_fields_are_ignored() -> None:
    encoded = codec.encode(DeviceLease(device=1, owner="rollout-1", epoch=3))
    values = {**codec.unpack_untyped(encoded.payload), "of_a_newer_peer": 1}
    import msgpack

    assert codec.decode(encoded.headers, msgpack.packb(values)) == DeviceLease(
        device=1, owner="rollout-1", epoch=3
    )


@pytest.mark.parametrize(
    ("headers", "payload", "problem"),
    [
        ({}, b"\x80", "unknown message type ''"),
        ({codec.TYPE_HEADER: "os.system"}, b"\x80", "unknown message type 'os.system'"),
        ({codec.TYPE_HEADER: "Done", codec.SCHEMA_HEADER: "9"}, b"\x80", "schema 9"),
        ({codec.TYPE_HEADER: "Done"}, b"\xc1", "not MessagePack"),
        ({codec.TYPE_HEADER: "DeviceLease"}, b"\x80", "DeviceLease.device: Field required"),
    ],
)
def test_bad_messages_are_refused_with_the_reason(
    headers: dict[str, str], payload: bytes, problem: str
) -> None:
    with pytest.raises(WireError, match=problem):
        codec.decode(headers, payload)


def test_a_failure_raises_its_error() -> None:
    encoded = codec.encode(Failure(**Conflict("taken", device=3).to_wire()))
    with pytest.raises(Conflict, match="taken"):
        codec.decode_as(DeviceLease, encoded.headers, encoded.payload)


def test_too_large_names_size_and_limit() -> None:
    with pytest.raises(MessageTooLarge, match="over the limit of 10: send it in parts"):
        codec.encode(DeviceLease(device=1, owner="x" * 100, epoch=1), max_bytes=10)


def test_an_arrow_in_a_summary_becomes_ascii() -> None:
    event = ShiftEvent(
        shift_id="p1", phase="started", now_s=0, up_role=Role.REWARD, up_replicas=("reward-0",)
    )
    assert "-> reward-0" in codec.encode(event).headers[codec.SUMMARY_HEADER]


def test_subjects_of_two_runs_never_meet() -> None:
    a, b = Subjects("a"), Subjects("b")
    assert a.trajectory == "pivotrl.v1.a.sample.trajectory"
    assert not {s.name for s in a.streams} & {s.name for s in b.streams}


def test_each_durable_subject_belongs_to_exactly_one_stream() -> None:
    from shared.bus.memory_bus import subject_matches

    s = Subjects("run")
    durable = [
        s.plan,
        s.shift_event("p1"),
        s.progress(Role.REWARD, "x"),
        s.trajectory,
        s.scored,
        s.step_completed,
    ]
    live = [
        s.workload,
        s.telemetry(Role.ROLLOUT, "x"),
        s.training_state,
        s.role_queue(Role.REWARD),
        s.rank(0, "status"),
    ]

    def holders(subject: str) -> list[StreamSpec]:
        return [spec for spec in s.streams if any(subject_matches(p, subject) for p in spec.subjects)]

    assert all(len(holders(subject)) == 1 for subject in durable)
    assert not any(holders(subject) for subject in live)
