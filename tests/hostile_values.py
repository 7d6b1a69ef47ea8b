"""Values that nobody should pass, by kind, and memory layouts that anybody may."""

from __future__ import annotations

import decimal
import enum
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

import refattn
from refattn import biases, masks

ARGUMENTS = (
    *("q", "k", "v", "grad_output", "causal", "mask", "bias", "scale", "softcap", "sinks"),
    *("q_start", "k_start", "path"),
)


class Own(np.ndarray):
    """A subclass that does nothing else."""


class Likeness:
    """What has the looks of an array, and no values."""

    shape, ndim = (2, 4, 3, 8), 4

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)


class Index:
    """An int by its own account."""

    def __index__(self) -> int:
        return 2


class Real:
    """A float by its own account, but no number."""

    def __float__(self) -> float:
        return 2.0


class Mute:
    """What can be neither printed, compared, hashed nor asked for its truth."""

    __hash__ = None  # type: ignore[assignment]  # so that hash() raises, as of a list

    def __repr__(self) -> str:
        raise RuntimeError("not printed")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not compared")


class Whole(int):
    """A subclass of int."""


class Text(str):
    """A subclass of str."""


class Number(enum.IntEnum):
    """An int with a name."""

    TWO = 2


def _foreign(shape: tuple[int, ...], dtype: str) -> Any:
    import array_api_strict

    return array_api_strict.zeros(shape, dtype=getattr(array_api_strict, dtype))


def _same(x: Any) -> Any:
    return x


SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**200, -(2**200), 10**400, 10**5000),
    *(0.0, -0.0, 1.5, 2.0, -0.5, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1j),
    *("q", "", "half", b"x", [1.0, 2.0], [0, 1], [], [[1, 2], [3]], (1, 2), {0: 1}, {1}),
    *(np.float32(0.5), np.float64(2), np.int8(2), np.uint8(200), np.uint64(2), np.True_, np.complex64(1j)),
    *(range(2), range(2**70), slice(None), ..., int, np.float32, np.dtype("float32"), len, memoryview(b"ab")),
    *(decimal.Decimal(2), Fraction(1, 2), Fraction(1, 10**400), Index(), Real(), Mute(), Whole(2), Text("half")),
    *(Number.TWO, Likeness("float32"), Likeness("bool"), Likeness("int64"), masks.causal(), biases.alibi(4)),
    refattn.KVCache,
)
ARRAYS: dict[str, Callable[[], Any]] = {
    "iterator": lambda: iter([0, 1]),
    "object": lambda: object(),
    "0-d": lambda: np.asarray(2.0, np.float32),
    "0-d int": lambda: np.asarray(2),
    "0-d object": lambda: np.asarray(None, dtype=object),
    "objects": lambda: np.asarray([1, "a", None], dtype=object),
    "text": lambda: np.asarray(["a", "b"]),
    "dates": lambda: np.zeros(2, "datetime64[s]"),
    "records": lambda: np.zeros(2, [("a", "f4")]),
    "rank 1": lambda: np.zeros(3, np.float32),
    "rank 2": lambda: np.zeros((3, 5), np.float32),
    "rank 5": lambda: np.zeros((1, 1, 1, 2, 2), np.float32),
    "empty": lambda: np.zeros(0, np.float32),
    "no ints": lambda: np.zeros(0, np.int64),
    "bytes": lambda: np.asarray([1, 200], np.uint8),
    "ints": lambda: np.asarray([-1, -5]),
    "large ints": lambda: np.asarray([2**63, 2**64 - 1], np.uint64),
    "masked": lambda: np.ma.masked_array(np.ones((2, 4, 3, 8), np.float32)),
    "masked ints": lambda: np.ma.masked_array(np.ones(2, int)),
    "masked booleans": lambda: np.ma.masked_array(np.ones((3, 5), bool)),
    "matrix": lambda: np.ones((3, 8), np.float32).view(np.matrix),
    "foreign": lambda: _foreign((2, 4, 3, 8), "float32"),
    "foreign ints": lambda: _foreign((2,), "int64"),
    "foreign booleans": lambda: _foreign((3, 5), "bool"),
    **{
        f"{dtype} of rank 4": partial(np.zeros, (2, 4, 3, 8), dtype)
        for dtype in ("complex64", "int32", "bool", "longdouble", "object")
    },
}
VALUES: dict[str, Callable[[], Any]] = {
    **{f"{number}: {type(x).__name__}": partial(_same, x) for number, x in enumerate(SCALARS)},
    **ARRAYS,
}


# Layouts whose rows lie apart: read in place, where products may round otherwise (N4).
APART = ("every other row", "heads behind rows")


def layouts(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same values in other places, or for "spread" those of the first row in every row."""
    flip = (..., slice(None, None, -1), slice(None, None, -1))
    locked = x.copy()
    locked.flags.writeable = False
    unaligned = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    turned = {} if x.dtype.kind == "V" else {"turned bytes": x.astype(x.dtype.newbyteorder())}  # ml_dtypes has none
    return {
        **turned,
        "as it is": x,
        "columns": np.asfortranarray(x),
        "flipped": np.ascontiguousarray(x[flip])[flip],
        "every other column": np.repeat(x, 2, axis=-1)[..., ::2],
        "every other row": np.repeat(x, 2, axis=-2)[..., ::2, :],
        "read-only": locked,
        "unaligned": unaligned,
        "a subclass": x.view(Own),
        "spread": np.broadcast_to(x[..., :1, :], x.shape),
        "heads behind rows": np.ascontiguousarray(np.swapaxes(x, 0, -2)).swapaxes(0, -2),
    }
