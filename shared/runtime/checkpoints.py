"""Which checkpoint a run continues from. `latest.json` is replaced in one step, after all ranks have saved."""

import json
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
        temporary.write_text(json.dumps({"step": checkpoint.step, "tag": checkpoint.tag}))
        temporary.replace(self._folder / "latest.json")
        tags = sorted(path for path in self._folder.glob("step-*") if path.is_dir())
        for old in tags[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    @staticmethod
    def tag(step: int) -> str:
        return f"step-{step:06d}"
