"""Verdicts are read strictly: anything but one score in range is no verdict, never a low one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.app import load_template
from services.reward.genrm import EXAMPLE_ASSISTANT, EXAMPLE_ASSISTANT_2, genrm_messages, parse_verdict
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 8", 0.8),
        ("It is right.\nScore: 10", 1.0),
        ("Score: 0", 0.0),
        ("score : 7.5", 0.75),
        ("**Score: 8**", 0.8),
        ("**Score**: 8", 0.8),
        ("Score: **8**.", 0.8),
        ("Score: 8/10", 0.8),
        ("Score: 8 / 10.", 0.8),
        ("  Score: 8  ", 0.8),
        ("Score: 8\r\n", 0.8),
        ("Score: 8\nso, again:\nScore: 8", 0.8),
        ("Score: 8\nScore: 8.0", 0.8),
        ("Score: 08", 0.8),
        (EXAMPLE_ASSISTANT, 1.0),
        (EXAMPLE_ASSISTANT_2, 0.0),
        ("", None),
        ("I would say 8", None),
        ("Score: N", None),
        ("Score: 11", None),
        ("Score: 80", None),
        ("Score: 100", None),
        ("Score: -3", None),
        ("Score: 8 out of 10", None),
        ("Score: 8/100", None),
        ("Score: 8/5", None),
        ("Score: 8 or 9", None),
        ("Score: 3\nScore: 8", None),
        ("The Score: 8", None),
        ("Score 8", None),
        ("Score:\n8", None),
        ("Score: eight", None),
        ("Score: 1e1", None),
        ("Score: nan", None),
        ("Score: ٣", None),
        ("Underscore: 8", None),
    ],
)
def test_what_is_a_verdict(text: str, score: float | None) -> None:
    verdict = parse_verdict(text)
    assert (None if verdict is None else verdict.score) == score


@given(st.text() | st.text(alphabet="Score: 0123456789./*\n-"))
def test_reading_never_raises_and_scores_are_in_range(text: str) -> None:
    for given_text in (text, f"Score: {text}", f"{text}\nScore: 5"):
        verdict = parse_verdict(given_text)
        assert verdict is None or 0 <= verdict.score <= 1


def test_reading_takes_no_time_whatever_was_generated() -> None:
    started = time.perf_counter()
    for text in ("\n" * 50_000, " " * 50_000, "*" * 50_000, "Score:" + " " * 50_000, "Score: 8\n" * 5_000):
        parse_verdict(text)
    assert time.perf_counter() - started < 1


def test_a_template_gets_its_parts_also_when_they_hold_braces() -> None:
    (message,) = genrm_messages("{question}|{response}|{answer}", "q {x}", "r", "a")
    assert message["content"] == "q {x}|r|a"
    assert genrm_messages("pointwise", "2 + {2}?", "4")[-1]["content"].count("2 + {2}?") == 1


def test_a_template_that_lacks_a_part_is_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/template.txt"
    with open(path, "w") as file:
        file.write("{question} only")
    with pytest.raises(ConfigError, match=r"lacks \{response\}"):
        load_template(path)
    with pytest.raises(ConfigError, match="no built-in template"):
        load_template("pointwize")
    assert load_template("pointwise") == "pointwise"
