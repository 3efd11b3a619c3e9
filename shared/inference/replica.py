"""One replica of a generating role: an engine that serves, sleeps and wakes on command (paper §5.2).

Who waits for whom:

    role service ──run/abort/sleep/wake/refresh──▶ ReplicaWorker (event loop)
                                                      │ one command queue   ▲ deltas and results, in order
                                                      ▼                     │
                                                   engine thread:  step, step, [commands], step, …
    GPS  ◀──lease── wake, refresh                  (never blocked by the bus)
    bus  ◀──progress── outbox: every 100 ms, or at once when a sequence finishes
    bus  ◀──telemetry── 4 Hz, from the last snapshot: also while the engine is busy with a long command

  - A command waits for the engine thread; the thread waits for nobody. A slow bus only lets the outbox grow
    and merge.
  - wake and refresh hold a GPS lease until the engine thread is done with the buffer, cancelled or not.
  - abort waits for a message under way: a token is in a progress message or in the answer, never in both or
    in neither.

States: starting → asleep → waking → awake → asleep. A command in the wrong state raises `Conflict` and
changes nothing. A wake that fails leaves the replica asleep with its memory given back. It serves only after
the engine proved a version of at least `min_version`. An engine that breaks (a step fails, weights stay torn,
memory cannot be given back) ends `run_forever` with its error: the process exits, a new incarnation starts,
and the role service requeues what ran here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from shared.contracts.base import Done
from shared.contracts.gps import ReadGrant
from shared.contracts.replica import (
    AbortSequences,
    RefreshReplica,
    ReplicaRefreshed,
    ReplicaSlept,
    ReplicaState,
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
from shared.errors import Conflict, EngineError, PivotError
from shared.ids import ReplicaId, Role
from shared.inference.engine_thread import EngineThread
from shared.inference.ports import Engine, LoadSnapshot, SequenceKey, WeightSource
from shared.inference.progress import ProgressOutbox, is_final, key_of, refusal
from shared.inference.telemetry import ReplicaIdentity, Telemetry, send_forever

log = logging.getLogger(__name__)


class ReplicaWorker:
    """The commands of `….replica.<id>.*` as coroutines. They are answered while `run_forever` runs."""

    def __init__(
        self,
        *,
        replica_id: ReplicaId,
        role: Role,
        devices: Sequence[int],
        engine: Engine,
        weights: WeightSource,
        publish_progress: Callable[[SequenceProgress], Awaitable[None]],
        publish_telemetry: Callable[[ReplicaTelemetry], Awaitable[None]],
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id, self.incarnation = replica_id, incarnation
        self._telemetry = Telemetry(ReplicaIdentity(replica_id, role, tuple(devices), incarnation), clock)
        self._engine, self._weights, self._clock = engine, weights, clock
        self._publish_progress, self._publish_telemetry = publish_progress, publish_telemetry
        self._thread = EngineThread(engine, self._on_step, name=f"engine-{replica_id}")
        self._state: ReplicaState = "starting"
        self._transition: str | None = None
        self._running: dict[SequenceKey, None] = {}
        self._outbox = ProgressOutbox(self._send)
        self._broken: asyncio.Future[NoReturn] | None = None
        self._snapshot = LoadSnapshot(0, (), 0, 0.0, 0)
        self.ready = asyncio.Event()
        """Set once the engine is up and asleep: commands are answered from now on."""

    @property
    def state(self) -> ReplicaState:
        return self._state

    # commands

    async def run(self, command: RunSequences) -> Done:
        """Start or resume sequences. One that cannot run here is reported as progress with an `error`."""
        self._require("run", "awake", during=("refresh",))
        fresh = [s for s in command.sequences if (s.sequence_id, s.attempt) not in self._running]
        self._running.update(dict.fromkeys((s.sequence_id, s.attempt) for s in fresh))
        for delta in await self._thread.call(lambda: [d for s in fresh for d in self._submit(s)]):
            self._take_in(delta)
        return Done()

    def _submit(self, spec: SequenceSpec) -> list[TokenDelta]:
        try:
            self._engine.submit(spec)
        except PivotError as error:
            log.warning("%s: sequence %s refused: %s", self.replica_id, spec.sequence_id, error)
            return [refusal(spec, error)]
        return []

    async def abort(self, command: AbortSequences) -> SequencesAborted:
        """Stop sequences and hand over what was not yet sent of them. Legal in every state.

        With nothing to stop it answers at once, also while the engine is busy: a peer may use it as a ping.
        """
        wanted = list(self._running) if command.sequences is None else list(command.sequences)
        if not self._running:
            return SequencesAborted(deltas=(), unknown=tuple(command.sequences or ()))
        if not wanted:
            return SequencesAborted(deltas=())
        stopped = await self._thread.call(lambda: self._engine.abort(wanted))
        for rest in stopped:
            self._running.pop(key_of(rest), None)
        deltas = await self._outbox.withdraw(stopped)
        found = {key_of(delta) for delta in deltas}
        unknown = () if command.sequences is None else tuple(key for key in wanted if key not in found)
        return SequencesAborted(deltas=deltas, unknown=unknown)

    async def sleep(self, command: SleepReplica) -> ReplicaSlept:
        """Give weights and KV back. `Conflict` while sequences run."""
        self._require("sleep", "awake")
        if self._running:
            raise Conflict(f"{self.replica_id} runs {len(self._running)} sequences: abort them before sleep")
        begin = self._clock()
        async with self._in_transition("sleep"):
            freed = await self._give_back()
            await self._outbox.flush()
        return ReplicaSlept(
            freed_bytes=freed,
            resident_bytes=self._snapshot.resident_bytes,
            duration_s=self._clock() - begin,
        )

    async def wake(self, command: WakeReplica) -> ReplicaWoke:
        """Allocate, Read at least `min_version`, prove it, serve. All or nothing."""
        self._require("wake", "asleep")
        begin = self._clock()
        async with self._in_transition("wake"):
            self._state = "waking"
            try:
                async with self._read(command.min_version) as grant:
                    report = await self._thread.call(lambda: self._engine.wake(grant.view, grant.version))
                self._prove(command.min_version)
            except BaseException:
                await asyncio.shield(asyncio.ensure_future(self._give_back()))
                raise
            self._state = "awake"
        return ReplicaWoke(
            version=self._engine.policy_version,
            kv_capacity_tokens=self._snapshot.kv_capacity_tokens,
            read_bytes=report.read_bytes,
            read_s=report.read_s,
            duration_s=self._clock() - begin,
        )

    async def refresh(self, command: RefreshReplica) -> ReplicaRefreshed:
        """Read newer weights under running sequences. Does nothing where the version is already held."""
        self._require("refresh", "awake")
        begin, read_bytes = self._clock(), 0
        async with self._in_transition("refresh"):
            before = self._engine.policy_version
            if before < command.min_version:
                async with self._read(command.min_version) as grant:
                    try:
                        report = await self._thread.call(
                            lambda: self._engine.refresh(grant.view, grant.version)
                        )
                    except PivotError as error:
                        if self._engine.policy_version != before:
                            self._break(EngineError(f"a failed refresh left the weights torn: {error}"))
                        raise
                read_bytes = report.read_bytes
                self._prove(command.min_version)
        return ReplicaRefreshed(
            version=self._engine.policy_version, read_bytes=read_bytes, duration_s=self._clock() - begin
        )

    # what they are made of

    def _require(self, command: str, state: ReplicaState, during: tuple[str, ...] = ()) -> None:
        if self._state != state:
            raise Conflict(
                f"{self.replica_id} is {self._state}: {command} needs it {state}", state=self._state
            )
        if self._transition is not None and self._transition not in during:
            raise Conflict(
                f"{self.replica_id} is {self._state}, busy with {self._transition}: no {command} meanwhile",
                state=self._state,
            )

    @asynccontextmanager
    async def _in_transition(self, name: str) -> AsyncIterator[None]:
        self._transition = name
        try:
            yield
        finally:
            self._transition = None

    @asynccontextmanager
    async def _read(self, min_version: int) -> AsyncIterator[ReadGrant]:
        async with self._weights.read(min_version) as grant:
            if grant.version < min_version:
                raise Conflict(f"GPS granted version {grant.version}, at least {min_version} was asked for")
            yield grant

    def _prove(self, min_version: int) -> None:
        held = self._engine.policy_version
        if held < min_version:
            raise EngineError(
                f"{self.replica_id} holds version {held} after a Read of at least {min_version}"
            )

    async def _give_back(self) -> int:
        try:
            freed = await self._thread.call(self._engine.sleep)
        except PivotError as error:
            self._break(EngineError(f"{self.replica_id} cannot give its memory back: {error}"))
            raise
        self._state = "asleep"
        return freed

    def _break(self, error: EngineError) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _on_step(self, deltas: list[TokenDelta], snapshot: LoadSnapshot) -> None:
        self._snapshot = snapshot
        for delta in deltas:
            self._take_in(delta)

    def _take_in(self, delta: TokenDelta) -> None:
        self._outbox.add(delta)
        self._telemetry.count(len(delta.token_ids))
        if is_final(delta):
            self._running.pop(key_of(delta), None)

    async def _send(self, deltas: tuple[TokenDelta, ...]) -> None:
        await self._publish_progress(
            SequenceProgress(replica_id=self.replica_id, incarnation=self.incarnation, deltas=deltas)
        )

    # life

    async def run_forever(self) -> None:
        """Start the engine and serve until cancelled; raise what broke the engine."""
        self._broken = asyncio.get_running_loop().create_future()
        self._thread.start()
        assert self._thread.failure is not None
        tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._start()),
            asyncio.ensure_future(self._outbox.flush_forever()),
            asyncio.ensure_future(send_forever(self.telemetry, self._publish_telemetry)),
        ]
        try:
            await _first_failure([*tasks, self._thread.failure, self._broken])
        except EngineError as error:
            log.critical(
                "%s: engine broke, %d sequences lost: %s", self.replica_id, len(self._running), error
            )
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(PivotError):
                await self._outbox.flush()

    async def close(self) -> None:
        """End the engine. `run_forever` is to be cancelled before."""
        with suppress(EngineError):  # a thread that broke has no engine left to close
            await self._thread.call(self._engine.close)
        await self._thread.stop()

    async def _start(self) -> None:
        await self._thread.call(self._engine.start)
        self._state = "asleep"
        self.ready.set()

    def telemetry(self) -> ReplicaTelemetry:
        """The state of this moment, from the last snapshot."""
        return self._telemetry.message(self._state, self._engine.policy_version, self._snapshot)


async def _first_failure(futures: Sequence["asyncio.Future[None] | asyncio.Future[NoReturn]"]) -> None:
    """Wait until one of them raises, and raise that."""
    pending = set(futures)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
