"""Seeded inputs: the same numbers on every machine and with every version of every library."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

# Significant bits, the exponent of the smallest positive number, and the largest number.
FORMATS = {
    "bfloat16": (8, -133, 3.3895313892515355e38),
    "float16": (11, -24, 65504.0),
    "float32": (24, -149, 3.4028234663852886e38),
    "float64": (53, -1074, 1.7976931348623157e308),
}
# What a kind of vector serves: the dtypes that hold its inputs exactly; they are stored in the first.
KINDS = {
    "base": ("bfloat16", "float16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}
# A number is the sum of four uniform integers of so many bits, over a power of two: bell-shaped, with deviation 1.15.
BITS = {"base": 6, "float32": 22, "float64": 51}


def fits(x: float, dtype: str) -> bool:
    """Whether a dtype holds x exactly; NaN and infinities fit all."""
    if x == 0 or not math.isfinite(x):
        return True
    significant, least, largest = FORMATS[dtype]
    mantissa, exponent = math.frexp(x)  # |mantissa| in [1/2, 1)
    place = max(exponent - significant, least)
    return abs(x) <= largest and math.ldexp(mantissa, exponent - place).is_integer()


class Draw:
    """Numbers from SHA-256 of a name and a counter."""

    def __init__(self, name: str, kind: str, again: int = 1) -> None:
        self.kind, self.again = kind, again
        self._words = _words(f"{name}/{kind}-{again}")

    @property
    def dtype(self) -> str:
        """The dtype that the inputs are stored in."""
        return KINDS[self.kind][0]

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return next(self._words) % n

    def number(self, spread: float = 1.0) -> float:
        """A number, never 0, times spread, a power of two; of full significance unless the kind is base."""
        bits = BITS[self.kind]
        half = 1 << (bits - 1)
        whole = sum(next(self._words) % (2 * half) - half for _ in range(4))
        if self.kind != "base" or whole == 0:
            whole |= 1
        return math.ldexp(whole, 1 - bits) * spread

    def array(self, *shape: int, spread: float = 1.0) -> np.ndarray:
        """Such numbers in an array."""
        return np.asarray([self.number(spread) for _ in range(math.prod(shape))], dtype=np.float64).reshape(shape)

    def shown(self, *shape: int, of: int = 8) -> np.ndarray:
        """Booleans, about 5 of 8 True."""
        return np.asarray([self.below(of) < 5 for _ in range(math.prod(shape))], dtype=bool).reshape(shape)

    def qkv(
        self,
        q_len: int = 4,
        k_len: int | None = None,
        *,
        batch: tuple[int, ...] | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        spread: float = 1.0,
    ) -> dict[str, Any]:
        """q, k and v. Sizes left out: two entries of two heads of width 8; drawn again, one of three of width 4.

        Ranks, groups and widths that some kernels lack stand where a clause is about them, and nowhere else.
        """
        first = self.again == 1
        batch = ((2,) if first else (1,)) if batch is None else batch
        heads = (2 if first else 3) if heads is None else heads
        kv_heads = heads if kv_heads is None else kv_heads
        d_k = (8 if first else 4) if d_k is None else d_k
        d_v = d_k if d_v is None else d_v
        k_len = q_len if k_len is None else k_len
        return {
            "q": self.array(*batch, heads, q_len, d_k, spread=spread),
            "k": self.array(*batch, kv_heads, k_len, d_k, spread=spread),
            "v": self.array(*batch, kv_heads, k_len, d_v),
        }

    def ramp(self, q_len: int = 4, k_len: int | None = None, *, up: bool = True, **sizes: Any) -> dict[str, Any]:
        """The same, but each key outweighs the one before it about e^2 times (or the one after it).

        One key too many or too few at that end then changes the output by as much as the values differ.
        """
        data = self.qkv(q_len, k_len, spread=0.5, **sizes)
        step = round(4 * math.sqrt(data["q"].shape[-1])) / 4  # in quarters, so that every dtype holds its multiples
        places = np.arange(data["k"].shape[-2], dtype=np.float64)
        data["q"][..., 0] = 2.0
        data["k"][..., 0] = step * (places if up else places[::-1])
        return data


def _words(name: str) -> Iterator[int]:
    """64-bit words without end."""
    counter = 0
    while True:
        yield from struct.unpack(">4Q", hashlib.sha256(f"{name}/{counter}".encode()).digest())
        counter += 1
