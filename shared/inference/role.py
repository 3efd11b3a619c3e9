"""The shell around a role's scheduler: messages in, events to the scheduler, effects out to replicas.

Who waits for whom:

    submit ─► scheduler ─► outbox of the replica ─► run / abort request ─► replica
    replica ─► progress stream ─► record ─► scheduler, and `on_finished` at the end
    abort reply ─► waits until progress has brought the record to where the reply starts ─► scheduler

Which replicas serve is `role_shifts`; how one is asked, and when it is given up, is `peers`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from shared.bus.ports import Bus
from shared.contracts.base import Done, Message
from shared.contracts.replica import (
    AbortSequences,
    RunSequences,
    SequenceProgress,
    SequencesAborted,
    SequenceSpec,
    TokenDelta,
)
from shared.contracts.role import ReplicaQueue, RoleQueue
from shared.contracts.subjects import Subjects
from shared.errors import (
    Conflict,
    NotFound,
    PivotError,
)
from shared.ids import ReplicaId, Role, SequenceId
from shared.inference import role_times as times
from shared.inference.peers import PeerLink, ReplicaPeer
from shared.inference.records import SequenceRecord
from shared.inference.role_shifts import RoleShifts
from shared.planning.cluster import ReplicaSlot
from shared.runtime.clock import Clock
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.sequence import (
    AbortSequence,
    Phase,
    Rebalance,
    ReplicaDied,
    RunSequence,
    SchedulerEvent,
    SequenceAborted,
    SequenceCancelled,
    SequenceFailed,
    SequenceFinished,
    SequencesRetired,
    SequenceSubmitted,
    TokensGenerated,
)

MAX_RUN_TOKENS = 500_000
"""Of one run command: a few MB on the wire."""

log = logging.getLogger("pivotrl.role")

M = TypeVar("M", bound=Message)
OnFinished = Callable[[SequenceRecord], Awaitable[None]]
OnFailed = Callable[[SequenceRecord, str], Awaitable[None]]


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
        link = PeerLink(role, bus, subjects, clock)
        self.peers = {slot.id: ReplicaPeer(slot.id, tuple(slot.devices), link) for slot in slots}
        self.shifts = RoleShifts(self, link)
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self._on_finished, self._on_failed = on_finished, on_failed
        self._progressed = asyncio.Condition()
        self.num_lost_tail_tokens = 0
        self.num_replica_deaths = 0
        self.num_migrated = 0
        self.describe: Callable[[], tuple[int, int, int, str]] = lambda: (len(self.records), 0, 0, "")
        """Gives (outstanding, issued, finished, blocked on) for the role's queue message."""

    # Life

    async def start(self) -> None:
        """Joins the bus. Tasks to spawn for ever are those of `tasks`."""
        await self.shifts.start()

    def tasks(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """Named endless tasks that the process runs."""
        workers: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            (f"{what} {replica.id}", lambda replica=replica, task=task: task(replica))  # type: ignore[misc]
            for replica in self.peers.values()
            for what, task in (("outbox", self._work), ("health", self.shifts.watch_health))
        ]
        return [
            ("progress", self._follow_progress),
            ("dispatch", self._tick),
            ("queue report", self._report),
            *workers,
        ]

    async def recover(self, records: Sequence[SequenceRecord]) -> int:
        """After a restart: takes back unfinished sequences with the tokens the progress stream still holds.
        Returns the number of tokens that need not be generated again. Replicas are told to stop."""
        await self.shifts.adopt()
        for record in records:
            self.records[record.sequence_id] = record
        # Stop first: when a replica answers, all it sent is in the stream, and its answer goes on from there.
        answers = await asyncio.gather(*(replica.stop_all() for replica in self.peers.values()))
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
        self.step(
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
            self.step(SequenceCancelled(SequenceId(sequence_id)))
            self._forget(sequence_id)

    def _forget(self, sequence_id: str) -> None:
        """The scheduler need not know it any longer, if it is done with it."""
        self.step(SequencesRetired((SequenceId(sequence_id),)))

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
            for replica in self.peers.values()
        ]

    def ready(self) -> str | None:
        """None once every replica has reported; else the missing ones."""
        missing = [
            r.id for r in self.peers.values() if r.telemetry is None or r.telemetry.state == "starting"
        ]
        return f"replicas {', '.join(missing)}" if missing else None

    @property
    def active_replicas(self) -> tuple[str, ...]:
        return tuple(r.id for r in self.peers.values() if r.is_active)

    # Scheduler in and out

    def step(self, event: SchedulerEvent) -> None:
        for effect in self.scheduler.step(event, self._clock.now_s()):
            self.peers[effect.replica].outbox.put_nowait(effect)

    async def _work(self, replica: ReplicaPeer) -> None:
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
                    self.lose(replica)
                continue
            await self._take_answer(replica, reply)

    async def _run(self, replica: ReplicaPeer, effects: list[RunSequence]) -> None:
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

    async def _start(self, replica: ReplicaPeer, specs: list[SequenceSpec]) -> None:
        command = RunSequences(sequences=tuple(specs))
        await replica.ask("run", command, Done, times.COMMAND_DEADLINE_S, "run")

    async def _abort(self, replica: ReplicaPeer, effects: list[AbortSequence]) -> SequencesAborted:
        keys = tuple((str(effect.sequence), self._first_attempt + effect.attempt) for effect in effects)
        return await replica.ask(
            "abort", AbortSequences(sequences=keys), SequencesAborted, times.COMMAND_DEADLINE_S, "abort"
        )

    async def _take_answer(self, replica: ReplicaPeer, reply: SequencesAborted) -> None:
        for delta in reply.deltas:
            await self._take_abort(replica, delta)
        unknown = ((name, attempt - self._first_attempt) for name, attempt in reply.unknown)
        await asyncio.gather(*(self._take_unknown(replica, name, attempt) for name, attempt in unknown))

    async def _take_abort(self, replica: ReplicaPeer, delta: TokenDelta) -> None:
        record = self.records.get(delta.sequence_id)
        if record is not None:
            if record.has_gap_before(delta):  # earlier tokens are still on their way through the stream
                await self.until(lambda: not record.has_gap_before(delta), 5.0)
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
        self.step(SequenceAborted(SequenceId(delta.sequence_id), replica.id, attempt, tokens))
        if record is None:
            self._forget(delta.sequence_id)
        await self._notify()

    async def _take_unknown(self, replica: ReplicaPeer, sequence_id: str, attempt: int) -> None:
        """The replica does not run it: it finished (that delta is on its way), or it never got there."""
        sequence = SequenceId(sequence_id)

        def is_settled() -> bool:
            state = self.scheduler.sequence(sequence)
            return state is None or state.attempt != attempt or state.place.phase is not Phase.ABORTING

        await self.until(lambda: is_settled() or sequence_id not in self.records, times.SETTLE_S)
        if not is_settled():
            record = self.records.get(sequence_id)
            tokens = record.num_tokens if record is not None else 0
            self.step(SequenceAborted(sequence, replica.id, attempt, tokens))
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
        replica = self.peers.get(replica_id)
        if record is None or replica is None or delta.attempt != record.attempt:
            return
        if record.has_gap_before(delta):
            log.error("%s: gap before token %d of %s", replica_id, delta.start, delta.sequence_id)
            return
        sequence, attempt = SequenceId(delta.sequence_id), delta.attempt - self._first_attempt
        if delta.error is not None:
            self.step(SequenceFailed(sequence, replica_id, attempt, delta.error))
            self.step(SequenceCancelled(sequence))  # where it went meanwhile it would fail as well
            del self.records[delta.sequence_id]
            await self._on_failed(record, delta.error)
            self._forget(delta.sequence_id)
            return
        record.extend(delta)
        if record.finish_reason is not None:
            await self._finished(replica, record, delta.attempt)
        else:
            self.step(TokensGenerated(sequence, replica_id, attempt, record.num_tokens))

    async def _finished(self, replica: ReplicaPeer, record: SequenceRecord, attempt: int) -> None:
        sequence = SequenceId(record.sequence_id)
        if self.records.pop(record.sequence_id, None) is None:
            return
        self.step(SequenceFinished(sequence, replica.id, attempt - self._first_attempt, record.num_tokens))
        self.step(SequenceCancelled(sequence))  # its replica was taken for dead, and it was to run elsewhere
        await self._on_finished(record)
        self._forget(record.sequence_id)
        await self._notify()

    # Health

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(times.HEALTH_INTERVAL_S)
            self.step(Rebalance())

    def is_down(self, replica: ReplicaPeer) -> bool:
        return not any(load.replica == replica.id for load in self.scheduler.load(0).replicas)

    def lose(self, replica: ReplicaPeer) -> None:
        """This life of it is over: its sequences go back to the queue with the tokens seen so far."""
        if not self.is_down(replica) or not self.scheduler.is_empty(replica.id):
            self.num_replica_deaths += 1
            log.error("%s is lost: its sequences go back to the queue", replica.id)
        replica.lose()
        self.step(ReplicaDied(replica.id))

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
                    shifting_replicas=tuple(r.id for r in self.peers.values() if r.is_shifting),
                    outstanding=outstanding,
                    issued_total=issued,
                    finished_total=finished,
                    blocked_on=blocked_on,
                    mean_new_tokens=load.mean_new_tokens,
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

    async def _notify(self) -> None:
        async with self._progressed:
            self._progressed.notify_all()

    async def until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Waits until `condition` holds; False at the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not condition():
                    async with self._progressed:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.2):
                                await self._progressed.wait()
        return condition()
