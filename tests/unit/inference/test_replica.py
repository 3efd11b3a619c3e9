"""The replica worker over the simulated engine: states, transactions, and no token lost or sent twice."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from shared.contracts.gps import PoolView, ReadGrant
from shared.contracts.replica import (
    AbortSequences,
    RefreshReplica,
    ReplicaTelemetry,
    RunSequences,
    SequenceProgress,
    SequenceSpec,
    SleepReplica,
    TokenDelta,
    WakeReplica,
)
from shared.errors import BusError, Conflict, EngineError, TransportError
from shared.ids import ReplicaId, Role
from shared.inference.engines.simulated_engine import SimulatedEngine
from shared.inference.ports import LoadSnapshot, ReadReport
from shared.inference.replica import ReplicaWorker
from tests.support import engine_contract as contract

STEP_S = 0.001


class Engine(SimulatedEngine):
    """Breaks where a test says so, and notes the threads that call it."""

    def __init__(self) -> None:
        super().__init__(lambda n, tokens: STEP_S)
        self.threads: set[str] = set()
        self.on_wake: Callable[[], None] = lambda: None
        self.on_refresh: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None

    def wake(self, view: PoolView, version: int) -> ReadReport:
        report = super().wake(view, version)
        self.on_wake()
        return report

    def refresh(self, view: PoolView, version: int) -> ReadReport:
        self.on_refresh()
        return super().refresh(view, version)

    def step(self) -> list[TokenDelta]:
        self.threads.add(threading.current_thread().name)
        self.on_step()
        return super().step()

    def load_snapshot(self) -> LoadSnapshot:
        self.threads.add(threading.current_thread().name)
        return super().load_snapshot()


class Weights:
    """GPS at a version of the test's choosing; counts the leases that are out."""

    def __init__(self) -> None:
        self.version = 5
        self.leases = 0
        self.error: Exception | None = None
        self.grants_any = False

    @asynccontextmanager
    async def read(self, min_version: int) -> AsyncIterator[ReadGrant]:
        if self.error is not None:
            raise self.error
        version = self.version if self.grants_any else max(self.version, min_version)
        view = PoolView(path="/nowhere", nbytes=1 << 20, tensors=())
        self.leases += 1
        try:
            yield ReadGrant(
                model="m", version=version, lease_id="l", view=view, plan_id="p", nbytes=view.nbytes
            )
        finally:
            self.leases -= 1


class House:
    """A worker that runs, and everything it says."""

    def __init__(self) -> None:
        self.engine, self.weights = Engine(), Weights()
        self.progress: list[SequenceProgress] = []
        self.telemetry: list[ReplicaTelemetry] = []
        self.said = asyncio.Condition()
        self.bus_is_down = False
        self.bus_delay_s = 0.0
        self.worker = ReplicaWorker(
            replica_id=ReplicaId("rollout-0"),
            role=Role.ROLLOUT,
            devices=(0, 1),
            engine=self.engine,
            weights=self.weights,
            publish_progress=self._on_progress,
            publish_telemetry=self._on_telemetry,
            incarnation="first",
        )
        self.life: asyncio.Future[None] | None = None

    async def _on_progress(self, message: SequenceProgress) -> None:
        if self.bus_is_down:
            raise BusError("broker gone")
        await asyncio.sleep(self.bus_delay_s)
        async with self.said:
            self.progress.append(message)
            self.said.notify_all()

    async def _on_telemetry(self, message: ReplicaTelemetry) -> None:
        async with self.said:
            self.telemetry.append(message)
            self.said.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10), self.said:
            await self.said.wait_for(condition)

    def deltas(self, attempt: int | None = None) -> list[TokenDelta]:
        return [
            delta
            for message in self.progress
            for delta in message.deltas
            if attempt is None or delta.attempt == attempt
        ]

    def is_finished(self, sequence_id: str) -> bool:
        return any(d.sequence_id == sequence_id and d.finish_reason for d in self.deltas())

    async def run(self, *specs: SequenceSpec) -> None:
        await self.worker.run(RunSequences(sequences=specs))


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    house.life = asyncio.ensure_future(house.worker.run_forever())
    await asyncio.wait_for(house.worker.ready.wait(), 10)
    yield house
    house.life.cancel()
    with suppress(asyncio.CancelledError, EngineError):
        await house.life
    await house.worker.close()


