"""Partial results over some of the keys, and how they merge into the whole (chapter T).

Softmax over a union of key sets follows from each set's output and log-sum-exp alone (Milakov and Gimelshein, 2018;
Dao et al., 2022), so any split of the keys, in any order, merges to the same result.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

from .arrays import Array, Library, describe, device_of, is_array, library_of, quiet, same_device, same_library
from .dtypes import dtype_name, is_float
from .errors import PartialError


class Partial(NamedTuple):
    """Attention over some keys, in the compute dtype, unrounded and without sinks; (0, -inf) over none  # T2, T3"""

    output: Array  #: (..., H, Lq, d_v)
    lse: Array  #: (..., H, Lq), natural


def merge(partials: Iterable[Partial], sinks: Array | None = None) -> Partial:
    """The partial over all the keys of the given ones, which share none; sinks (H,) are applied once, here (T3).

    Commutative, and associative within the bound (T2). Raises PartialError (T3) for none, or for ones that do not fit.

    >>> import numpy as np
    >>> from refattn import Partial, merge
    >>> first = Partial(np.asarray([[1.0]]), np.log([8.0]))
    >>> second = Partial(np.asarray([[0.0]]), np.log([2.0]))
    >>> output, lse = merge([first, second])
    >>> output.round(3), np.exp(lse).round(3)
    (array([[0.8]]), array([10.]))
    """
    if is_array(partials) or not isinstance(partials, Iterable):
        raise PartialError("partials", "a sequence of Partials", describe(partials))
    parts = [_checked(partial) for partial in partials]
    if not parts:
        raise PartialError("partials", "at least one Partial", "none")
    library = library_of(parts[0].output, "partials")
    device = device_of(library, parts[0].output)
    for part in parts:
        for x in part:
            same_library(library, x, "partials")
            same_device(library, device, x, "partials")
        for x, first in zip(part, parts[0], strict=True):
            if tuple(x.shape) != tuple(first.shape) or dtype_name(x.dtype) != dtype_name(parts[0].output.dtype):
                raise PartialError("partials", "partials of one shape and dtype", describe(x))
        if not is_float(part.output.dtype):
            raise PartialError("partials", "partials of a floating dtype", describe(part.output))
    if sinks is not None:
        same_library(library, sinks, "sinks")
        same_device(library, device, sinks, "sinks")
        heads = (parts[0].output.shape[-3],) if parts[0].output.ndim > 2 else ()
        if not is_float(sinks.dtype) or tuple(sinks.shape) not in (heads, heads or (1,)):
            raise PartialError("sinks", f"a floating array of shape {heads}", describe(sinks))
    with quiet(library):
        whole = reduce(lambda first, second: merge_two(library, first, second), parts)
        return whole if sinks is None else with_sinks(library, whole, sinks)


def merge_two(library: Library, first: Partial, second: Partial) -> Partial:
    """Two partials as one: outputs weighted by their shares of the sum of exponentials  # T1, T2"""
    xp = library.xp
    peak = xp.maximum(first.lse, second.lse)
    level = xp.where(peak == -float("inf"), 0.0, peak)  # -inf - (-inf) would be NaN
    shares = [xp.exp(part.lse - level) for part in (first, second)]
    total = shares[0] + shares[1]
    divisor = xp.where(total == 0.0, 1.0, total)
    output = _mixed(xp, first.output, second.output, shares[0] / divisor, shares[1] / divisor)
    lse = xp.where(total == 0.0, -float("inf"), xp.log(divisor) + level)
    return Partial(output, lse)


def with_sinks(library: Library, whole: Partial, sinks: Array) -> Partial:
    """A complete result with one sink logit per head in its denominator  # T3, P3"""
    xp = library.xp
    sinks = xp.astype(sinks, whole.lse.dtype, copy=False)
    sinks = xp.reshape(sinks, (-1, 1)) if whole.lse.ndim > 1 else xp.reshape(sinks, ())
    sinks = xp.where(sinks == float("inf"), float("nan"), sinks)
    lse = xp.zeros_like(whole.lse) + sinks
    output = xp.where(xp.isnan(lse)[..., None], float("nan"), xp.zeros_like(whole.output))
    return merge_two(library, whole, Partial(output, lse))


def _mixed(xp: Any, first: Array, second: Array, share: Array, other: Array) -> Array:
    """share * first + other * second, where an infinite element stays what it is whatever its share (M20)."""
    finite = [xp.where(xp.isfinite(x), x, 0.0) for x in (first, second)]
    mixed = finite[0] * share[..., None] + finite[1] * other[..., None]
    up = (first == float("inf")) | (second == float("inf"))
    down = (first == -float("inf")) | (second == -float("inf"))
    mixed = xp.where(up, float("inf"), xp.where(down, -float("inf"), mixed))
    return xp.where((up & down) | xp.isnan(first) | xp.isnan(second), float("nan"), mixed)


def _checked(partial: Any) -> Partial:
    fits = isinstance(partial, tuple) and len(partial) == 2 and all(map(is_array, partial))
    if not fits or len(partial[0].shape) < 2 or tuple(partial[0].shape[:-1]) != tuple(partial[1].shape):
        expected = "Partial(output (..., H, Lq, d_v), lse (..., H, Lq))"
        raise PartialError("partials", expected, " and ".join(map(describe, partial)) if fits else describe(partial))
    return Partial(*partial)
