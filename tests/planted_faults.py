"""Attention in plain NumPy, right and wrong on purpose: functions of refattn's convention for the suite to judge.

`correct` keeps scores and weights in the wide dtype, `correct_unfused` stores them in the dtype of q. Each other
function breaks one rule; FAULTS says which clause's cases must catch it, and in which dtypes it can show.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np

from refattn.arrays import Array

ALL = ("bfloat16", "float16", "float32", "float64")
LOW = ("bfloat16", "float16")
FULL = ("float32", "float64")


def attend(q: Array, k: Array, v: Array, *, fault: str = "", stored: bool = False, **options: Any) -> Any:
    """The pipeline, with one step wrong if a fault is named."""
    causal, mask, bias = options.get("causal", False), options.get("mask"), options.get("bias")
    scale, softcap, sinks = options.get("scale"), options.get("softcap"), options.get("sinks")
    q_start, k_start = options.get("q_start"), options.get("k_start", 0)
    result = q.dtype
    wide = np.float64 if result == np.float64 and fault != "float32 inside" else np.float32

    def narrow(x: Array) -> Array:
        return x.astype(result).astype(wide) if stored else x

    flat = q.ndim == 2
    q, k, v = ((x[None] if flat else x).astype(wide) for x in (q, k, v))
    heads, q_len, d_k = q.shape[-3:]
    kv_heads, k_len = k.shape[-3:-1]
    group = heads // kv_heads if kv_heads else 1
    chosen = np.arange(heads) % max(kv_heads, 1) if fault == "interleaved heads" else np.arange(heads) // group
    k, v = k[..., chosen, :, :], v[..., chosen, :, :]

    seen = np.ones((q_len, k_len), dtype=bool)
    if causal and not (fault == "mask drops causal" and mask is not None):
        start = np.asarray(0 if q_start is None else q_start)
        if fault == "always top-left":
            start = np.asarray(0)
        elif fault == "always bottom-right":
            start = np.asarray(k_len - q_len)
        elif fault == "first start for all" and start.ndim:
            start = start[:1]
        keys = np.arange(k_len) + _column(np.asarray(0 if fault == "k_start ignored" else k_start))
        rows = np.arange(q_len)[:, None] + _column(start)
        reach = {"causal hides itself": -1, "causal shows the next": 1}.get(fault, 0)
        seen = keys <= rows + reach
    if mask is not None:
        if fault == "mask polarity":
            mask = ~mask
        if fault == "rank 3 as batch" and mask.ndim == 3:
            mask = mask[:, None]
        seen = seen & mask
    if bias is not None and fault != "added mask":
        bias = bias.astype(wide)
        seen = seen & ~np.isneginf(bias)
    elif bias is not None:
        bias = bias.astype(wide)

    finite_k, finite_v = np.where(np.isfinite(k), k, 0), np.where(np.isfinite(v), v, 0)
    if fault == "poison leaks from v":
        finite_v = v
    if fault == "poison leaks from k":
        finite_k = k
    with np.errstate(all="ignore"):
        scores = np.matmul(q, np.swapaxes(finite_k, -1, -2))
        if fault == "overflow before scale":
            scores = scores.astype(result).astype(wide)
        broken = np.any(~np.isfinite(k), axis=-1)[..., None, :]
        scores = narrow(np.where(broken, np.nan, scores) if fault != "poison leaks from k" else scores)
        width = d_k * heads if fault == "d_model scale" else d_k
        factor = (1 / math.sqrt(width) if width else 1.0) if scale is None else scale
        factor = {"no scale": 1.0, "squared scale": factor**2, "absolute scale": abs(factor)}.get(fault, factor)
        if fault == "scale ignored" and scale is not None:
            factor = 1 / math.sqrt(d_k)
        if softcap is not None and fault == "cap before scale":
            scores = softcap * np.tanh(scores / softcap)
        x = narrow(scores * wide(factor))
        if bias is not None and fault == "bias before cap":
            x = x + np.where(seen, bias, 0)
        if softcap is not None and fault not in ("cap before scale", "cap ignored"):
            x = narrow(softcap * np.tanh(x / softcap))
        if bias is not None and fault != "bias before cap":
            x = narrow(x + np.where(seen, bias * (wide(factor) if fault == "bias is scaled" else 1), 0))
        weights, lse = _softmax(x, np.broadcast_to(seen, x.shape), sinks, fault, wide, result, factor, finite_v)
        output = np.matmul(narrow(weights), finite_v)
        if not fault.startswith("poison leaks"):
            output = output + _special(np.broadcast_to(seen, x.shape), v)
        if fault == "empty row is the mean":
            empty = ~np.any(np.broadcast_to(seen, x.shape), axis=-1)[..., None]
            output = np.where(empty & (k_len > 0), np.mean(finite_v, axis=-2, keepdims=True), output)
        if fault == "sink in the numerator" and sinks is not None:
            output = output + (1 - np.sum(weights, axis=-1, keepdims=True)) * np.mean(finite_v, axis=-2, keepdims=True)
        if fault == "width of q":
            output = np.resize(output, (*output.shape[:-1], d_k))
        output = output.astype(np.float32 if fault == "float32 out" else result)
    if fault == "lse in base 2":
        lse = lse / wide(math.log(2))
    if fault == "lse of an empty row is 0":
        lse = np.where(np.isneginf(lse), 0, lse)
    return (output[0], lse[0]) if flat else (output, lse)


def _softmax(
    x: Array, seen: Array, sinks: Array | None, fault: str, wide: Any, result: Any, factor: float, v: Array
) -> tuple[Array, Array]:
    axis = -2 if fault == "softmax over queries" else -1
    if fault == "added mask":
        x = x + seen.astype(wide)
    elif fault == "sentinel":
        x = np.where(seen, x, -1e4)
    elif fault == "poison leaks from k":
        x = x + np.where(seen, 0, -np.inf)
    elif fault != "mask after softmax":
        x = np.where(seen, x, -np.inf)
    sink = None
    if sinks is not None:
        sink = sinks.astype(wide).reshape(-1, 1, 1) * (wide(factor) if fault == "sinks are scaled" else 1)
    if x.shape[-1] == 0:
        lse = np.full(x.shape[:-1], -np.inf, dtype=wide)
        return x, lse if sink is None else np.maximum(lse, sink[..., 0])
    top = np.max(x, axis=axis, keepdims=True)
    top = top if sink is None else np.maximum(top, sink)
    top = np.where(np.isneginf(top), 0, top)
    if fault == "no maximum":
        top = np.zeros_like(top)
    if fault == "maximum starts at 0":
        top = np.maximum(top, 0)
    grown = np.exp(x - top)
    if fault == "low sum":
        total = np.zeros_like(top)
        for j in range(x.shape[-1]):
            total = (total + grown[..., j : j + 1]).astype(result).astype(wide)
    else:
        total = np.sum(grown, axis=axis, keepdims=True)
    if sink is not None and fault != "sinks ignored":
        total = total + np.exp(sink - top)
    empty = total == 0
    nan = np.any(seen, axis=-1, keepdims=True) & empty if fault != "empty row is NaN" else empty
    if fault not in ("maximum starts at 0", "no maximum", "softmax over queries"):
        total = np.where(nan, np.nan, total)
    weights = grown / np.where(empty & ~nan, 1, total)
    if fault == "mask after softmax":
        weights = np.where(seen, weights, 0)
    lse = (np.log(total) + top)[..., 0] if axis == -1 else np.zeros(x.shape[:-1])
    return weights, lse


def _special(seen: Any, v: Any) -> Array:
    """NaN, +inf or -inf where a visible value is that; NaN where the two infinities meet."""
    if np.all(np.isfinite(v)):
        return np.zeros(1, dtype=v.dtype)
    pairs = seen[..., None]
    up = np.any(pairs & np.isposinf(v)[..., None, :, :], axis=-2)
    down = np.any(pairs & np.isneginf(v)[..., None, :, :], axis=-2)
    nan = np.any(pairs & np.isnan(v)[..., None, :, :], axis=-2)
    return np.where(nan | (up & down), np.nan, np.where(up, np.inf, np.where(down, -np.inf, 0))).astype(v.dtype)


def _column(start: Array) -> Array:
    return start[..., None, None, None] if start.ndim else start


def correct(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Everything in at least float32, one rounding at the end."""
    return attend(q, k, v, **options)


