"""How processes that copy weights on the host should be started.

glibc's memcpy stores past the cache only from a size on that it takes from the last-level cache: 119 MB on a
CPU with 300 MB of it. Below, every copied byte is first read at its target as well, and a copy of one weight
runs at two thirds of the speed of a copy of the whole model. Weights are used much later than copied, so for
these processes the cache is of no use. glibc reads the limit once, when a process starts.
"""

from collections.abc import Mapping

STREAMING_FROM_BYTES = 1 << 20
_VARIABLE, _TUNABLE = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"


def copy_environment(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What to add to `environment` of a new process. A limit that is set there already stays; where the C
    library is another, or knows no such limit, the variable does nothing.

    >>> copy_environment({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    (('GLIBC_TUNABLES', 'glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=0x100000'),)
    """
    present = environment.get(_VARIABLE, "")
    if _TUNABLE in present:
        return ()
    ours = f"{_TUNABLE}={STREAMING_FROM_BYTES:#x}"
    return ((_VARIABLE, f"{present}:{ours}" if present else ours),)
