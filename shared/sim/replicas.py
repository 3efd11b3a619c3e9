"""Awake replicas: each role's scheduler, the engines it places sequences on, and when they need attention.

Schedulers are those of the services; engines are models. What concerns the run as a whole (a finished
sample, an emptied replica) goes to `RunHooks`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol

from shared.ids import ReplicaId, Role, SequenceId
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.sequence import (
    FINISHED,
    AbortSequence,
    ReplicaDied,
    ReplicaProgressed,
    ReplicasShiftedUp,
    RunSequence,
    SchedulerEffect,
    SchedulerEvent,
    SequenceAborted,
    SequenceFinished,
    SequencesRetired,
)
from shared.sim.cluster import Engine, EngineModel, Usage
from shared.sim.faults import FaultDraws
from shared.sim.kernel import EventQueue
from shared.sim.run import GENERATING


class RunHooks(Protocol):
    """What replicas ask of the run, and tell it."""

    def num_tokens_of(self, role: Role, sequence: SequenceId) -> int:
        """Tokens that a sequence will generate in all."""

    def on_started(self, role: Role, sequence: SequenceId) -> None:
        """It runs, perhaps not for the first time."""

    def on_finished(self, role: Role, sequence: SequenceId) -> None: ...

    def on_stopped(self) -> None:
        """A sequence was stopped: its replica may be empty now."""

    def on_reported_end(self, role: Role) -> None:
        """A sequence of `role` ended, and everything that follows was done."""


class Replicas:
    """Engines by replica. After a turn of the event queue, `flush` sets their next events."""

    def __init__(
        self,
        queue: EventQueue,
        models: Mapping[Role, EngineModel],
        schedulers: Mapping[Role, Scheduler],
        role_of: Mapping[ReplicaId, Role],
        draws: FaultDraws,
        hooks: RunHooks,
        *,
        abort_s: float,
    ) -> None:
        self._queue, self._models, self.schedulers = queue, models, schedulers
        self._role_of, self._draws, self._hooks, self._abort_s = role_of, draws, hooks, abort_s
        self.engines: dict[ReplicaId, Engine] = {}
        self._wake_s: dict[ReplicaId, float] = {}
        self._dirty: dict[ReplicaId, None] = {}
        self._usage = {role: Usage() for role in GENERATING}
        self.num_moves = 0
        """Sequences stopped to run elsewhere."""

    def feed(self, role: Role, event: SchedulerEvent) -> None:
        """Give a scheduler an event and carry out what it decides."""
        self._carry_out(role, self.schedulers[role].step(event, self._queue.now_s))

    def _carry_out(self, role: Role, effects: list[SchedulerEffect]) -> None:
        scheduler = self.schedulers[role]
        for effect in effects:
            engine = self._advanced(effect.replica)
            match effect:
                case RunSequence(_, sequence, attempt):
                    state = scheduler.sequence(sequence)
                    assert state is not None
                    generated = state.generated_tokens
                    left = self._hooks.num_tokens_of(role, sequence) - generated
                    engine.run(sequence, attempt, state.length, generated, left)
                    self._hooks.on_started(role, sequence)
                case AbortSequence(replica, sequence, attempt):
                    self.num_moves += 1
                    self._abort(role, replica, sequence, attempt)

    def _advanced(self, replica: ReplicaId) -> Engine:
        """The engine, brought to now; something is about to happen to it."""
        engine = self.engines[replica]
        engine.advance(self._queue.now_s)
        self._dirty[replica] = None
        return engine

    def _abort(self, role: Role, replica: ReplicaId, sequence: SequenceId, attempt: int) -> None:
        stopped = self.engines[replica].abort(sequence)
        if stopped is None:  # it has finished, and that report is on its way
            return
        event = SequenceAborted(sequence, replica, attempt, stopped[1])
        for delay_s in self._draws.deliveries_s():
            self._queue.after(self._abort_s + delay_s, partial(self._confirm, role, event))

    def _confirm(self, role: Role, event: SequenceAborted) -> None:
        self.feed(role, event)
        self._hooks.on_stopped()

    # Coming and going

    def awaken(self, replicas: Iterable[ReplicaId]) -> None:
        """Start engines; they take sequences at once."""
        by_role: dict[Role, list[tuple[ReplicaId, int]]] = {}
        for replica in replicas:
            role = self._role_of[replica]
            model = self._models[role]
            self.engines[replica] = Engine(model, self._queue.now_s)
            by_role.setdefault(role, []).append((replica, model.kv_capacity_tokens))
        for role, awake in by_role.items():
            self.feed(role, ReplicasShiftedUp(tuple(awake)))

    def remove(self, replica: ReplicaId) -> None:
        """Its engine is gone, if it has not died before."""
        engine = self.engines.pop(replica, None)
        if engine is None:
            return
        engine.advance(self._queue.now_s)
        self._usage[self._role_of[replica]].add(engine.usage)
        self._wake_s.pop(replica, None)
        self._dirty.pop(replica, None)

    def kill(self, replica: ReplicaId) -> None:
        self.remove(replica)
        self.feed(self._role_of[replica], ReplicaDied(replica))

    def refresh(self, role: Role, seconds: float) -> None:
        """All replicas of `role` read new weights."""
        for replica in self.engines:
            if self._role_of[replica] is role:
                self._advanced(replica).refresh(seconds)

    # Time

    def flush(self) -> None:
        """Set the next event of every engine that something happened to."""
        for replica in self._dirty:
            due_s = self.engines[replica].next_event_s()
            if due_s != self._wake_s.get(replica):
                self._wake_s[replica] = due_s
                if due_s < inf:
                    self._queue.at(due_s, self._waker(replica, due_s))
        self._dirty.clear()

    def _waker(self, replica: ReplicaId, due_s: float) -> Callable[[], None]:
        def wake() -> None:
            if self._wake_s.get(replica) == due_s:
                del self._wake_s[replica]
                self._settle(replica)

        return wake

    def _settle(self, replica: ReplicaId) -> None:
        role = self._role_of[replica]
        for sequence, attempt, total in self._advanced(replica).settle():
            self._deliver(partial(self._finish, role, SequenceFinished(sequence, replica, attempt, total)))

    def _finish(self, role: Role, event: SequenceFinished) -> None:
        self.feed(role, event)
        state = self.schedulers[role].sequence(event.sequence)
        if state is not None and state.place is FINISHED:
            self.feed(role, SequencesRetired((event.sequence,)))
            self._hooks.on_finished(role, event.sequence)
        self._hooks.on_reported_end(role)

    def report(self) -> None:
        """Every replica reports how far its sequences are."""
        for replica, engine in list(self.engines.items()):
            engine.advance(self._queue.now_s)
            if engine.num_sequences:
                event = ReplicaProgressed(replica, tuple(engine.progress()))
                self._deliver(partial(self.feed, self._role_of[replica], event))

    def _deliver(self, report: Callable[[], None]) -> None:
        """Now, or late, or twice: as the faults have it."""
        for delay_s in self._draws.deliveries_s():
            if delay_s:
                self._queue.after(delay_s, report)
            else:
                report()

    # Accounts

    def usage(self) -> dict[Role, Usage]:
        """Of all replicas, past and present, until now."""
        totals = {role: replace(usage) for role, usage in self._usage.items()}
        for replica, engine in self.engines.items():
            engine.advance(self._queue.now_s)
            totals[self._role_of[replica]].add(engine.usage)
        return totals

    def devices_and_tokens(self) -> tuple[dict[Role, int], dict[Role, float]]:
        """Devices of each role now, and tokens generated as of each engine's last event."""
        devices = dict.fromkeys(GENERATING, 0)
        tokens = {role: usage.tokens for role, usage in self._usage.items()}
        for replica, engine in self.engines.items():
            role = self._role_of[replica]
            devices[role] += engine.model.num_devices
            tokens[role] += engine.usage.tokens
        return devices, tokens
