"""Biases: what is added to the capped scores (chapter B). They add with +, with each other and with arrays (B4)."""

from __future__ import annotations

from typing import Any

from .arrays import LARGEST_SIZE, Array, Shape, as_size, broadcasts_to, describe, library_of
from .dtypes import is_float
from .errors import BiasError
from .frames import Frame, pair_readings


class Bias:
    """A summand of the logits that is computed from heads and positions, or a sum of such; adds with + (B4)."""

    positional = False
    """Whether it reads query positions, so that Lq != Lk needs q_start (M5)."""
    __array_ufunc__ = None  # lets `array + bias` reach __radd__

    def terms(self) -> tuple[Bias, ...]:
        """The summands, in order."""
        return (self,)

    def arrays(self) -> dict[str, Array]:
        """The arrays it holds, whose dtypes take part in the compute dtype (A5), by the argument they came in."""
        return {}

    def check(self, scores_shape: Shape) -> None:
        """Raises an error of clause B if the bias does not fit scores of shape (..., H, Lq, Lk)."""
        raise NotImplementedError

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        """The summand, broadcastable to (..., H, Lq, Lk), in the given dtype."""
        raise NotImplementedError

    def part(self, entry: tuple[int, ...], heads: slice) -> Bias:
        """The summand of one batch entry and some heads, broadcastable to (h, Lq, Lk), with that entry's starts."""
        return Part(self, entry, heads)

    def __add__(self, other: Any) -> Bias:
        return Sum(self.terms() + as_bias(other).terms())

    def __radd__(self, other: Any) -> Bias:
        return Sum(as_bias(other).terms() + self.terms())


class Alibi(Bias):
    """slope_h * -|query position - key position|  # B1"""

    positional = True

    def __init__(self, heads: int, slopes: list[float] | None = None) -> None:
        self.heads, self._slopes = heads, slopes

    @property
    def slopes(self) -> list[float]:
        """One for each of the heads, computed once these are known to be as many as q has."""
        return alibi_slopes(self.heads) if self._slopes is None else self._slopes

    def __repr__(self) -> str:
        return f"alibi({self.heads})"

    def check(self, scores_shape: Shape) -> None:
        _check_head_count(self.heads, "alibi(heads)", scores_shape, "B1")

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        xp = frame.xp
        slopes = xp.asarray(self.slopes, dtype=dtype, device=frame.device)
        distance = xp.abs(frame.keys_from_rows - frame.rows)
        return xp.reshape(slopes, (-1, 1, 1)) * -xp.astype(distance, dtype)

    def part(self, entry: tuple[int, ...], heads: slice) -> Bias:
        return Alibi(self.heads, self.slopes[heads])


class Relative(Bias):
    """table[h, clip(key position - query position, -R, R) + R]  # B3"""

    positional = True

    def __init__(self, table: Array) -> None:
        self.table = table

    def __repr__(self) -> str:
        return f"relative({describe(self.table)})"

    def arrays(self) -> dict[str, Array]:
        return {"relative(table)": self.table}

    def check(self, scores_shape: Shape) -> None:
        _check_head_count(self.table.shape[0], "relative(table)", scores_shape, "B3")

    def columns(self, frame: Frame) -> Array:
        """The column of the table that each pair reads, (batch..., 1?, R, K)."""
        reach = self.table.shape[1] // 2
        return frame.xp.clip(frame.keys_from_rows - frame.rows, -reach, reach) + reach

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        xp = frame.xp
        table = xp.astype(frame.array(self.table, "relative(table)"), dtype, copy=False)
        index = self.columns(frame)
        if 0 in index.shape:  # Dask cannot reshape axes of size zero
            shape = (*index.shape[:-3], table.shape[0], *index.shape[-2:])
            return xp.zeros(shape, dtype=dtype, device=frame.device)
        picked = xp.take(table, xp.reshape(index, (-1,)), axis=1)  # (H, all pairs)
        batch = tuple(index.shape[:-3])
        picked = xp.reshape(picked, (table.shape[0], *batch, *index.shape[-2:]))
        return xp.moveaxis(picked, 0, len(batch)) if batch else picked

    def part(self, entry: tuple[int, ...], heads: slice) -> Bias:
        return Relative(self.table[heads, :])


class Plain(Bias):
    """An array, broadcast right-aligned to (..., H, Lq, Lk)  # B4"""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __repr__(self) -> str:
        return describe(self.array)

    def arrays(self) -> dict[str, Array]:
        return {"bias": self.array}

    def check(self, scores_shape: Shape) -> None:
        if not broadcasts_to(tuple(self.array.shape), scores_shape):
            expected = f"a shape that broadcasts to (..., H, Lq, Lk) = {scores_shape}"
            raise BiasError("bias", expected + pair_readings(self.array.ndim), describe(self.array))

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        return frame.xp.astype(frame.per_pair(self.array, "bias"), dtype, copy=False)

    def part(self, entry: tuple[int, ...], heads: slice) -> Bias:
        return Plain(_narrowed(self.array, entry, heads))


