"""Prompt sources: the same prompt for the same seed and index, and every broken row told with its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.rollout.dataset import ANSWER_INSTRUCTION, open_source
from shared.errors import ConfigError
from shared.runtime.config import DataSection


def source_of(source: object, seed: int = 0, **options: Any) -> Any:
    return open_source(DataSection(source=str(source), options=options), seed)


def dapo_row(i: int) -> dict[str, Any]:
    """As in DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{i}"},
    }


def test_reasoning_gym_is_a_function_of_seed_and_index() -> None:
    first, again = (
        source_of("reasoning_gym:basic_arithmetic", 3),
        source_of("reasoning_gym:basic_arithmetic", 3),
    )
    other = source_of("reasoning_gym:basic_arithmetic", 4)
    indices = [0, 5, 1, 70_000, 5]
    assert [first.prompt(i) for i in indices] == [again.prompt(i) for i in indices]
    assert [first.prompt(i).question for i in range(8)] != [other.prompt(i).question for i in range(8)]
    prompt = first.prompt(0)
    assert prompt.task["kind"] == "reasoning_gym"
    assert prompt.task["name"] == "basic_arithmetic"
    assert json.loads(json.dumps(prompt.task)) == prompt.task
    assert prompt.messages[0]["content"].endswith(ANSWER_INSTRUCTION)


def test_reasoning_gym_takes_options() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    question = source_of("reasoning_gym:basic_arithmetic", 0, **options).prompt(0).question
    assert question.count("+") == 1


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_as_in_dapo_math_are_read_shuffled_and_repeated(tmp_path: Path, kind: str) -> None:
    write = write_jsonl if kind == "jsonl" else write_parquet
    path = write(tmp_path / f"data.{kind}", *(dapo_row(i) for i in range(10)))
    source, again = source_of(path, 1), source_of(path, 1)
    epochs = [[source.prompt(epoch * 10 + i).question for i in range(10)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(f"What is {i} + 1?" for i in range(10))
    assert epochs[0] != epochs[1]
    assert [again.prompt(i).question for i in reversed(range(30))] == [
        q for e in epochs[::-1] for q in e[::-1]
    ]
    prompt = source.prompt(0)
    number = int(prompt.question.split()[2])
    assert prompt.task == {"kind": "math", "answer": str(number + 1)}


def test_plain_prompts_and_answers_are_taken_too(tmp_path: Path) -> None:
    rows = ({"prompt": "1 + 1?", "answer": 2}, "", {"prompt": "a\u2028b", "answer": 0})
    path = write_jsonl(tmp_path / "data.jsonl", rows[0], rows[1], json.dumps(rows[2], ensure_ascii=False))
    source = source_of(path)
    found = {source.prompt(i).question: source.prompt(i).task["answer"] for i in range(2)}
    assert found == {"1 + 1?": "2", "a\u2028b": "0"}


GOOD = dapo_row(1)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ('{"prompt": ', ("data.jsonl:3", "is not JSON", "Mend or drop")),
        ("[1, 2]", ("data.jsonl:3", "is not a JSON object", "Mend or drop")),
        ('"text"', ("data.jsonl:3", "is not a JSON object")),
        ({"answer": 1}, ("data.jsonl:3: prompt", "no chat message list and no text", "Give [")),
        ({"prompt": [], "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": "", "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": 7, "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": {"role": "user"}, "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": ["text"], "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": [{"role": "user"}], "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": [{"role": "user", "content": None}], "answer": 1}, ("data.jsonl:3: prompt",)),
        ({"prompt": "1 + 1?"}, ("data.jsonl:3: answer", "no ground truth", "Add `answer`")),
        ({"prompt": "1 + 1?", "reward_model": {}}, ("data.jsonl:3: answer",)),
        ({"prompt": "1 + 1?", "reward_model": "rule"}, ("data.jsonl:3: answer",)),
        ({"prompt": "1 + 1?", "answer": None}, ("data.jsonl:3: answer",)),
    ],
)
def test_a_broken_line_is_told_with_file_line_and_remedy(
    tmp_path: Path, bad: Any, told: tuple[str, ...]
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", GOOD, "", bad, GOOD)
    with pytest.raises(ConfigError) as raised:
        source_of(path)
    for part in told:
        assert part in raised.value.message


def test_a_broken_parquet_row_is_told(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data.parquet", GOOD, {**GOOD, "reward_model": None})
    with pytest.raises(ConfigError, match=r"data\.parquet row 1: answer"):
        source_of(path)


def test_a_file_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_text("no")
    with pytest.raises(ConfigError, match="is not Parquet"):
        source_of(tmp_path / "data.parquet")


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        source_of(tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("/no/such/file.jsonl", {}, "no such file"),
        ("reasoning_gym:no_such_task", {}, "unknown task. Known: "),
        ("reasoning_gym:basic_arithmetic", {"colour": "red"}, "basic_arithmetic refuses them"),
        ("reasoning_gym:basic_arithmetic", {"min_terms": 9, "max_terms": 2}, "basic_arithmetic refuses them"),
        ("reasoning_gym:basic_arithmetic", {"seed": 3}, "basic_arithmetic refuses them"),
        ("/etc/hostname", {}, "is of no known kind"),
    ],
)
def test_a_source_that_cannot_be_is_told(source: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_source(DataSection(source=source, options=options), 0)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no rows"):
        source_of(write_jsonl(tmp_path / "data.jsonl", "", ""))
