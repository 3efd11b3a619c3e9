"""The scheduler, case by case."""

import pytest

from shared.errors import ConfigError
from shared.ids import ReplicaId, Role, SequenceId, replica_id, sample_id
from shared.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.scheduling.sequence import (
    FAILED,
    FINISHED,
    WAITING,
    AbortSequence,
    Phase,
    Rebalance,
    ReplicaDied,
    ReplicaLoad,
    ReplicaProgressed,
    ReplicaShiftedUp,
    ReplicaShiftingDown,
    ReplicasShiftedUp,
    RunSequence,
    SequenceAborted,
    SequenceCancelled,
    SequenceFailed,
    SequenceFinished,
    SequencesRetired,
    SequenceSubmitted,
    Tick,
    TokensGenerated,
)
from shared.scheduling.throughput import H20_7B_TP1

R0, R1, R2 = (ReplicaId(f"rollout-{i}") for i in range(3))
A, B, C = (SequenceId(f"0000000{i}.00") for i in range(3))


def scheduler(**config) -> Scheduler:
    return Scheduler(SchedulerConfig(**{"throughput_model": H20_7B_TP1, **config}))


def feed(s: Scheduler, *events):
    return [effect for event in events for effect in s.step(event, 0.0)]


def submit(sequence, prompt=100, max_new=1_000):
    return SequenceSubmitted(sequence, prompt, max_new)


def test_a_sequence_waits_until_a_replica_is_up():
    s = scheduler()
    assert feed(s, submit(A)) == []
    assert feed(s, ReplicaShiftedUp(R0, 10_000)) == [RunSequence(R0, A, 0)]


def test_sequences_spread_over_replicas_by_gain():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), ReplicaShiftedUp(R1, 10_000))
    assert feed(s, submit(A), submit(B)) == [RunSequence(R0, A, 0), RunSequence(R1, B, 0)]


def test_growth_room_is_capped_by_what_may_still_be_generated():
    s = scheduler(growth_margin_tokens=512)
    feed(s, ReplicaShiftedUp(R0, 240))
    assert feed(s, submit(A, 100, 20)) == [RunSequence(R0, A, 0)]
    assert feed(s, submit(B, 100, 21)) == []
    assert feed(s, submit(C, 10, 10)) == [], "the head blocks even what would fit"
    assert s.load().queue == (100, 10)
    assert feed(s, SequenceFinished(A, R0, 0, 20)) == [RunSequence(R0, B, 0), RunSequence(R0, C, 0)]


def test_priority_decides_the_order_before_the_id():
    s = scheduler(priority=lambda state: -state.prompt_tokens)
    feed(s, submit(A, 10), submit(B, 30), submit(C, 20))
    runs = feed(s, ReplicaShiftedUp(R0, 100_000))
    assert [run.sequence for run in runs] == [B, C, A]


def test_an_aborted_sequence_resumes_elsewhere_with_its_tokens_only_once_confirmed():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(A), TokensGenerated(A, R0, 0, 40))
    assert feed(s, ReplicaShiftedUp(R1, 10_000)) == [], "moving one sequence gains nothing"
    assert feed(s, ReplicaShiftingDown((R0,))) == [AbortSequence(R0, A, 0)]
    assert s.sequence(A).place.phase is Phase.ABORTING
    assert feed(s, Tick(), TokensGenerated(A, R0, 0, 45)) == []
    assert not s.is_empty(R0)
    assert feed(s, SequenceAborted(A, R0, 0, 47)) == [RunSequence(R1, A, 1)]
    assert s.is_empty(R0)
    assert s.sequence(A).generated_tokens == 47
    assert [r.replica for r in s.load().replicas] == [R1]


def test_a_finish_may_overtake_an_abort():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(A), ReplicaShiftingDown((R0,)))
    assert feed(s, SequenceFinished(A, R0, 0, 900)) == []
    assert s.sequence(A).place == FINISHED
    assert feed(s, SequenceAborted(A, R0, 0, 900)) == []
    assert s.sequence(A).place == FINISHED
    assert s.gauges()["num_stale_reports"] == 1


def test_a_dead_replica_gives_its_sequences_back_with_the_tokens_last_reported():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(A), TokensGenerated(A, R0, 0, 40))
    assert feed(s, ReplicaDied(R0)) == []
    assert s.sequence(A).place == WAITING
    assert feed(s, TokensGenerated(A, R0, 0, 60), ReplicaDied(R0)) == []
    assert s.sequence(A).generated_tokens == 40
    assert feed(s, ReplicaShiftedUp(R1, 10_000)) == [RunSequence(R1, A, 1)]


def test_death_of_a_replica_being_emptied_frees_what_it_held():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(A), submit(B), ReplicaShiftingDown((R0,)))
    assert feed(s, ReplicaDied(R0), ReplicaShiftedUp(R1, 10_000)) == [
        RunSequence(R1, A, 1),
        RunSequence(R1, B, 1),
    ]


def test_shift_up_moves_sequences_from_the_fullest_replica():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 100_000))
    feed(s, *(submit(SequenceId(f"{i:08d}.00"), 100 + i) for i in range(10)))
    effects = feed(s, ReplicaShiftedUp(R1, 100_000))
    assert [e.sequence for e in effects] == [f"{i:08d}.00" for i in range(5)], "the shortest half"
    assert all(isinstance(e, AbortSequence) for e in effects)
    for e in effects:
        assert feed(s, SequenceAborted(e.sequence, R0, 0, 0)) == [RunSequence(R1, e.sequence, 1)]


def test_without_migration_a_new_replica_only_gets_what_waits():
    s = scheduler(migration=False)
    feed(s, ReplicaShiftedUp(R0, 100_000), submit(A), submit(B))
    assert feed(s, ReplicaShiftedUp(R1, 100_000)) == []
    assert feed(s, submit(C)) == [RunSequence(R1, C, 0)]


