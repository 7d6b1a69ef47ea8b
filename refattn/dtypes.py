"""Questions about dtypes, answered by name: the one way that holds for every library and for ml_dtypes' types.

`isdtype` of the array libraries raises on ml_dtypes' bfloat16, so nothing else in refattn asks it.
"""

from __future__ import annotations

from typing import Any

COMPUTED = ("bfloat16", "float16", "float32", "float64")  # A4: the dtypes of q, k and v

# The smallest normal and the largest number of each dtype that scores are computed in.
RANGES = {"float32": (2.0**-126, 2.0**128 - 2.0**104), "float64": (2.0**-1022, 1.7976931348623157e308)}

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

_NAMES: dict[tuple[type, Any], str] = {}  # by class too: some libraries' dtypes warn when compared with others'


def dtype_name(dtype: Any) -> str:
    """The plain name of a dtype object of any library: "float32", "bfloat16", "bool", ..."""
    key = type(dtype), dtype
    name = _NAMES.get(key)
    if name is None:
        name = _NAMES[key] = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return name


def is_float(dtype: Any) -> bool:
    """Whether bias, sinks and scale may have it: a real floating dtype that attention computes with (A5)."""
    return dtype_name(dtype) in COMPUTED


def is_float8(dtype: Any) -> bool:
    """Whether the dtype is one of the 8-bit storage formats, which return float32 (A4)."""
    return dtype_name(dtype).startswith("float8")


def is_bool(dtype: Any) -> bool:
    """Whether the dtype is boolean."""
    return dtype_name(dtype) == "bool"


def is_integer(dtype: Any) -> bool:
    """Whether the dtype is a signed or unsigned integer of the standard."""
    return dtype_name(dtype) in INTEGERS


def compute_dtype(xp: Any, *dtypes: Any) -> Any:
    """promote(float32, ...): float64 if any of them is, else float32 (A5, N1)."""
    return xp.float64 if any(dtype_name(dtype) == "float64" for dtype in dtypes) else xp.float32
