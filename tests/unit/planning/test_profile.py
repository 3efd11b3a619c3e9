"""Sweeps, and profiles as files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, InvalidRequest
from shared.planning.profile import Profile, profile_of, sweep
from shared.planning.throughput import StepTime
from shared.scheduling.throughput import H20_7B_TP1

PROFILE = Profile(H20_7B_TP1, 2e-4, 0.01, 0.04, 24, "one")


@given(st.integers(1, 600), st.integers(1, 100_000), st.integers(1, 1 << 22), st.integers(0, 2_000))
def test_a_sweep_fits_the_cache_and_begins_each_context_with_the_most_sequences(
    max_sequences: int, max_context: int, capacity: int, growth: int
) -> None:
    points = sweep(max_sequences, max_context, capacity, growth)
    assert len(set(points)) == len(points)
    for n, context in points:
        assert 1 <= n <= max_sequences
        assert 1 <= context <= max_context
        assert n == 1 or n * (context + growth) <= capacity
    for context in {point.context for point in points}:
        numbers = [point.num_sequences for point in points if point.context == context]
        assert numbers == sorted(numbers, reverse=True)
        assert numbers[-1] == 1
    if max_sequences * (max_context + growth) <= capacity:
        assert {n for n, context in points if context == max_context} >= {1, max_sequences}


def test_a_profile_is_the_same_after_a_file() -> None:
    assert Profile.from_json(PROFILE.to_json(), "x.json") == PROFILE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no profile"),
        ("[]", "is no profile"),
        ('{"model": {}}', "is no profile"),
        (PROFILE.to_json().replace("0.0064", "-1"), "weights_s"),
    ],
)
def test_a_bad_file_is_named_with_what_to_do(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.json") as raised:
        Profile.from_json(text, "x.json")
    assert told in raised.value.message
    assert "pivotrl profile" in raised.value.message


def test_too_few_points_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 4 needed"):
        profile_of([StepTime(1, 10, 0.01)] * 3, 0.0)


def test_errors_are_of_points_that_the_fit_has_not_seen() -> None:
    """Only the held-out ones are beyond B/C, where C shows: a fit without them must miss them."""
    sizes = [1, 2, 400, 3, 4, 6, 500, 8, 12]
    points = [
        StepTime(n, n * 50 * (i + 1), H20_7B_TP1.latency_s(n, n * 50 * (i + 1))) for i, n in enumerate(sizes)
    ]
    found = profile_of(points, 0.0)
    assert found.held_out_median > 0.2
    assert found.model.latency_s(450, 90_000) == pytest.approx(H20_7B_TP1.latency_s(450, 90_000), rel=0.05)
