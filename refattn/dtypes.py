"""Questions about dtypes, answered by name: the one way that holds for every library and for ml_dtypes' types.

`isdtype` of the array libraries raises on ml_dtypes' bfloat16, so nothing else in refattn asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOW, FULL = ("bfloat16", "float16"), ("float32", "float64")
COMPUTED = (*LOW, *FULL)  # A4: the dtypes of q, k and v

# What users of other libraries call them on a command line.
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
}

# The smallest normal and the largest number of each dtype that scores are computed in.
RANGES = {"float32": (2.0**-126, 2.0**128 - 2.0**104), "float64": (2.0**-1022, 1.7976931348623157e308)}

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

_NAMES: dict[tuple[type, Any], str] = {}  # by class too: some libraries' dtypes warn when compared with others'


def dtypes_in(text: str, known: Sequence[str] = COMPUTED) -> tuple[str, ...]:
    """The dtypes that a text names, with commas or spaces, by their names or aliases. Raises ValueError."""
    words = tuple(ALIASES.get(word.lower(), word) for word in text.replace(",", " ").split())
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"no dtype {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(dict.fromkeys(words))


def dtype_in(text: str, known: Sequence[str] = COMPUTED) -> str:
    """The one dtype that a text names. Raises ValueError."""
    found = dtypes_in(text, known)
    if len(found) != 1:
        raise ValueError(f"expected one dtype, got {text!r}")
    return found[0]


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