@pytest.fixture
async def awake(house: House) -> House:
    await house.worker.wake(WakeReplica())
    return house


async def test_a_wake_reads_proves_its_version_and_serves(house: House) -> None:
    assert house.worker.state == "asleep"
    woke = await house.worker.wake(WakeReplica(min_version=7))
    assert (woke.version, woke.read_bytes, house.worker.state) == (7, 1 << 20, "awake")
    assert woke.kv_capacity_tokens == 100_000
    assert house.weights.leases == 0
    await house.run(contract.spec("a", max_new_tokens=30))
    await house.until(lambda: house.is_finished("a"))
    assert len(contract.tokens_of(house.deltas(), "a")) == 30
    assert {version for delta in house.deltas() for version, _ in delta.versions} == {7}


async def test_sleep_gives_memory_back_and_refuses_while_sequences_run(awake: House) -> None:
    await awake.run(contract.spec("a", max_new_tokens=10_000))
    with pytest.raises(Conflict, match="runs 1 sequences"):
        await awake.worker.sleep(SleepReplica())
    await awake.worker.abort(AbortSequences(sequences=None))
    slept = await awake.worker.sleep(SleepReplica())
    assert slept.freed_bytes == 2 << 30
    assert slept.resident_bytes == 1 << 28
    assert awake.worker.state == "asleep"


async def test_commands_in_the_wrong_state_name_the_state(house: House) -> None:
    for command in (
        house.run(contract.spec("a")),
        house.worker.sleep(SleepReplica()),
        house.worker.refresh(RefreshReplica(min_version=1)),
    ):
        with pytest.raises(Conflict, match="asleep"):
            await command
    await house.worker.wake(WakeReplica())
    with pytest.raises(Conflict, match="is awake"):
        await house.worker.wake(WakeReplica())


async def test_commands_before_the_start_name_the_state() -> None:
    house = House()
    with pytest.raises(Conflict, match="starting"):
        await house.worker.wake(WakeReplica())
    assert (await house.worker.abort(AbortSequences(sequences=None))).deltas == ()


async def test_only_one_transition_at_a_time(awake: House) -> None:
    release = threading.Event()
    awake.engine.on_refresh = lambda: assert_true(release.wait(10))
    refresh = asyncio.ensure_future(awake.worker.refresh(RefreshReplica(min_version=9)))
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="busy with refresh"):
        await awake.worker.sleep(SleepReplica())
    run = asyncio.ensure_future(awake.run(contract.spec("a", max_new_tokens=3)))
    release.set()
    assert (await refresh).version == 9
    await run
    await awake.until(lambda: awake.is_finished("a"))
    assert {version for delta in awake.deltas() for version, _ in delta.versions} == {9}


def assert_true(value: bool) -> None:
    assert value


async def test_abort_and_resume_lose_and_repeat_nothing(awake: House) -> None:
    """Ten interruptions at arbitrary moments, over a bus slower than the engine."""
    awake.bus_delay_s = 0.01
    total, parts = 1200, list[int]()
    for attempt in range(10):
        await awake.run(contract.spec("a", attempt=attempt, generated=tuple(parts), max_new_tokens=total))
        await asyncio.sleep(0.03 + 0.013 * attempt)
        answer = await awake.worker.abort(AbortSequences(sequences=(("a", attempt), ("ghost", 0))))
        assert answer.unknown == (("ghost", 0),)
        assert len(answer.deltas) == 1
        deltas = [*awake.deltas(attempt), *answer.deltas]
        parts += contract.tokens_of(deltas, "a", start=len(parts))
    assert 10 < len(parts) < total
    await awake.run(contract.spec("a", attempt=99, generated=tuple(parts), max_new_tokens=total))
    await awake.until(lambda: awake.is_finished("a"))
    parts += contract.tokens_of(awake.deltas(99), "a", start=len(parts))
    assert len(parts) == total
    await awake.run(contract.spec("a", attempt=100, max_new_tokens=total))
    await awake.until(lambda: len(contract.tokens_of(awake.deltas(100), "a")) == total)
    assert contract.tokens_of(awake.deltas(100), "a") == parts


