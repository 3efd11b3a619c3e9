"""The verifiable reward: right is 1, wrong is 0, and what never ends is killed."""

import asyncio
import time
from typing import Any

import pytest

from services.reward import verifier_process
from services.reward.verifier_process import VerifierProcess
from services.reward.verifiers import final_answer, verify
from shared.errors import DeadlineExceeded, InvalidRequest, PivotError


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("3 + 4 = 7\nAnswer: 7", "7"),
        ("Answer: 7.", "7"),
        ("**Answer: 7**", "7"),
        ("Answer: **7**", "7"),
        ("The answer is 7", "7"),
        ("Answer: 3\nno, wait\nAnswer: 7", "7"),
        ("Answer: $7$", "7"),
        ("Answer: -7.5", "-7.5"),
        ("Answer: x = 7", "7"),
        ("Answer: 7 apples", "7"),
        ("Answer: 7%", "7"),
        ("Answer: .5", ".5"),
        ("Answer:\n7", "7"),
        ("<answer> 7 </answer>", "7"),
        ("<answer>3</answer> <answer>7</answer>", "7"),
        ("3 + 4 = 7", "7"),
        ("Answer: 2x", "2x"),
        ("Answer: x^2", "x^2"),
        ("Answer: \\sqrt{2}", "\\sqrt{2}"),
        ("Answer: 1/2", "1/2"),
        ("Answer: 1,000", "1,000"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_what_a_response_commits_to(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("7", "Answer: 7", 1.0),
        ("7", "Answer: 8", 0.0),
        ("7", "7 it is not\nAnswer: 8", 0.0),
        ("5", "\\boxed{5}\nAnswer: 7", 0.0),
        ("\\frac{3}{4}", "so it is \\boxed{\\frac{3}{4}}", 1.0),
        ("4", "so it is \\boxed{\\frac{3}{4}}", 0.0),
        ("0.5", "Answer: 1/2", 1.0),
        ("1/2", "Answer: \\frac{1}{2}", 1.0),
        ("1000", "Answer: 1,000", 1.0),
        ("\\sqrt{2}", "Answer: \\sqrt{2}", 1.0),
        ("2", "Answer: \\sqrt{2}", 0.0),
        ("2", "Answer: 2x", 0.0),
        ("2", "Answer: x^2", 0.0),
        ("5", "Answer: .5", 0.0),
        ("-3", "Answer: -3", 1.0),
        ("3", "", 0.0),
    ],
)
def test_math(gold: str, response: str, score: float) -> None:
    assert verify({"kind": "math", "answer": gold}, response) == score


def gym_task(task: str = "basic_arithmetic") -> tuple[dict[str, Any], str]:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, seed=3, size=5)[0]
    return {"kind": "reasoning_gym", "name": task, "entry": dict(entry)}, str(entry["answer"])


def test_reasoning_gym() -> None:
    task, answer = gym_task()
    assert verify(task, f"so\nAnswer: {answer}") == 1.0
    assert verify(task, "Answer: 123456789") == 0.0
    assert verify(task, "no idea") == 0.0


def test_a_failed_rollout_is_worth_nothing_and_an_unknown_task_is_refused() -> None:
    assert verify({"kind": "math", "answer": "1", "failed": "engine"}, "Answer: 1") == 0.0
    with pytest.raises(InvalidRequest, match=r"task\.kind"):
        verify({"kind": "poetry"}, "")


def test_reading_an_answer_takes_no_time_whatever_was_generated() -> None:
    started = time.perf_counter()
    for text in (
        "answer" + "\n" * 20_000,
        "answer is " * 5_000,
        "answer" + " *" * 20_000,
        "<answer>" * 3_000,
    ):
        final_answer(text)
    assert time.perf_counter() - started < 2


async def test_what_never_ends_is_killed_and_the_next_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_process, "VERIFY_DEADLINE_S", 4.0)
    verifier = VerifierProcess()
    try:
        math = {"kind": "math", "answer": "7"}
        assert await verifier.verify(math, "Answer: 7") == 1.0
        with pytest.raises(DeadlineExceeded, match="verifier"):
            await verifier.verify(math, "Answer: 9^{9^{9^{9}}}")
        assert await verifier.verify(math, "Answer: 8") == 0.0
        with pytest.raises(InvalidRequest, match="poetry"):
            await verifier.verify({"kind": "poetry"}, "")
        with pytest.raises(PivotError, match="KeyError"):
            await verifier.verify({"kind": "math"}, "Answer: 8")
        results = await asyncio.gather(*(verifier.verify(math, f"Answer: {i}\nétape") for i in range(10)))
        assert results == [0.0] * 7 + [1.0] + [0.0] * 2
        assert verifier.num_killed == 1
    finally:
        await verifier.close()
