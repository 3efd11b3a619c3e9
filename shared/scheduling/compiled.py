"""Where compiled loops are kept between runs.

Numba notices a change in the file of a function, not one in a file whose constants or functions it uses: with
its own folders, a pulled change of one file would run with what was compiled of the other. So the folder
is named after the text of all files with compiled loops.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

_SOURCES = ("compiled.py", "kernels.py", "placement.py", "rows.py")
_OPTIONS = {"error_model": "numpy", "fastmath": {"nnan", "nsz"}}


def cache_folder() -> Path:
    """Under Numba's CACHE_DIR setting (NUMBA_CACHE_DIR), or the user's cache."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join((here / name).read_bytes() for name in _SOURCES)).hexdigest()[:16]
    base = numba.config.CACHE_DIR or Path.home() / ".cache" / "pivotrl" / "numba"
    return Path(base) / digest


def kernel(function: F) -> F:
    """Compiled when first called, and kept if the folder (or one of Numba's own) can be written."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_FOLDER)
    try:
        return cast(F, numba.njit(cache=True, **_OPTIONS)(function))
    except (RuntimeError, OSError):  # nowhere to write
        return cast(F, numba.njit(**_OPTIONS)(function))
    finally:
        numba.config.CACHE_DIR = before


_FOLDER = cache_folder()
