"""What every `Bus` must do, over the in-memory one and a real NATS server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus.memory_bus import MemoryBus
from shared.bus.nats_bus import connect
from shared.bus.ports import Bus, Stored
from shared.contracts.base import Done, Message
from shared.contracts.planner import DeviceLease, ShiftDown, ShiftStepDone
from shared.contracts.replica import RunSequences, SamplingSpec, SequenceSpec
from shared.contracts.subjects import Subjects
from shared.errors import BusError, Conflict, DeadlineExceeded, MessageTooLarge, NoResponder
from shared.ids import Role
from tests.support.nats_server import nats_bus

SUBJECTS = Subjects("test")
ASK = {"role": "planner", "peer": "rollout", "phase": "down"}


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    async with contextlib.AsyncExitStack() as stack:
        made: Bus
        if request.param == "memory":
            made = MemoryBus()
            stack.push_async_callback(made.close)
        else:
            made = await stack.enter_async_context(nats_bus(tmp_path))
        for spec in SUBJECTS.streams:
            await made.ensure_stream(spec)
        await made.ensure_bucket("bucket")
        yield made


def lease(device: int, owner: str = "rollout-0") -> DeviceLease:
    return DeviceLease(device=device, owner=owner, epoch=1)


async def until(condition: "list[object]", count: int) -> None:
    async with asyncio.timeout(5):
        while len(condition) < count:  # noqa: ASYNC110  # filled by a handler, whatever the bus
            await asyncio.sleep(0.01)


async def test_an_event_reaches_matching_subscribers_in_order(bus: Bus) -> None:
    seen: list[object] = []

    async def handler(message: Message) -> None:
        seen.append(message)

    await bus.subscribe("pivotrl.v1.test.telemetry.>", handler)
    for device in range(20):
        await bus.publish("pivotrl.v1.test.telemetry.rollout.rollout-0", lease(device))
    await bus.publish("pivotrl.v1.other.telemetry.x", lease(99))
    await until(seen, 20)
    assert seen == [lease(device) for device in range(20)]


async def test_a_failing_event_handler_is_counted_and_lives(bus: Bus) -> None:
    seen: list[object] = []

    async def handler(message: Message) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise ValueError("first one fails")

    await bus.subscribe("a.b", handler)
    await bus.publish("a.b", lease(0))
    await bus.publish("a.b", lease(1))
    await until(seen, 2)
    assert bus.handler_errors == 1  # type: ignore[attr-defined]


async def test_a_closed_subscription_hears_nothing(bus: Bus) -> None:
    seen: list[object] = []

    async def handler(message: Message) -> None:
        seen.append(message)

    subscription = await bus.subscribe("a.b", handler)
    await subscription.close()
    await bus.publish("a.b", lease(0))
    await asyncio.sleep(0.1)
    assert seen == []


async def test_a_command_is_answered(bus: Bus) -> None:
    async def handler(message: Message) -> Message:
        assert isinstance(message, ShiftDown)
        return ShiftStepDone(duration_s=1.5, freed_bytes=len(message.replicas))

    await bus.serve("shift", handler)
    command = ShiftDown(shift_id="p1", role=Role.ROLLOUT, replicas=("rollout-0", "rollout-1"), deadline_s=5)
    reply = await bus.request("shift", command, ShiftStepDone, deadline_s=5, **ASK)
    assert reply == ShiftStepDone(duration_s=1.5, freed_bytes=2)


async def test_the_peers_error_is_raised_as_its_own_class(bus: Bus) -> None:
    async def handler(message: Message) -> Message:
        raise Conflict("rollout-0 is asleep", replica="rollout-0")

    await bus.serve("wake", handler)
    with pytest.raises(Conflict, match="rollout-0 is asleep") as raised:
        await bus.request("wake", lease(0), Done, deadline_s=5, **ASK)
    assert raised.value.data == {"replica": "rollout-0"}


async def test_a_bug_in_a_handler_reaches_the_caller(bus: Bus) -> None:
    async def handler(message: Message) -> Message:
        raise ZeroDivisionError("oops")

    await bus.serve("x", handler)
    with pytest.raises(Exception, match="ZeroDivisionError: oops"):
        await bus.request("x", lease(0), Done, deadline_s=5, **ASK)


async def test_a_silent_peer_costs_the_deadline_and_is_named(bus: Bus) -> None:
    async def handler(message: Message) -> Message:
        await asyncio.sleep(30)
        return Done()

    await bus.serve("slow", handler)
    with pytest.raises(
        DeadlineExceeded, match=r"planner: no answer from rollout in phase 'down' within 0.1 s"
    ):
        await bus.request("slow", lease(0), Done, deadline_s=0.1, **ASK)


async def test_an_absent_peer_is_known_at_once(bus: Bus) -> None:
    async with asyncio.timeout(2):
        with pytest.raises(NoResponder):
            await bus.request("nobody", lease(0), Done, deadline_s=30, **ASK)


async def test_commands_are_answered_concurrently(bus: Bus) -> None:
    both = asyncio.Barrier(2)

    async def handler(message: Message) -> Message:
        await both.wait()
        return Done()

    await bus.serve("meet", handler)
    async with asyncio.timeout(5):
        await asyncio.gather(*(bus.request("meet", lease(i), Done, deadline_s=5, **ASK) for i in range(2)))


async def test_an_oversized_message_is_refused_before_sending(bus: Bus) -> None:
    spec = SequenceSpec(
        sequence_id="s",
        attempt=0,
        prompt_token_ids=tuple([100_000] * 2_000_000),
        sampling=SamplingSpec(max_new_tokens=1),
    )
    with pytest.raises(MessageTooLarge, match=r"RunSequences has .* over the limit"):
        await bus.publish("a.b", RunSequences(sequences=(spec,)))


async def follow(bus: Bus, count: int, after_seq: int = 0) -> list[Stored[DeviceLease]]:
    seen: list[Stored[DeviceLease]] = []
    stream = SUBJECTS.scored_stream
    async with asyncio.timeout(10):
        async for stored in bus.follow(stream, SUBJECTS.scored, DeviceLease, after_seq=after_seq):
            seen.append(stored)
            if len(seen) == count:
                break
    return seen


async def test_a_stream_keeps_what_was_appended_and_then_follows(bus: Bus) -> None:
    first = await bus.append(SUBJECTS.scored, lease(1))
    following = asyncio.create_task(follow(bus, 2))
    await asyncio.sleep(0.2)
    second = await bus.append(SUBJECTS.scored, lease(2))
    assert await following == [Stored(first, lease(1)), Stored(second, lease(2))]
    assert await follow(bus, 1, after_seq=first) == [Stored(second, lease(2))]


async def test_a_repeated_dedupe_id_is_stored_once(bus: Bus) -> None:
    seqs = [await bus.append(SUBJECTS.scored, lease(1), dedupe_id="sample/1") for _ in range(3)]
    assert len(set(seqs)) == 1
    assert len(await bus.replay(SUBJECTS.scored_stream, SUBJECTS.scored, DeviceLease)) == 1


async def test_a_discarded_message_is_gone_and_discarding_twice_is_fine(bus: Bus) -> None:
    first, second = [await bus.append(SUBJECTS.scored, lease(i)) for i in range(2)]
    await bus.discard(SUBJECTS.scored_stream, first)
    await bus.discard(SUBJECTS.scored_stream, first)
    stored = await bus.replay(SUBJECTS.scored_stream, SUBJECTS.scored, DeviceLease)
    assert stored == [Stored(second, lease(1))]


async def test_replay_of_an_empty_stream_is_empty(bus: Bus) -> None:
    assert await bus.replay(SUBJECTS.scored_stream, SUBJECTS.scored, DeviceLease) == []


async def test_replay_gives_one_subject_only(bus: Bus) -> None:
    await bus.append(SUBJECTS.progress(Role.ROLLOUT, "rollout-0"), lease(1))
    await bus.append(SUBJECTS.progress(Role.REWARD, "reward-0"), lease(2))
    pattern = SUBJECTS.progress(Role.REWARD, "*")
    stored = await bus.replay(SUBJECTS.progress_stream, pattern, DeviceLease)
    assert [entry.message for entry in stored] == [lease(2)]


async def test_appending_where_no_stream_listens_is_an_error(bus: Bus) -> None:
    with pytest.raises(BusError):
        await bus.append("nowhere.at.all", lease(1))


async def test_ensuring_a_stream_twice_keeps_its_messages(bus: Bus) -> None:
    await bus.append(SUBJECTS.scored, lease(1))
    await bus.ensure_stream(SUBJECTS.scored_stream)
    assert len(await bus.replay(SUBJECTS.scored_stream, SUBJECTS.scored, DeviceLease)) == 1


async def test_swap_succeeds_once_per_revision(bus: Bus) -> None:
    assert await bus.kv_get("bucket", "0", DeviceLease) is None
    revision = await bus.kv_swap("bucket", "0", lease(0, "a"), 0)
    results = await asyncio.gather(
        *(bus.kv_swap("bucket", "0", lease(0, owner), revision) for owner in "bcd"), return_exceptions=True
    )
    assert sum(isinstance(result, Conflict) for result in results) == 2
    found = await bus.kv_get("bucket", "0", DeviceLease)
    assert found is not None
    assert found[0].owner in "bcd"
    with pytest.raises(Conflict):
        await bus.kv_swap("bucket", "0", lease(0, "z"), 0)


async def test_a_watcher_sees_the_present_value_and_later_ones(bus: Bus) -> None:
    seen: list[object] = []

    async def handler(value: DeviceLease) -> None:
        seen.append(value.owner)

    await bus.kv_put("bucket", "0", lease(0, "a"))
    await bus.kv_watch("bucket", "0", DeviceLease, handler)
    await until(seen, 1)
    await bus.kv_put("bucket", "0", lease(0, "b"))
    await bus.kv_put("bucket", "1", lease(1, "other key"))
    await until(seen, 2)
    assert seen == ["a", "b"]


async def test_connecting_to_nothing_fails_within_its_deadline() -> None:
    async with asyncio.timeout(3):
        with pytest.raises(BusError, match="no NATS server answers at"):
            await connect("nats://127.0.0.1:9", timeout_s=0.2)