async def test_abort_of_a_finished_sequence_is_unknown_and_its_end_is_sent(awake: House) -> None:
    await awake.run(contract.spec("a", max_new_tokens=2), contract.spec("b", max_new_tokens=10_000))
    await awake.until(lambda: awake.is_finished("a"))
    answer = await awake.worker.abort(AbortSequences(sequences=(("a", 0), ("b", 0))))
    assert answer.unknown == (("a", 0),)
    assert [delta.sequence_id for delta in answer.deltas] == ["b"]


async def test_a_repeated_run_starts_nothing_twice(awake: House) -> None:
    spec = contract.spec("a", max_new_tokens=50)
    await awake.run(spec)
    await awake.run(spec)
    await awake.until(lambda: awake.is_finished("a"))
    assert len(contract.tokens_of(awake.deltas(), "a")) == 50


async def test_a_sequence_that_cannot_run_is_reported_and_the_rest_runs(awake: House) -> None:
    await awake.run(contract.spec("bad", prompt=(1,) * 50_000), contract.spec("good", max_new_tokens=3))
    await awake.until(lambda: awake.is_finished("good"))
    (bad,) = [delta for delta in awake.deltas() if delta.sequence_id == "bad"]
    assert bad.error is not None
    assert "do not fit" in bad.error
    assert awake.worker.telemetry().num_running == 0


async def test_a_refresh_keeps_running_sequences_and_stamps_versions(awake: House) -> None:
    await awake.run(contract.spec("a", max_new_tokens=600))
    await awake.until(lambda: bool(awake.progress))
    refreshed = await awake.worker.refresh(RefreshReplica(min_version=6))
    assert (refreshed.version, refreshed.read_bytes) == (6, 1 << 20)
    await awake.until(lambda: awake.is_finished("a"))
    stamps = [version for d in awake.deltas() for version, count in d.versions for _ in range(count)]
    assert len(stamps) == 600
    assert stamps == sorted(stamps)
    assert set(stamps) == {5, 6}


async def test_a_refresh_to_a_held_version_reads_nothing(awake: House) -> None:
    refreshed = await awake.worker.refresh(RefreshReplica(min_version=3))
    assert (refreshed.version, refreshed.read_bytes) == (5, 0)


@pytest.mark.parametrize("where", ["lease", "engine", "version"])
async def test_a_failed_wake_leaves_it_asleep_with_everything_freed(house: House, where: str) -> None:
    def fail() -> None:
        raise EngineError("out of memory")

    if where == "lease":
        house.weights.error = TransportError("no holder")
    elif where == "engine":
        house.engine.on_wake = fail
    else:
        house.weights.grants_any = True
    with pytest.raises((TransportError, EngineError, Conflict)):
        await house.worker.wake(WakeReplica(min_version=8))
    assert house.worker.state == "asleep"
    assert house.engine.load_snapshot().resident_bytes == 1 << 28
    assert house.weights.leases == 0
    house.weights.error, house.engine.on_wake, house.weights.grants_any = None, lambda: None, False
    assert (await house.worker.wake(WakeReplica(min_version=8))).version == 8


async def test_a_cancelled_wake_holds_its_lease_until_the_engine_is_done(house: House) -> None:
    entered, release, leases_then = threading.Event(), threading.Event(), []

    def slow() -> None:
        entered.set()
        assert release.wait(10)
        leases_then.append(house.weights.leases)

    house.engine.on_wake = slow
    wake = asyncio.ensure_future(house.worker.wake(WakeReplica()))
    await asyncio.to_thread(entered.wait, 10)
    wake.cancel()
    await asyncio.sleep(0.05)
    assert not wake.done()
    assert house.worker.state == "waking"
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await wake
    assert leases_then == [1]
    assert house.worker.state == "asleep"
    assert house.engine.load_snapshot().resident_bytes == 1 << 28


