"""Proves from the journals that every issued sample was trained once, is in flight, or is accounted for by
name.

Pure over journal entries. A `resumed` entry of the trainer voids the entries of later steps before it:
that work was lost with its checkpoint and is done again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.runtime.journal import read_journal

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts over sample ids. `masked` holds reasons; `lost` and `duplicated` hold the offending ids."""

    issued: int
    trained: int
    in_flight: int
    unscored: int
    masked: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    duplicated: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    resumes: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.unknown)


def audit(rollout: Iterable[Entry], trainer: Iterable[Entry], *, prompts_per_step: int) -> Audit:
    """
    A sample of a trained step that is neither trained nor masked is *lost*; one settled or issued
    twice, is *duplicated*; one trained but never issued is *unknown*.
    """
    issues = Counter(str(entry["sample"]) for entry in rollout if entry["event"] == "issued")
    outcomes: list[Entry] = []
    step, resumes = 0, 0
    for entry in trainer:
        if entry["event"] == "resumed":
            resumes += 1
            step = int(entry["step"])
            outcomes = [o for o in outcomes if int(o["step"]) <= step]
        else:
            outcomes.append(entry)
            step = max(step, int(entry["step"]))
    trained = Counter(str(o["sample"]) for o in outcomes if o["event"] == "trained")
    settled = Counter(str(o["sample"]) for o in outcomes if o["event"] in ("trained", "masked"))
    masked = {str(o["sample"]): str(o["reason"]) for o in outcomes if o["event"] == "masked"}
    in_flight = [s for s in issues if s not in settled]
    lost = [s for s in in_flight if int(s.split(".", 1)[0]) // prompts_per_step < step]
    reasons = Counter(_kind(reason) for reason in masked.values())
    return Audit(
        issued=len(issues),
        trained=len(trained),
        in_flight=len(in_flight) - len(lost),
        unscored=len(masked),
        masked=dict(sorted(reasons.items())),
        lost=tuple(sorted(lost)),
        duplicated=tuple(sorted(s for s in issues | settled if max(issues[s], settled[s]) > 1)),
        unknown=tuple(sorted(settled.keys() - issues.keys())),
        resumes=max(0, resumes - 1),
    )


def audit_folder(journal: Path, *, prompts_per_step: int) -> Audit:
    return audit(
        read_journal(journal / "rollout.jsonl"),
        read_journal(journal / "trainer.jsonl"),
        prompts_per_step=prompts_per_step,
    )


def _kind(reason: str) -> str:
    """Reasons with a number in them count together."""
    return "".join("#" if c.isdigit() else c for c in reason.split(":")[0])
