"""The environment of a process that copies weights."""

import doctest
import os
import subprocess
import sys

from shared.weights import host_copy
from shared.weights.host_copy import copy_environment


def test_the_limit_is_added_once_and_other_tunables_stay() -> None:
    assert doctest.testmod(host_copy).failed == 0
    first = dict(copy_environment({}))
    assert list(first) == ["GLIBC_TUNABLES"]
    assert copy_environment(first) == ()


def test_a_process_starts_under_it() -> None:
    environment = {**os.environ, **dict(copy_environment(os.environ))}
    done = subprocess.run(
        [sys.executable, "-c", "print(bytes(bytearray(4 << 20)).count(0))"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(4 << 20)
    assert done.stderr == ""
