"""Data for cases, and visibility written out plainly: nothing here asks refattn.masks or refattn.biases."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF
from refattn.dtypes import FULL

LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38, "float64": 1.7e308}


def rounded(x: Array, dtype: str) -> Array:
    """x rounded to a dtype, to nearest and ties to even, as float64; needs no library that knows bfloat16."""
    x = np.asarray(x, dtype=np.float64)
    if dtype == "bfloat16":
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 2**8), exponent - 8)
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float64)


def precision(dtype: str) -> float:
    """The unit roundoff of a dtype."""
    return ROUNDOFF[dtype]


class Draw:
    """Seeded numbers that a dtype holds exactly, as host float64."""

    def __init__(self, dtype: str, rng: np.random.Generator) -> None:
        self.dtype, self.rng = dtype, rng

    def normal(self, *shape: int, spread: float = 1.0) -> Array:
        """Independent normal numbers of that standard deviation."""
        return self.exact(spread * self.rng.standard_normal(shape))

    def exact(self, x: Array) -> Array:
        """x rounded to the dtype."""
        return rounded(x, self.dtype)

    def given(self, q: Array, k: Array, v: Array) -> dict[str, Any]:
        """Given q, k and v rounded to the dtype, as keyword arguments of Problem."""
        return {"q": self.exact(q), "k": self.exact(k), "v": self.exact(v), "dtype": self.dtype}

    def qkv(
        self,
        q_len: int = 6,
        k_len: int | None = None,
        *,
        batch: tuple[int, ...] = (2,),
        heads: int = 2,
        kv_heads: int | None = None,
        d_k: int = 8,
        d_v: int | None = None,
        spread: float = 1.0,
    ) -> dict[str, Array]:
        """Normal q, k and v, as keyword arguments of Problem."""
        k_len, kv_heads, d_v = _or(k_len, q_len), _or(kv_heads, heads), _or(d_v, d_k)
        return {
            "q": self.normal(*batch, heads, q_len, d_k, spread=spread),
            "k": self.normal(*batch, kv_heads, k_len, d_k, spread=spread),
            "v": self.normal(*batch, kv_heads, k_len, d_v),
            "dtype": self.dtype,
        }

    def ramp(self, q_len: int = 6, k_len: int | None = None, *, step: float = 2.0, **sizes: Any) -> dict[str, Array]:
        """The same, but each key outweighs the one before it by e^step (after it, if negative).

        One key too many or too few at that end then changes the output by about as much as the values differ, which
        no rounding of any dtype does.
        """
        data = self.qkv(q_len, k_len, spread=0.5, **sizes)
        d_k, k_len = data["q"].shape[-1], data["k"].shape[-2]
        data["q"][..., 0] = 2.0
        data["k"][..., 0] = self.exact(step * np.sqrt(d_k) / 2 * np.arange(k_len))
        return data


def published(seed: int, *shapes: tuple[int, ...]) -> list[Array]:
    """Standard normal arrays drawn in order from NumPy's default generator, as public reports give their data."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def known_output(draw: Draw, rows: Any, shape: tuple[int, ...] | None = None) -> dict[str, tuple[Array, float]]:
    """Published digits, six after the point; they hold for inputs as published, not as rounded to 16 bits."""
    if draw.dtype not in FULL:
        return {}
    output = np.asarray(rows)
    return {"output": (output if shape is None else output.reshape(shape), 2e-6)}


def indices(q_len: int, k_len: int) -> tuple[Array, Array]:
    """Row indices (Lq, 1) and key indices (1, Lk)."""
    return np.arange(q_len)[:, None], np.arange(k_len)[None, :]


def positions(q_len: int, k_len: int, q_start: Any = 0, k_start: Any = 0) -> tuple[Array, Array]:
    """Query and key positions: (Lq, 1) and (1, Lk), or (batch, 1, Lq, 1) and (batch, 1, 1, Lk) for starts (batch,)."""
    rows, keys = indices(q_len, k_len)
    return rows + _per_entry(q_start), keys + _per_entry(k_start)


def causal_pairs(q_len: int, k_len: int, q_start: Any = 0, k_start: Any = 0) -> Array:
    """Key position <= query position."""
    query, key = positions(q_len, k_len, q_start, k_start)
    return key <= query


def _or(size: int | None, other: int) -> int:
    return other if size is None else size


def _per_entry(start: Any) -> Array:
    start = np.asarray(start)
    return start[..., None, None, None] if start.ndim else start


def numbers_of(values: Array) -> Array:
    """The number of each element, in C order, in float64, so that it can take the values' place anywhere."""
    return np.arange(np.size(values), dtype=np.float64).reshape(np.shape(values))
