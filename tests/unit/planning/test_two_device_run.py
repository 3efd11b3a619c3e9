"""A whole run on two devices, simulated in small steps: every kind of shift happens, and it ends.

Slots rollout-0/1, reward-0/1, training over both. Each finished response becomes one reward sequence, each
finished verdict a scored sample; the next batch in issue order starts a training step once it is complete.
The planner and both schedulers are the real ones.
"""

from collections import Counter

import pytest
from planning_cases import cluster

from shared.ids import ReplicaId, Role, SequenceId, sample_id
from shared.planning.config import PlannerConfig, PolicyName, RolePlanning
from shared.planning.plan import ExecuteShift, ShiftCompleted, WorkloadObserved
from shared.planning.policies import initial_allocation, make_policy
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.scheduling.sequence import (
    AbortSequence,
    ReplicaShiftedUp,
    ReplicaShiftingDown,
    RunSequence,
    SequenceAborted,
    SequenceFinished,
    SequencesRetired,
    SequenceSubmitted,
    TokensGenerated,
)
from shared.scheduling.staleness import num_issuable, sample_staleness
from shared.scheduling.throughput import CPU_SMOLLM2_135M

STEP_S, SHIFT_S, TRAIN_S = 0.25, 1.0, 6.0
BATCH, STALENESS, NUM_BATCHES, KV_TOKENS = 16, 1, 4, 5_000
GENERATING = (Role.ROLLOUT, Role.REWARD)


class House:
    """The devices and the services around the policies."""

    def __init__(self, policy: PolicyName, staleness: int) -> None:
        role = RolePlanning(CPU_SMOLLM2_135M, KV_TOKENS, 64, shift_up_s=SHIFT_S / 2, shift_down_s=SHIFT_S / 2)
        spec = cluster(2)
        start = initial_allocation(policy, spec)
        self.planner = make_policy(PlannerConfig(policy=policy, rollout=role, reward=role), spec, start)
        config = SchedulerConfig(CPU_SMOLLM2_135M, growth_margin_tokens=64)
        self.schedulers = {role: Scheduler(config) for role in GENERATING}
        self.on: dict[Role, dict[SequenceId, tuple[ReplicaId, int, float]]] = {
            role: {} for role in GENERATING
        }
        self.now_s = 0.0
        self.staleness = staleness
        self.num_issued = self.version = 0
        self.issued_at: dict[SequenceId, int] = {}
        self.scored: set[SequenceId] = set()
        self.trained: list[SequenceId] = []
        self.shifts: Counter[str] = Counter()
        self.shift_ends_s: float | None = None
        self.step_ends_s: float | None = None
        for replica in sorted(start.active):
            self.feed(Role.ROLLOUT, ReplicaShiftedUp(replica, KV_TOKENS))

    def feed(self, role: Role, event) -> None:
        events = [event]
        for current in events:
            for effect in self.schedulers[role].step(current, self.now_s):
                if isinstance(effect, RunSequence):
                    state = self.schedulers[role].sequence(effect.sequence)
                    self.on[role][effect.sequence] = (effect.replica, effect.attempt, state.generated_tokens)
                else:
                    assert isinstance(effect, AbortSequence)
                    replica, attempt, total = self.on[role].pop(effect.sequence)
                    events.append(SequenceAborted(effect.sequence, replica, attempt, int(total)))

    def length_of(self, role: Role, sequence: SequenceId) -> int:
        """Responses have a long tail, verdicts are short."""
        i = int(sequence[:8])
        return 40 + 97 * i % 110 if role is Role.ROLLOUT else 30 + 53 * i % 40

    def issue(self) -> None:
        left = min(
            num_issuable(self.version, self.staleness, BATCH, self.num_issued),
            NUM_BATCHES * BATCH - self.num_issued,
        )
        for _ in range(left):
            sequence = sample_id(self.num_issued, 0)
            self.num_issued += 1
            self.issued_at[sequence] = self.version
            self.feed(Role.ROLLOUT, SequenceSubmitted(sequence, 60, 200))

    def generate(self, role: Role) -> None:
        busy = Counter(replica for replica, *_ in self.on[role].values())
        for sequence, (replica, attempt, total) in list(self.on[role].items()):
            if self.on[role].get(sequence) != (replica, attempt, total):
                continue
            n = busy[replica]
            tokens = total + STEP_S * CPU_SMOLLM2_135M.tokens_per_s(n, 120 * n) / n
            if tokens >= self.length_of(role, sequence):
                del self.on[role][sequence]
                self.feed(role, SequenceFinished(sequence, replica, attempt, self.length_of(role, sequence)))
                self.feed(role, SequencesRetired((sequence,)))
                if role is Role.ROLLOUT:
                    self.feed(Role.REWARD, SequenceSubmitted(sequence, 160, 100))
                else:
                    self.scored.add(sequence)
            else:
                self.on[role][sequence] = (replica, attempt, tokens)
                self.feed(role, TokensGenerated(sequence, replica, attempt, int(tokens)))

    def next_batch(self) -> list[SequenceId]:
        first = len(self.trained)
        return [sample_id(i, 0) for i in range(first, first + BATCH)]

    def is_batch_ready(self) -> bool:
        return self.scored.issuperset(self.next_batch())

    def train(self) -> None:
        holds = self.planner.allocation.training_holds and self.planner.in_flight is None
        if self.step_ends_s is None and holds and self.is_batch_ready():
            batch = self.next_batch()
            for sequence in batch:
                assert sample_staleness(self.version, self.issued_at[sequence]) <= self.staleness
            self.trained += batch
            self.step_ends_s = self.now_s + TRAIN_S
        elif self.step_ends_s is not None and self.now_s >= self.step_ends_s:
            self.step_ends_s = None
            self.version += 1

    def shift(self) -> None:
        plan = self.planner.in_flight
        if plan is not None:
            assert self.shift_ends_s is not None
            if self.now_s < self.shift_ends_s:
                return
            for replica in plan.up_replicas:
                self.feed(plan.up_role, ReplicaShiftedUp(replica, KV_TOKENS))
            self.planner.step(ShiftCompleted(plan.id, {}), self.now_s)
        activity = TrainingActivity.ACTIVE if self.step_ends_s is not None else TrainingActivity.IDLE
        training = TrainingState(activity, self.is_batch_ready())
        loads = (self.schedulers[role].load() for role in GENERATING)
        for effect in self.planner.step(WorkloadObserved(WorkloadState(*loads, training)), self.now_s):
            if isinstance(effect, ExecuteShift):
                self.begin(effect.plan)

    def begin(self, plan) -> None:
        for role in GENERATING:
            leaving = tuple(r for r in plan.down_replicas if r.startswith(role))
            if leaving:
                self.feed(role, ReplicaShiftingDown(leaving))
                self.shifts[f"{role} to {plan.up_role}"] += 1
        if plan.training_down:
            assert self.step_ends_s is None
            self.shifts[f"training to {plan.up_role}"] += 1
        self.shift_ends_s = self.now_s + SHIFT_S

    def run(self, limit_s: float) -> None:
        while self.version < NUM_BATCHES and self.now_s < limit_s:
            self.issue()
            for role in GENERATING:
                self.generate(role)
            self.train()
            self.shift()
            self.now_s += STEP_S


