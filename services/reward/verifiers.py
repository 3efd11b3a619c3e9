"""The verifiable part of the reward: 1 for a right final answer, 0 for a wrong one (reasoning-gym may give parts).

Pure functions over text; they run in a thread, since a symbolic comparison can take long.
"""

import re
from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidRequest

_ANSWER_LINE = re.compile(r"answer\s*(?:is)?\s*[:=]?\s*\**\s*(.+?)\s*\**\s*$", re.IGNORECASE | re.MULTILINE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def final_answer(response: str) -> str | None:
    """What a response commits to: `<answer>…</answer>`, else the last `Answer: …` line, else its last line if that is
    one number.

    >>> final_answer("3 + 4 = 7\\nAnswer: 7.")
    '7'
    """
    if tagged := _ANSWER_TAG.findall(response):
        return str(tagged[-1]).strip()
    if lines := _ANSWER_LINE.findall(response):
        return _bare(str(lines[-1]))
    last = response.strip().rsplit("\n", 1)[-1]
    numbers = _NUMBER.findall(last)
    return numbers[-1] if numbers else None


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
    from math_verify import parse, verify

    gold = parse(f"${answer}$", parsing_timeout=None)
    given = final_answer(response)
    candidates = [response] if given is None else [f"${given}$", response]
    return float(
        any(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None) for text in candidates)
    )


def _bare(text: str) -> str:
    text = text.strip().strip("$*").rstrip(".")
    number = _NUMBER.search(text)
    return number.group() if number and len(_NUMBER.findall(text)) == 1 else text
