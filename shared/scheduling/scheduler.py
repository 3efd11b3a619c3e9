"""The scheduler of one generating role: which sequence runs on which replica (paper §6).

Invariants, under any interleaving of arrivals, reports, shifts, deaths, duplicates and late messages
- A sequence is in exactly one place, and none is lost.
- Its generated tokens only grow, and no token is generated twice: while tokens may still be in flight from
  one replica (ABORTING), the sequence is not run on another.
- At dispatch, what a replica holds plus the growth set aside never exceeds its KV capacity.
- The queue is served in priority order; the first sequence that fits nowhere waits at its head.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from shared.ids import ReplicaId, SequenceId
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.migration import Movable, ReplicaLoads, dispatch, tie_order
from shared.scheduling.rebalance import sequences_to_move
from shared.scheduling.sequence import (
    FAILED,
    FINISHED,
    WAITING,
    AbortSequence,
    Phase,
    Place,
    Rebalance,
    ReplicaDied,
    ReplicaLoad,
    ReplicaProgressed,
    ReplicaShiftedUp,
    ReplicaShiftingDown,
    ReplicasShiftedUp,
    RoleLoad,
    RunSequence,
    SchedulerEffect,
    SchedulerEvent,
    SequenceAborted,
    SequenceCancelled,
    SequenceFailed,
    SequenceFinished,
    SequencesRetired,
    SequenceState,
    SequenceSubmitted,
    Tick,
    TokensGenerated,
)
from shared.scheduling.throughput import UNIT

__all__ = ["Scheduler", "SchedulerConfig"]

_LENGTH_WEIGHT = 0.002
"""Of one finished sequence in the moving average of lengths: it follows over some hundreds of them."""


class Scheduler:
    """`step(event, now_s)` returns what to run and what to abort; nothing here waits or reads a clock."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._model = config.throughput_model or UNIT
        self._sequences: dict[SequenceId, SequenceState] = {}
        self._queue: list[tuple[float, SequenceId]] = []
        self._on: dict[ReplicaId, set[SequenceId]] = {}
        self._capacity: dict[ReplicaId, int] = {}
        self._leaving: set[ReplicaId] = set()
        self._loads = self._new_loads()
        self._counts = dict.fromkeys(("num_stale_reports", "num_dispatched", "num_aborts", "num_moves"), 0)
        self._counts |= dict.fromkeys(("num_finished", "num_failed"), 0)
        self._mean_new_tokens = 0.0

    def step(self, event: SchedulerEvent, now_s: float) -> list[SchedulerEffect]:
        """Take in `event` and return the effects to carry out, in order."""
        effects: list[SchedulerEffect] = []
        match event:
            case SequenceSubmitted():
                self._submit(event)
            case TokensGenerated():
                if state := self._reported(event):
                    self._grow(state, event.num_tokens_total)
            case ReplicaProgressed():
                self._grow_all(event)
            case SequenceFinished():
                if state := self._reported(event):
                    self._take_off(self._grow(state, event.num_tokens_total), FINISHED)
            case SequenceFailed():
                if state := self._reported(event):
                    self._take_off(state, FAILED)
            case SequenceAborted():
                if state := self._reported(event):
                    self._requeue(self._grow(state, event.num_tokens_total))
            case SequenceCancelled():
                effects += self._cancel(event.sequence)
            case SequencesRetired():
                self._retire(event.sequences)
            case ReplicaShiftedUp():
                return self._shift_up(((event.replica, event.kv_capacity_tokens),))
            case ReplicasShiftedUp():
                return self._shift_up(event.replicas)
            case ReplicaShiftingDown():
                effects += self._shift_down(event.replicas)
            case ReplicaDied():
                self._bury(event.replica)
            case Tick():
                pass
            case Rebalance():
                effects += self._rebalance()
            case _:
                assert_never(event)
        effects += self._dispatch()
        return effects

    def sequence(self, sequence: SequenceId) -> SequenceState | None:
        """What is known about a sequence, until it is retired."""
        return self._sequences.get(sequence)

    def is_empty(self, replica: ReplicaId) -> bool:
        """True once nothing runs on `replica` and no abort is outstanding: it may be put to sleep."""
        return not self._on.get(replica)

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait or are on a replica."""
        return len(self._queue) + sum(len(on) for on in self._on.values())

    def load(self, max_lengths: int | None = None) -> RoleLoad:
        """A snapshot for telemetry and planning; `max_lengths` keeps only the shortest of each replica.

        Replicas being emptied are left out: what is still on them counts as waiting.
        """
        replicas, leaving = [], []
        for replica in sorted(self._on, key=tie_order):
            lengths = sorted(self._sequences[s].length for s in self._on[replica])
            if replica in self._leaving:
                leaving += lengths
                continue
            load = ReplicaLoad(
                replica, len(lengths), sum(lengths), self._capacity[replica], tuple(lengths[:max_lengths])
            )
            replicas.append(load)
        waiting = [self._sequences[s].length for _, s in sorted(self._queue)]
        return RoleLoad(tuple(replicas), (*leaving, *waiting), self._mean_new_tokens)

    def gauges(self) -> dict[str, float]:
        """Counts since the start, and the present state."""
        running = sum(len(on) for on in self._on.values())
        active = [i for i, replica in enumerate(self._loads.ids) if replica not in self._leaving]
        return {
            **self._counts,
            "num_waiting": len(self._queue),
            "num_on_replicas": running,
            "num_replicas": len(active),
            "tokens_per_s": self._loads.total_tokens_per_s,
            "kv_room_tokens": sum(max(0, self._loads.room_tokens(i)) for i in active),
        }

    # Sequences

    def _submit(self, event: SequenceSubmitted) -> None:
        if event.sequence in self._sequences:
            return
        state = SequenceState(
            event.sequence, event.prompt_tokens, event.generated_tokens, event.max_new_tokens
        )
        self._sequences[state.id] = state
        self._enqueue(state)

    def _enqueue(self, state: SequenceState) -> None:
        heapq.heappush(self._queue, (self._config.priority(state), state.id))

    def _reported(
        self, event: TokensGenerated | SequenceFinished | SequenceFailed | SequenceAborted
    ) -> SequenceState | None:
        """The sequence a report is about, if it is still on that replica in that attempt."""
        state = self._sequences.get(event.sequence)
        if state and state.place.replica == event.replica and state.attempt == event.attempt:
            return state
        self._counts["num_stale_reports"] += 1
        return None

    def _grow(self, state: SequenceState, num_tokens_total: int) -> SequenceState:
        new_tokens = num_tokens_total - state.generated_tokens
        if new_tokens <= 0:
            return state
        grown = replace(state, generated_tokens=num_tokens_total)
        self._sequences[state.id] = grown
        assert state.place.replica is not None
        self._loads.change(
            self._loads.index[state.place.replica], 0, new_tokens, self._need(grown) - self._need(state)
        )
        return grown

    def _grow_all(self, event: ReplicaProgressed) -> None:
        """As TokensGenerated of each, with one change of the replica's load."""
        new_tokens = new_need = 0
        margin = self._config.growth_margin_tokens
        for sequence, attempt, total in event.progress:
            state = self._sequences.get(sequence)
            if state is None or state.place.replica != event.replica or state.attempt != attempt:
                self._counts["num_stale_reports"] += 1
                continue
            grown_by = total - state.generated_tokens
            if grown_by <= 0:
                continue
            self._sequences[sequence] = SequenceState(
                sequence,
                state.prompt_tokens,
                total,
                state.max_new_tokens,
                attempt,
                state.place,
                state.is_cancelled,
            )
            new_tokens += grown_by
            may_generate = state.max_new_tokens - total
            new_need += grown_by
            if may_generate < margin:  # room set aside shrinks as the end comes near
                new_need += self._need(self._sequences[sequence]) - self._need(state) - grown_by
        if new_tokens:
            self._loads.change(self._loads.index[event.replica], 0, new_tokens, new_need)

    def _take_off(self, state: SequenceState, to: Place) -> SequenceState:
        """Move a sequence from its replica to `to`; an emptied replica is forgotten with its last one."""
        replica = state.place.replica
        assert replica is not None
        self._on[replica].remove(state.id)
        self._loads.change(self._loads.index[replica], -1, -state.length, -self._need(state))
        moved = replace(state, place=to, attempt=state.attempt + (to is WAITING))
        self._sequences[state.id] = moved
        if to is FINISHED:
            self._counts["num_finished"] += 1
            weight = max(_LENGTH_WEIGHT, 1.0 / self._counts["num_finished"])
            self._mean_new_tokens += weight * (state.generated_tokens - self._mean_new_tokens)
        self._counts["num_failed"] += to is FAILED
        if replica in self._leaving and not self._on[replica]:
            self._forget_replica(replica)
        return moved

    def _requeue(self, state: SequenceState) -> None:
        if state.is_cancelled:
            self._take_off(state, FAILED)
        else:
            self._enqueue(self._take_off(state, WAITING))

    def _cancel(self, sequence: SequenceId) -> list[SchedulerEffect]:
        state = self._sequences.get(sequence)
        if state is None or state.place in (FINISHED, FAILED) or state.is_cancelled:
            return []
        if state.place is WAITING:
            self._queue.remove((self._config.priority(state), state.id))
            heapq.heapify(self._queue)
            self._sequences[sequence] = replace(state, place=FAILED)
            self._counts["num_failed"] += 1
            return []
        self._sequences[sequence] = state = replace(state, is_cancelled=True)
        return self._abort(state)

    def _abort(self, state: SequenceState) -> list[SchedulerEffect]:
        if state.place.phase is Phase.ABORTING:
            return []
        assert state.place.replica is not None
        self._sequences[state.id] = replace(state, place=Place(Phase.ABORTING, state.place.replica))
        self._counts["num_aborts"] += 1
        return [AbortSequence(state.place.replica, state.id, state.attempt)]

    def _retire(self, sequences: tuple[SequenceId, ...]) -> None:
        for sequence in sequences:
            state = self._sequences.get(sequence)
            if state and state.place in (FINISHED, FAILED):
                del self._sequences[sequence]

    def _need(self, state: SequenceState) -> int:
        return state.kv_need(self._config.growth_margin_tokens)

    # Replicas

    def _shift_up(self, replicas: tuple[tuple[ReplicaId, int], ...]) -> list[SchedulerEffect]:
        has_new = False
        is_changed = False
        for replica, kv_capacity_tokens in replicas:
            is_new = replica not in self._on or replica in self._leaving
            self._leaving.discard(replica)
            self._on.setdefault(replica, set())
            is_changed |= is_new or self._capacity[replica] != kv_capacity_tokens
            self._capacity[replica] = kv_capacity_tokens
            has_new |= is_new
        if is_changed:
            self._rebuild()
        effects = self._dispatch()
        if has_new and self._config.migration and not self._queue:
            effects += self._abort_for_moves()
        return effects

    def _rebalance(self) -> list[SchedulerEffect]:
        has_idle = any(not on and replica not in self._leaving for replica, on in self._on.items())
        if not has_idle or self._queue or self._leaving:
            return []
        return self._abort_for_moves(from_slowest=True)

    def _abort_for_moves(self, *, from_slowest: bool = False) -> list[SchedulerEffect]:
        on_replicas = (self._sequences[s] for on in self._on.values() for s in on)
        moved = sequences_to_move(self._loads, on_replicas, self._config, from_slowest=from_slowest)
        self._counts["num_moves"] += len(moved)
        return [effect for state in moved for effect in self._abort(state)]

    def _shift_down(self, replicas: tuple[ReplicaId, ...]) -> list[SchedulerEffect]:
        effects: list[SchedulerEffect] = []
        for replica in sorted(replicas, key=tie_order):
            if replica not in self._on:
                continue
            if not self._on[replica]:
                self._forget_replica(replica)
                continue
            self._leaving.add(replica)
            self._loads.set_open(self._loads.index[replica], False)
            for sequence in sorted(self._on[replica]):
                effects += self._abort(self._sequences[sequence])
        return effects

    def _bury(self, replica: ReplicaId) -> None:
        for sequence in sorted(self._on.get(replica, ())):
            self._requeue(self._sequences[sequence])
        if replica in self._on:
            self._forget_replica(replica)

    def _forget_replica(self, replica: ReplicaId) -> None:
        del self._on[replica], self._capacity[replica]
        self._leaving.discard(replica)
        self._rebuild()

    def _new_loads(self) -> ReplicaLoads:
        share = self._config.min_gain_share if self._config.throughput_model else 0.0
        return ReplicaLoads(self._model, self._capacity, min_gain_share=share)

    def _rebuild(self) -> None:
        self._loads = self._new_loads()
        for replica, sequences in self._on.items():
            at = self._loads.index[replica]
            states = [self._sequences[sequence] for sequence in sequences]
            tokens, need = sum(state.length for state in states), sum(self._need(state) for state in states)
            self._loads.change(at, len(states), tokens, need)
            self._loads.set_open(at, replica not in self._leaving)

    # Dispatch

    def _dispatch(self) -> list[SchedulerEffect]:
        """Run the head of the queue where it gains most, until the head fits nowhere."""
        effects: list[SchedulerEffect] = []
        popped: list[SequenceState] = []
        placed = dispatch(self._loads, self._heads(popped))
        for state, at in zip(popped, placed, strict=True):
            replica = self._loads.ids[at]
            self._sequences[state.id] = replace(state, place=Place(Phase.RUNNING, replica))
            self._on[replica].add(state.id)
            self._counts["num_dispatched"] += 1
            effects.append(RunSequence(replica, state.id, state.attempt))
        return effects

    def _heads(self, popped: list[SequenceState]) -> Iterator[Movable]:
        """The queue in order; a head leaves it when the next one is asked for, that is, once placed."""
        while self._queue:
            state = self._sequences[self._queue[0][1]]
            yield Movable(state.length, self._need(state))
            heapq.heappop(self._queue)
            popped.append(state)
