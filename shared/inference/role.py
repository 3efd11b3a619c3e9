"""The shell around a role's scheduler: messages in, events to the scheduler, effects out to replicas.

Who waits for whom:

    submit ─► scheduler ─► outbox of the replica ─► run / abort request ─► replica
    replica ─► progress stream ─► record ─► scheduler, and `on_finished` at the end
    abort reply ─► waits until progress has brought the record to where the reply starts ─► scheduler
    shift down ─► waits until the scheduler says the replica is empty ─► sleep request
    shift up ─► wake request (the replica Reads from GPS and proves its version) ─► scheduler

Whoever waits is freed by a deadline, or at once when the replica's process is replaced: a replica that
answers no more is declared dead, its sequences go back to the queue with the tokens seen so far, and the
waiters see that. A replica makes one transition at a time (`_turns`), whoever asks: the planner, a
version, or its health."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.bus.ports import Bus, Subscription
from shared.contracts.base import Done, Message
from shared.contracts.planner import DeviceLease, ShiftDown, ShiftStepDone, ShiftUp
from shared.contracts.replica import (
    AbortSequences,
    RefreshReplica,
    ReplicaRefreshed,
    ReplicaSlept,
    ReplicaTelemetry,
    ReplicaWoke,
    RunSequences,
    SequenceProgress,
    SequencesAborted,
    SequenceSpec,
    SleepReplica,
    TokenDelta,
    WakeReplica,
)
from shared.contracts.role import ReplicaQueue, RoleQueue
from shared.contracts.subjects import Subjects
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NoResponder,
    NotFound,
    PivotError,
    ShiftFailed,
)
from shared.ids import DeviceId, ReplicaId, Role, SequenceId
from shared.inference.records import SequenceRecord
from shared.planning.cluster import ReplicaSlot
from shared.runtime.clock import Clock
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.sequence import (
    AbortSequence,
    Phase,
    ReplicaDied,
    ReplicaShiftedUp,
    ReplicaShiftingDown,
    RunSequence,
    SchedulerEvent,
    SequenceAborted,
    SequenceCancelled,
    SequenceFailed,
    SequenceFinished,
    SequencesRetired,
    SequenceSubmitted,
    Tick,
    TokensGenerated,
)

COMMAND_DEADLINE_S = 30.0
WAKE_DEADLINE_S = 90.0
SILENCE_S = 2.0
"""A replica silent for this long is asked whether it lives."""
DEATH_S = 20.0
"""One that neither reports nor answers for this long is taken for dead."""
SHIFT_MARGIN_S = 2.0
HEALTH_INTERVAL_S = 0.5
MAX_ASTRAY = 4
"""Looks at a replica in a state it should not be in before anything is done: telemetry lags a shift."""
PING_DEADLINE_S = 2.0
SETTLE_S = 3.0
"""How long a sequence that an abort did not find may take to show up as finished."""
MAX_RUN_TOKENS = 500_000
"""Of one run command: a few MB on the wire."""

log = logging.getLogger("pivotrl.role")

M = TypeVar("M", bound=Message)
OnFinished = Callable[[SequenceRecord], Awaitable[None]]
OnFailed = Callable[[SequenceRecord, str], Awaitable[None]]


@dataclass(slots=True)
class _Replica:
    """What is known of one replica process."""

    id: ReplicaId
    devices: tuple[DeviceId, ...]
    outbox: asyncio.Queue[RunSequence | AbortSequence] = field(default_factory=asyncio.Queue)
    telemetry: ReplicaTelemetry | None = None
    seen_s: float = float("-inf")
    is_active: bool = False
    """Serves, as far as the planner is concerned; a crashed one is woken again."""
    is_shifting: bool = False
    version: int = 0
    """Of its parameters, as it proved at its last wake or refresh."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held through a wake, sleep or refresh: a replica refuses a second one meanwhile."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this life of it is over; the next life has another."""


class RoleShell:
    """One generating role: rollout or reward."""

    def __init__(
        self,
        role: Role,
        slots: Iterable[ReplicaSlot],
        scheduler: Scheduler,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        *,
        on_finished: OnFinished,
        on_failed: OnFailed,
    ) -> None:
        self._first_attempt = int(clock.unix_s() * 1000) << 10
        """Attempts on the wire grow over restarts of this process too: a late delta never fits by chance."""
        self.role = role
        self.scheduler = scheduler
        self.records: dict[str, SequenceRecord] = {}
        self._replicas = {slot.id: _Replica(slot.id, tuple(slot.devices)) for slot in slots}
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self._on_finished, self._on_failed = on_finished, on_failed
        self._progressed = asyncio.Condition()
        self._subscriptions: list[Subscription] = []
        self._min_version = 0
        self.num_lost_tail_tokens = 0
        self.num_replica_deaths = 0
        self.num_migrated = 0
        self.describe: Callable[[], tuple[int, int, int, str]] = lambda: (len(self.records), 0, 0, "")
        """Gives (outstanding, issued, finished, blocked on) for the role's queue message."""

    # Life

    async def start(self) -> None:
        """Joins the bus. Tasks to spawn for ever are those of `tasks`."""
        telemetry = self._subjects.telemetry(self.role, "*")
        self._subscriptions += [
            await self._bus.subscribe(telemetry, self._on_telemetry),
            await self._bus.serve(self._subjects.shift(self.role, "down"), self._on_shift_down),
            await self._bus.serve(self._subjects.shift(self.role, "up"), self._on_shift_up),
        ]

    def tasks(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """Named endless tasks that the process runs."""
        workers: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            (f"{what} {replica.id}", lambda replica=replica, task=task: task(replica))  # type: ignore[misc]
            for replica in self._replicas.values()
            for what, task in (("outbox", self._work), ("health", self._watch_health))
        ]
        return [
            ("progress", self._follow_progress),
            ("dispatch", self._tick),
            ("queue report", self._report),
            *workers,
        ]

    async def _adopt(self) -> None:
        """After a restart: a replica that the leases still give to this role serves again. `_watch_health`
        sees to it, whether it is awake or was restarted too."""
        for replica in self._replicas.values():
            found = [
                await self._bus.kv_get(self._subjects.device_bucket, f"{device}", DeviceLease)
                for device in replica.devices
            ]
            replica.is_active = all(entry is not None and entry[0].owner == replica.id for entry in found)
            if replica.is_active:
                log.warning("%s still holds its devices", replica.id)

    async def recover(self, records: Sequence[SequenceRecord]) -> int:
        """After a restart: takes back unfinished sequences with the tokens the progress stream still holds.
        Returns the number of tokens that need not be generated again. Replicas are told to stop."""
        await self._adopt()
        for record in records:
            self.records[record.sequence_id] = record
        # Stop first: when a replica answers, all it sent is in the stream, and its answer goes on from there.
        answers = await asyncio.gather(*(self._stop_all(replica) for replica in self._replicas.values()))
        subject = self._subjects.progress(self.role, "*")
        stored = await self._bus.replay(self._subjects.progress_stream, subject, SequenceProgress)
        self._follow_after = stored[-1].seq if stored else 0
        sent = (delta for entry in stored for delta in entry.message.deltas)
        for delta in (*sent, *(delta for answer in answers for delta in answer)):
            if (known := self.records.get(delta.sequence_id)) is not None:
                known.restore(delta)
        finished = [r for r in records if r.finish_reason is not None]
        for record in finished:
            del self.records[record.sequence_id]
            await self._on_finished(record)
        for record in records:
            if record.finish_reason is None:
                self._submit(record)
        return sum(record.num_tokens for record in records)

    _follow_after = 0

    async def _stop_all(self, replica: _Replica) -> tuple[TokenDelta, ...]:
        """Ends whatever a replica runs; nothing if it does not answer."""
        everything = AbortSequences(sequences=None)
        with contextlib.suppress(PivotError):
            answer = await self._ask(replica, "abort", everything, SequencesAborted, 5.0, "stop all")
            return answer.deltas
        return ()

    # Sequences

    def submit(self, record: SequenceRecord) -> None:
        """
        Raises:
            Conflict: a sequence of that id is under way.
        """
        if record.sequence_id in self.records:
            raise Conflict(f"sequence {record.sequence_id} is under way", sequence=record.sequence_id)
        self.records[record.sequence_id] = record
        self._submit(record)

    def _submit(self, record: SequenceRecord) -> None:
        self._step(
            SequenceSubmitted(
                SequenceId(record.sequence_id),
                len(record.prompt_token_ids),
                record.sampling.max_new_tokens,
                record.num_tokens,
            )
        )

    def cancel(self, sequence_id: str) -> None:
        """Nobody waits for it any more; unknown is fine."""
        if self.records.pop(sequence_id, None) is not None:
            self._step(SequenceCancelled(SequenceId(sequence_id)))
            self._forget(sequence_id)

    def _forget(self, sequence_id: str) -> None:
        """The scheduler need not know it any longer, if it is done with it."""
        self._step(SequencesRetired((SequenceId(sequence_id),)))

    def describe_sequence(self, sequence_id: str) -> dict[str, object]:
        """
        Raises:
            NotFound: no such sequence is under way.
        """
        record = self.records.get(sequence_id)
        if record is None:
            raise NotFound(
                f"no sequence {sequence_id} is under way in {self.role.value}", sequence=sequence_id
            )
        state = self.scheduler.sequence(SequenceId(sequence_id))
        return {
            "sequence_id": sequence_id,
            "place": state.place.phase.value if state else "unknown",
            "replica": state.place.replica if state else None,
            "attempt": state.attempt if state else record.attempt,
            "prompt_tokens": len(record.prompt_token_ids),
            "generated_tokens": record.num_tokens,
            "versions": record.versions,
        }

    def describe_replicas(self) -> list[dict[str, object]]:
        now = self._clock.now_s()
        return [
            {
                "replica_id": replica.id,
                "active": replica.is_active,
                "shifting": replica.is_shifting,
                "seen_s_ago": round(now - replica.seen_s, 2) if replica.telemetry else None,
                "telemetry": replica.telemetry.model_dump(mode="json") if replica.telemetry else None,
            }
            for replica in self._replicas.values()
        ]

    def ready(self) -> str | None:
        """None once every replica has reported; else the missing ones."""
        missing = [
            r.id for r in self._replicas.values() if r.telemetry is None or r.telemetry.state == "starting"
        ]
        return f"replicas {', '.join(missing)}" if missing else None

    @property
    def active_replicas(self) -> tuple[str, ...]:
        return tuple(r.id for r in self._replicas.values() if r.is_active)

    # Scheduler in and out

    def _step(self, event: SchedulerEvent) -> None:
        for effect in self.scheduler.step(event, self._clock.now_s()):
            self._replicas[effect.replica].outbox.put_nowait(effect)

    async def _work(self, replica: _Replica) -> None:
        """Carries out one replica's effects in order, as many as are waiting in one request."""
        while True:
            effects = [await replica.outbox.get()]
            while not replica.outbox.empty() and type(replica.outbox._queue[0]) is type(effects[0]):  # type: ignore[attr-defined]
                effects.append(replica.outbox.get_nowait())
            life = replica.lost
            try:
                if isinstance(effects[0], RunSequence):
                    await self._run(replica, [e for e in effects if isinstance(e, RunSequence)])
                    continue
                reply = await self._abort(replica, [e for e in effects if isinstance(e, AbortSequence)])
            except PivotError as error:
                if replica.lost is life:
                    log.warning("%s: %s", replica.id, error.message)
                    self._lost(replica)
                continue
            await self._take_answer(replica, reply)

    async def _run(self, replica: _Replica, effects: list[RunSequence]) -> None:
        specs: list[SequenceSpec] = []
        size = 0
        for effect in effects:
            record = self.records.get(effect.sequence)
            state = self.scheduler.sequence(effect.sequence)
            if record is None or state is None or state.attempt != effect.attempt:
                continue  # cancelled or moved on meanwhile
            record.attempt = self._first_attempt + effect.attempt
            specs.append(record.spec(record.attempt))
            size += len(record.prompt_token_ids) + record.num_tokens
            if size >= MAX_RUN_TOKENS:
                await self._start(replica, specs)
                specs, size = [], 0
        if specs:
            await self._start(replica, specs)

    async def _start(self, replica: _Replica, specs: list[SequenceSpec]) -> None:
        command = RunSequences(sequences=tuple(specs))
        await self._ask(replica, "run", command, Done, COMMAND_DEADLINE_S, "run")

    async def _abort(self, replica: _Replica, effects: list[AbortSequence]) -> SequencesAborted:
        keys = tuple((str(effect.sequence), self._first_attempt + effect.attempt) for effect in effects)
        return await self._ask(
            replica, "abort", AbortSequences(sequences=keys), SequencesAborted, COMMAND_DEADLINE_S, "abort"
        )

    async def _take_answer(self, replica: _Replica, reply: SequencesAborted) -> None:
        for delta in reply.deltas:
            await self._take_abort(replica, delta)
        unknown = ((name, attempt - self._first_attempt) for name, attempt in reply.unknown)
        await asyncio.gather(*(self._take_unknown(replica, name, attempt) for name, attempt in unknown))

    async def _take_abort(self, replica: _Replica, delta: TokenDelta) -> None:
        record = self.records.get(delta.sequence_id)
        if record is not None:
            if record.has_gap_before(delta):  # earlier tokens are still on their way through the stream
                await self._until(lambda: not record.has_gap_before(delta), 5.0)
            if record.has_gap_before(delta):
                self.num_lost_tail_tokens += len(delta.token_ids)
            else:
                record.extend(delta)
        if record is not None and record.finish_reason is not None:
            await self._finished(replica, record, delta.attempt)
            return
        tokens = record.num_tokens if record is not None else 0
        self.num_migrated += 1
        attempt = delta.attempt - self._first_attempt
        self._step(SequenceAborted(SequenceId(delta.sequence_id), replica.id, attempt, tokens))
        if record is None:
            self._forget(delta.sequence_id)
        await self._notify()

    async def _take_unknown(self, replica: _Replica, sequence_id: str, attempt: int) -> None:
        """The replica does not run it: it finished (that delta is on its way), or it never got there."""
        sequence = SequenceId(sequence_id)

        def is_settled() -> bool:
            state = self.scheduler.sequence(sequence)
            return state is None or state.attempt != attempt or state.place.phase is not Phase.ABORTING

        await self._until(lambda: is_settled() or sequence_id not in self.records, SETTLE_S)
        if not is_settled():
            record = self.records.get(sequence_id)
            tokens = record.num_tokens if record is not None else 0
            self._step(SequenceAborted(sequence, replica.id, attempt, tokens))
        if sequence_id not in self.records:
            self._forget(sequence_id)
        await self._notify()

    # Progress

    async def _follow_progress(self) -> None:
        subject = self._subjects.progress(self.role, "*")
        stream = self._subjects.progress_stream
        async for stored in self._bus.follow(stream, subject, SequenceProgress, after_seq=self._follow_after):
            for delta in stored.message.deltas:
                await self._take_delta(ReplicaId(stored.message.replica_id), delta)
            await self._notify()

    async def _take_delta(self, replica_id: ReplicaId, delta: TokenDelta) -> None:
        record = self.records.get(delta.sequence_id)
        replica = self._replicas.get(replica_id)
        if record is None or replica is None or delta.attempt != record.attempt:
            return
        if record.has_gap_before(delta):
            log.error("%s: gap before token %d of %s", replica_id, delta.start, delta.sequence_id)
            return
        sequence, attempt = SequenceId(delta.sequence_id), delta.attempt - self._first_attempt
        if delta.error is not None:
            self._step(SequenceFailed(sequence, replica_id, attempt, delta.error))
            self._step(SequenceCancelled(sequence))  # where it went meanwhile it would fail as well
            del self.records[delta.sequence_id]
            await self._on_failed(record, delta.error)
            self._forget(delta.sequence_id)
            return
        record.extend(delta)
        if record.finish_reason is not None:
            await self._finished(replica, record, delta.attempt)
        else:
            self._step(TokensGenerated(sequence, replica_id, attempt, record.num_tokens))

    async def _finished(self, replica: _Replica, record: SequenceRecord, attempt: int) -> None:
        sequence = SequenceId(record.sequence_id)
        if self.records.pop(record.sequence_id, None) is None:
            return
        self._step(SequenceFinished(sequence, replica.id, attempt - self._first_attempt, record.num_tokens))
        self._step(SequenceCancelled(sequence))  # its replica was taken for dead, and it was to run elsewhere
        await self._on_finished(record)
        self._forget(record.sequence_id)
        await self._notify()

    # Health

    async def _on_telemetry(self, message: Message) -> None:
        assert isinstance(message, ReplicaTelemetry)
        replica = self._replicas.get(ReplicaId(message.replica_id))
        if replica is None:
            return
        before, replica.telemetry, replica.seen_s = replica.telemetry, message, self._clock.now_s()
        if before is not None and before.incarnation != message.incarnation:
            log.warning("%s restarted", replica.id)
            self._lost(replica)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self._step(Tick())

    async def _watch_health(self, replica: _Replica) -> None:
        """One replica: whether it lives, and serves just while it should, with the version it should."""
        num_astray = 0
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if replica.turn.locked():
                continue
            num_astray = num_astray + 1 if self._is_astray(replica) else 0
            if not replica.is_active:
                if num_astray >= MAX_ASTRAY:
                    await self._put_down(replica)
                continue
            silent_s = self._clock.now_s() - replica.seen_s
            is_dead = silent_s > SILENCE_S and await self._is_dead(replica, silent_s)
            if is_dead or num_astray >= MAX_ASTRAY:
                self._lost(replica)
            if self._is_down(replica) and self._state(replica) in ("asleep", "awake"):
                await self._revive(replica)
            elif replica.version < self._min_version:
                await self._refresh(replica, self._min_version)

    def _is_astray(self, replica: _Replica) -> bool:
        """What it says of itself is not what it should be: awake without its devices, or not awake while
        sequences are given to it (it was restarted before its first life was heard of)."""
        state = self._state(replica)
        if not replica.is_active:
            return state == "awake"
        return state in ("asleep", "starting") and not self._is_down(replica)

    async def _is_dead(self, replica: _Replica, silent_s: float) -> bool:
        """An empty abort is a question any living replica answers at once."""
        try:
            ping = AbortSequences(sequences=())
            await self._ask(replica, "abort", ping, SequencesAborted, PING_DEADLINE_S, "health")
        except NoResponder:
            return True
        except PivotError:
            return silent_s > DEATH_S
        return False

    def _is_down(self, replica: _Replica) -> bool:
        return not any(load.replica == replica.id for load in self.scheduler.load(0).replicas)

    def _state(self, replica: _Replica) -> str:
        """What it last said, if that was not long ago."""
        if replica.telemetry is None or self._clock.now_s() - replica.seen_s > SILENCE_S:
            return "unknown"
        return replica.telemetry.state

    def _lost(self, replica: _Replica) -> None:
        """This life of it is over: whoever waits for its answer is freed."""
        if not self._is_down(replica) or not self.scheduler.is_empty(replica.id):
            self.num_replica_deaths += 1
            log.error("%s is lost: its sequences go back to the queue", replica.id)
        replica.lost.set()
        replica.lost = asyncio.Event()
        replica.version = 0
        while not replica.outbox.empty():
            replica.outbox.get_nowait()
        self._step(ReplicaDied(replica.id))

    async def _revive(self, replica: _Replica) -> None:
        """A replica the planner counts on came back from a crash, was taken for dead, or this service
        crashed: it proves its version and serves again."""
        async with self._turns([replica], WAKE_DEADLINE_S):
            if not replica.is_active or not self._is_down(replica):
                return
            try:
                woke = await self._wake(replica, WAKE_DEADLINE_S)
            except PivotError as error:
                log.error("%s cannot be woken after its crash: %s", replica.id, error.message)
                return
            self._step(ReplicaShiftedUp(replica.id, woke.kv_capacity_tokens))
            log.warning("%s is back at version %d", replica.id, woke.version)

    async def _put_down(self, replica: _Replica) -> None:
        """Its devices are not its own: a wake that was given up ended well after all."""
        async with self._turns([replica], COMMAND_DEADLINE_S):
            if replica.is_active:
                return
            try:
                await self._stop_all(replica)
                await self._sleep(replica, COMMAND_DEADLINE_S)
            except PivotError as error:
                log.error("%s is awake without its devices: %s", replica.id, error.message)
                return
            log.warning("%s was awake without its devices and sleeps now", replica.id)

    @contextlib.asynccontextmanager
    async def _turns(self, replicas: Sequence[_Replica], deadline_s: float) -> AsyncIterator[None]:
        """Their transitions are the caller's alone while the block runs."""
        async with contextlib.AsyncExitStack() as turns:
            try:
                async with asyncio.timeout(deadline_s):
                    for replica in sorted(replicas, key=lambda r: r.id):
                        await turns.enter_async_context(replica.turn)
            except TimeoutError:
                peer = ", ".join(replica.id for replica in replicas)
                raise DeadlineExceeded(
                    role=self.role.value, peer=peer, phase="turn", deadline_s=deadline_s
                ) from None
            for replica in replicas:
                replica.is_shifting = True
            try:
                yield
            finally:
                for replica in replicas:
                    replica.is_shifting = False

    # Shifts

    async def _on_shift_down(self, message: Message) -> Message:
        assert isinstance(message, ShiftDown)
        replicas = self._named(message.replicas)
        started_s = self._clock.now_s()
        deadline_s = max(1.0, message.deadline_s - SHIFT_MARGIN_S)
        before = self.num_migrated
        async with self._turns(replicas, deadline_s):
            for replica in replicas:
                replica.is_active = False
            self._step(ReplicaShiftingDown(tuple(replica.id for replica in replicas)))
            left_s = max(1.0, started_s + deadline_s - self._clock.now_s())
            if not await self._until(lambda: all(self.scheduler.is_empty(r.id) for r in replicas), left_s):
                for replica in replicas:
                    if not self.scheduler.is_empty(replica.id):
                        self._lost(replica)
            left_s = max(1.0, started_s + deadline_s - self._clock.now_s())
            answers = await asyncio.gather(
                *(self._sleep(replica, left_s) for replica in replicas), return_exceptions=True
            )
        slept = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            slept.append(answer)
        return ShiftStepDone(
            duration_s=self._clock.now_s() - started_s,
            freed_bytes=sum(answer.freed_bytes for answer in slept),
            migrated_sequences=self.num_migrated - before,
        )

    async def _on_shift_up(self, message: Message) -> Message:
        assert isinstance(message, ShiftUp)
        replicas = self._named(message.replicas)
        started_s = self._clock.now_s()
        deadline_s = max(1.0, message.deadline_s - SHIFT_MARGIN_S)
        failed: dict[ReplicaId, BaseException] = {}
        read_bytes, version = 0, 0
        async with self._turns(replicas, deadline_s):
            left_s = started_s + deadline_s - self._clock.now_s()
            results = await asyncio.gather(
                *(self._wake(replica, left_s) for replica in replicas), return_exceptions=True
            )
            for replica, result in zip(replicas, results, strict=True):
                if isinstance(result, BaseException):
                    log.error("%s cannot wake: %s", replica.id, result)
                    replica.is_active = False
                    failed[replica.id] = result
                    continue
                replica.is_active = True
                read_bytes, version = read_bytes + result.read_bytes, result.version
                self._step(ReplicaShiftedUp(replica.id, result.kv_capacity_tokens))
            await asyncio.gather(
                *(self._sleep(self._replicas[name], 10.0) for name in failed), return_exceptions=True
            )
        if len(failed) == len(replicas):
            name, error = next(iter(failed.items()))
            raise ShiftFailed(f"{', '.join(failed)} cannot wake: {name}: {error}", role=self.role.value)
        return ShiftStepDone(
            duration_s=self._clock.now_s() - started_s,
            read_bytes=read_bytes,
            policy_version=version,
            failed_replicas=tuple(failed),
        )

    def require_version(self, min_version: int) -> None:
        """No replica serves with an older one."""
        self._min_version = max(self._min_version, min_version)

    async def refresh(self, min_version: int) -> None:
        """Every active replica Reads `min_version` in place, its requests kept. Returns when none of them
        serves with an older one; later wakes ask for it too."""
        self.require_version(min_version)
        active = [r for r in self._replicas.values() if r.is_active and not self._is_down(r)]
        await asyncio.gather(*(self._refresh(replica, min_version) for replica in active))

    async def _refresh(self, replica: _Replica, min_version: int) -> None:
        """One that cannot is taken for lost."""
        life = replica.lost
        try:
            async with self._turns([replica], WAKE_DEADLINE_S):
                if replica.is_active and not self._is_down(replica):
                    await self._read(replica, min_version)
        except PivotError as error:
            log.error("%s cannot refresh to version %d: %s", replica.id, min_version, error.message)
            if replica.lost is life:
                self._lost(replica)

    async def _wake(self, replica: _Replica, deadline_s: float) -> ReplicaWoke:
        """Serving with the newest version required, also if that went up meanwhile."""
        command = WakeReplica(min_version=self._min_version)
        try:
            woke = await self._ask(replica, "wake", command, ReplicaWoke, max(1.0, deadline_s), "wake")
        except Conflict as conflict:
            if conflict.data.get("state") != "awake":
                raise
            if self._is_down(replica):  # what it runs went back to the queue long ago
                await self._stop_all(replica)
            await self._until(lambda: self._state(replica) == "awake", SILENCE_S)
            telemetry = replica.telemetry
            if telemetry is None:
                raise
            woke = ReplicaWoke(
                version=telemetry.policy_version,
                kv_capacity_tokens=telemetry.kv_capacity_tokens,
                read_bytes=0,
                read_s=0.0,
                duration_s=0.0,
            )
        replica.version = woke.version
        while replica.version < self._min_version:
            await self._read(replica, self._min_version)
        return woke.model_copy(update={"version": replica.version})

    async def _read(self, replica: _Replica, min_version: int) -> None:
        if replica.version >= min_version:
            return
        command = RefreshReplica(min_version=min_version)
        done = await self._ask(replica, "refresh", command, ReplicaRefreshed, WAKE_DEADLINE_S, "refresh")
        replica.version = done.version
        if done.version < min_version:
            raise ShiftFailed(
                f"{replica.id} has version {done.version}, version {min_version} is needed",
                role=self.role.value,
            )

    async def _sleep(self, replica: _Replica, deadline_s: float) -> ReplicaSlept:
        """A replica whose process died, or was started anew, holds nothing: that counts as asleep."""
        try:
            return await self._ask(replica, "sleep", SleepReplica(), ReplicaSlept, deadline_s, "sleep")
        except NoResponder:
            pass
        except Conflict as conflict:
            if conflict.data.get("state") not in ("asleep", "starting"):
                raise
        return ReplicaSlept(freed_bytes=0, resident_bytes=0, duration_s=0.0)

    # Reports

    async def _report(self) -> None:
        while True:
            load = self.scheduler.load()
            outstanding, issued, finished, blocked_on = self.describe()
            await self._bus.publish(
                self._subjects.role_queue(self.role),
                RoleQueue(
                    role=self.role,
                    waiting_lengths=load.queue,
                    active_replicas=self.active_replicas,
                    shifting_replicas=tuple(r.id for r in self._replicas.values() if r.is_shifting),
                    outstanding=outstanding,
                    issued_total=issued,
                    finished_total=finished,
                    blocked_on=blocked_on,
                    replicas=tuple(
                        ReplicaQueue(
                            replica_id=r.replica, lengths=r.lengths, kv_capacity_tokens=r.kv_capacity_tokens
                        )
                        for r in load.replicas
                    ),
                ),
            )
            await asyncio.sleep(0.25)

    # Small things

    def _named(self, names: Sequence[str]) -> list[_Replica]:
        unknown = [name for name in names if name not in self._replicas]
        if unknown or not names:
            known = ", ".join(self._replicas)
            raise InvalidRequest(
                "replicas", f"{unknown or 'none'} not among {known}", "Name replicas of this role"
            )
        return [self._replicas[ReplicaId(name)] for name in dict.fromkeys(names)]

    async def _ask(
        self, replica: _Replica, command: str, message: Message, reply: type[M], deadline_s: float, phase: str
    ) -> M:
        """
        Raises:
            NoResponder: also if the process was replaced, or taken for dead, while it was waited for.
        """
        life = asyncio.ensure_future(replica.lost.wait())
        answer = asyncio.ensure_future(
            self._bus.request(
                self._subjects.replica(replica.id, command),
                message,
                reply,
                deadline_s=deadline_s,
                role=self.role.value,
                peer=replica.id,
                phase=phase,
            )
        )
        try:
            await asyncio.wait({life, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise NoResponder(role=self.role.value, peer=replica.id, phase=phase, deadline_s=deadline_s)
            return answer.result()
        finally:
            for task in (life, answer):
                task.cancel()

    async def _notify(self) -> None:
        async with self._progressed:
            self._progressed.notify_all()

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Waits until `condition` holds; False at the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not condition():
                    async with self._progressed:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.2):
                                await self._progressed.wait()
        return condition()
