"""Element types by their torch names: how wide they are, and what numpy calls them."""

from typing import Any

import numpy as np

from shared.errors import InvalidRequest

_ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_AS_UNSIGNED = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names in a safetensors header → torch names."""

WIDE_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types that parameters of one model may be converted between; quantised and integer ones stay as they
are."""


def itemsize_of(dtype: str) -> int:
    """Bytes of one element. Raises InvalidRequest for an unknown name.

    >>> itemsize_of("bfloat16")
    2
    """
    if dtype not in _ITEMSIZE:
        raise InvalidRequest("dtype", f"{dtype!r} is unknown", f"Known: {', '.join(sorted(_ITEMSIZE))}")
    return _ITEMSIZE[dtype]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's type of the same width; unsigned integers where numpy has none (bfloat16, float8)."""
    itemsize_of(dtype)
    return np.dtype(_AS_UNSIGNED.get(dtype, dtype))
