"""Append-only JSON lines that outlive a crash: who issued, scored, trained or gave up which sample.

`pivotrl audit` reads nothing else. A line is on disk (fsync) when `append` returns; a torn last line is
ignored."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # held for the life of the process
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a torn line stays alone

    def append(self, *entries: dict[str, Any]) -> None:
        """Several entries cost one fsync."""
        self._file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Entries oldest first; none if the file is not there."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError:
                continue
