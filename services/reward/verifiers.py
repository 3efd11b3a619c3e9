"""The verifiable part of the reward: 1 for a right final answer, 0 for a wrong one (reasoning-gym may give
parts).

Pure functions over text. A symbolic comparison can take for ever: `verifier_process` runs them where they
can be killed."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from shared.errors import InvalidRequest

_ANSWER_LINE = re.compile(r"answer(?:[ \t]+is\b)?[ \t*:=]*([^\n]+)", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_INTEGER = re.compile(r"-?[0-9]{1,4000}")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
_BARE_NUMBER = re.compile(
    rf"(?:[A-Za-z]\w*[ ]*=[ ]*)?\$?[ ]*({_NUMBER.pattern})(?:[ ]+[A-Za-z][A-Za-z ]*|[ ]*%)?"
)
"""A number alone, or with a name before it or a unit after it: `x = 3`, `$7`, `5 apples`; not `2x`, not a
root."""


def final_answer(response: str) -> str | None:
    """What a response commits to: `<answer>…</answer>`, else the last `Answer: …` line, else its last line
    if that is one number.

    >>> final_answer("3 + 4 = 7\\nAnswer: 7.")
    '7'
    """
    if (stated := _stated_answer(response)) is not None:
        return stated
    last = response.strip().rsplit("\n", 1)[-1]
    numbers = _NUMBER.findall(last)
    return numbers[-1] if numbers else None


def _stated_answer(response: str) -> str | None:
    tags = list(_ANSWER_TAG.finditer(response))
    for opening, closing in reversed(list(pairwise(tags))):
        if "/" in closing.group() and "/" not in opening.group():
            return response[opening.end() : closing.start()].strip()
    lines = [line for line in _ANSWER_LINE.findall(response) if line.strip(" \t*:=.")]
    return _bare(lines[-1]) if lines else None


def verify(task: Mapping[str, Any], response: str) -> float:
    """R_verifiable in 0..1.

    Raises:
        InvalidRequest: a task kind this version does not know.
    """
    if task.get("failed"):
        return 0.0
    match task.get("kind"):
        case "reasoning_gym":
            return _verify_reasoning_gym(task, response)
        case "math":
            return _verify_math(str(task["answer"]), response)
    raise InvalidRequest("task.kind", f"{task.get('kind')!r} is unknown", "Use reasoning_gym or math")


def _verify_reasoning_gym(task: Mapping[str, Any], response: str) -> float:
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(task["name"])
    answer = final_answer(response)
    if answer is None:
        return 0.0
    value = float(score(answer, task["entry"]))
    return value if value >= 0.5 else 0.0  # its consolation points for form are not correctness


def _verify_math(answer: str, response: str) -> float:
    stated = _stated_answer(response)
    if stated == answer:
        return 1.0
    if stated is not None and _INTEGER.fullmatch(stated) and _INTEGER.fullmatch(answer):
        return float(int(stated) == int(answer))

    from math_verify import parse, verify

    gold = parse(f"${answer}$", parsing_timeout=None)
    # Where none is stated the library looks for a boxed one.
    given = parse(response if stated is None else f"${stated}$", parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def _bare(text: str) -> str:
    text = text.strip().strip("*").strip().rstrip(".").strip("$*").strip()
    number = _BARE_NUMBER.fullmatch(text)
    return number.group(1) if number else text
