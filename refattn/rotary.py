"""Rotary position embedding (B5, B6, B7; Su et al., 2021)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .arrays import (
    Array,
    as_int,
    as_real,
    broadcasts_to,
    describe,
    device_of,
    from_list,
    into_library,
    is_array,
    is_one_of,
    library_of,
    quiet,
)
from .dtypes import RANGES, compute_dtype, is_float, is_integer
from .errors import RotaryError

STYLES = ("half", "interleaved")


class Rotary(NamedTuple):
    """The options of `rope`, for `multi_head_attention(rope=...)` (B5, L4)."""

    style: str  #: "half" or "interleaved"
    base: float = 10000.0  #: a pair takes less than 2 pi times as many positions for a turn
    width: int | None = None  #: how many components are turned, all by default


def rope(x: Array, positions: Any, *, style: str, base: float = 10000.0, width: int | None = None) -> Array:
    """x with its component pairs turned by position * base^(-2i/width), in x's dtype  # B5

    x (..., L, d) floating, heads on axis -3 from rank 3 on; positions (L,) or (batch..., L), real; style "half" pairs
    (i, i + width/2), "interleaved" pairs (2i, 2i + 1); width, even and at most d, is d by default, and the components
    beyond it stay as they are. Angles are in radians. Raises RotaryError (B5).

    >>> import numpy as np, refattn
    >>> x = np.asarray([[1.0, 0.0, 1.0, 0.0]] * 2)  # two tokens of width 4
    >>> refattn.rope(x, [0, 1], style="interleaved").round(2)
    array([[1.  , 0.  , 1.  , 0.  ],
           [0.54, 0.84, 1.  , 0.01]])
    """
    library = library_of(x, "x")
    xp, device = library.xp, device_of(library, x)
    if x.ndim < 2 or not is_float(x.dtype):
        raise RotaryError("x", "a floating array (..., L, d)", describe(x))
    if not is_one_of(style, STYLES):
        raise RotaryError("style", f"one of {', '.join(STYLES)}", describe(style))
    dtype = compute_dtype(xp, x.dtype)
    least, number = RANGES["float64" if dtype is xp.float64 else "float32"][0], as_real(base)
    if number is None or not least <= number < math.inf:  # beyond, no speed is a number of that dtype
        raise RotaryError("base", f"a finite real number > 0, {least:.3g} at the least", describe(base))
    turned = x.shape[-1] if width is None else as_int(width)
    if turned is None or turned < 0 or turned % 2 or turned > x.shape[-1]:
        raise RotaryError("width", f"an even int from 0 to d = {x.shape[-1]}", describe(x if width is None else width))
    given, positions = positions, from_list(positions)
    if not is_array(positions) or not (is_integer(positions.dtype) or is_float(positions.dtype)):
        raise RotaryError("positions", "a real array (L,) or (batch..., L)", describe(given))
    positions = into_library(positions, library, device, "positions")
    batch, length = tuple(x.shape[:-3]), x.shape[-2]
    if positions.ndim < 1 or positions.shape[-1] != length or not broadcasts_to(tuple(positions.shape[:-1]), batch):
        raise RotaryError("positions", f"(L,) or (batch..., L), batch {batch}, L = {length}", describe(positions))

    if not turned:
        return x
    head = (1,) if positions.ndim > 1 else ()
    angle = xp.reshape(xp.astype(positions, dtype), (*positions.shape[:-1], *head, length, 1))  # B7
    speed = xp.asarray([number ** (-2.0 * i / turned) for i in range(turned // 2)], dtype=dtype, device=device)
    with quiet(library):
        cos, sin = xp.cos(angle * speed), xp.sin(angle * speed)  # (..., L, width / 2)
        wide = xp.astype(x, dtype, copy=False)
        if style == "half":
            first, second = wide[..., : turned // 2], wide[..., turned // 2 : turned]
        else:
            first, second = wide[..., 0:turned:2], wide[..., 1:turned:2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        if style == "half":
            result = xp.concat(pair, axis=-1)
        else:
            result = xp.reshape(xp.stack(pair, axis=-1), (*pair[0].shape[:-1], turned))
        if turned < x.shape[-1]:
            result = xp.concat((result, wide[..., turned:]), axis=-1)
        return xp.astype(result, x.dtype, copy=False)
