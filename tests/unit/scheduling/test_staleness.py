"""The staleness bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.staleness import num_issuable, sample_staleness


@given(st.integers(0, 50), st.integers(0, 4), st.integers(1, 64), st.integers(0, 5_000))
def test_issuing_all_that_may_be_issued_meets_the_bound_exactly(version, staleness, batch, issued):
    allowed = num_issuable(version, staleness, batch, issued)
    bound = (version + 1 + staleness) * batch
    assert issued + allowed == max(issued, bound)


@given(st.integers(0, 3), st.integers(1, 8), st.lists(st.booleans(), max_size=60))
def test_samples_trained_in_issue_order_never_exceed_the_bound(staleness, batch, issue_or_train):
    """Issue whenever allowed, train whenever a batch is there, in any interleaving."""
    version, issued_at = 0, []
    for issue in issue_or_train:
        if issue:
            issued_at += [version] * num_issuable(version, staleness, batch, len(issued_at))
        elif len(issued_at) >= (version + 1) * batch:
            for oldest in issued_at[version * batch : (version + 1) * batch]:
                assert sample_staleness(version, oldest) <= staleness
            version += 1


def test_colocated_samples_are_never_stale():
    assert num_issuable(version=3, staleness=0, batch_size=8, num_issued=32) == 0
    assert sample_staleness(3, 3) == 0


def test_a_token_from_the_future_is_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="version 4"):
        sample_staleness(3, 4)
