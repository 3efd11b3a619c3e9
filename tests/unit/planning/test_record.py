"""Lines of the journal of decisions: written and read again, compact, versioned."""

import json
import random
from dataclasses import replace
from math import inf

import pytest

from shared.errors import InvalidRequest
from shared.ids import ReplicaId, Role
from shared.planning.cluster import Allocation
from shared.planning.plan import (
    ConfigChanged,
    Direction,
    ManualShiftRequested,
    Paused,
    Resumed,
    ShiftCompleted,
    ShiftFailed,
    ShiftStarted,
    WorkloadObserved,
)
from shared.planning.planner import Planner
from shared.planning.record import EVENTS, Decided, Entry, Started, from_line, observed, to_line
from shared.planning.workload import TrainingState
from shared.scheduling.sequence import ReplicaLoad
from tests.support.planner_states import DENSE, MOE, mid_run, random_situation

SITUATION = mid_run(16, random.Random(1))
EVENTS_MET = [
    Started(SITUATION.config, SITUATION.cluster, SITUATION.allocation),
    WorkloadObserved(SITUATION.state),
    ShiftStarted("p000001"),
    ShiftCompleted("p000001", {(Role.REWARD, Direction.UP): 1.5, (Role.ROLLOUT, Direction.DOWN): 0.25}),
    ShiftFailed("p000001", "reward-0 did not come up", Allocation(frozenset({ReplicaId("rollout-1")}), True)),
    ShiftFailed("p000001", "broke"),
    Paused(),
    Resumed(),
    ConfigChanged(replace(SITUATION.config, window_s=5.0)),
    ManualShiftRequested(Role.REWARD, (ReplicaId("reward-1"),), True),
]


def again(entry):
    return from_line(json.loads(json.dumps(to_line(entry))))


@pytest.mark.parametrize("event", EVENTS_MET, ids=lambda event: type(event).__name__)
def test_every_event_is_read_as_it_was_written(event):
    entry = Entry(12.5, event)
    assert again(entry) == entry


def test_all_events_are_covered():
    assert {type(event).__name__ for event in EVENTS_MET} == set(EVENTS)


@pytest.mark.parametrize("seed", range(20))
def test_a_decision_is_read_as_it_was_made(seed):
    config, cluster, allocation, state = random_situation(random.Random(seed), (DENSE, MOE))
    effects = Planner(config, cluster, allocation).step(WorkloadObserved(state), 1.0)
    entry = Entry(
        1.0,
        WorkloadObserved(state),
        Decided.of(effects[0].record),
        observed(state),
        {"rollout": 10.0, "reward": 2.5},
    )
    assert again(entry) == entry
    assert again(Entry(1.0, Started(config, cluster, allocation))).event == Started(
        config, cluster, allocation
    )


def test_a_line_stays_the_same():
    """What is in journals of old runs must be readable: change this only with FORMAT."""
    state = replace(
        SITUATION.state,
        reward=type(SITUATION.state.reward)(),
        rollout=type(SITUATION.state.reward)(
            (ReplicaLoad(ReplicaId("rollout-0"), 3, 30, 1_000, (5, 5, 20)),), (7, 4)
        ),
    )
    line = to_line(
        Entry(2.0, WorkloadObserved(state), Decided("nothing to do"), observed(state), {"rollout": 9.96})
    )
    assert line == {
        "now_s": 2.0,
        "event": "WorkloadObserved",
        "values": {
            "state": {
                "rollout": {
                    "replicas": [{"replica": "rollout-0", "kv_capacity_tokens": 1000, "steps": [5, 0, 15]}],
                    "queue": [7, 4],
                }
            }
        },
        "decided": {"reason": "nothing to do"},
        "num_sequences": {"rollout": 5, "reward": 0},
        "measured": {"rollout": 10.0},
    }


def test_a_part_of_a_batch_is_recorded_and_old_lines_are_of_whole_ones():
    training = TrainingState(batch_ready=True, is_batch_complete=False)
    entry = Entry(2.0, WorkloadObserved(replace(SITUATION.state, training=training)))
    assert again(entry) == entry
    line = to_line(entry)
    assert line["values"]["state"]["training"].pop("is_batch_complete") is False
    assert from_line(line).event.state.training == TrainingState(batch_ready=True)


@pytest.mark.parametrize("rest", [40.0, inf])
def test_the_limit_of_what_is_left_is_recorded(rest):
    entry = Entry(0.0, ConfigChanged(replace(SITUATION.config, training_rest_per_replica=rest)))
    assert again(entry) == entry


def test_a_load_with_lengths_left_out_keeps_its_numbers():
    load = ReplicaLoad(ReplicaId("rollout-0"), 9, 900, 1_000, (50, 60))
    state = replace(SITUATION.state, rollout=type(SITUATION.state.rollout)((load,)))
    assert again(Entry(0.0, WorkloadObserved(state))).event.state.rollout.replicas == (load,)


def test_an_observation_without_a_decision_has_no_state():
    entry = Entry(3.0, None, None, {"rollout": 4, "reward": 0}, {"rollout": 1.0, "reward": 0.0})
    assert to_line(entry)["event"] == "WorkloadObserved"
    assert again(entry) == entry


def test_a_setting_that_this_version_does_not_have_is_dropped():
    line = to_line(Entry(0.0, EVENTS_MET[0]))
    line["values"]["config"]["of_the_future"] = 1
    assert from_line(line).event == EVENTS_MET[0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"now_s": 1, "event": "WorkloadObserved", "values": {}, "effects": []}, "format 1"),
        ({"now_s": 1, "event": "Started", "format": 3, "values": {}}, "format 3"),
        ({"now_s": 1, "event": "Nonsense"}, "Nonsense"),
        ({"event": "Paused"}, "now_s"),
        ({"now_s": 1, "event": "ShiftStarted", "values": 3}, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(line, why):
    with pytest.raises(InvalidRequest, match=why) as raised:
        from_line(line)
    assert raised.value.field == "decisions"
