"""The throughput model: shape, monotonicity, units."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.scheduling.throughput import (
    CPU_SMOLLM2_135M,
    H20_7B_TP1,
    H200_7B_TP1,
    H200_30B_A3B_TP1,
    UNIT,
    ThroughputModel,
)

KNOWN = [H20_7B_TP1, H200_7B_TP1, H200_30B_A3B_TP1, CPU_SMOLLM2_135M]


@st.composite
def models(draw, experts=st.booleans()):
    constants = [draw(st.floats(0, high)) for high in (1e-6, 0.05, 1e-3, 0.05)]
    model = ThroughputModel(*constants[:3], constants[3] + 1e-6)
    if draw(experts):
        model = replace(model, experts_s=draw(st.floats(1e-6, 0.05)), num_experts=128, experts_per_token=8)
    return model


@given(models(), st.integers(0, 10**6))
def test_idle_replica_generates_nothing(model, tok):
    assert model.tokens_per_s(0, tok) == 0
    assert model.tokens_per_s(1, tok) > 0


@given(models(), st.integers(1, 400), st.integers(1, 20_000))
def test_throughput_never_falls_with_more_sequences_of_the_same_length(model, n, length):
    more = model.tokens_per_s(n + 1, (n + 1) * length)
    assert more >= model.tokens_per_s(n, n * length) * (1 - 1e-12)


@given(models(experts=st.just(False)), st.integers(1, 400), st.integers(1, 20_000))
def test_dense_throughput_is_concave_along_a_constant_length(model, n, length):
    before, here, after = (model.tokens_per_s(m, m * length) for m in (n - 1, n, n + 1))
    assert after - here <= here - before + 1e-9 * here


@given(models(experts=st.just(True)), st.integers(1, 300), st.integers(1, 300_000))
def test_throughput_falls_with_every_cost(model, n, tok):
    for field in fields(ThroughputModel)[:5]:
        dearer = replace(model, **{field.name: getattr(model, field.name) * 2 + 1e-9})
        assert dearer.tokens_per_s(n, tok) <= model.tokens_per_s(n, tok)


@given(models(), st.integers(0, 300), st.integers(0, 300_000), st.integers(1, 30_000))
def test_gain_is_the_difference_a_sequence_makes(model, n, tok, length):
    expected = model.tokens_per_s(n + 1, tok + length) - model.tokens_per_s(n, tok)
    assert model.gain(n, tok, length) == expected


def test_experts_slow_a_step_from_the_first_sequences_on():
    """Eight sequences are nearly eight times as fast as one on a dense model, not even four on an MoE."""
    for model, low, high in ((H200_7B_TP1, 7.5, 8.0), (H200_30B_A3B_TP1, 3.0, 4.0)):
        assert low < model.tokens_per_s(8, 4_000) / model.tokens_per_s(1, 500) < high


@settings(max_examples=30)
@given(st.integers(1, 1_000), st.integers(0, 10**6))
def test_unit_model_counts_a_busy_replica_as_one(n, tok):
    assert UNIT.tokens_per_s(n, tok) == pytest.approx(1, abs=2e-6)
    assert UNIT.gain(n, tok, 100) > UNIT.gain(n + 1, tok, 100) > 0


def test_cpu_default_matches_its_measurements():
    for n, tokens_per_s in ((1, 60), (16, 640), (32, 945)):
        assert CPU_SMOLLM2_135M.tokens_per_s(n, 100 * n) == pytest.approx(tokens_per_s, rel=0.02)


@pytest.mark.parametrize(
    ("constants", "field"),
    [
        ((-1e-9, 1e-3, 1e-5, 1e-3), "attention_s_per_token"),
        ((1e-9, 1e-3, 1e-5, float("inf")), "fixed_s"),
        ((1e-9, 0.0, 0.0, 0.0), "weights_s"),
        ((1e-9, 1e-3, 1e-5, 1e-3, 1e-2, 8, 16), "experts_per_token"),
    ],
)
def test_bad_constants_name_their_field(constants, field):
    with pytest.raises(ConfigError) as error:
        ThroughputModel(*constants)
    assert error.value.field == field
