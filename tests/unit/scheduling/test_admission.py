"""`min_gain_share`: a replica near saturation takes no further sequence; others wait in order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.ids import Role, replica_id, sample_id
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.migration import ReplicaLoads
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.sequence import ReplicaShiftedUp, RunSequence, SequenceFinished, SequenceSubmitted
from shared.scheduling.throughput import H20_7B_TP1, H200_30B_A3B_TP1, ThroughputModel

MODELS = (H20_7B_TP1, H200_30B_A3B_TP1)
ONE = replica_id(Role.REWARD, 0)


def gain_share(model: ThroughputModel, n: int, tok: int) -> float:
    """What one more sequence as long as the mean adds, in units of T / n."""
    return (model.tokens_per_s(n + 1, tok * (n + 1) / n) / model.tokens_per_s(n, tok) - 1.0) * n


@given(
    model=st.sampled_from(MODELS),
    n=st.integers(1, 600),
    mean_length=st.integers(1, 20_000),
    share=st.floats(0.01, 0.9),
)
def test_a_replica_takes_one_more_exactly_while_it_gains_the_share(model, n, mean_length, share):
    loads = ReplicaLoads(model, {ONE: 1 << 40}, min_gain_share=share)
    loads.change(0, n, n * mean_length, 0)
    gained = gain_share(model, n, n * mean_length)
    if abs(gained - share) > 1e-9:
        assert (loads.best(mean_length, 1) is not None) == (gained > share)


def test_an_empty_replica_always_takes_one_and_a_long_sequence_does_not_block_the_queue():
    loads = ReplicaLoads(H20_7B_TP1, {ONE: 1 << 40}, min_gain_share=0.9)
    assert loads.place(1_000_000, 1) == 0
    loads = ReplicaLoads(H20_7B_TP1, {ONE: 1 << 40}, min_gain_share=0.25)
    loads.change(0, 20, 20_000, 0)
    assert loads.best(15_000, 1) == 0, "what counts is the load of the replica, not the length of the next"


def test_the_rest_waits_in_order_and_follows_as_sequences_finish():
    scheduler = Scheduler(SchedulerConfig(throughput_model=H20_7B_TP1, min_gain_share=0.3))
    scheduler.step(ReplicaShiftedUp(ONE, 1 << 30), 0.0)
    ids = [sample_id(i, 0) for i in range(500)]
    running = [
        effect.sequence
        for sequence in ids
        for effect in scheduler.step(SequenceSubmitted(sequence, 1_000, 4_000), 0.0)
        if isinstance(effect, RunSequence)
    ]
    assert running == ids[: len(running)]
    assert 50 < len(running) < 500
    assert all(a < b for a, b in pairwise(running))
    (effect,) = scheduler.step(SequenceFinished(ids[0], ONE, 0, 100), 1.0)
    assert effect == RunSequence(ONE, ids[len(running)], 0)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ConfigError, match="min_gain_share"):
        SchedulerConfig(min_gain_share=share)
