"""The audit: clean runs are clean, and nothing lost, doubled or unknown goes unseen."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import sample_id
from shared.runtime.audit import audit, audit_folder
from shared.runtime.journal import Journal, read_journal

PROMPTS, SAMPLES = 2, 2
Entry = Mapping[str, Any]


def issued(*prompts: int) -> list[Entry]:
    return [
        {"event": "issued", "sample": sample_id(p, k), "version": 0} for p in prompts for k in range(SAMPLES)
    ]


def trained(step: int, *samples: str) -> list[Entry]:
    return [{"event": "trained", "step": step, "sample": s} for s in samples]


def masked(step: int, *samples: str, reason: str = "no verdict in 3 attempts") -> list[Entry]:
    return [{"event": "masked", "step": step, "sample": s, "reason": reason} for s in samples]


def resumed(step: int) -> list[Entry]:
    return [{"event": "resumed", "step": step}]


def batch(step: int) -> list[str]:
    return [sample_id(p, k) for p in range((step - 1) * PROMPTS, step * PROMPTS) for k in range(SAMPLES)]


@pytest.mark.parametrize(
    ("rollout", "trainer", "expected"),
    [
        ([], [], {}),
        (issued(0, 1, 2), resumed(0), {"in_flight": 6}),
        (issued(0, 1, 2), [*resumed(0), *trained(1, *batch(1))], {"trained": 4, "in_flight": 2}),
        (issued(0, 1), [*trained(1, *batch(1)[1:]), *masked(1, batch(1)[0])], {"trained": 3, "unscored": 1}),
        (issued(0, 1), trained(1, *batch(1)[1:]), {"trained": 3, "lost": (batch(1)[0],)}),
        (
            issued(0, 1, 2, 3),
            [*trained(1, *batch(1)), *trained(2, *batch(2)), *trained(2, batch(1)[0])],
            {"trained": 8, "duplicated": (batch(1)[0],)},
        ),
        ([*issued(0, 1), *issued(1)], [], {"in_flight": 4, "duplicated": tuple(batch(1)[2:])}),
        (
            issued(0, 1),
            [*trained(1, *batch(1)), *masked(1, batch(1)[0])],
            {"trained": 4, "unscored": 1, "duplicated": (batch(1)[0],)},
        ),
        (
            issued(0, 1),
            [*trained(1, *batch(1)[1:]), *masked(1, batch(1)[0]), *masked(1, batch(1)[0])],
            {"trained": 3, "unscored": 1, "duplicated": (batch(1)[0],)},
        ),
        (issued(0), trained(1, *batch(1)), {"trained": 4, "unknown": tuple(batch(1)[2:])}),
        (
            issued(0, 1, 2, 3),
            [*resumed(0), *trained(1, *batch(1)), *trained(2, *batch(2)), *resumed(1)],
            {"trained": 4, "in_flight": 4, "resumes": 1},
        ),
        (
            issued(0, 1, 2, 3),
            [
                *resumed(0),
                *trained(1, *batch(1)),
                *trained(2, *batch(2)),
                *resumed(1),
                *trained(2, *batch(2)),
                *resumed(2),
            ],
            {"trained": 8, "resumes": 2},
        ),
    ],
)
def test_what_the_journals_say(rollout: list[Entry], trainer: list[Entry], expected: dict[str, Any]) -> None:
    result = audit(rollout, trainer, prompts_per_step=PROMPTS)
    counts = {"trained": 0, "in_flight": 0, "unscored": 0, "lost": (), "duplicated": (), "unknown": ()}
    wanted = {**counts, "resumes": 0, **expected}
    assert {name: getattr(result, name) for name in wanted} == wanted
    assert result.is_clean == (not (result.lost or result.duplicated or result.unknown))


def test_reasons_count_together_whatever_their_numbers() -> None:
    names = batch(1)
    trainer = [
        *masked(1, names[0], reason="no verdict in 3 attempts"),
        *masked(1, names[1], reason="no verdict in 2 attempts"),
        *masked(1, *names[2:], reason="verifier: TypeError: x"),
    ]
    assert audit(issued(0, 1), trainer, prompts_per_step=PROMPTS).masked == {
        "no verdict in # attempts": 2,
        "verifier": 2,
    }


@given(st.integers(0, 5), st.data())
def test_any_run_with_crashes_is_clean_and_any_damage_is_seen(num_steps: int, data: st.DataObject) -> None:
    """A run crashes after any step and goes on from any earlier checkpoint. Then one entry is lost or
    doubled."""
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    rollout = issued(*range(num_steps * PROMPTS + rng.randrange(3)))
    trainer: list[Entry] = list(resumed(0))
    step = 0
    while step < num_steps:
        step += 1
        for sample in batch(step):
            trainer += trained(step, sample) if rng.random() < 0.8 else masked(step, sample)
        if rng.random() < 0.3:
            step = rng.randrange(step + 1)
            trainer += resumed(step)
    clean = audit(rollout, trainer, prompts_per_step=PROMPTS)
    assert clean.is_clean
    assert clean.issued == clean.trained + clean.unscored + clean.in_flight == len(rollout)
    assert clean.trained + clean.unscored == num_steps * PROMPTS * SAMPLES

    last = max((i for i, e in enumerate(trainer) if e["event"] == "resumed"), default=0)
    valid = [i for i, e in enumerate(trainer) if i > last and e["event"] != "resumed"]
    if valid:
        at = rng.choice(valid)
        sample = trainer[at]["sample"]
        without = audit(rollout, trainer[:at] + trainer[at + 1 :], prompts_per_step=PROMPTS)
        assert without.lost == (sample,)
        twice = audit(rollout, [*trainer, trainer[at]], prompts_per_step=PROMPTS)
        assert twice.duplicated == (sample,)
        unknown = [e for e in rollout if e["sample"] != sample]
        assert audit(unknown, trainer, prompts_per_step=PROMPTS).unknown == (sample,)


def test_the_journal_outlives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "rollout.jsonl"
    journal = Journal(path)
    journal.append(*({"event": "issued", "sample": s} for s in batch(1)))
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"event": "issu')
    assert len(list(read_journal(path))) == 4
    journal = Journal(path)
    journal.append({"event": "issued", "sample": batch(2)[0]})
    journal.append({"event": "issued", "sample": "é"})
    journal.close()
    assert [e["sample"] for e in read_journal(path)] == [*batch(1), batch(2)[0], "é"]
    assert list(read_journal(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("torn", range(0, 60, 7))
def test_a_journal_cut_anywhere_reads_as_its_whole_lines(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "trainer.jsonl"
    journal = Journal(path)
    journal.append(*trained(1, *batch(1)))
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - torn])
    kept = whole[: len(whole) - torn].count(b"\n") + (torn == 1)
    journal = Journal(path)
    journal.append(*trained(2, batch(2)[0]))
    entries = list(read_journal(path))
    assert len(entries) == kept + 1
    assert entries[-1]["sample"] == batch(2)[0]


def test_the_audit_reads_a_run_folder(tmp_path: Path) -> None:
    rollout, trainer = Journal(tmp_path / "rollout.jsonl"), Journal(tmp_path / "trainer.jsonl")
    rollout.append(*map(dict, issued(0, 1)))
    trainer.append(*map(dict, trained(1, *batch(1))))
    result = audit_folder(tmp_path, prompts_per_step=PROMPTS)
    assert (result.trained, result.is_clean) == (4, True)
    assert audit_folder(tmp_path / "empty", prompts_per_step=PROMPTS).is_clean
