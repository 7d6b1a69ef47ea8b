"""Tensors as files hold them: in NumPy's dtypes, or as the bit patterns of those that NumPy lacks."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.plain import rounded
from refattn.dtypes import COMPUTED, INTEGERS, dtype_name, is_float8

# Kept as unsigned integers.
PATTERNS = {"bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}
FLOATS = (*COMPUTED, "float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, *INTEGERS, "bool")


class Tensor(NamedTuple):
    """An array as it is stored, and the name of the dtype that its numbers or bit patterns have."""

    stored: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.stored.shape)

    def values(self) -> Array:
        """Floats of any dtype as float64, and everything else as it is."""
        stored = self.stored
        if self.dtype == "float8_e4m3fn":
            return _E4M3[stored]
        if self.dtype == "float8_e5m2":
            stored = (stored.astype(np.uint16) << 8).view(np.float16)
        elif self.dtype == "bfloat16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        elif self.dtype not in COMPUTED:
            return stored
        with np.errstate(invalid="ignore"):  # a signalling NaN is one like any other
            return stored.astype(np.float64)

    def data(self) -> bytes:
        """The elements in C order, little-endian."""
        data: bytes = self.stored.astype(self.stored.dtype.newbyteorder("<"), order="C").tobytes()
        return data

    def digest(self) -> str:
        """SHA-256 of the elements in C order, little-endian."""
        return hashlib.sha256(self.data()).hexdigest()

    def read_as(self, dtype: str) -> Tensor:
        """The same with raw bytes or unsigned integers taken for bit patterns of that dtype.

        Floats that lost the dtype on the way, being stored in a wider one, get it back if it holds all of them.
        """
        stored = self.stored
        if dtype in PATTERNS and stored.dtype.itemsize == np.dtype(PATTERNS[dtype]).itemsize:
            return Tensor(stored.view(PATTERNS[dtype]), dtype) if stored.dtype.kind in "Vu" else self
        if self.dtype not in COMPUTED or dtype not in COMPUTED or self.dtype == dtype:
            return self
        wide = self.values()
        same = np.array_equal(rounded(wide, dtype), wide, equal_nan=True)
        return tensor_of(wide, dtype) if same else self


def tensor_of(x: Array, dtype: str | None = None) -> Tensor:
    """Numbers that a dtype holds exactly, stored in it; by default in their own."""
    x = np.asarray(x)
    if dtype is None or dtype not in FLOATS:
        return Tensor(x, dtype_name(x.dtype))
    if dtype == "bfloat16":
        return Tensor((np.asarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16), dtype)
    if is_float8(dtype):
        raise TypeError(f"nothing is written in {dtype}")
    return Tensor(x.astype(dtype), dtype)


def _e4m3() -> Array:
    """The number of each bit pattern: sign, four bits of exponent, three of fraction; no infinity, two NaN."""
    pattern = np.arange(256)
    exponent, fraction = pattern >> 3 & 15, pattern & 7
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8.0 + fraction, exponent - 10))
    return np.where(pattern & 127 == 127, np.nan, np.where(pattern < 128, size, -size))


_E4M3 = _e4m3()
