"""When the complete prompts of a batch are trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.scheduling.streaming import BURSTS, EAGER, LATE, STREAMING, Streaming

PROMPTS = 100


@pytest.mark.parametrize(
    ("streaming", "num_complete", "num_trained", "is_dedicated", "is_ready"),
    [
        (EAGER, 4, 0, False, False),
        (EAGER, 5, 0, False, True),
        (BURSTS, 14, 0, False, False),
        (BURSTS, 15, 0, False, True),
        (BURSTS, 14, 85, False, False),
        (BURSTS, 15, 70, False, True),
        (BURSTS, 5, 95, False, True),
        (LATE, 49, 0, False, False),
        (LATE, 50, 0, False, True),
        (LATE, 4, 0, True, False),
        (LATE, 5, 0, True, True),
        (LATE, 4, 50, False, False),
        (LATE, 5, 50, False, True),
        (LATE, 1, 99, False, True),
        (EAGER, 1, 99, True, True),
        (EAGER, 0, 100, False, False),
    ],
)
def test_a_part_is_trained_once_it_is_worth_it(streaming, num_complete, num_trained, is_dedicated, is_ready):
    assert streaming.is_ready(num_complete, num_trained, PROMPTS, is_dedicated=is_dedicated) is is_ready


@given(
    st.sampled_from([EAGER, BURSTS, LATE, Streaming(1.0, 0.0, 1.0)]),
    st.integers(1, 600),
    st.data(),
    st.booleans(),
)
def test_every_batch_ends_and_is_never_trained_empty(streaming, num_prompts, data, is_dedicated):
    num_trained = data.draw(st.integers(0, num_prompts))
    left = num_prompts - num_trained
    assert not streaming.is_ready(0, num_trained, num_prompts, is_dedicated=is_dedicated)
    assert streaming.is_ready(left, num_trained, num_prompts, is_dedicated=is_dedicated) == (left > 0)
    ready = [
        streaming.is_ready(num, num_trained, num_prompts, is_dedicated=is_dedicated)
        for num in range(left + 1)
    ]
    assert ready == sorted(ready), "more complete prompts are never less ready"


def test_shares_are_checked():
    for start, least in ((0.0, 0.5), (1.1, 0.5), (0.5, 0.0), (0.5, 2.0)):
        with pytest.raises(ConfigError, match="share"):
            Streaming(start, min_share=least)


def test_off_is_no_streaming():
    assert STREAMING["off"] is None
    assert (STREAMING["eager"], STREAMING["late"]) == (EAGER, LATE)
