"""Whole runs on a small cluster, in every mode."""

import json
from dataclasses import replace

import pytest

from shared.errors import ConfigError
from shared.sim.modes import MODES
from shared.sim.report import describe, device_seconds, digest
from shared.sim.scenarios import SCENARIOS, Shares, scenario_from
from shared.sim.workload import Drift, Sample
from tests.support.sim_cases import SMALL, simulate


@pytest.fixture(scope="module", params=list(MODES))
def result(request):
    return simulate(request.param)


def test_every_step_is_trained_within_the_staleness_bound(result):
    assert len(result.step_ends_s) == 5
    assert result.max_staleness <= (0 if result.mode.is_synchronous else SMALL.staleness)
    assert result.end.at_s > result.start.at_s > 0


def test_device_seconds_add_up_to_the_cluster(result):
    spent = device_seconds(result)
    steps = result.end.num_trained - result.start.num_trained
    whole = SMALL.num_devices * (result.end.at_s - result.start.at_s) / steps
    assert sum(s for causes in spent.values() for s in causes.values()) == pytest.approx(whole, abs=2.0)
    assert min(s for causes in spent.values() for s in causes.values()) >= -1.0


def test_no_deployment_beats_the_fluid_bound(result):
    row = describe(result)
    assert 0 < row["efficiency"] <= 1
    assert row["throughput_tokens_per_s"] <= row["fluid_bound_tokens_per_s"]


def test_engines_generated_what_was_trained_and_no_more_than_was_issued(result):
    generated = sum(usage.tokens for usage in result.end.usage.values())
    trained = sum(s.response + s.verdict for s in result.trained)
    assert generated >= trained * 0.999
    assert generated <= trained * 5 / 3 * 3


@pytest.mark.parametrize("mode", ["pivot", "disaggregated", "colocated"])
def test_the_same_seed_gives_the_same_bytes(mode):
    first, second, other = (json.dumps(describe(simulate(mode, seed))) for seed in (0, 0, 1))
    assert first == second != other


def test_the_digest_leaves_measured_decision_times_out():
    row = describe(simulate("pivot"))
    assert digest([row]) == digest([row | {"planner_ms": {"p50": 1.0, "p99": 2.0}}])


def test_fixed_devices_never_shift():
    result = simulate("disaggregated")
    assert result.end.num_shifts == 0
    assert {(p.rollout_devices, p.reward_devices) for p in result.timeline} == {(4, 2)}


def test_colocated_serves_one_role_at_a_time():
    for point in simulate("colocated").timeline:
        assert min(point.rollout_devices, point.reward_devices) == 0
        assert not (point.is_training and point.rollout_devices + point.reward_devices)


def test_a_recorded_trace_is_replayed():
    trace = (Sample(50, 120, 300), Sample(50, 400, 100), Sample(50, 60, 60), Sample(50, 90, 500))
    result = simulate("disaggregated", scenario=replace(SMALL, workload=replace(SMALL.workload, trace=trace)))
    assert result.trained[:4] == list(trace)


def test_drift_scales_the_median():
    assert [Drift("linear", 4.0).scale(x) for x in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert [Drift("jump", 4.0).scale(x) for x in (0.0, 0.49, 0.5)] == [1.0, 1.0, 4.0]
    work = replace(SMALL.workload, response_drift=Drift("linear", 4.0))
    first, last = (sum(s.response for s in work.batch(0, k, 10)) for k in (0, 9))
    assert last > 2 * first


def test_scenarios_fit_their_devices():
    for scenario in SCENARIOS.values():
        split = scenario.paper_split
        assert split.rollout + split.reward + split.training == scenario.num_devices


def test_a_scenario_from_a_file():
    scenario = scenario_from(
        {
            "base": "group2",
            "name": "short",
            "workload": {"response": {"median": 300, "sigma": 0.5, "cap": 4096}},
            "paper_split": {"rollout": 8, "reward": 16, "training": 8},
        }
    )
    assert scenario.workload.response.median == 300
    assert scenario.workload.verdict == SCENARIOS["group2"].workload.verdict
    assert scenario.paper_split == Shares(8, 16, 8)
    with pytest.raises(ConfigError, match="num_gpus"):
        scenario_from({"num_gpus": 3})
    with pytest.raises(ConfigError, match="group9"):
        scenario_from({"base": "group9"})


def test_a_scenario_on_more_devices_grows_in_proportion():
    bigger = SCENARIOS["group2"].on_devices(64)
    assert bigger.workload.batch_samples == 2048
    assert bigger.paper_split == Shares(24, 24, 16)
    with pytest.raises(ConfigError, match="gpus"):
        SCENARIOS["group2"].on_devices(10)
