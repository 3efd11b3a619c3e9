"""Devices for training when only a part of its batch is there."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import cluster, load

from shared.errors import ConfigError
from shared.ids import ReplicaId, Role
from shared.planning.cluster import Allocation
from shared.planning.config import PlannerConfig, RolePlanning
from shared.planning.planner import Planner
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.scheduling.throughput import H20_7B_TP1

MODEL = RolePlanning(H20_7B_TP1, kv_capacity_tokens=1_000_000)
NUM_DEVICES = 8
PART = TrainingState(batch_ready=True, is_batch_complete=False)
WHOLE = TrainingState(batch_ready=True)
COUNTS = st.integers(0, 60)


def planner(rest, *, devices=2, reward_tp=2, rollout_tp=1, holds=False, **settings):
    """Everything is rollout's, but what training `holds`."""
    spec = cluster(NUM_DEVICES, rollout_tp, reward_tp, training=devices)
    first = -(-devices // rollout_tp) if holds else 0
    active = frozenset(ReplicaId(f"rollout-{i}") for i in range(first, NUM_DEVICES // rollout_tp))
    config = PlannerConfig(rollout=MODEL, reward=MODEL, training_rest_per_replica=rest, **settings)
    return Planner(config, spec, Allocation(active, holds))


def state(training, running=0, waiting=0, verdicts=0):
    rollout = load(Role.ROLLOUT, {7: [100] * running}, (70,) * waiting)
    return WorkloadState(rollout, load(Role.REWARD, {}, (200,) * verdicts), training)


def shifts_training_up(made, observed):
    plan = made.decide(observed, 0.0).plan
    return plan is not None and plan.training_up


@given(st.sampled_from([0.0, 1.0, 10.0, inf]), COUNTS, COUNTS, COUNTS, st.integers(1, NUM_DEVICES))
def test_a_whole_batch_is_given_devices_whatever_is_left(rest, running, waiting, verdicts, devices):
    made = planner(rest, devices=devices)
    assert shifts_training_up(made, state(WHOLE, running, waiting, verdicts))


@given(st.sampled_from([0.0, 1.0, 10.0]), COUNTS, COUNTS, COUNTS, st.integers(1, NUM_DEVICES))
def test_a_part_is_given_devices_when_the_rest_fits_beside_training(
    rest, running, waiting, verdicts, devices
):
    beside = (NUM_DEVICES - devices) // 2
    fits = beside > 0 and running + waiting + verdicts <= rest * beside
    made = planner(rest, devices=devices)
    assert shifts_training_up(made, state(PART, running, waiting, verdicts)) == fits


def test_without_a_limit_a_part_is_given_devices_at_once():
    assert shifts_training_up(planner(inf), state(PART, 60, 60, 60))


@pytest.mark.parametrize("rest", [0.0, 40.0, inf])
@pytest.mark.parametrize(("devices", "rollout_tp"), [(NUM_DEVICES, 1), (7, 1), (6, 4)])
def test_never_where_the_rest_could_not_be_generated(rest, devices, rollout_tp):
    """No room beside training for a replica of reward, or of rollout: it would hold devices for ever."""
    made = planner(rest, devices=devices, rollout_tp=rollout_tp)
    observed = WorkloadState(training=PART)
    assert not shifts_training_up(made, observed)
    assert shifts_training_up(made, replace(observed, training=WHOLE))


def test_meanwhile_generation_is_planned_as_if_nothing_were_ready_and_the_record_says_why():
    observed = state(PART, 8, verdicts=30)
    record = planner(4.0).decide(observed, 0.0)
    idle = planner(4.0).decide(replace(observed, training=TrainingState()), 0.0)
    assert record.plan is not None
    assert (record.plan, record.candidates) == (idle.plan, idle.candidates)
    assert record.reason == f"{idle.reason} (part of a batch is ready: 38 sequences left, 12 fit)"


def test_the_record_of_a_shift_says_what_is_trained():
    assert "part of the next batch is ready" in planner(4.0).decide(state(PART, 4), 0.0).reason
    assert planner(4.0).decide(state(WHOLE, 4), 0.0).reason.startswith("the next batch is ready")


def test_a_part_that_may_not_begin_waits_for_a_version_like_none():
    publishing = replace(PART, activity=TrainingActivity.DONE, is_publishing=True)
    made = planner(4.0, wait_for_version=True)
    assert "about to come" in made.decide(state(publishing, 8, verdicts=30), 0.0).reason
    assert shifts_training_up(made, state(publishing, 8))


def test_training_that_holds_devices_and_is_ready_keeps_them_whatever_is_left():
    """It begins by itself: no shift is needed, and none may take the devices away."""
    made = planner(0.0, holds=True)
    record = made.decide(state(PART, 60, 200, 60), 0.0)
    assert not any(c.training_down for c in record.candidates)
    assert "part of a batch" not in record.reason
    given_up = made.decide(state(TrainingState(), 60, 200, 60), 0.0)
    assert any(c.training_down for c in given_up.candidates)


@pytest.mark.parametrize("rest", [-1.0, float("nan")])
def test_a_limit_is_no_less_than_nothing(rest):
    with pytest.raises(ConfigError, match="training_rest_per_replica"):
        PlannerConfig(training_rest_per_replica=rest)
