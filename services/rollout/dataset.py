"""Prompts by index: a reasoning-gym task, a local JSONL or Parquet file, or a Hugging Face data set.

A source is a pure function of (seed, index), so that a restarted run draws the same prompts.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ConfigError
from shared.runtime.config import DataSection

ANSWER_INSTRUCTION = "Work it out briefly, then give the final result on a last line as 'Answer: <result>'."


@dataclass(frozen=True, slots=True)
class Prompt:
    """`messages` as chat templates take them; `task` is what a verifier needs to check a response."""

    messages: tuple[Mapping[str, str], ...]
    question: str
    task: dict[str, Any]


class PromptSource(Protocol):
    def prompt(self, index: int) -> Prompt:
        """The prompt drawn at `index`; any index >= 0 works (a file is reshuffled and repeated)."""


def open_source(data: DataSection, seed: int) -> PromptSource:
    """
    Raises:
        ConfigError: unknown task, missing file, or a line that is not as it must be (with its number).
    """
    kind, _, rest = data.source.partition(":")
    if kind == "reasoning_gym":
        return ReasoningGymSource(rest, data.options, seed)
    if kind == "hf":
        return RowSource(_hugging_face_rows(rest), data.source, seed)
    path = Path(data.source)
    if not path.exists():
        raise ConfigError(
            "data.source", data.source, "no such file", "Name a .jsonl or .parquet file that exists"
        )
    if path.suffix == ".jsonl":
        return RowSource(_jsonl_rows(path), data.source, seed)
    if path.suffix == ".parquet":
        return RowSource(_parquet_rows(path), data.source, seed)
    raise ConfigError(
        "data.source",
        data.source,
        "is of no known kind",
        "Use reasoning_gym:<task>, a .jsonl or .parquet file, or hf:<dataset>",
    )


class ReasoningGymSource:
    """A procedural task with its own verifier. Each index has its own generator seed."""

    def __init__(self, task: str, options: Mapping[str, Any], seed: int) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if task not in DATASETS:
            raise ConfigError(
                "data.source",
                f"reasoning_gym:{task}",
                "unknown task",
                f"Known: {', '.join(sorted(DATASETS)[:12])}, …",
            )
        try:
            self._dataset = reasoning_gym.create_dataset(task, seed=seed, size=1 << 30, **options)
            self._dataset[0]
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(
                "data.options", dict(options), f"{task} refuses them ({error})", "See its config"
            ) from error
        self._task = task

    def prompt(self, index: int) -> Prompt:
        entry = self._dataset[index]
        question = str(entry["question"])
        task = {
            "kind": "reasoning_gym",
            "name": self._task,
            "entry": json.loads(json.dumps(entry, default=str)),
        }
        return Prompt(({"role": "user", "content": f"{question}\n{ANSWER_INSTRUCTION}"},), question, task)


class RowSource:
    """Rows with `prompt` (a list of chat messages, or a text) and a ground-truth answer, as in DAPO-Math-17k:
    `reward_model.ground_truth`, or `answer`. Shuffled anew in every epoch."""

    def __init__(self, rows: Sequence[tuple[str, Mapping[str, Any]]], name: str, seed: int) -> None:
        self._prompts = [_row_prompt(row, where) for where, row in rows]
        if not self._prompts:
            raise ConfigError("data.source", name, "holds no rows", "Name a file with at least one prompt")
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def prompt(self, index: int) -> Prompt:
        epoch, at = divmod(index, len(self._prompts))
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self._prompts[self._orders[epoch][at]]


def _row_prompt(row: Mapping[str, Any], where: str) -> Prompt:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt or not all(_is_message(m) for m in prompt):
        raise ConfigError(
            f"{where}: prompt",
            None,
            "is no chat message list and no text",
            'Give [{"role": "user", "content": "…"}]',
        )
    judged = row.get("reward_model")
    answer = judged.get("ground_truth") if isinstance(judged, Mapping) else None
    answer = row.get("answer") if answer is None else answer
    if answer is None:
        raise ConfigError(
            f"{where}: answer",
            None,
            "there is no ground truth",
            "Add `answer` or `reward_model.ground_truth`",
        )
    messages = tuple({"role": str(m.get("role", "user")), "content": str(m["content"])} for m in prompt)
    return Prompt(messages, messages[-1]["content"], {"kind": "math", "answer": str(answer)})


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str) and bool(value["content"])


def _jsonl_rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    rows: list[tuple[str, Mapping[str, Any]]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "data.source", str(path), f"cannot be read ({error})", "Write it as UTF-8"
        ) from error
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold other line breaks
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{path}:{number}", line[:60], f"is not JSON ({error})", "Mend or drop the line"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}", line[:60], "is not a JSON object", "Mend or drop the line")
        rows.append((f"{path}:{number}", row))
    return rows


def _parquet_rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError("data.source", str(path), f"is not Parquet ({error})", "Write it again") from error
    return [(f"{path} row {i}", row) for i, row in enumerate(table.to_pylist())]


def _hugging_face_rows(name: str) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data.source", f"hf:{name}", "needs `datasets`", "pip install datasets") from error
    dataset, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(dataset, split=split or "train")
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be had
        raise ConfigError(
            "data.source", f"hf:{name}", f"cannot be loaded ({error})", "Check name and network"
        ) from error
    return [(f"{name} row {i}", row) for i, row in enumerate(rows)]
