"""Training as a model: whole batches, and groups as they get complete."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.streaming import BURSTS, EAGER, LATE, Streaming
from shared.sim.report import describe
from shared.sim.scenarios import Shares
from shared.sim.training import Training
from tests.support.sim_cases import SMALL, simulate

WORK = SMALL.workload
BATCHES = [WORK.batch(0, k, 2) for k in range(2)]
GROUP = WORK.samples_per_prompt


def training(streaming=None, is_dedicated=True):
    return Training(SMALL, 2, BATCHES, streaming=streaming, is_dedicated=is_dedicated)


def score(trained, *prompts):
    for prompt in prompts:
        for _ in range(GROUP):
            trained.scored(prompt)


def whole_step_s(batch):
    tokens = sum(s.prompt + s.response for s in BATCHES[batch])
    return SMALL.policy.training_s(SMALL.device, 2, tokens) + SMALL.training_fixed_s


def test_a_whole_batch_waits_for_its_last_sample():
    trained = training()
    score(trained, 0, 1, 2)
    for _ in range(GROUP - 1):
        trained.scored(3)
    assert not trained.is_ready
    trained.scored(3)
    assert trained.is_ready
    assert trained.is_batch_complete
    assert trained.begin(10.0) == pytest.approx(whole_step_s(0))
    assert not trained.is_ready
    assert trained.is_active
    assert trained.end(15.0)
    assert (trained.num_trained, trained.step_ends_s) == (1, [15.0])
    assert trained.active_s(99.0) == 5.0


def test_the_next_batch_may_be_complete_first():
    trained = training()
    score(trained, 4, 5, 6, 7)
    assert not trained.is_ready
    score(trained, 0, 1, 2, 3)
    assert trained.begin(0.0) == pytest.approx(whole_step_s(0))
    trained.end(1.0)
    assert trained.is_ready


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.permutations(range(4)))
def test_a_step_in_parts_takes_as_long_and_ends_with_the_last_part(begins, order):
    trained = training(Streaming(0.25, min_share=0.25))
    seconds = 0.0
    for prompt, begin in zip(order, begins, strict=True):
        score(trained, prompt)
        if begin:
            assert trained.is_ready
            assert trained.is_batch_complete == (prompt == order[-1])
            seconds += trained.begin(0.0)
            assert trained.end(1.0) == (prompt == order[-1])
    if not begins[-1]:
        seconds += trained.begin(0.0)
        assert trained.end(2.0)
    assert seconds == pytest.approx(whole_step_s(0))
    assert trained.num_trained == 1
    assert not trained.is_active


def test_a_batch_is_begun_with_its_share_and_then_goes_on_with_less():
    trained = training(LATE, is_dedicated=False)
    score(trained, 0)
    assert not trained.is_ready
    score(trained, 1)
    assert trained.is_ready
    assert not trained.is_batch_complete
    trained.begin(0.0)
    trained.end(1.0)
    assert trained.is_active, "a batch that was begun keeps its devices"
    assert not trained.is_ready
    score(trained, 2)
    assert trained.is_ready
    assert training(LATE).is_ready is False, "nothing is complete"


def test_bursts_give_devices_back_between_the_parts_of_a_batch():
    trained = training(BURSTS, is_dedicated=False)
    score(trained, 0)
    trained.begin(0.0)
    assert trained.is_active
    assert not trained.end(1.0)
    assert not trained.is_active


def test_dedicated_training_begins_with_the_least_share():
    trained = training(LATE)
    score(trained, 0)
    assert trained.is_ready


@pytest.mark.parametrize(
    ("mode", "streaming", "named"),
    [
        ("disaggregated", EAGER, "eager"),
        ("rollout_reward_colocated", EAGER, "eager"),
        ("pivot_best", EAGER, "eager"),
        ("pivot_best", LATE, "late"),
        ("pivot_best", BURSTS, "bursts"),
        ("pivot", Streaming(0.25), "other"),
        ("static", LATE, "late"),
        ("rule_based", LATE, "late"),
        ("colocated", EAGER, None),
    ],
)
def test_runs_on_parts_of_batches_train_every_sample_once(mode, streaming, named):
    result = simulate(mode, streaming=streaming)
    assert len(result.step_ends_s) == 5
    assert result.max_staleness <= SMALL.staleness
    row = describe(result)
    assert 0 < row["efficiency"] <= 1
    assert row["streaming"] == named


@pytest.mark.parametrize("streaming", [EAGER, BURSTS, LATE])
@pytest.mark.parametrize("devices", [7, 8])
def test_batches_are_whole_where_training_leaves_no_room_for_both_roles(streaming, devices):
    shares = Shares(0, 0, devices)
    whole, parts = (describe(simulate("pivot", shares=shares, streaming=s)) for s in (None, streaming))
    assert parts == whole
    assert whole["streaming"] is None


@pytest.mark.parametrize("mode", ["disaggregated", "rollout_reward_colocated"])
def test_dedicated_training_that_waits_for_stragglers_gains(mode):
    slow = replace(SMALL, workload=replace(WORK, prompts_per_step=8))
    whole, parts = (describe(simulate(mode, scenario=slow, streaming=s)) for s in (None, EAGER))
    assert parts["throughput_tokens_per_s"] > whole["throughput_tokens_per_s"]


def test_synchronous_modes_train_whole_batches():
    whole, parts = (describe(simulate("colocated", streaming=s)) for s in (None, EAGER))
    assert parts == whole


def test_devices_shift_for_a_part_only_when_the_rest_fits_beside_training():
    shifts = {}
    for rest in (0.0, inf):
        plans = simulate("pivot_best", streaming=Streaming(0.25, rest), num_steps=8).plans
        shifts[rest] = sum(record.reason.startswith("part of") for record in plans)
    assert shifts[0.0] == 0 < shifts[inf]
