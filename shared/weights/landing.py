"""Landing buffers: shared-memory regions in the canonical layout of a model that hold only parts of it.

A receiver that reads from other nodes gets one for ever: it is registered with the transport once, engines
map it once, and only the pages of the boxes that were asked for are ever filled. Writers of a sharded node
put their bytes into one as well. The files are locked like those of the host pool, so that what a dead
process left is found and removed with them.
"""

import fcntl
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError, InvalidRequest
from shared.weights.mapped_pool import PREFIX, SHM_FOLDER

_NAME = re.compile(r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+)*")


@dataclass(slots=True)
class Landing:
    """`memory` has shape (nbytes,); pages appear as they are written."""

    path: Path
    nbytes: int
    memory: NDArray[np.uint8]
    lock_fd: int

    @property
    def region(self) -> str:
        return self.path.name

    def remove(self) -> None:
        """Remove the file. Who has it mapped keeps the pages. A second call does nothing."""
        if self.lock_fd < 0:
            return
        self.path.unlink(missing_ok=True)
        os.close(self.lock_fd)
        self.lock_fd, self.memory = -1, np.empty(0, np.uint8)


def check_name(receiver: str) -> None:
    """Raises InvalidRequest for a receiver that cannot name a file."""
    if not _NAME.fullmatch(receiver) or len(receiver) > 100:
        raise InvalidRequest(
            "receiver",
            f"{receiver!r} is no name of letters, digits, '_', '.' and '-'",
            "Use the replica's or rank's name",
        )


def make_landing(
    run: str, node: int, name: str, nbytes: int, *, filled_bytes: int, folder: Path = SHM_FOLDER
) -> Landing:
    """A new empty one of `nbytes`, of which `filled_bytes` will be used. Raises ConfigError if those do not
    fit the free shared memory, or it cannot be made."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if filled_bytes > free:
        problem = f"landing buffer {name} needs {filled_bytes} bytes of shared memory, {free} are free"
        raise ConfigError(
            str(folder), None, problem, "Mount it larger (docker --shm-size), or use more nodes"
        )
    path = folder / f"{PREFIX}{run}-n{node}-{name}"
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, max(nbytes, 1))
        mapped = mmap.mmap(fd, max(nbytes, 1), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        problem = f"a landing buffer of {nbytes} bytes cannot be mapped ({error.strerror})"
        raise ConfigError(str(folder), None, problem, "Free shared memory, or mount it larger") from error
    return Landing(path, nbytes, np.frombuffer(mapped, np.uint8)[:nbytes], fd)
