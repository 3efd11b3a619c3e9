"""How the ranks of one life find each other: rank 0 opens a store and names it in
`<run>/processes/ranks.json`.

The file of an earlier life must never be used. It names the process that wrote it, by pid and start time, and
ranks live and die together: a file whose writer is alive is this life's, any other is old and is waited out.

    rank 0   removes the old file, opens a store on a free loopback port, writes the file (in one step)
    others   read until the file's writer is alive, then connect
"""

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from shared.errors import DeadlineExceeded

POLL_S = 0.1
COLLECTIVE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """`generation` is the same for all ranks of one life and no other."""

    generation: str
    port: int
    pid: int
    started_unix_s: float


def meet(folder: Path, rank: int, world_size: int, *, deadline_s: float) -> tuple[str, Any]:
    """The generation and a connected torch.distributed store.

    Raises:
        DeadlineExceeded: the others did not come.
    """
    from torch.distributed import PrefixStore, TCPStore

    path = folder / "ranks.json"
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if rank == 0:
        path.unlink(missing_ok=True)
        store = TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False)
        meeting = Meeting(secrets.token_hex(6), store.port, os.getpid(), psutil.Process().create_time())
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(meeting)))
        temporary.replace(path)
    else:
        meeting = _await_meeting(path, deadline_s)
        store = TCPStore("127.0.0.1", meeting.port, world_size, False, timeout, wait_for_workers=False)
    return meeting.generation, PrefixStore(meeting.generation, store)


def _await_meeting(path: Path, deadline_s: float) -> Meeting:
    for _ in range(int(deadline_s / POLL_S)):
        if (found := read_meeting(path)) is not None:
            return found
        time.sleep(POLL_S)
    raise DeadlineExceeded(role="rank", peer="rank 0", phase="rendezvous", deadline_s=deadline_s)


def read_meeting(path: Path) -> Meeting | None:
    """What the file says, if its writer lives."""
    try:
        meeting = Meeting(**json.loads(path.read_text()))
        started = psutil.Process(meeting.pid).create_time()
    except (FileNotFoundError, ValueError, TypeError, psutil.NoSuchProcess):
        return None
    return meeting if abs(started - meeting.started_unix_s) < 0.05 else None
