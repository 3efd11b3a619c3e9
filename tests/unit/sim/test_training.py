"""Training as a model: whole batches, and groups as they get complete."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.sim.report import describe
from shared.sim.training import MicroBatches, Training
from tests.support.sim_cases import SMALL, simulate

WORK = SMALL.workload
BATCHES = [WORK.batch(0, k, 2) for k in range(2)]
GROUP = WORK.samples_per_prompt


def training(micro_batches=None, is_dedicated=True):
    return Training(SMALL, 2, BATCHES, micro_batches=micro_batches, is_dedicated=is_dedicated)


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
    assert not trained.is_ready(0)
    trained.scored(3)
    assert trained.is_ready(1_000)
    assert trained.begin(10.0) == pytest.approx(whole_step_s(0))
    assert not trained.is_ready(0)
    assert trained.is_active
    assert trained.end(15.0)
    assert (trained.num_trained, trained.step_ends_s) == (1, [15.0])
    assert trained.active_s(99.0) == 5.0


def test_the_next_batch_may_be_complete_first():
    trained = training()
    score(trained, 4, 5, 6, 7)
    assert not trained.is_ready(0)
    score(trained, 0, 1, 2, 3)
    assert trained.begin(0.0) == pytest.approx(whole_step_s(0))
    trained.end(1.0)
    assert trained.is_ready(0)


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.permutations(range(4)))
def test_a_step_in_parts_takes_as_long_and_ends_with_the_last_part(begins, order):
    trained = training(MicroBatches(min_share=0.25))
    seconds = 0.0
    for prompt, begin in zip(order, begins, strict=True):
        score(trained, prompt)
        if begin:
            assert trained.is_ready(10**9)
            seconds += trained.begin(0.0)
            assert trained.end(1.0) == (prompt == order[-1])
    if not begins[-1]:
        seconds += trained.begin(0.0)
        assert trained.end(2.0)
    assert seconds == pytest.approx(whole_step_s(0))
    assert trained.num_trained == 1
    assert not trained.is_active


def test_devices_are_taken_when_the_rest_fits_beside_training():
    scenario_beside = (SMALL.num_devices - 2) // SMALL.genrm_tp
    trained = training(MicroBatches(start_share=0.5, rest_per_replica=3.0), is_dedicated=False)
    score(trained, 0)
    assert not trained.is_ready(0)
    score(trained, 1)
    assert trained.is_ready(3 * scenario_beside)
    assert not trained.is_ready(3 * scenario_beside + 1)
    trained.begin(0.0)
    trained.end(1.0)
    assert trained.is_active, "a batch that was begun keeps its devices"
    score(trained, 2)
    assert trained.is_ready(10**9), "what was begun is finished"


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="min_share"):
        MicroBatches(min_share=0.0)


@pytest.mark.parametrize("mode", ["disaggregated", "pivot_best", "colocated"])
def test_runs_with_micro_batches_train_every_sample_once(mode):
    result = simulate(mode, micro_batches=MicroBatches())
    assert len(result.step_ends_s) == 5
    assert result.max_staleness <= SMALL.staleness
    row = describe(result)
    assert 0 < row["efficiency"] <= 1
    assert row["micro_batches"]


def test_dedicated_training_that_waits_for_stragglers_gains():
    slow = replace(SMALL, workload=replace(WORK, prompts_per_step=8))
    whole, parts = (
        describe(simulate("disaggregated", scenario=slow, micro_batches=micro))
        for micro in (None, MicroBatches())
    )
    assert parts["throughput_tokens_per_s"] > whole["throughput_tokens_per_s"]


def test_synchronous_modes_train_whole_batches():
    whole, parts = (describe(simulate("colocated", micro_batches=micro)) for micro in (None, MicroBatches()))
    assert parts["throughput_tokens_per_s"] == whole["throughput_tokens_per_s"]