@pytest.mark.parametrize("policy", ["pivot", "colocated"])
def test_four_batches_are_trained_on_two_devices(policy):
    house = House(policy, STALENESS if policy == "pivot" else 0)
    house.run(limit_s=600.0)
    assert house.version == NUM_BATCHES, (house.now_s, house.shifts, house.planner.allocation)
    assert sorted(house.trained) == sorted({sample_id(i, 0) for i in range(NUM_BATCHES * BATCH)})
    assert house.shifts["rollout to reward"] >= 1
    assert house.shifts["training to rollout"] >= 1
    assert house.shifts["rollout to training"] + house.shifts["reward to training"] >= 1
    if policy == "colocated":
        assert set(house.shifts.values()) == {NUM_BATCHES}


def test_shifting_beats_one_role_at_a_time():
    """The same work on the same two devices."""
    pivot, colocated = House("pivot", STALENESS), House("colocated", 0)
    pivot.run(600.0)
    colocated.run(600.0)
    assert pivot.now_s < 0.85 * colocated.now_s


def test_a_run_is_deterministic():
    first, second = House("pivot", STALENESS), House("pivot", STALENESS)
    first.run(600.0)
    second.run(600.0)
    assert (first.now_s, first.shifts, first.trained) == (second.now_s, second.shifts, second.trained)


def test_replaying_the_same_observations_gives_the_same_decisions():
    """What makes a recorded run replayable: a policy's effects depend on its events alone."""
    house = House("pivot", STALENESS)
    record = []
    step = house.planner.step

    def recording(event, now_s):
        effects = step(event, now_s)
        record.append((event, now_s, effects))
        return effects

    house.planner.step = recording
    house.run(600.0)
    fresh = House("pivot", STALENESS).planner
    for event, now_s, effects in record:
        assert fresh.step(event, now_s) == effects
