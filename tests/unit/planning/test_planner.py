"""The planner's decisions, its life cycle, and its choice against brute force."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import cluster, load

from shared.ids import ReplicaId, Role, replica_id
from shared.planning.cluster import Allocation
from shared.planning.config import PlannerConfig, RolePlanning
from shared.planning.evaluate import RoleReplay, combined_tokens_per_s
from shared.planning.pairs import shift_pairs
from shared.planning.plan import (
    CandidateRecord,
    ConfigChanged,
    Direction,
    ExecuteShift,
    ManualShiftRequested,
    Paused,
    PlanRecorded,
    Resumed,
    ShiftCompleted,
    ShiftFailed,
    ShiftStarted,
    WorkloadObserved,
)
from shared.planning.planner import PUBLISHING_LIMIT_S, Planner, search
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.scheduling.sequence import RoleLoad
from shared.scheduling.throughput import H20_7B_TP1

MODEL = RolePlanning(H20_7B_TP1, kv_capacity_tokens=1_000_000)
CONFIG = PlannerConfig(rollout=MODEL, reward=MODEL)
IDLE, ACTIVE, DONE = TrainingActivity


def alloc(*active, training=False):
    return Allocation(frozenset(ReplicaId(a) for a in active), training)


def rollouts(num):
    return [f"rollout-{i}" for i in range(num)]


def state(rollout=None, reward=None, activity=IDLE, ready=False, queues=((), ())):
    return WorkloadState(
        load(Role.ROLLOUT, rollout or {}, queues[0]),
        load(Role.REWARD, reward or {}, queues[1]),
        TrainingState(activity, ready),
    )


def observe(planner, observed, now_s=0.0):
    """(record, plan or None)"""
    effects = planner.step(WorkloadObserved(observed), now_s)
    record = effects[0].record
    assert isinstance(effects[0], PlanRecorded)
    plans = [e.plan for e in effects[1:] if isinstance(e, ExecuteShift)]
    assert [record.plan] == (plans or [None])
    return record, record.plan


def complete(planner, plan, now_s=0.0, durations=None):
    planner.step(ShiftStarted(plan.id), now_s)
    assert planner.step(ShiftCompleted(plan.id, durations or {}), now_s) == []


def test_a_waiting_reward_with_no_replica_gets_one():
    planner = Planner(CONFIG, cluster(2), alloc(*rollouts(2)))
    record, plan = observe(planner, state({0: [100] * 8, 1: [100] * 8}, queues=((), (200,))))
    assert plan.up_role is Role.REWARD
    assert len(plan.up_replicas) == len(plan.down_replicas) == 1
    assert record.current_tokens_per_s == 0
    assert [c.is_chosen for c in record.candidates] == [True, False]
    assert record.candidates[1].tokens_per_s == 0, "taking the last rollout replica would stall rollout"


def test_an_empty_reward_replica_goes_back_for_nothing():
    planner = Planner(CONFIG, cluster(2), alloc("rollout-0", "reward-1"))
    _, plan = observe(planner, state({0: [100] * 8}, {1: []}))
    assert (plan.up_replicas, plan.down_replicas) == (("rollout-1",), ("reward-1",))
    assert plan.penalty_tokens == 0


def test_decisions_wait_for_the_prompts_of_a_new_version_but_not_for_ever():
    waiting = state({}, {}, activity=TrainingActivity.DONE, queues=((), (70,) * 9))
    waiting = replace(waiting, training=replace(waiting.training, is_publishing=True))
    for waits in (True, False):
        config = replace(CONFIG, wait_for_version=waits)
        planner = Planner(config, cluster(4, training=2), alloc(training=True))
        record, plan = observe(planner, waiting, 10.0)
        assert (plan is None) == waits
        assert ("about to come" in record.reason) == waits
    planner = Planner(replace(CONFIG, wait_for_version=True), cluster(4, training=2), alloc(training=True))
    observe(planner, waiting, 10.0)
    assert observe(planner, waiting, 10.0 + PUBLISHING_LIMIT_S)[1] is not None
    ready = replace(waiting, training=replace(waiting.training, is_publishing=False))
    planner = Planner(replace(CONFIG, wait_for_version=True), cluster(4, training=2), alloc(training=True))
    observe(planner, waiting, 10.0)
    assert observe(planner, ready, 11.0)[1] is not None


def test_what_moves_costs_its_prefill():
    """The same state; with a long prefill no shift pays any more."""
    busy = state({0: [4_000] * 60, 1: [4_000] * 60}, {}, queues=((), (4_000,) * 2))
    chosen = {}
    for prefill_s in (0.0, 1.0):
        role = replace(MODEL, prefill_s_per_token=prefill_s)
        planner = Planner(
            replace(CONFIG, rollout=role, reward=role), cluster(2), alloc("rollout-0", "rollout-1")
        )
        record, plan = observe(planner, busy)
        chosen[prefill_s] = max(c.penalty_tokens for c in record.candidates), plan
    assert chosen[0.0][1] is not None
    assert chosen[1.0][0] > 100 * chosen[0.0][0]


def test_sequences_that_migration_moves_to_a_new_replica_cost_their_prefill():
    """No donor: all the penalty is the prefill of what moves to the free device."""
    busy = state({0: [4_000] * 60}, {})
    role = replace(MODEL, prefill_s_per_token=1e-4)
    planner = Planner(replace(CONFIG, rollout=role, reward=role), cluster(2), alloc("rollout-0"))
    record, plan = observe(planner, busy)
    assert plan is not None
    (chosen,) = (c for c in record.candidates if c.is_chosen)
    assert chosen.rollout_tokens_per_s == pytest.approx(2 * H20_7B_TP1.tokens_per_s(30, 120_000))
    expected = 1e-4 * 30 * 4_000 * chosen.rollout_tokens_per_s / 2
    assert chosen.penalty_tokens == pytest.approx(expected)


def test_verdicts_still_to_come_count_for_reward():
    """With as much work in both roles, what is upstream decides; without weight it does not."""
    known = state({0: [100] * 40}, {1: [100] * 20})
    known = replace(
        known,
        rollout=replace(known.rollout, mean_new_tokens=100.0),
        reward=replace(known.reward, mean_new_tokens=100.0),
    )
    asked = {}
    for weight in (0.0, 1.0):
        planner = Planner(
            replace(CONFIG, length_aware=True, upstream_weight=weight),
            cluster(3),
            alloc("rollout-0", "reward-1"),
        )
        asked[weight] = observe(planner, known)[0].up_role
    assert asked == {0.0: Role.ROLLOUT, 1.0: Role.REWARD}


def test_a_ready_batch_shifts_training_up_and_everyone_on_its_devices_down():
    planner = Planner(CONFIG, cluster(4, training=2), alloc("rollout-0", "reward-1", "rollout-2"))
    _, plan = observe(planner, state({0: [50] * 4, 2: [50] * 4}, {1: [70] * 2}, ready=True))
    assert plan.training_up
    assert plan.down_replicas == ("reward-1", "rollout-0")
    expected = 5.0 * (H20_7B_TP1.tokens_per_s(4, 200) + H20_7B_TP1.tokens_per_s(2, 140))
    assert plan.penalty_tokens == pytest.approx(expected)
    complete(planner, plan)
    assert planner.allocation == alloc("rollout-2", training=True)


def test_training_that_is_done_gives_its_devices_back():
    planner = Planner(CONFIG, cluster(2), alloc(training=True))
    waiting = state(activity=DONE, queues=((100,) * 20, ()))
    _, plan = observe(planner, waiting)
    assert plan.training_down
    assert plan.up_replicas == ("rollout-0", "rollout-1")
    assert plan.penalty_tokens == 0


@pytest.mark.parametrize("training", [{"activity": ACTIVE}, {"ready": True}])
def test_training_that_runs_or_is_about_to_keeps_its_devices(training):
    planner = Planner(CONFIG, cluster(2), alloc(training=True))
    record, plan = observe(planner, state(queues=((100,) * 20, ()), **training))
    assert plan is None
    assert "can get no further replica" in record.reason


def test_two_stalled_roles_do_not_wait_for_each_other():
    """Training gives everything back while both queues hold work: T of one stays 0 whatever starts."""
    planner = Planner(CONFIG, cluster(2), alloc(training=True))
    both = state(activity=DONE, queues=((100,) * 20, (100,) * 3))
    _, plan = observe(planner, both)
    assert plan.up_role is Role.ROLLOUT
    complete(planner, plan)
    started = state({0: [100] * 10, 1: [100] * 10}, activity=DONE, queues=((), (100,) * 3))
    _, plan = observe(planner, started, 10.0)
    assert plan.up_role is Role.REWARD
    assert len(plan.up_replicas) == 1


def test_free_devices_are_used_for_nothing():
    planner = Planner(CONFIG, cluster(4), alloc("rollout-0", "reward-1"))
    _, plan = observe(planner, state({0: [100] * 60}, {1: [100] * 4}))
    assert plan.up_replicas == ("rollout-2", "rollout-3")
    assert plan.down_replicas == ()
    assert plan.penalty_tokens == 0


def test_nothing_to_do_is_recorded_with_its_reason():
    planner = Planner(CONFIG, cluster(2), alloc(*rollouts(2)))
    record, plan = observe(planner, state())
    assert plan is None
    assert record.reason == "neither rollout nor reward has sequences"
    planner = Planner(CONFIG, cluster(2), alloc("rollout-0", "reward-1"))
    record, plan = observe(planner, state({0: [100] * 8}, {1: [100] * 6}))
    assert plan is None
    assert "no shift pays" in record.reason
    assert record.candidates
    assert record.candidates[0].benefit_tokens <= 0


def test_no_second_shift_while_one_is_in_flight_and_ids_count_up():
    planner = Planner(CONFIG, cluster(2), alloc(*rollouts(2)))
    pressed = state({0: [100] * 8, 1: [100] * 8}, queues=((), (200,)))
    _, plan = observe(planner, pressed)
    assert plan.id == "p000001"
    assert planner.step(WorkloadObserved(pressed), 1.0) == []
    assert planner.step(ShiftCompleted("p000009", {}), 1.0) == [], "not ours"
    assert planner.in_flight == plan
    complete(planner, plan)
    _, plan = observe(planner, state({0: [100] * 16}, {1: []}), 2.0)
    assert plan.id == "p000002"


def test_a_failed_shift_leaves_its_devices_free_unless_told_otherwise():
    planner = Planner(CONFIG, cluster(2), alloc(*rollouts(2)))
    pressed = state({0: [100] * 8, 1: [100] * 8}, queues=((), (200,)))
    _, plan = observe(planner, pressed)
    planner.step(ShiftFailed(plan.id, "no memory"), 1.0)
    assert planner.allocation.active == set(rollouts(2)) - set(plan.down_replicas)
    _, plan = observe(planner, state({1: [100] * 16}, queues=((), (200,))), 2.0)
    assert plan.down_replicas == (), "the free device is tried first"
    planner.step(ShiftFailed(plan.id, "never began", alloc(*rollouts(2))), 3.0)
    assert planner.allocation == alloc(*rollouts(2))
    assert planner.gauges()["num_shifts_failed"] == 2


def test_paused_planner_decides_nothing_but_obeys_people():
    planner = Planner(CONFIG, cluster(2), alloc(*rollouts(2)))
    pressed = state({0: [100] * 8, 1: [100] * 8}, queues=((), (200,)))
    planner.step(Paused(), 0.0)
    assert planner.step(WorkloadObserved(pressed), 0.0) == []
    (dry,) = planner.step(ManualShiftRequested(Role.REWARD, (ReplicaId("reward-1"),), dry_run=True), 0.0)
    assert dry.record.plan.down_replicas == ("rollout-1",)
    assert planner.in_flight is None
    recorded, executed = planner.step(ManualShiftRequested(Role.REWARD, (ReplicaId("reward-1"),)), 0.0)
    assert recorded.record.plan == executed.plan
    complete(planner, executed.plan)
    planner.step(Resumed(), 0.0)
    assert planner.allocation == alloc("rollout-0", "reward-1")
    assert observe(planner, state({0: [100] * 8}, {1: []}))[1] is not None


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ManualShiftRequested(Role.REWARD), "give replicas of reward"),
        (ManualShiftRequested(Role.REWARD, (ReplicaId("rollout-0"),)), "give replicas of reward"),
        (ManualShiftRequested(Role.ROLLOUT, (ReplicaId("rollout-3"),)), "active already"),
        (ManualShiftRequested(Role.REWARD, (ReplicaId("reward-0"),)), "training is active"),
        (ManualShiftRequested(Role.TRAINING), "holds its devices already"),
    ],
)
def test_manual_shifts_that_cannot_be_are_refused_with_the_reason(request_, reason):
    planner = Planner(CONFIG, cluster(4, training=2), alloc("rollout-2", "rollout-3", training=True))
    planner.step(WorkloadObserved(state(activity=ACTIVE)), 0.0)
    (effect,) = planner.step(request_, 0.0)
    assert reason in effect.record.reason
    assert effect.record.plan is None


def test_minimum_and_maximum_replicas_are_kept():
    pressed = state({i: [100] * 4 for i in range(4)}, queues=((), (200,) * 60))
    keep = replace(CONFIG, rollout=replace(MODEL, min_replicas=3))
    record, plan = observe(Planner(keep, cluster(4), alloc(*rollouts(4))), pressed)
    assert len(plan.up_replicas) == 1
    assert "rollout keeps at least 3" in record.candidates[1].refusal
    most = replace(CONFIG, reward=replace(MODEL, max_replicas=2))
    record, plan = observe(Planner(most, cluster(4), alloc(*rollouts(4))), pressed)
    assert len(record.candidates) == 2


def test_measured_shifts_change_the_penalty():
    planner = Planner(
        replace(CONFIG, measured_shift_weight=0.5), cluster(4), alloc("rollout-0", "rollout-1", "reward-2")
    )
    planner.step(ManualShiftRequested(Role.REWARD, (ReplicaId("reward-3"),)), 0.0)
    durations = {(Role.REWARD, Direction.UP): 13.0, (Role.ROLLOUT, Direction.DOWN): 4.0}
    complete(planner, planner.in_flight, durations=durations)
    record, _ = observe(planner, state({0: [100] * 2, 1: [100] * 2}, {2: [100] * 99, 3: [100] * 99}))
    tau_s = 0.5 * (3 + 13) + 0.5 * (2 + 4)
    assert record.candidates[0].penalty_tokens == pytest.approx(tau_s * H20_7B_TP1.tokens_per_s(2, 200))
    assert planner.gauges()["reward_shift_up_s"] == 8.0


def test_a_shift_is_not_reversed_at_a_cost_before_it_paid_back():
    planner = Planner(CONFIG, cluster(4), alloc("rollout-0", "rollout-1", "rollout-2", "reward-3"))
    _, plan = observe(planner, state({i: [100] * 4 for i in range(3)}, {3: [100] * 200}))
    assert plan.up_role is Role.REWARD
    complete(planner, plan, now_s=10.0)
    left = sorted(int(r[-1]) for r in planner.allocation.active if r.startswith("rollout"))
    reverse = state({i: [100] * 200 for i in left}, {i: [100] * 2 for i in range(4) if i not in left})
    record, plan = observe(planner, reverse, now_s=10.1)
    assert all(
        "has not paid back" in c.refusal for c in record.candidates if c.down_replicas != ("reward-3",)
    )
    if plan:
        assert plan.down_replicas == ("reward-3",)
        complete(planner, plan, now_s=10.2)
    _, plan = observe(
        Planner(replace(CONFIG, payback_guard=False), cluster(4), planner.allocation), reverse, 99.0
    )
    assert plan is None or plan.up_role is Role.ROLLOUT


def test_cooldown_holds_generation_shifts_but_not_training():
    planner = Planner(replace(CONFIG, cooldown_s=30.0), cluster(2), alloc(*rollouts(2)))
    pressed = state({0: [100] * 8, 1: [100] * 8}, queues=((), (200,)))
    _, plan = observe(planner, pressed)
    complete(planner, plan, now_s=5.0)
    record, plan = observe(planner, state({0: [100] * 16}, {1: []}), now_s=20.0)
    assert (plan, record.reason) == (None, "cooling down after the last shift")
    _, plan = observe(planner, state({0: [100] * 16}, {1: []}, ready=True), now_s=21.0)
    assert plan.training_up


def test_config_changes_apply_to_the_next_decision():
    planner = Planner(CONFIG, cluster(2), alloc("rollout-0", "reward-1"))
    pressed = state({0: [100] * 8}, {1: []})
    planner.step(ConfigChanged(replace(CONFIG, rollout=replace(MODEL, max_replicas=1))), 0.0)
    assert observe(planner, pressed)[1] is None
    planner.step(ConfigChanged(CONFIG), 0.0)
    assert observe(planner, pressed)[1] is not None


def test_the_vanilla_ablation_sees_only_busy_or_idle():
    vanilla = replace(CONFIG, use_throughput_model=False)
    planner = Planner(vanilla, cluster(4), alloc("rollout-0", "rollout-1", "reward-2", "reward-3"))
    record, plan = observe(planner, state({0: [9] * 9, 1: [9] * 9}, {2: [9] * 300, 3: [9] * 300}))
    assert record.current_tokens_per_s == pytest.approx(2)
    assert plan is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 2),
    st.integers(0, 60),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)
def test_the_chosen_benefit_equals_brute_force(num_busy, each, num_free, reward_n, queue, training, tp):
    """All ways to take from every pair, on clusters whose replicas are alike."""
    rollout_tp, reward_tp = tp
    unit = max(tp)
    num = unit * (num_busy + num_free + 1) + (unit if training else 0)
    spec = cluster(num, rollout_tp, reward_tp, training=unit)
    first = unit if training else 0
    busy = range(first // rollout_tp, (first + unit * num_busy) // rollout_tp)
    allocation = alloc(*(f"rollout-{i}" for i in busy), f"reward-{num // reward_tp - 1}", training=training)
    observed = state(
        {i: [100] * each for i in busy},
        {num // reward_tp - 1: [100] * reward_n},
        DONE,
        queues=((), (100,) * queue),
    )
    planner = Planner(CONFIG, spec, allocation)
    record, plan = observe(planner, observed)
    if record.up_role is None:
        return
    up, down = record.up_role, record.up_role.opposite
    replays = {
        role: RoleReplay(
            observed.of(role),
            allocation.active_of(role, spec),
            [s.id for s in spec.slots_of(role) if s.id not in allocation.active],
            model=H20_7B_TP1,
            migrate=True,
            kv_capacity_tokens=1_000_000,
            growth_tokens=512,
        )
        for role in (Role.ROLLOUT, Role.REWARD)
    }
    n_up, n_down = replays[up].num_sequences, replays[down].num_sequences
    pairs = shift_pairs(
        spec, allocation, up, lambda r: 5.0 * replays[down].tokens_per_s_of(r), training_active=False
    )
    current = combined_tokens_per_s(n_up, replays[up].tokens_per_s, n_down, replays[down].tokens_per_s)
    best = 0.0
    for taken in product(*(range(len(p.up_replicas) + 1) for p in pairs)):
        if not any(taken):
            continue
        ups = [r for p, e in zip(pairs, taken, strict=True) for r in p.up_replicas[:e]]
        downs = [r for p, e in zip(pairs, taken, strict=True) if e for r in p.down_replicas]
        penalty = sum(p.penalty_tokens for p, e in zip(pairs, taken, strict=True) if e)
        after = combined_tokens_per_s(
            n_up, replays[up].after_shift_up(ups).tokens_per_s, n_down, replays[down].after_shift_down(downs)
        )
        best = max(best, 60.0 * (after - current) - penalty)
    chosen = max((c.benefit_tokens for c in record.candidates if c.is_chosen), default=0.0)
    assert chosen == pytest.approx(best, rel=1e-9, abs=1e-6)
    assert (plan is None) == (chosen == 0)
    if plan:
        plan.apply(allocation).validate(spec)


def test_an_empty_role_load_is_no_work():
    assert RoleLoad().num_sequences == 0
    assert WorkloadState().of(Role.REWARD) == RoleLoad()


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=120)
)
def test_the_search_finds_the_best_where_throughputs_are_monotone(steps):
    """Up-role throughput rises along the candidates, the donor's falls, penalties rise."""
    up, down, penalty = 0, 2_000, 0
    found = []
    for more, less, cost in steps:
        up, down, penalty = up + more, down - less, penalty + cost
        found.append((float(up), float(down), float(penalty)))
    asked = []

    def value(up, down, penalty):
        return up + down - 2_000 - penalty

    def judge(i):
        asked.append(i)
        up, down, penalty = found[i]
        return CandidateRecord((), (), False, penalty, up, down, up + down, value(up, down, penalty))

    def bound(before, after, i):
        return value(after.rollout_tokens_per_s, before.reward_tokens_per_s, found[i][2])

    judged = search(len(found), judge, bound, 200)
    assert sorted(asked) == list(judged), "each at most once"
    best = max(0.0, *(value(*each) for each in found), 0.0)
    assert max(0.0, *(c.benefit_tokens for c in judged.values()), 0.0) == best


