"""The memory of an engine's process."""

import ctypes


def resident_bytes() -> int:
    """Resident memory of this process, without shared memory: the pages of the host pool are GPS's."""
    kib = {}
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssFile:")):
                field, value, _ = line.split()
                kib[field] = int(value)
    return sum(kib.values()) * 1024


def trim_heap() -> None:
    """Hand freed heap pages back to the system, where the C library can."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc: large blocks were returned when they were freed
        return