class Sum(Bias):
    """The terms, added in order; each that is -inf hides its pair (M17)  # B4"""

    def __init__(self, terms: tuple[Bias, ...]) -> None:
        self._terms = terms
        self.positional = any(term.positional for term in terms)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._terms))

    def terms(self) -> tuple[Bias, ...]:
        return self._terms

    def check(self, scores_shape: Shape) -> None:
        for term in self._terms:
            term.check(scores_shape)

    def part(self, entry: tuple[int, ...], heads: slice) -> Bias:
        return Sum(tuple(term.part(entry, heads) for term in self._terms))


class Part(Bias):
    """One batch entry and some of the heads of a bias that can only be evaluated for all."""

    def __init__(self, bias: Bias, entry: tuple[int, ...], heads: slice) -> None:
        self.bias, self.entry, self.heads = bias, entry, heads

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        return _narrowed(self.bias.evaluate(frame, dtype), self.entry, self.heads)


def alibi(heads: int) -> Bias:
    """Attention with linear biases for H = heads query heads (B1, B2; Press, Smith and Lewis, 2021).

    Raises BiasError (B1) for heads that are no int >= 1, and in the call unless q has as many.

    >>> import numpy as np
    >>> from refattn import attention_stages, biases
    >>> zeros = np.zeros((2, 3, 1))  # (H, L, d_k)
    >>> attention_stages(zeros, zeros, zeros, bias=biases.alibi(2)).biased[0]
    array([[ 0.    , -0.0625, -0.125 ],
           [-0.0625,  0.    , -0.0625],
           [-0.125 , -0.0625,  0.    ]])
    """
    return Alibi(_head_count(heads, "alibi(heads)"))


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head; BiasError (B1) for heads that are no int >= 1  # B2

    >>> from refattn import biases
    >>> biases.alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    heads = _head_count(heads, "heads")
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


def relative(table: Array) -> Bias:
    """A learned bias by clipped distance: table (H, 2R + 1), a floating array of q's library (B3).

    Column R is for the query's own position, those before it for earlier keys. Raises BiasError (B3) for another form.

    >>> import numpy as np
    >>> from refattn import attention_stages, biases
    >>> zeros = np.zeros((1, 3, 1))
    >>> bias = biases.relative(np.asarray([[-1.0, 0.0, 1.0]]))
    >>> attention_stages(zeros, zeros, zeros, bias=bias).biased[0].astype(int)
    array([[ 0,  1,  1],
           [-1,  0,  1],
           [-1, -1,  0]])
    """
    library_of(table, "relative(table)")
    if not is_float(table.dtype) or table.ndim != 2 or table.shape[1] % 2 != 1:
        raise BiasError("relative(table)", "a floating array (H, 2R + 1)", describe(table), "B3")
    return Relative(table)


def as_bias(bias: Any) -> Bias:
    """A Bias as it is, a floating array as a plain one. Raises BiasError for anything else (B4)."""
    if isinstance(bias, Bias):
        return bias
    if not hasattr(bias, "dtype") or not is_float(bias.dtype):
        advice = "; a boolean array is passed as mask=" if getattr(bias, "dtype", None) is not None else ""
        raise BiasError("bias", f"a Bias or a floating array{advice}", describe(bias))
    library_of(bias, "bias")
    return Plain(bias)


def _narrowed(x: Array, entry: tuple[int, ...], heads: slice) -> Array:
    """One entry and some heads of an array that broadcasts to (batch..., H, Lq, Lk)."""
    for at in entry[len(entry) + 3 - x.ndim :] if x.ndim > 3 else ():
        x = x[at if x.shape[0] > 1 else 0, ...]
    return x if x.ndim < 3 or x.shape[0] == 1 else x[heads, ...]


def _head_count(heads: Any, argument: str) -> int:
    number = as_size(heads, 1)
    if number is None:
        raise BiasError(argument, f"an int >= 1, at most {LARGEST_SIZE}", describe(heads), "B1")
    return number


def _check_head_count(heads: int, argument: str, scores_shape: Shape, clause: str) -> None:
    wanted = scores_shape[-3] if len(scores_shape) > 2 else 1
    if heads != wanted:
        raise BiasError(argument, f"as many heads as q has, H = {wanted}", f"{heads} heads", clause)
