import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from services.trainer.rendezvous import Meeting, meet, read_meeting
from shared.errors import DeadlineExceeded

pytest.importorskip("torch")


def write(path: Path, meeting: Meeting) -> None:
    path.write_text(json.dumps(asdict(meeting)))


def test_a_file_of_a_dead_process_is_old(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    write(tmp_path / "ranks.json", Meeting("old", 1, int(child.stdout), 0.0))
    assert read_meeting(tmp_path / "ranks.json") is None


def test_a_file_of_an_earlier_process_with_the_same_pid_is_old(tmp_path: Path) -> None:
    started = psutil.Process().create_time()
    write(tmp_path / "ranks.json", Meeting("old", 1, os.getpid(), started - 100))
    assert read_meeting(tmp_path / "ranks.json") is None
    write(tmp_path / "ranks.json", Meeting("new", 1, os.getpid(), started))
    assert read_meeting(tmp_path / "ranks.json") == Meeting("new", 1, os.getpid(), started)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"generation": "x"}'])
def test_a_file_that_says_nothing_is_waited_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "ranks.json").write_text(text)
    assert read_meeting(tmp_path / "ranks.json") is None


def test_ranks_meet_whoever_is_first(tmp_path: Path) -> None:
    found: dict[int, tuple[str, object]] = {}

    def rank(number: int) -> None:
        generation, store = meet(tmp_path, number, 2, deadline_s=20)
        found[number] = generation, store  # rank 0's store is the server: it must outlive the others
        store.set(f"r{number}", "here")
        assert store.get(f"r{1 - number}") == b"here"

    threads = [threading.Thread(target=rank, args=(n,)) for n in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0][0] == found[1][0]


def test_a_rank_that_is_left_alone_gives_up(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="rendezvous"):
        meet(tmp_path, 1, 2, deadline_s=0.3)