async def test_telemetry_flows_while_the_engine_is_busy(house: House) -> None:
    house.engine.on_wake = lambda: time.sleep(0.8)
    house.telemetry.clear()
    await house.worker.wake(WakeReplica())
    assert [message.state for message in house.telemetry].count("waking") >= 2


async def test_an_empty_abort_is_answered_while_the_engine_is_busy(house: House) -> None:
    release = threading.Event()
    house.engine.on_wake = lambda: assert_true(release.wait(10))
    wake = asyncio.ensure_future(house.worker.wake(WakeReplica()))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(house.worker.abort(AbortSequences(sequences=())), 1)
    release.set()
    await wake


async def test_telemetry_tells_load_rate_and_version(awake: House) -> None:
    await awake.run(*(contract.spec(f"s{i}", max_new_tokens=400) for i in range(4)))
    await awake.until(lambda: awake.telemetry[-1].tokens_per_s > 0 and awake.telemetry[-1].num_running == 4)
    message = awake.telemetry[-1]
    assert (message.state, message.policy_version, message.devices) == ("awake", 5, (0, 1))
    assert message.lengths == (message.lengths[0],) * 4
    assert message.lengths[0] > len(contract.PROMPT)
    assert message.generated_tokens_total >= 4
    assert 0 < message.tokens_per_s < 4 / STEP_S
    assert message.step_latency_s >= STEP_S


async def test_progress_survives_a_broker_that_is_gone_for_a_while(awake: House) -> None:
    awake.bus_is_down = True
    await awake.run(contract.spec("a", max_new_tokens=100))
    await asyncio.sleep(0.3)
    assert not awake.progress
    awake.bus_is_down = False
    await awake.until(lambda: awake.is_finished("a"))
    assert len(contract.tokens_of(awake.deltas(), "a")) == 100


async def test_a_step_that_fails_ends_the_worker_with_its_error(awake: House) -> None:
    def fail() -> None:
        raise EngineError("device lost")

    await awake.run(contract.spec("a", max_new_tokens=10_000))
    await awake.until(lambda: bool(awake.progress))
    awake.engine.on_step = fail
    assert awake.life is not None
    with pytest.raises(EngineError, match="device lost"):
        await asyncio.wait_for(awake.life, 10)
    with pytest.raises(EngineError, match="ended"):
        await awake.worker.refresh(RefreshReplica(min_version=99))


async def test_a_torn_refresh_ends_the_worker(awake: House) -> None:
    def fail() -> None:
        awake.engine._version = -1
        raise EngineError("read failed half way")

    awake.engine.on_refresh = fail
    with pytest.raises(EngineError, match="half way"):
        await awake.worker.refresh(RefreshReplica(min_version=9))
    assert awake.life is not None
    with pytest.raises(EngineError, match="torn"):
        await asyncio.wait_for(awake.life, 10)


async def test_a_refresh_that_fails_before_it_touches_anything_changes_nothing(awake: House) -> None:
    def fail() -> None:
        raise EngineError("cannot map")

    awake.engine.on_refresh = fail
    with pytest.raises(EngineError, match="cannot map"):
        await awake.worker.refresh(RefreshReplica(min_version=9))
    await awake.run(contract.spec("a", max_new_tokens=3))
    await awake.until(lambda: awake.is_finished("a"))
    assert {version for delta in awake.deltas() for version, _ in delta.versions} == {5}


async def test_one_thread_calls_the_engine(awake: House) -> None:
    await awake.run(contract.spec("a", max_new_tokens=20))
    await awake.until(lambda: awake.is_finished("a"))
    assert awake.engine.threads == {"engine-rollout-0"}
