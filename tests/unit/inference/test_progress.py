"""The progress buffer: each token leaves it once, in order, whatever the bus and the aborts do."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.replica import TokenDelta
from shared.errors import BusError
from shared.inference.progress import ProgressBuffer, ProgressOutbox, merge


def delta(sequence: str, start: int, count: int, version: int = 0, end: bool = False) -> TokenDelta:
    """Tokens named by their position."""
    return TokenDelta(
        sequence_id=sequence,
        attempt=0,
        start=start,
        token_ids=tuple(range(start, start + count)),
        logprobs=(-1.0,) * count,
        versions=((version, count),) if count else (),
        finish_reason="stop" if end else None,
    )


def test_merge_joins_runs_of_one_version() -> None:
    joined = merge(merge(delta("a", 0, 2, 1), delta("a", 2, 3, 1)), delta("a", 5, 1, 2, end=True))
    assert joined.token_ids == (0, 1, 2, 3, 4, 5)
    assert joined.versions == ((1, 5), (2, 1))
    assert joined.finish_reason == "stop"


def test_an_empty_last_delta_ends_a_sequence_without_a_version() -> None:
    joined = merge(delta("a", 0, 2, 1), delta("a", 2, 0, end=True))
    assert (joined.versions, joined.finish_reason) == (((1, 2),), "stop")


def test_messages_stay_small() -> None:
    buffer = ProgressBuffer()
    for i in range(10):
        buffer.add(delta(f"s{i}", 0, 30))
    sizes = []
    while buffer:
        sizes.append(sum(len(d.token_ids) for d in buffer.take(max_tokens=50)))
    assert sizes == [60] * 5


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "send", "fail", "abort"]), st.integers(0, 3)), max_size=60))
def test_every_token_leaves_once_and_in_order(actions: list[tuple[str, int]]) -> None:
    buffer = ProgressBuffer()
    produced = dict.fromkeys(range(4), 0)
    out: dict[str, list[int]] = {str(i): [] for i in range(4)}

    def leave(gone: TokenDelta) -> None:
        assert gone.start == len(out[gone.sequence_id])
        out[gone.sequence_id] += gone.token_ids

    for action, i in actions:
        if action == "add":
            buffer.add(delta(str(i), produced[i], i + 1))
            produced[i] += i + 1
        elif action == "send":
            for gone in buffer.take(max_tokens=4):
                leave(gone)
        elif action == "fail":
            taken = buffer.take(max_tokens=4)
            buffer.add(delta(str(i), produced[i], 1))
            produced[i] += 1
            buffer.put_back(taken)
        elif (withdrawn := buffer.withdraw((str(i), 0))) is not None:
            leave(withdrawn)
    while buffer:
        for gone in buffer.take():
            leave(gone)
    assert out == {str(i): list(range(count)) for i, count in produced.items()}


async def test_withdrawing_waits_for_the_message_under_way() -> None:
    sent: list[TokenDelta] = []
    arrive = asyncio.Event()

    async def publish(deltas: tuple[TokenDelta, ...]) -> None:
        await arrive.wait()
        sent.extend(deltas)

    outbox = ProgressOutbox(publish)
    outbox.add(delta("a", 0, 3))
    flush = asyncio.ensure_future(outbox.flush())
    await asyncio.sleep(0)
    outbox.add(delta("a", 3, 2))
    withdraw = asyncio.ensure_future(outbox.withdraw([delta("a", 5, 0)]))
    await asyncio.sleep(0)
    assert not withdraw.done()
    arrive.set()
    (rest,) = await withdraw
    await flush

    assert [token for d in [*sent, rest] for token in d.token_ids] == [0, 1, 2, 3, 4]


async def test_what_the_bus_refuses_is_sent_later_and_before_newer_tokens() -> None:
    sent: list[TokenDelta] = []
    is_down = True

    async def publish(deltas: tuple[TokenDelta, ...]) -> None:
        if is_down:
            raise BusError("gone")
        sent.extend(deltas)

    outbox = ProgressOutbox(publish)
    outbox.add(delta("a", 0, 3))
    await outbox.flush()
    outbox.add(delta("a", 3, 2))
    is_down = False
    await outbox.flush()
    assert [d.token_ids for d in sent] == [(0, 1, 2, 3, 4)]
