"""Running error analysis: float64 values, each with a bound on what an implementation in some dtype may differ by.

Layers and models are judged with it. Every operation adds its own rounding to the error that came in, in the worst
case, so that a bound holds for any order of summation; attention's own part is the bound of `refattn.bounds`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF
from refattn.goldens import Golden, golden_visible


class Tracked(NamedTuple):
    """An exact value and the largest error of its computed counterpart, arrays of one shape."""

    value: Array
    error: Array


class Arithmetic:
    """Operations of one storage dtype, accumulating in float32, or float64 for float64."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.storage = ROUNDOFF[dtype]
        self.accumulation = ROUNDOFF["float64" if dtype == "float64" else "float32"]

    def exact(self, x: Array) -> Tracked:
        """Numbers that the dtype holds exactly."""
        return Tracked(np.asarray(x, dtype=np.float64), np.zeros(np.shape(x)))

    def rounded(self, value: Array, error: Array) -> Tracked:
        """A result rounded once to storage; the last factor covers the float64 reference itself."""
        error = error + self.storage * (np.abs(value) + error)
        return Tracked(value, error * (1 + ROUNDOFF["float64"] / self.accumulation))

    def linear(self, x: Tracked, w: Array, b: Array | None = None) -> Tracked:
        """x @ w + b, accumulated and then rounded once, or also between product and sum."""
        value, size = x.value @ w, (np.abs(x.value) + x.error) @ np.abs(w)
        error = x.error @ np.abs(w) + (w.shape[0] + 1) * self.accumulation * size
        if b is not None:
            error = error + self.storage * np.abs(value)
            value = value + b
        return self.rounded(value, error)

    def add(self, x: Tracked, y: Tracked) -> Tracked:
        """x + y."""
        return self.rounded(x.value + y.value, x.error + y.error)

    def relu(self, x: Tracked) -> Tracked:
        """max(x, 0)."""
        return Tracked(np.maximum(x.value, 0.0), x.error)

    def rope(self, x: Tracked, where: Array, style: str, base: float = 10000.0) -> Tracked:
        """x turned by its positions, over the whole width."""
        value = turned(x.value, where, style, base, x.value.shape[-1])
        largest = pair_sums(np.abs(x.value) + x.error, style, x.value.shape[-1])
        incoming = pair_sums(x.error, style, x.value.shape[-1])
        return Tracked(value, incoming + turning_error(largest, where, self.dtype))

    def attention(self, q: Tracked, k: Tracked, v: Tracked, visible: Array, **options: Any) -> tuple[Tracked, Golden]:
        """Attention over the visible pairs, and its golden value with weights."""
        golden = golden_visible(
            q.value, k.value, v.value, visible, errors=(q.error, k.error, v.error), weights=True, **options
        )
        return Tracked(golden.output, golden.bound(self.dtype, coherent=True)), golden


def split(x: Tracked, heads: int) -> Tracked:
    """(..., S, D) as (..., H, S, D / H)."""
    return Tracked(*(np.stack(np.split(part, heads, axis=-1), axis=-3) for part in x))


def merge(x: Tracked) -> Tracked:
    """(..., H, S, d) as (..., S, H * d)."""
    return Tracked(*(np.concatenate(list(np.moveaxis(part, -3, 0)), axis=-1) for part in x))


def rotary_pairs(style: str, width: int) -> list[tuple[int, int]]:
    """The components that turn together."""
    return [(i, i + width // 2) if style == "half" else (2 * i, 2 * i + 1) for i in range(width // 2)]


def turned(x: Array, where: Array, style: str, base: float, width: int) -> Array:
    """Rotation pair by pair, as complex numbers: x (..., L, d), where (..., L) that broadcasts to x without d."""
    out = x.copy()
    for i, (first, second) in enumerate(rotary_pairs(style, width)):
        pair = (x[..., first] + 1j * x[..., second]) * np.exp(1j * where * float(base) ** (-2 * i / width))
        out[..., first], out[..., second] = pair.real, pair.imag
    return out


def pair_sums(x: Array, style: str, width: int) -> Array:
    """|x1| + |x2| of each component's pair, which bounds both whatever the angle; components beyond stay."""
    out = np.abs(x)
    for first, second in rotary_pairs(style, width):
        out[..., first] = out[..., second] = np.abs(x[..., first]) + np.abs(x[..., second])
    return out


def turning_error(sums: Array, where: Array, dtype: str) -> Array:
    """Rounding of speed, angle, cosine, sine, two products, their sum and the result; sums are those of pair_sums."""
    wide = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    angle = np.abs(np.asarray(where, dtype=np.float64))[..., None]
    return sums * (wide * (4 * angle + 8) + 1.01 * ROUNDOFF[dtype])