def test_the_search_leaves_out_what_cannot_pay():
    def judge(i):
        asked.append(i)
        return CandidateRecord((), (), False, 0.0, 1.0, 1.0, 1.0, -5.0)

    asked = []
    assert search(0, judge, lambda before, after, i: 1.0, 48) == {}
    judged = search(300, judge, lambda before, after, i: -1.0, 48)
    assert list(judged) == sorted(asked) == [0, 299]
    assert len(search(300, judge, lambda before, after, i: 1.0, 9)) == 9


def test_length_awareness_weighs_sequences_by_what_finished_ones_wrote():
    """As many responses as verdicts, far shorter: counted alike rollout presses, weighed reward does."""
    spec = cluster(4)
    reward_replicas = [replica_id(Role.REWARD, i) for i in (1, 2, 3)]
    active = Allocation(frozenset([replica_id(Role.ROLLOUT, 0), *reward_replicas]))
    config = RolePlanning(H20_7B_TP1)
    rollout = replace(load(Role.ROLLOUT, {0: [100] * 40}), mean_new_tokens=200.0)
    reward = replace(load(Role.REWARD, {i: [100] * 20 for i in (1, 2, 3)}), mean_new_tokens=5_000.0)
    state = WorkloadState(rollout, reward)
    chosen = {}
    for length_aware in (False, True):
        planner = Planner(
            PlannerConfig(rollout=config, reward=config, length_aware=length_aware), spec, active
        )
        chosen[length_aware] = planner.decide(state, 0.0).up_role
    assert chosen == {False: Role.ROLLOUT, True: Role.REWARD}