def test_without_a_throughput_model_sequences_go_to_the_replica_with_the_fewest():
    s = scheduler(throughput_model=None, migration=False)
    feed(s, ReplicaShiftedUp(R0, 100_000), ReplicaShiftedUp(R1, 100_000))
    runs = feed(s, *(submit(SequenceId(f"{i:08d}.00")) for i in range(6)))
    assert [run.replica for run in runs] == [R0, R1] * 3


def test_a_second_shift_up_counts_aborts_under_way_as_landed():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 100_000))
    feed(s, *(submit(SequenceId(f"{i:08d}.00"), 100) for i in range(9)))
    first = feed(s, ReplicaShiftedUp(R1, 100_000))
    second = feed(s, ReplicaShiftedUp(R2, 100_000))
    assert len(first) == 4
    assert len(second) <= 2
    assert not {e.sequence for e in first} & {e.sequence for e in second}


def test_cancelling_fails_a_waiting_sequence_at_once_and_a_running_one_when_confirmed():
    s = scheduler()
    feed(s, submit(A), SequenceCancelled(A))
    assert s.sequence(A).place == FAILED
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(B))
    assert feed(s, SequenceCancelled(B), SequenceCancelled(B)) == [AbortSequence(R0, B, 0)]
    assert feed(s, SequenceAborted(B, R0, 0, 5)) == []
    assert s.sequence(B).place == FAILED
    assert s.load().num_sequences == 0


def test_failed_and_retired_sequences():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(A), submit(B), SequenceFailed(A, R0, 0, "too long"))
    assert s.sequence(A).place == FAILED
    feed(s, SequencesRetired((A, B)))
    assert s.sequence(A) is None
    assert s.sequence(B) is not None, "still running"


def test_load_reports_replicas_and_queue():
    s = scheduler(growth_margin_tokens=0)
    feed(s, ReplicaShiftedUp(R0, 350), submit(A, 200), submit(B, 100), submit(C, 60), Tick())
    load = s.load(max_lengths=1)
    assert load.replicas == (ReplicaLoad(R0, 2, 300, 350, (100,)),)
    assert load.queue == (60,)
    assert load.num_sequences == 3
    assert load.replicas[0].all_lengths() == [100, 200]


def test_a_replica_shifted_up_twice_is_one_replica():
    s = scheduler()
    feed(s, ReplicaShiftedUp(R0, 10_000), submit(A))
    assert feed(s, ReplicaShiftedUp(R0, 10_000)) == []
    assert s.gauges()["num_replicas"] == 1


def test_a_negative_margin_is_refused():
    with pytest.raises(ConfigError, match="growth_margin_tokens"):
        SchedulerConfig(growth_margin_tokens=-1)


def test_progress_of_many_is_the_progress_of_each():
    each, many = (scheduler() for _ in range(2))
    for one in (each, many):
        one.step(ReplicaShiftedUp(replica_id(Role.ROLLOUT, 0), 100_000), 0.0)
        for i in range(3):
            one.step(SequenceSubmitted(sample_id(i, 0), 50, 600), 0.0)
    totals = ((sample_id(0, 0), 0, 20), (sample_id(1, 0), 0, 400), (sample_id(2, 0), 7, 9))
    for sequence, attempt, total in totals:
        each.step(TokensGenerated(sequence, replica_id(Role.ROLLOUT, 0), attempt, total), 1.0)
    many.step(ReplicaProgressed(replica_id(Role.ROLLOUT, 0), totals), 1.0)
    assert many.load() == each.load()
    assert many.gauges() == each.gauges()


def test_replicas_that_come_up_together_share_the_queue_without_a_move():
    one = scheduler()
    for i in range(8):
        one.step(SequenceSubmitted(sample_id(i, 0), 50, 100), 0.0)
    replicas = tuple((replica_id(Role.ROLLOUT, i), 100_000) for i in range(4))
    effects = one.step(ReplicasShiftedUp(replicas), 1.0)
    assert [type(e) for e in effects] == [RunSequence] * 8
    assert [r.num_sequences for r in one.load().replicas] == [2, 2, 2, 2]


def test_the_mean_of_finished_lengths_is_reported():
    one = scheduler()
    one.step(ReplicaShiftedUp(replica_id(Role.ROLLOUT, 0), 100_000), 0.0)
    assert one.load().mean_new_tokens == 0.0
    for i, total in enumerate((100, 300)):
        one.step(SequenceSubmitted(sample_id(i, 0), 50, 600), 0.0)
        one.step(SequenceFinished(sample_id(i, 0), replica_id(Role.ROLLOUT, 0), 0, total), 1.0)
    assert one.load().mean_new_tokens == 200.0


def test_rebalancing_moves_sequences_to_an_idle_replica_and_only_then():
    one = scheduler()
    feed(one, ReplicaShiftedUp(R0, 1_000_000))
    feed(one, *(submit(sample_id(i, 0), prompt=9_000) for i in range(40)))
    assert feed(one, Rebalance()) == []
    feed(one, ReplicaShiftedUp(R1, 1_000_000), ReplicaShiftingDown((R1,)))
    aborts = feed(scheduler(), Rebalance())
    assert aborts == []
    balanced = scheduler(migration=False)
    feed(balanced, ReplicaShiftedUp(R0, 1_000_000))
    feed(balanced, *(submit(sample_id(i, 0), prompt=9_000) for i in range(40)))
    assert feed(balanced, ReplicaShiftedUp(R1, 1_000_000)) == []
    aborts = feed(balanced, Rebalance())
    assert 10 <= len(aborts) <= 25
    assert {type(effect) for effect in aborts} == {AbortSequence}
