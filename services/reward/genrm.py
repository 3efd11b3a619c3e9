"""Prompts of the generative reward model and the strict reading of its verdicts. Pure.

The GenRM reasons first and ends with one line, `Score: <0..10>`. Anything else is no verdict: not a low
score."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_SCORE = 10.0

_VERDICT = re.compile(
    r"\*{0,3}Score\*{0,3}\s*:\s*\*{0,3}\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*(?:/\s*10)?\s*\*{0,3}\.?",
    re.IGNORECASE,
)
MAX_LINE = 60
"""Of a verdict, in characters. A longer line is none, and costs no time."""

POINTWISE = """You grade answers. Read the question and the answer, say in one short sentence whether the \
answer is right, and end with a line of the form
Score: N
where N is a whole number from 0 (wrong) to 10 (right and well explained).

Question:
{question}

Answer:
{response}"""

EXAMPLE_USER = POINTWISE.format(question="What is 2 + 2?", response="2 + 2 = 4. Answer: 4")
EXAMPLE_ASSISTANT = "The sum of 2 and 2 is 4, so the answer is right.\nScore: 10"
EXAMPLE_USER_2 = POINTWISE.format(question="What is 5 - 1?", response="Answer: 9")
EXAMPLE_ASSISTANT_2 = "5 - 1 is 4, not 9, so the answer is wrong.\nScore: 0"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`score` in 0..1."""

    score: float
    raw: str


def genrm_messages(template: str, question: str, response: str, answer: str = "") -> list[Mapping[str, str]]:
    """The conversation for one sample. With the built-in `pointwise` template two worked examples come
    first, which teaches small models the form; another template is a text with `{question}`, `{response}`,
    `{answer}`."""
    if template != "pointwise":
        text = (
            template.replace("{question}", question)
            .replace("{response}", response)
            .replace("{answer}", answer)
        )
        return [{"role": "user", "content": text}]
    return [
        {"role": "user", "content": EXAMPLE_USER},
        {"role": "assistant", "content": EXAMPLE_ASSISTANT},
        {"role": "user", "content": EXAMPLE_USER_2},
        {"role": "assistant", "content": EXAMPLE_ASSISTANT_2},
        {"role": "user", "content": POINTWISE.format(question=question, response=response)},
    ]


def parse_verdict(text: str) -> Verdict | None:
    """The verdict, or None if there is not exactly one score in range after the reasoning.

    >>> parse_verdict("Looks right.\\nScore: 8")
    Verdict(score=0.8, raw='8')
    >>> parse_verdict("Score: 80") is None, parse_verdict("I would say 8") is None
    (True, True)
    """
    lines = (line.strip() for line in text.split("\n"))
    matches = (_VERDICT.fullmatch(line) for line in lines if len(line) <= MAX_LINE)
    found = [match.group(1) for match in matches if match]
    if not found or len({float(raw) for raw in found}) > 1:
        return None
    value = float(found[-1])
    if value > MAX_SCORE:
        return None
    return Verdict(value / MAX_SCORE, found[-1])
