"""Fitting the throughput model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.planning.throughput import OnlineCalibration, StepTime, fit, relative_errors
from shared.scheduling.throughput import H20_7B_TP1, H200_7B_TP1, H200_30B_A3B_TP1

# One H200, decode steps with CUDA graphs: sequences, resident tokens, ms of a dense 7B, ms of a 30B-A3B MoE.
MEASURED = [
    (1, 601, 4.77, 4.21),
    (8, 4_792, 4.93, 9.25),
    (32, 19_072, 5.20, 16.04),
    (64, 37_888, 5.58, 18.53),
    (128, 87_552, 6.80, 20.34),
    (256, 170_752, 10.55, 24.66),
    (448, 286_272, 17.68, 30.37),
    (8, 32_744, 5.31, 9.95),
    (32, 130_240, 6.69, 18.62),
    (128, 521_216, 12.74, 30.24),
    (8, 128_584, 6.55, 12.11),
]
DENSE = [StepTime(n, tok, dense / 1e3) for n, tok, dense, _ in MEASURED]
MOE = [StepTime(n, tok, moe / 1e3) for n, tok, _, moe in MEASURED]


def test_dense_points_fit_without_an_expert_term():
    found = fit(DENSE)
    assert found.median_rel_error < 0.02
    assert found.worst_rel_error < 0.05
    assert found.model.attention_s_per_token == pytest.approx(H200_7B_TP1.attention_s_per_token, rel=0.1)


def test_moe_points_need_the_expert_term():
    plain, with_experts = fit(MOE), fit(MOE, num_experts=128, experts_per_token=8)
    assert plain.median_rel_error > 0.15
    assert plain.worst_rel_error > 0.4
    assert with_experts.median_rel_error < 0.015
    assert with_experts.worst_rel_error < 0.025


def test_published_constants_match_the_points():
    assert relative_errors(H200_7B_TP1, DENSE) == pytest.approx((0.014, 0.039), abs=0.001)
    assert relative_errors(H200_30B_A3B_TP1, MOE) == pytest.approx((0.014, 0.025), abs=0.001)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_a_sweep_across_the_kink_recovers_the_constants_in_spite_of_outliers(seed):
    random_ = random.Random(seed)
    points = []
    for n in (1, 4, 16, 32, 48, 64, 96, 128, 256):
        for length in (200, 1_000, 4_000, 16_000):
            latency = H20_7B_TP1.latency_s(n, n * length) * random_.gauss(1, 0.01)
            points.append(StepTime(n, n * length, latency * (3.0 if random_.random() < 0.05 else 1.0)))
    found = fit(points).model
    for n, length in ((2, 500), (64, 2_000), (200, 8_000)):
        expected = H20_7B_TP1.latency_s(n, n * length)
        assert found.latency_s(n, n * length) == pytest.approx(expected, rel=0.03)


def test_too_few_points_are_refused():
    with pytest.raises(InvalidRequest, match="3 given, at least 4"):
        fit(DENSE[:3])
    with pytest.raises(InvalidRequest, match="latency_s > 0"):
        fit([*DENSE, StepTime(1, 10, 0.0)])


def test_online_calibration_follows_a_slower_device():
    online = OnlineCalibration(H200_7B_TP1, weight=0.1)
    for i in range(100):
        n = 1 + i % 64
        online.observe(StepTime(n, n * 500, 1.3 * H200_7B_TP1.latency_s(n, n * 500)))
    assert online.gauges()["latency_factor"] == pytest.approx(1.3, rel=1e-3)
    assert online.model.latency_s(10, 5_000) == pytest.approx(
        1.3 * H200_7B_TP1.latency_s(10, 5_000), rel=1e-3
    )
    assert online.gauges()["model_rel_error"] < 0.02
