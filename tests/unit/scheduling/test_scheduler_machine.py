"""The scheduler under any interleaving: simulated replicas, with messages repeated, delayed and lost."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.ids import ReplicaId, sample_id
from shared.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.scheduling.sequence import (
    AbortSequence,
    Phase,
    ReplicaDied,
    ReplicaShiftedUp,
    ReplicaShiftingDown,
    RunSequence,
    SequenceAborted,
    SequenceCancelled,
    SequenceFailed,
    SequenceFinished,
    SequenceSubmitted,
    Tick,
    TokensGenerated,
)
from shared.scheduling.throughput import H20_7B_TP1

MARGIN = 64
REPLICAS = [ReplicaId(f"rollout-{i}") for i in range(4)]
CAPACITY = {replica: 600 + 300 * i for i, replica in enumerate(REPLICAS)}


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(SchedulerConfig(H20_7B_TP1, growth_margin_tokens=MARGIN))
        self.submitted = {}
        self.generated = {}
        self.real = {}  # sequence -> (replica, attempt, tokens): what a replica truly generates
        self.abort_asked = set()
        self.up = set()
        self.leaving = set()
        self.sent = []

    def feed(self, event):
        self.sent.append(event)
        queue_before = self.waiting()
        effects = self.scheduler.step(event, 0.0)
        placed = [e for e in effects if isinstance(e, RunSequence)]
        for effect in effects:
            if isinstance(effect, RunSequence):
                assert effect.sequence not in self.real, "the sequence still generates elsewhere"
                assert effect.replica in self.up - self.leaving
                state = self.scheduler.sequence(effect.sequence)
                self.real[effect.sequence] = (effect.replica, effect.attempt, state.generated_tokens)
            else:
                assert isinstance(effect, AbortSequence)
                assert self.real[effect.sequence][:2] == (effect.replica, effect.attempt)
                assert effect.sequence not in self.abort_asked
                self.abort_asked.add(effect.sequence)
        for replica in {e.replica for e in placed}:
            held = [self.scheduler.sequence(s) for s, (at, *_) in self.real.items() if at == replica]
            assert sum(s.kv_need(MARGIN) for s in held) <= CAPACITY[replica]
        runs = [e.sequence for e in placed]
        assert runs == sorted(runs)
        if placed and self.waiting():
            assert max(runs) < min(self.waiting()), "nothing overtakes the head"
        assert set(runs) <= set(queue_before) | {getattr(event, "sequence", None)} | set(self.submitted)

    def waiting(self):
        states = map(self.scheduler.sequence, self.submitted)
        return [s.id for s in states if s and s.place.phase is Phase.WAITING]

    def on_replicas(self):
        return sorted(self.real)

    @rule(prompt=st.integers(1, 300), max_new=st.integers(1, 200))
    def submit(self, prompt, max_new):
        sequence = sample_id(len(self.submitted), 0)
        self.submitted[sequence] = (prompt, max_new)
        self.feed(SequenceSubmitted(sequence, prompt, max_new))

    @precondition(lambda self: self.real)
    @rule(data=st.data(), tokens=st.integers(1, 50))
    def progress(self, data, tokens):
        sequence = data.draw(st.sampled_from(self.on_replicas()))
        replica, attempt, total = self.real[sequence]
        total = min(total + tokens, self.submitted[sequence][1])
        self.real[sequence] = (replica, attempt, total)
        self.feed(TokensGenerated(sequence, replica, attempt, total))

    @precondition(lambda self: self.real)
    @rule(data=st.data(), tokens=st.integers(0, 50), fails=st.booleans())
    def end(self, data, tokens, fails):
        sequence = data.draw(st.sampled_from(self.on_replicas()))
        replica, attempt, total = self.real.pop(sequence)
        self.abort_asked.discard(sequence)
        total = min(total + tokens, self.submitted[sequence][1])
        if fails:
            self.feed(SequenceFailed(sequence, replica, attempt))
        else:
            self.feed(SequenceFinished(sequence, replica, attempt, total))
        self.forget_empty()

    @precondition(lambda self: self.abort_asked)
    @rule(data=st.data(), tokens=st.integers(0, 5))
    def confirm_abort(self, data, tokens):
        sequence = data.draw(st.sampled_from(sorted(self.abort_asked)))
        replica, attempt, total = self.real.pop(sequence)
        self.abort_asked.discard(sequence)
        # The replica is gone for the scheduler with its last sequence.
        self.forget_empty()
        total = min(total + tokens, self.submitted[sequence][1])
        self.feed(SequenceAborted(sequence, replica, attempt, total))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data):
        self.feed(SequenceCancelled(data.draw(st.sampled_from(sorted(self.submitted)))))

    @precondition(lambda self: len(self.up) < len(REPLICAS) or self.leaving)
    @rule(data=st.data())
    def shift_up(self, data):
        replica = data.draw(st.sampled_from([r for r in REPLICAS if r not in self.up or r in self.leaving]))
        self.up.add(replica)
        self.leaving.discard(replica)
        self.feed(ReplicaShiftedUp(replica, CAPACITY[replica]))

    @precondition(lambda self: self.up - self.leaving)
    @rule(data=st.data())
    def shift_down(self, data):
        some = data.draw(st.sets(st.sampled_from(sorted(self.up)), min_size=1))
        self.leaving |= some
        self.feed(ReplicaShiftingDown(tuple(sorted(some))))
        self.forget_empty()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def die(self, data):
        replica = data.draw(st.sampled_from(sorted(self.up)))
        for sequence in [s for s, (at, *_) in self.real.items() if at == replica]:
            del self.real[sequence]
            self.abort_asked.discard(sequence)
        self.up.discard(replica)
        self.leaving.discard(replica)
        self.feed(ReplicaDied(replica))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat_an_old_message(self, data):
        """Replicas repeat and delay reports; arrivals are delivered again after a restart."""
        event = data.draw(st.sampled_from(self.sent))
        if isinstance(event, TokensGenerated | SequenceFinished | SequenceFailed | SequenceAborted):
            at = self.real.get(event.sequence)
            if at and at[:2] == (event.replica, event.attempt) and not isinstance(event, TokensGenerated):
                return  # that stay is not over: it would be a lie, not a repetition
            self.feed(event)
        elif isinstance(event, SequenceSubmitted | SequenceCancelled):
            self.feed(event)

    @rule()
    def tick(self):
        self.feed(Tick())

    def forget_empty(self):
        busy = {at for at, *_ in self.real.values()}
        for replica in [r for r in self.leaving if r not in busy]:
            self.leaving.discard(replica)
            self.up.discard(replica)

    @invariant()
    def each_sequence_is_in_exactly_one_place(self):
        load = self.scheduler.load()
        phases = {}
        for sequence, (prompt, max_new) in self.submitted.items():
            state = self.scheduler.sequence(sequence)
            assert state is not None, "lost"
            assert state.prompt_tokens == prompt
            phases.setdefault(state.place.phase, []).append(state)
            if sequence in self.real:
                replica, attempt, total = self.real[sequence]
                assert (state.place.replica, state.attempt) == (replica, attempt)
                assert state.place.phase is (
                    Phase.ABORTING if sequence in self.abort_asked else Phase.RUNNING
                )
                assert state.generated_tokens == total
            else:
                assert state.place.replica is None
            assert self.generated.get(sequence, 0) <= state.generated_tokens <= max_new
            self.generated[sequence] = state.generated_tokens
        on = len(phases.get(Phase.RUNNING, [])) + len(phases.get(Phase.ABORTING, []))
        assert on == len(self.real)
        assert load.num_sequences == on + len(phases.get(Phase.WAITING, []))
        assert {r.replica for r in load.replicas} == self.up - self.leaving

    @invariant()
    def loads_equal_the_sum_of_their_sequences(self):
        for replica in self.scheduler.load().replicas:
            held = [self.scheduler.sequence(s) for s, (at, *_) in self.real.items() if at == replica.replica]
            assert replica.num_sequences == len(held)
            assert replica.num_tokens == sum(s.length for s in held)
        expected = 0.0
        for replica in self.up:
            held = [self.scheduler.sequence(s) for s, (at, *_) in self.real.items() if at == replica]
            expected += H20_7B_TP1.tokens_per_s(len(held), sum(s.length for s in held))
        assert abs(self.scheduler.gauges()["tokens_per_s"] - expected) <= 1e-6 * (1 + expected)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
