"""Baselines on the planner's interface."""

from typing import get_args

import pytest
from planning_cases import cluster, load

from shared.errors import ConfigError
from shared.ids import ReplicaId, Role
from shared.planning.cluster import Allocation
from shared.planning.config import PlannerConfig, PolicyName, RolePlanning
from shared.planning.plan import ExecuteShift, ShiftCompleted, WorkloadObserved
from shared.planning.planner import Planner
from shared.planning.policies import Split, initial_allocation, make_policy
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.scheduling.sequence import RoleLoad
from shared.scheduling.throughput import H20_7B_TP1

IDLE, ACTIVE, DONE = TrainingActivity
MODEL = RolePlanning(H20_7B_TP1, kv_capacity_tokens=1_000)
NAMES = get_args(PolicyName)


def policy(name, spec, split=None, **config):
    settings = PlannerConfig(policy=name, rollout=MODEL, reward=MODEL, **config)
    return make_policy(settings, spec, initial_allocation(name, spec, split))


def drive(policy_, rollout=0, reward=0, activity=IDLE, ready=False):
    """Observe work that waits in queues, complete the shift if one comes, return its plan."""
    observed = WorkloadState(
        load(Role.ROLLOUT, {}, (100,) * rollout),
        load(Role.REWARD, {}, (100,) * reward),
        TrainingState(activity, ready),
    )
    plans = [e.plan for e in policy_.step(WorkloadObserved(observed), 0.0) if isinstance(e, ExecuteShift)]
    for plan in plans:
        policy_.step(ShiftCompleted(plan.id, {}), 0.0)
        policy_.allocation.validate(policy_.cluster)
    return plans[0] if plans else None


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_starts_on_a_legal_allocation(name):
    spec = cluster(8, reward_tp=2, training=2)
    made = policy(name, spec, Split(4, 2))
    made.allocation.validate(spec)
    assert made.allocation.active_of(Role.ROLLOUT, spec)
    assert made.allocation.training_holds == (name not in ("pivot", "colocated"))
    assert isinstance(made, Planner) == (name == "pivot")
    assert made.gauges()["num_shifts"] == 0


def test_fixed_splits_are_checked():
    spec = cluster(8, reward_tp=4, training=2)
    with pytest.raises(ConfigError, match="split"):
        initial_allocation("disaggregated", spec)
    with pytest.raises(ConfigError, match="reward_devices"):
        initial_allocation("disaggregated", spec, Split(2, 8))
    allocation = initial_allocation("disaggregated", spec, Split(2, 4))
    assert allocation.active == {"reward-1", "rollout-2", "rollout-3"}


def test_disaggregated_never_shifts():
    made = policy("disaggregated", cluster(4, training=2), Split(1, 1))
    assert drive(made, 100, 100, ready=True) is None


def test_colocated_serves_one_role_at_a_time():
    spec = cluster(4, reward_tp=2)
    made = policy("colocated", spec)
    assert drive(made, rollout=5, reward=3) is None
    assert drive(made, reward=3).up_replicas == ("reward-0", "reward-1")
    assert drive(made, reward=1, ready=True) is None
    assert drive(made, ready=True).training_up
    assert made.allocation == Allocation(training_holds=True)
    assert drive(made, ready=True) is None, "the step has not begun yet"
    assert drive(made, activity=ACTIVE) is None
    back = drive(made, activity=DONE)
    assert back.training_down
    assert len(back.up_replicas) == 4
    assert drive(made, activity=DONE) is None


def test_rollout_and_reward_take_turns_off_the_training_devices():
    spec = cluster(6, reward_tp=2, training=2)
    made = policy("rollout_reward_colocated", spec)
    assert drive(made, rollout=3, reward=3) is None
    plan = drive(made, reward=3)
    assert plan.up_replicas == ("reward-1", "reward-2")
    assert plan.down_replicas == tuple(f"rollout-{i}" for i in range(2, 6))
    assert drive(made, rollout=3, reward=1, ready=True) is None
    assert drive(made, rollout=3).up_role is Role.ROLLOUT
    assert made.allocation.training_holds


def test_static_lends_training_devices_half_and_half():
    spec = cluster(8, reward_tp=2, training=4)
    made = policy("static", spec, Split(2, 2))
    assert drive(made, 9, 9, activity=ACTIVE) is None
    first, second = drive(made, 9, 9), drive(made, 9, 9)
    assert (first.up_replicas, first.training_down) == (("rollout-0", "rollout-1"), True)
    assert (second.up_replicas, second.training_down) == (("reward-1",), False)
    assert drive(made, 9, 9) is None
    back = drive(made, 9, 9, ready=True)
    assert back.training_up
    assert back.down_replicas == ("reward-1", "rollout-0", "rollout-1")


def test_rule_based_goes_by_kv_use():
    spec = cluster(4, training=0)
    made = policy("rule_based", spec, Split(2, 2))

    def observe(rollout, reward):
        observed = WorkloadState(
            load(Role.ROLLOUT, {2: [rollout], 3: [rollout]}, capacity=1_000),
            load(Role.REWARD, {0: [reward], 1: [reward]}, capacity=1_000),
        )
        return [e.plan for e in made.step(WorkloadObserved(observed), 0.0) if isinstance(e, ExecuteShift)]

    assert made.allocation.active_of(Role.REWARD, spec) == ["reward-0", "reward-1"]
    assert observe(rollout=700, reward=50) == []
    assert observe(rollout=900, reward=500) == []
    (plan,) = observe(rollout=900, reward=50)
    assert plan.up_replicas == ("rollout-0",)
    assert plan.down_replicas == ("reward-0",)


def test_rule_based_counts_work_without_replicas_as_full():
    spec = cluster(2)
    settings = PlannerConfig(policy="rule_based", rollout=MODEL, reward=MODEL)
    made = make_policy(
        settings, spec, Allocation(frozenset([ReplicaId("rollout-0"), ReplicaId("rollout-1")]))
    )
    assert drive(made, reward=1).up_role is Role.REWARD
    assert drive(made, reward=1, ready=True).training_up


def test_rollout_reward_colocated_starts_again_after_a_failed_shift():
    spec = cluster(4, training=2)
    policy = make_policy(
        PlannerConfig(policy="rollout_reward_colocated"), spec, Allocation(frozenset(), training_holds=True)
    )
    state = WorkloadState(reward=RoleLoad(queue=(100,)))
    record = policy.decide(state, 0.0)
    assert record.plan is not None
    assert record.plan.up_role is Role.REWARD
    assert not record.plan.training_down
