"""Replaying a recorded run: the recorded settings decide as recorded, others are compared."""

import random
from dataclasses import replace

import pytest

from shared.ids import Role
from shared.planning.plan import (
    ConfigChanged,
    Direction,
    ExecuteShift,
    ManualShiftRequested,
    ShiftCompleted,
    ShiftFailed,
    ShiftStarted,
    WorkloadObserved,
)
from shared.planning.planner import Planner
from shared.planning.record import Decided, Entry, Started, observed
from shared.planning.replay import replay
from shared.scheduling.sequence import ReplicaLoad
from tests.support.planner_states import mid_run


def unchanged(config):
    return config


def recorded_run(num=40, seed=0, fails=False, speed=0.9):
    """What the planner's journal would hold of a run with drifting loads: `speed` of the modelled throughput
    is measured."""
    rng = random.Random(seed)
    situation = mid_run(16, rng)
    planner = Planner(situation.config, situation.cluster, situation.allocation)
    entries = [Entry(0.0, Started(situation.config, situation.cluster, situation.allocation))]
    for i in range(num):
        now_s = float(5 * i)
        state = shaken(situation, planner.allocation, rng)
        effects = planner.step(WorkloadObserved(state), now_s)
        measured = {}
        for role in (Role.ROLLOUT, Role.REWARD):
            model = situation.config.of(role).throughput_model
            rates = (model.tokens_per_s(r.num_sequences, r.num_tokens) for r in state.of(role).replicas)
            measured[role.value] = speed * sum(rates)
        entries.append(
            Entry(now_s, WorkloadObserved(state), Decided.of(effects[0].record), observed(state), measured)
        )
        for effect in effects:
            if isinstance(effect, ExecuteShift):
                plan = effect.plan
                events = [ShiftStarted(plan.id), ShiftCompleted(plan.id, {(Role.REWARD, Direction.UP): 1.0})]
                if fails and rng.random() < 0.5:
                    events[1] = ShiftFailed(plan.id, "no", plan.apply_down(planner.allocation))
                for event in events:
                    planner.step(event, now_s + 1)
                    entries.append(Entry(now_s + 1, event))
    return entries


def shaken(situation, allocation, rng):
    """Loads on the replicas that are active now; one role or the other is full."""
    loads = {}
    for role in (Role.ROLLOUT, Role.REWARD):
        fullness = rng.choice((3, 40, 120))
        replicas = []
        for replica in allocation.active_of(role, situation.cluster):
            lengths = tuple(sorted(rng.randrange(100, 4_000) for _ in range(rng.randrange(fullness))))
            replicas.append(ReplicaLoad(replica, len(lengths), sum(lengths), 400_000, lengths))
        loads[role] = replace(
            situation.state.of(role), replicas=tuple(replicas), queue=(500,) * rng.randrange(9)
        )
    return replace(situation.state, rollout=loads[Role.ROLLOUT], reward=loads[Role.REWARD])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_recorded_settings_decide_as_recorded(seed, fails):
    found = replay(recorded_run(seed=seed, fails=fails), unchanged)
    assert found.num_decisions == found.num_reproduced == found.num_observations == 40
    assert found.differences == []
    assert found.num_shifts_recorded == found.num_shifts_changed > 0


def test_a_window_of_nothing_shifts_less():
    entries = recorded_run()
    found = replay(entries, lambda config: replace(config, window_s=0.001))
    assert found.num_reproduced == found.num_decisions
    assert found.num_shifts_changed < found.num_shifts_recorded
    assert len(found.differences) >= found.num_shifts_recorded - found.num_shifts_changed
    assert all(d.recorded.plan != d.changed.plan for d in found.differences)


def test_another_policy_is_asked_from_the_recorded_allocation():
    found = replay(recorded_run(), lambda config: replace(config, policy="disaggregated"))
    assert found.num_shifts_changed == 0
    assert len(found.differences) == found.num_shifts_recorded


def test_model_error_is_of_what_replicas_measured():
    found = replay(recorded_run(speed=0.8), unchanged)
    summary = found.summary()
    assert summary["rollout_model_error_median"] == pytest.approx(0.25, abs=1e-3)
    assert summary["reward_model_error_median"] == pytest.approx(0.25, abs=1e-3)
    assert found.outcomes
    assert all(o.before > 0 and o.predicted > o.before for o in found.outcomes)
    seen = [o for o in found.outcomes if o.actual]
    assert all(o.error == pytest.approx(o.predicted / o.actual - 1) for o in seen)


def test_changed_settings_follow_those_changed_during_the_run():
    entries = recorded_run()
    slower = replace(entries[0].event.config, window_s=30.0)
    entries.insert(1, Entry(0.0, ConfigChanged(slower)))
    asked = []

    def change(config):
        asked.append(config.window_s)
        return config

    replay(entries, change)
    assert set(asked) == {30.0}


def test_a_shift_by_hand_is_followed():
    entries = recorded_run(num=1)
    situation = entries[0].event
    planner = Planner(situation.config, situation.cluster, situation.allocation)
    wanted = ManualShiftRequested(Role.ROLLOUT, ("rollout-0",))
    by_hand = Entry(1.0, wanted, Decided.of(planner.step(wanted, 1.0)[0].record))
    done = Entry(2.0, ShiftCompleted("p000001", {}))
    later = [replace(e, now_s=9.0) for e in entries[1:2]]
    found = replay([entries[0], by_hand, done, *later], unchanged)
    assert found.num_decisions == 1
    assert found.outcomes == [], "nothing was predicted"


def test_entries_before_a_start_are_passed_over():
    entries = recorded_run(num=3)
    assert replay(entries[1:], unchanged).num_decisions == 0