def correct_unfused(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Scores and weights stored in the dtype of q, as an eager implementation has them."""
    return attend(q, k, v, stored=True, **options)


def correct_in_its_features(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> Array:
    """A function of few parameters, which returns the output alone."""
    return attend(q, k, v, causal=causal, scale=scale)[0]


def takes_nothing_but_tensors(q: Array, k: Array, v: Array) -> Array:
    """A function without options that refuses everything, politely."""
    raise NotImplementedError("not written yet")


# Name of the fault -> clause whose cases must catch it, and the dtypes that can show it.
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "d_model scale": ("S1", ALL),
    "no scale": ("S1", ALL),
    "squared scale": ("S1", ALL),
    "absolute scale": ("S2", ALL),
    "scale ignored": ("S2", ALL),
    "cap ignored": ("S3", ALL),
    "cap before scale": ("S5", ALL),
    "bias before cap": ("S5", ALL),
    "bias is scaled": ("S5", ALL),
    "softmax over queries": ("P1", ALL),
    "no maximum": ("P1", FULL),
    "maximum starts at 0": ("P6", ALL),
    "mask after softmax": ("M2", ALL),
    "added mask": ("M2", ALL),
    "mask polarity": ("M1", ALL),
    "mask drops causal": ("M13", ALL),
    "rank 3 as batch": ("M15", ALL),
    "causal hides itself": ("M4", ALL),
    "causal shows the next": ("M4", ALL),
    "always top-left": ("M5", ALL),
    "always bottom-right": ("M5", ALL),
    "first start for all": ("M3", ALL),
    "k_start ignored": ("M3", ALL),
    "poison leaks from k": ("M19", ALL),
    "poison leaks from v": ("M19", ALL),
    "empty row is NaN": ("P2", ALL),
    "empty row is the mean": ("P2", ALL),
    "sentinel": ("P2", ALL),
    "sinks are scaled": ("P3", ALL),
    "sinks ignored": ("P3", ALL),
    "sink in the numerator": ("P3", ALL),
    "lse in base 2": ("P4", FULL),
    "lse of an empty row is 0": ("P4", FULL),
    "interleaved heads": ("G1", ALL),
    "overflow before scale": ("N1", ("float16",)),
    "low sum": ("N1", LOW),
    "float32 inside": ("N1", ("float64",)),
    "width of q": ("A1", ALL),
    "float32 out": ("A4", ("bfloat16", "float16", "float64")),
}


def faulty(name: str) -> Any:
    """The function with that fault."""

    def attention(q: Array, k: Array, v: Array, **options: Any) -> Any:
        return attend(q, k, v, fault=name, **options)

    return attention


def __getattr__(name: str) -> Any:
    """`planted_faults:low_sum` is the function with the fault "low sum"."""
    for fault in FAULTS:
        if fault.replace(" ", "_").replace("-", "_") == name:
            return faulty(fault)
    raise AttributeError(name)


def writes_to_its_input(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Right, but scales q in place."""
    result = attend(q, k, v, **options)
    q *= 2
    return result


_CALLS = itertools.count()


def never_the_same(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Right within the bound, but every second call is off by a rounding."""
    output, lse = attend(q, k, v, **options)
    return (np.nextafter(output, np.inf) if next(_CALLS) % 2 else output), lse


_SEEN: list[Array] = []


def memoised(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Answers with the first result it ever computed, as long as the shape fits."""
    output = attend(q, k, v, **options)[0]
    for old in _SEEN:
        if old.shape == output.shape and old.dtype == output.dtype:
            return old
    _SEEN.append(output)
    return output


def returns_a_list(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The right numbers in the wrong type."""
    return attend(q, k, v, **options)[0].tolist()


def chatty(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Right, but prints."""
    print("tile", q.shape)
    return attend(q, k, v, **options)


def raises(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Fails on every call."""
    raise RuntimeError("no kernel image is available")


def exits(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Ends the process on every call, with the exit code of success."""
    sys.exit(0)


def interrupted_at_six_queries(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Right, until a user loses patience."""
    if q.shape[-2] == 6:
        raise KeyboardInterrupt
    return correct(q, k, v, **options)


def asserts(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Fails on every call by an assertion of its own."""
    assert q.shape[-1] == 128, "width must be 128"
    return q


def nothing_but_nan(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """A result full of NaN, which a careless comparison takes for a wildcard."""
    return np.full_like(attend(q, k, v, **options)[0], np.nan)
