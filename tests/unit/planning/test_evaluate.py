"""Combined throughput and replayed role loads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import load

from shared.ids import ReplicaId, Role
from shared.planning.evaluate import RoleReplay, combined_tokens_per_s, generation_latency
from shared.scheduling.throughput import H20_7B_TP1

R = [ReplicaId(f"rollout-{i}") for i in range(4)]


def replay(role_load, active, inactive=(), **options):
    settings = {"model": H20_7B_TP1, "migrate": True, "kv_capacity_tokens": 100_000, "growth_tokens": 0}
    return RoleReplay(role_load, active, inactive, **{**settings, **options})


@given(st.integers(1, 500), st.floats(1, 1e5), st.integers(1, 500), st.floats(1, 1e5))
def test_the_combined_throughput_lies_between_both(n1, t1, n2, t2):
    combined = combined_tokens_per_s(n1, t1, n2, t2)
    assert min(t1, t2) * (1 - 1e-9) <= combined <= max(t1, t2) * (1 + 1e-9)
    assert combined_tokens_per_s(n2, t2, n1, t1) == pytest.approx(combined)


def test_idle_and_stalled_roles():
    assert combined_tokens_per_s(10, 50.0, 0, 0.0) == pytest.approx(50.0)
    assert combined_tokens_per_s(10, 50.0, 1, 0.0) == 0
    assert combined_tokens_per_s(0, 0.0, 0, 0.0) == 0
    assert generation_latency(0, 0.0) == 0
    assert generation_latency(1, 0.0) == float("inf")
    # The paper's example state: reward is the more pressed role.
    assert generation_latency(385, 4752) == pytest.approx(0.081, abs=1e-3)
    assert generation_latency(59, 2077) == pytest.approx(0.028, abs=1e-3)


def test_a_new_replica_takes_the_queue_then_levels_the_load():
    busy = load(Role.ROLLOUT, {0: [100] * 20})
    after = replay(busy, R[:1], R[1:2]).after_shift_up(R[1:2])
    assert after.tokens_per_s == pytest.approx(2 * H20_7B_TP1.tokens_per_s(10, 1_000))
    queued = load(Role.ROLLOUT, {0: [100] * 10}, [100] * 10)
    level = replay(queued, R[:1], R[1:2]).after_shift_up(R[1:2])
    assert level.tokens_per_s == pytest.approx(after.tokens_per_s)
    assert (after.moved_tokens, level.moved_tokens) == (1_000, 0), "what waits is prefilled in any case"
    alone = replay(busy, R[:1], R[1:2], migrate=False)
    assert alone.after_shift_up(R[1:2]) == (alone.tokens_per_s, 0)


def test_leaving_replicas_hand_their_work_to_the_rest():
    role = replay(load(Role.ROLLOUT, {0: [100] * 4, 1: [200] * 4}), R[:2])
    assert role.after_shift_down(R[1:2]) == H20_7B_TP1.tokens_per_s(8, 1_200)
    assert role.after_shift_down(R[:2]) == 0
    assert role.after_shift_down([]) == role.tokens_per_s
    assert role.num_sequences == 8


def test_work_on_replicas_that_hold_no_device_counts_as_waiting():
    role = replay(load(Role.ROLLOUT, {0: [100] * 4}), [], R[:2])
    assert role.tokens_per_s == 0
    assert role.after_shift_up(R[1:2]).tokens_per_s == H20_7B_TP1.tokens_per_s(4, 400)


def test_lengths_that_were_not_listed_count_as_equal():
    listed = load(Role.ROLLOUT, {0: [100, 300, 300]})
    short = replace(listed.replicas[0], lengths=(100,))
    assert short.all_lengths() == [100, 300, 300]
