"""Heads: grouping, splitting, merging and pooling (chapter G)."""

from __future__ import annotations

from typing import Any

from .arrays import LARGEST_SIZE, Array, as_size, describe, device_of, library_of
from .dtypes import compute_dtype, is_float
from .errors import HeadCountError, HeadSplitError


def check_heads(heads: int, kv_heads: int, argument: str = "heads") -> int:
    """Query heads per key/value head. Raises HeadCountError unless heads is a multiple of kv_heads (G1)."""
    if heads == kv_heads:
        return 1
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise HeadCountError(argument, f"a head count H that is a multiple of Hkv = {kv_heads}", f"H = {heads}")
    return heads // kv_heads


def head_count(heads: Any, argument: str, clause: str | None = None) -> int:
    """A number of heads as a Python int. Raises HeadSplitError for what is none, 0 included."""
    number = as_size(heads, 1)
    if number is None:
        raise HeadSplitError(argument, f"an int >= 1, at most {LARGEST_SIZE}", describe(heads), clause)
    return number


def kv_head_of(h: int, heads: int, kv_heads: int) -> int:
    """The key/value head that query head h reads: h // (heads / kv_heads)  # G1

    All three are ints, h counts from 0. Raises HeadCountError (G1) unless heads is a multiple of kv_heads, and
    HeadSplitError for what is no head.

    >>> import refattn
    >>> [refattn.kv_head_of(h, heads=8, kv_heads=2) for h in range(8)]
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    index = as_size(h)
    if index is None:
        raise HeadSplitError("h", "a head index >= 0", describe(h), "G1")
    heads, kv_heads = head_count(heads, "heads", "G1"), head_count(kv_heads, "kv_heads", "G1")
    group = check_heads(heads, kv_heads)
    if index >= heads:
        raise HeadSplitError("h", f"a head index below heads = {heads}", describe(h), "G1")
    return index // group


def split_heads(x: Array, heads: int) -> Array:
    """(..., S, D) as (..., H, S, D / H), head h holding the h-th block of D / H components  # G3, G5

    x may have any dtype, which is the result's. Raises HeadSplitError (G3) unless D is divisible by heads = H.

    >>> import numpy as np, refattn
    >>> refattn.split_heads(np.zeros((2, 5, 12)), 3).shape
    (2, 3, 5, 4)
    """
    library = library_of(x, "x")
    xp, number = library.xp, head_count(heads, "heads")
    if x.ndim < 2 or x.shape[-1] % number:
        raise HeadSplitError("x", f"a shape (..., S, D) with D divisible by heads = {number}", describe(x))
    shape = (*x.shape[:-1], number, x.shape[-1] // number)  # (..., S, H, D / H)
    if x.shape[-1]:
        parts = xp.reshape(x, shape)
    else:  # Dask cannot split an axis of size zero
        parts = xp.zeros(shape, dtype=x.dtype, device=device_of(library, x))
    return xp.moveaxis(parts, -2, -3)


def merge_heads(x: Array) -> Array:
    """(..., H, S, d) as (..., S, H * d), the inverse of split_heads  # G3

    Raises HeadSplitError (G3) for a rank below 3.

    >>> import numpy as np, refattn
    >>> refattn.merge_heads(np.zeros((2, 3, 5, 4))).shape
    (2, 5, 12)
    """
    xp = library_of(x, "x").xp
    if x.ndim < 3:
        raise HeadSplitError("x", "a shape (..., H, S, d)", describe(x))
    parts = xp.moveaxis(x, -3, -2)  # (..., S, H, d)
    return xp.reshape(parts, (*parts.shape[:-2], parts.shape[-2] * parts.shape[-1]))


def pool_kv_heads(w: Array, kv_heads: int) -> Array:
    """The mean over each group of heads: (..., H, m, n) as (..., kv_heads, m, n), heads on axis -3  # G4

    Of an MHA checkpoint's key or value projection, one (d_model, d_h) matrix per head, it makes the start of GQA
    up-training (Ainslie et al., 2023). Group g pools the heads that later read key/value head g (G1). The dtype is
    that of w, rounded to once. Raises HeadSplitError (G4) for what does not divide or is not floating.

    >>> import numpy as np, refattn
    >>> refattn.pool_kv_heads(np.asarray([1.0, 3.0, 10.0, 30.0]).reshape(4, 1, 1), 2).ravel()
    array([ 2., 20.])
    """
    xp = library_of(w, "w").xp
    number = head_count(kv_heads, "kv_heads", "G4")
    if w.ndim < 3 or w.shape[-3] % number:
        raise HeadSplitError("w", f"a shape (..., H, m, n) with H divisible by kv_heads = {number}", describe(w), "G4")
    if not is_float(w.dtype):
        raise HeadSplitError("w", "a floating array", describe(w), "G4")
    wide = xp.astype(w, compute_dtype(xp, w.dtype), copy=False)
    groups = xp.reshape(wide, (*w.shape[:-3], number, w.shape[-3] // number, *w.shape[-2:]))
    return xp.astype(xp.mean(groups, axis=-3), w.dtype, copy=False)


def stack_groups(xp: Any, x: Array, group: int) -> Array:
    """(..., H, L, n) as (..., Hkv, G * L, n): the rows of a group under each other, so that no key is copied (G2)."""
    if group == 1:
        return x
    *batch, heads, length, width = x.shape
    parts = xp.reshape(x, (*batch, heads // group, group, length, width))  # in two steps: Dask does no more in one
    return xp.reshape(parts, (*batch, heads // group, group * length, width))


def unstack_groups(xp: Any, x: Array, group: int) -> Array:
    """The inverse of stack_groups."""
    if group == 1:
        return x
    *batch, kv_heads, rows, width = x.shape
    parts = xp.reshape(x, (*batch, kv_heads, group, rows // group, width))
    return xp.reshape(parts, (*batch, kv_heads * group, rows // group, width))
