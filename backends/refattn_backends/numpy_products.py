"""Stacks of matrix products in pieces of a size that BLAS multiplies without copying its operands first.

OpenBLAS, which NumPy's wheels carry, has kernels for small products that read their operands in place; at the shapes of
attention (an inner axis of 64 or 128) they are a fifth faster than the ones that pack, and far faster for a few rows.
One `np.matmul` over a stack of pieces runs them all without returning to Python. Other libraries lose nothing much.
"""

from __future__ import annotations

import numpy as np

from refattn.arrays import Array

SMALL = 1_000_000  # multiplications: beyond, OpenBLAS packs
LEAST, WIDE = 16, 64  # rows at a time at least, columns that are not divided
NARROW = 32_768  # elements of a transposed operand: likewise


def by_rows(a: Array, b: Array, out: Array) -> Array:
    """a (S, M, K) @ b (S, K, N) into out, a few rows at a time, and half of b's columns where it is large."""
    inner, width = b.shape[-2:]
    if LEAST * inner * width > SMALL and width > WIDE:
        half = width // 32 * 16
        for columns in (slice(half), slice(half, None)):
            by_rows(a, b[..., columns], out[..., columns])
        return out
    step = max(LEAST, SMALL // max(inner * width, 1) // 16 * 16)
    whole = a.shape[-2] // step * step
    if whole:
        np.matmul(_pieces(a[:, :whole], step), b[:, None], out=_pieces(out[:, :whole], step))
    if whole < a.shape[-2]:
        np.matmul(a[:, whole:], b, out=out[:, whole:])
    return out


def by_columns(a: Array, b: Array, out: Array) -> Array:
    """a (S, M, K) @ b (S, K, N) into out, a few columns at a time: for few rows."""
    step = _step(*a.shape[-2:])
    whole = b.shape[-1] // step * step
    if whole:
        pieces = _pieces(b.mT[:, :whole], step).mT
        np.matmul(a[:, None], pieces, out=_pieces(out.mT[:, :whole], step).mT)
    if whole < b.shape[-1]:
        np.matmul(a, b[..., whole:], out=out[..., whole:])
    return out


def by_inner(a: Array, b: Array, out: Array) -> Array:
    """a (S, M, K) @ b (S, K, N) into out, a stretch of K at a time: for few rows."""
    step = _step(a.shape[-2], b.shape[-1])
    whole = b.shape[-2] // step * step
    if whole:
        np.sum(np.matmul(_pieces(a.mT[:, :whole], step).mT, _pieces(b[:, :whole], step)), axis=1, out=out)
    if whole < b.shape[-2]:
        last = np.matmul(a[..., whole:], b[:, whole:])
        np.add(out, last, out=out) if whole else np.copyto(out, last)
    return out


def _step(rows: int, width: int) -> int:
    return max(16, min(NARROW // max(width, 1), SMALL // max(rows * width, 1)) // 16 * 16)


def _pieces(x: Array, step: int) -> Array:
    """x (S, M, N) as (S, M / step, step, N), a view."""
    return x.reshape(x.shape[0], x.shape[1] // step, step, x.shape[2])
