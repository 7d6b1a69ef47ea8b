"""Attention that rounds each step as a model says, and no step more: honest implementations, simulated on float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from refattn.arrays import Array
from refattn.conformance.plain import causal_pairs
from refattn.rounding import NORMAL, Model

BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53, "tfloat32": 11, "float8_e4m3": 4, "float8_e5m2": 3}
TYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
Round = Callable[[Array], Array]


def to_nearest(x: Array, dtype: str) -> Array:
    if dtype == "tfloat32":
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 2.0**11), exponent - 11)
    return np.asarray(x, dtype=np.float64).astype(TYPES[dtype]).astype(np.float64)


def cut_off(x: Array, dtype: str) -> Array:
    """The first significant bits of x alone; the range is float64's."""
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.int64)
    return (bits & ~((1 << (53 - BITS[dtype])) - 1)).view(np.float64).reshape(np.shape(x))


def rounding_to(dtype: str | None, *, cut: bool = False, flush: bool = False) -> Round:
    """The function that rounds to a dtype; None leaves everything as it is."""

    def apply(x: Array) -> Array:
        if dtype is None:
            return x
        x = cut_off(x, dtype) if cut else to_nearest(x, dtype)
        return np.where(np.abs(x) < NORMAL[dtype], 0.0, x) if flush else x

    return apply


def visible_pairs(q: Array, k: Array, options: dict[str, Any]) -> Array:
    """(Lq, Lk) or more, boolean, of calls with plain options."""
    seen = np.ones((q.shape[-2], k.shape[-2]), dtype=bool)
    if options.get("causal"):
        seen = seen & causal_pairs(seen.shape[0], seen.shape[1], options.get("q_start", 0), options.get("k_start", 0))
    for name in ("mask", "bias"):
        if name in options:
            x = np.asarray(options[name])
            seen = seen & (x if name == "mask" else ~np.isneginf(x.astype(np.float64)))
    return seen


def attend(
    q: Array, k: Array, v: Array, *, dtype: str, model: Model, spoil: Round = lambda weights: weights, **options: Any
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp and weights, float64, of a call of attention; spoil is what is done to weights besides."""
    wide = "float64" if dtype == "float64" else "float32"
    store, plain = rounding_to(dtype, flush=model.flush), rounding_to(wide)
    low = store if model.stored else plain
    add = rounding_to(model.sums or wide, cut=model.truncating)
    operand = rounding_to(model.products, cut=model.truncating, flush=model.flush)
    cast = rounding_to(model.weights, flush=model.flush)
    seen = visible_pairs(q, k, options)
    q, k, v = (store(np.asarray(x, dtype=np.float64)) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    k, v = (np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v))

    scale = options.get("scale")
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if model.prescaled:
        root = np.sqrt(abs(factor))
        q, k, factor = store(plain(q * root)), store(plain(k * root)), float(np.sign(factor))
    left, right = operand(q), operand(k)
    scores = np.zeros((*q.shape[:-1], k.shape[-2]))
    for i in range(q.shape[-1]):
        scores = add(scores + left[..., i : i + 1] * right[..., None, :, i])
    x = low(plain(low(scores) * factor))
    if (cap := options.get("softcap")) is not None:
        x = low(plain(cap * plain(np.tanh(plain(x / cap)))))
    if "bias" in options:
        bias = np.asarray(options["bias"]).astype(np.float64)
        x = low(plain(x + np.where(np.isneginf(bias), 0.0, bias)))
    x = np.where(seen, x, -np.inf)
    sinks = options.get("sinks")
    sink = np.full((), -np.inf) if sinks is None else np.asarray(sinks, dtype=np.float64)[..., None]
    sink = low(np.broadcast_to(sink, x.shape[:-1]))

    top, total, sums = sink, np.where(np.isneginf(sink), 0.0, 1.0), np.zeros((*x.shape[:-1], v.shape[-1]))
    step = max(1, x.shape[-1]) if model.stored else model.tile
    grown = np.zeros(x.shape)
    for start in range(0, x.shape[-1], step):
        tile = slice(start, start + step)
        new = np.maximum(top, np.max(x[..., tile], axis=-1))
        level = np.where(np.isneginf(new), 0.0, new)
        shift = np.where(np.isneginf(top), 0.0, plain(np.exp(plain(top - level))))
        total, sums, top = add(total * shift), add(sums * shift[..., None]), new
        grown[..., :start] *= shift[..., None]
        grown[..., tile] = plain(np.exp(plain(x[..., tile] - level[..., None])))
        for j in range(start, min(start + step, x.shape[-1])):
            total = add(total + grown[..., j])
            if not model.stored:
                weight = spoil(cast(operand(store(grown[..., j]) if dtype != wide else grown[..., j])))
                sums = add(sums + weight[..., None] * operand(v)[..., None, j, :])
    divisor = np.where(total == 0, 1.0, total)
    weights = low(plain(grown / divisor[..., None]))
    if model.stored:
        for j in range(x.shape[-1]):
            sums = add(sums + spoil(cast(operand(weights[..., j])))[..., None] * operand(v)[..., None, j, :])
        divisor = np.ones_like(divisor)
    with np.errstate(divide="ignore"):
        lse = plain(np.where(total == 0, -np.inf, plain(np.log(total)) + top))
    return store(plain(sums / divisor[..., None])), lse, weights
