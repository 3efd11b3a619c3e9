"""Which checkpoint a run continues from. `latest.json` is replaced in one step, after all ranks have
saved."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

KEEP = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after `step` optimizer steps: policy version `step`. `tag` is empty for a fresh run."""

    step: int = 0
    tag: str = ""


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def latest(self) -> Checkpoint:
        path = self._folder / "latest.json"
        if not path.exists():
            return Checkpoint()
        values = json.loads(path.read_text())
        return Checkpoint(values["step"], values["tag"])

    def commit(self, checkpoint: Checkpoint) -> None:
        """Makes it the one to continue from, then drops all but the newest `KEEP`."""
        temporary = self._folder / "latest.tmp"
        with open(temporary, "w") as file:
            file.write(json.dumps({"step": checkpoint.step, "tag": checkpoint.tag}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / "latest.json")
        # What is newer was never committed: a former life died over it.
        tags = sorted(p for p in self._folder.glob("step-*") if p.is_dir() and p.name <= checkpoint.tag)
        for old in tags[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    @staticmethod
    def tag(step: int) -> str:
        return f"step-{step:06d}"
