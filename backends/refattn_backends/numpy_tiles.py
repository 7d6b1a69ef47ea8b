"""Tiled attention on NumPy: threads over (batch entry, key/value head, tile of rows), BLAS on one thread each.

A job stacks the rows of a head group, so that its keys are read once, and walks over tiles of keys with scratch that
its thread keeps. Where the row norms prove that no logit leaves +-BOUND, the running maximum, its subtraction and the
rescaling are left out: the same weights within the bound. Jobs share nothing, so their number of threads changes no
bit. Calls with biases or non-finite keys and values take the generic tiles.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from refattn.arguments import Call
from refattn.arrays import Array, quiet
from refattn.partials import Partial, with_sinks
from refattn_backends.blas import one_thread
from refattn_backends.tiles import cut, spans
from refattn_backends.tiles import tiled as generic

BOUND = 40.0  # exp(+-40) summed over a million keys neither overflows nor underflows in float32
ROWS, KEYS = 256, 512  # a tile of float32 scores is 512 KiB, half of a usual L2 cache
_scratch = threading.local()


def tiled(call: Call) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq), in the compute dtype, sinks included."""
    finite = all(np.isfinite(x).all() for x in (call.k, call.v))
    if call.bias is not None or not finite or 0 in call.scores_shape or not call.q.shape[-1]:
        return generic(call)
    batch, heads, q_len = call.scores_shape[:-3], *call.scores_shape[-3:-1]
    q, k, v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (call.q, call.k, call.v))
    group = call.group
    whole = Partial(
        np.empty((*batch, heads, q_len, v.shape[-1]), call.compute), np.empty((*batch, heads, q_len), call.compute)
    )
    height = max(1, ROWS // group)
    width = KEYS if q_len * group > 32 else 8 * KEYS  # few rows: longer tiles, the same scratch
    with quiet(call.library):
        small = _small_logits(call, q, k)
        jobs = [
            (rows, index)
            for rows in reversed(list(spans(range(q_len), height)))  # causal: the long ones first
            for index in np.ndindex(*batch, heads // group)
        ]

        def run(job: tuple[range, tuple[int, ...]]) -> None:
            rows, (*entry, kv_head) = job
            at: tuple[Any, ...] = (*entry, slice(kv_head * group, (kv_head + 1) * group), slice(rows.start, rows.stop))
            kv: tuple[Any, ...] = (*entry, kv_head)
            with quiet(call.library):
                whole.output[at], whole.lse[at] = _job(call, at, q[at], k[kv], v[kv], width, bool(small[kv]))

        with one_thread():
            list(_pool().map(run, jobs))
        return whole if call.sinks is None else with_sinks(call.library, whole, call.sinks)


def _job(call: Call, at: tuple[Any, ...], q: Array, k: Array, v: Array, width: int, small: bool) -> tuple[Array, Array]:
    """Output (G, T, d_v) and log-sum-exp (G, T) of one head group's rows, without sinks."""
    group, height, d_k = q.shape
    rows = range(at[-1].start, at[-1].stop)
    count, dtype = group * height, q.dtype
    scaled = np.multiply(q, call.scale, out=_take("q", (group, height, d_k), dtype)).reshape(count, d_k)
    output = np.zeros((count, v.shape[-1]), dtype)
    total, seen = np.zeros((count, 1), dtype), np.zeros((group, height, 1), bool)
    peak = np.full((count, 1), 0.0 if small else -np.inf, dtype)
    product = _take("product", output.shape, dtype)
    ones = np.ones((width, 1), dtype)
    for keys in spans(range(k.shape[0]), width):
        answer = "all" if call.mask is None else call.mask.answer(rows, keys, *call.spans())
        if answer == "none":
            continue
        scores = np.matmul(scaled, k[keys.start : keys.stop].T, out=_take("scores", (count, len(keys)), dtype))
        if call.softcap is not None:
            scores /= call.softcap
            np.tanh(scores, out=scores)
            scores *= call.softcap
        if answer != "all":
            visible = _visible(call, rows, keys, at)
            np.copyto(scores.reshape(group, height, len(keys)), -np.inf, where=~visible)
            seen |= visible.any(axis=-1, keepdims=True)
        else:
            seen[...] = True
        if not small:
            highest = np.maximum(peak, scores.max(axis=-1, keepdims=True))
            level = np.where(np.isneginf(highest), 0.0, highest).astype(dtype, copy=False)
            shrink = np.exp(peak - level)
            total *= shrink
            output *= shrink
            peak = highest
            scores -= level
        np.exp(scores, out=scores)
        total += np.matmul(scores, ones[: len(keys)])  # a product is four times as fast as a sum
        output += np.matmul(scores, v[keys.start : keys.stop], out=product)
    nothing = total == 0
    total[nothing] = 1
    output /= total
    lse = np.where(nothing, -np.inf, np.log(total) + peak)  # P2
    if call.sinks is None:  # P7: nothing but -inf, which a sink would make harmless
        broken = nothing & seen.reshape(count, 1)
        output[broken[:, 0]], lse[broken] = np.nan, np.nan
    return output.reshape(group, height, v.shape[-1]), lse.reshape(group, height)


def _visible(call: Call, rows: range, keys: range, at: tuple[Any, ...]) -> Array:
    """The mask on one tile, for one batch entry and head group: broadcasts to (G, T, K)."""
    assert call.mask is not None
    seen = call.mask.evaluate(cut(call, rows, keys, masked=True).frame())
    lead = seen.shape[:-2]
    for axis, index in enumerate(at[len(at) - 1 - len(lead) : -1]):  # the last entries of at are heads and rows
        if isinstance(index, slice):
            return seen if lead[axis] == 1 else seen[index]
        seen = seen[0 if lead[axis] == 1 else index]
    return seen


def _small_logits(call: Call, q: Array, k: Array) -> Array:
    """Per batch entry and key/value head: whether |logit| <= BOUND for certain (Cauchy and Schwarz, or the cap)."""
    if call.softcap is not None and call.softcap <= BOUND:
        return np.isfinite(q).all(axis=(-2, -1)).reshape(*q.shape[:-3], -1, call.group).all(axis=-1)
    queries, keys = (np.sqrt(np.einsum("...i,...i->...", x, x)).max(axis=-1) for x in (q, k))
    queries = queries.reshape(*queries.shape[:-1], -1, call.group).max(axis=-1)
    return np.asarray(queries * keys * abs(float(call.scale)) <= BOUND)


def _take(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Scratch of this thread, reused from tile to tile and call to call."""
    size = int(np.prod(shape))
    key = f"{name} {dtype}"
    buffer = _scratch.__dict__.get(key)
    if buffer is None or buffer.size < size:
        buffer = _scratch.__dict__[key] = np.empty(size, dtype)
    taken: Array = buffer[:size].reshape(shape)
    return taken


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="refattn")
