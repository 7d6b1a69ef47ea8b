"""What public reports found, as tiny NumPy functions of refattn's convention; each is right but for that.

`planted_faults` holds the general faults; here are those that need a shape of their own. The clauses that each breaks
stand with its report.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planted_faults import correct as attend
from refattn.arrays import Array
from refattn.conformance.faults import Fault, named
from refattn.conformance.faults.backward import Backward


def _logits(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array, Array]:
    """Logits before masking (..., H, Lq, Lk), visible pairs, values per query head; in float32, or float64."""
    wide = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[-3] // k.shape[-3]
    q, k, v = (x.astype(wide) for x in (q, np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)))
    scale = options.get("scale")
    x = np.matmul(q, np.swapaxes(k, -1, -2)) * wide(q.shape[-1] ** -0.5 if scale is None else scale)
    seen = np.ones(x.shape, dtype=bool)
    if options.get("mask") is not None:
        seen = seen & options["mask"]
    if options.get("causal"):
        start = np.asarray(options.get("q_start") or 0)
        start = start[:, None, None, None] if start.ndim else start
        seen = seen & (np.arange(x.shape[-1]) <= np.arange(x.shape[-2])[:, None] + start)
    return x, seen, v


def _online(x: Array, v: Array, size: int, level: float, guarded: bool = False) -> Array:
    """Softmax over tiles of keys from right to left; the maximum starts at `level`."""
    top = np.full((*x.shape[:-1], 1), level, dtype=x.dtype)
    total, output = np.zeros_like(top), np.zeros((*x.shape[:-1], v.shape[-1]), dtype=x.dtype)
    for start in reversed(range(0, x.shape[-1], size)):
        tile = x[..., start : start + size]
        peak = np.max(tile, axis=-1, keepdims=True)
        if guarded:
            peak = np.where(np.isneginf(peak), 0, peak)
        new = np.maximum(top, peak)
        safe = np.where(np.isneginf(new), 0, new)
        weights, rescale = np.exp(tile - safe), np.exp(top - safe)
        total = total * rescale + np.sum(weights, axis=-1, keepdims=True)
        output = output * rescale + np.matmul(weights, v[..., start : start + size, :])
        top = new
    return output / np.where(total == 0, 1, total)


def infinite_log_of_nothing(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The log-sum-exp of an empty row is +inf."""
    output, lse = attend(q, k, v, **options)
    return output, np.where(np.isneginf(lse), np.inf, lse)


def dropout_scaled_by_p(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Every fourth key is dropped, and the others are scaled by the chance to be dropped."""
    kept = np.arange(k.shape[-2]) % 4 != 3
    return attend(q, k, (v * (kept * 0.25)[:, None]).astype(v.dtype), **options)


def zero_left_by_a_hidden_tile(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Tiles from right to left; one that is hidden leaves 0 as the running maximum."""
    x, seen, v = _logits(q, k, v, **options)
    return _online(np.where(seen, x, -np.inf), v, 2, -np.inf, guarded=True).astype(q.dtype)


def maximum_from_a_sentinel(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The running maximum of raw scores starts at -50000."""
    x, seen, v = _logits(q, k, v, **options)
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    return _online(np.where(seen, x, -np.inf), v, 64, -5e4 * scale).astype(q.dtype)


def maximum_of_hidden_keys_too(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The maximum is taken before the mask."""
    x, seen, v = _logits(q, k, v, **options)
    weights = np.where(seen, np.exp(x - np.max(x, axis=-1, keepdims=True)), 0)
    total = np.sum(weights, axis=-1, keepdims=True)
    return (np.matmul(weights, v) / np.where(total == 0, 1, total)).astype(q.dtype)


def masks_that_add_up(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Mask and causal each add -10000."""
    x, past, wide_v = _logits(q, k, v, **{**options, "mask": None})
    x = x - 1e4 * ~past - 1e4 * ~np.broadcast_to(options.get("mask", True), x.shape)
    weights = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return (np.matmul(weights, wide_v) / np.sum(weights, axis=-1, keepdims=True)).astype(q.dtype)


def not_causal_over_a_cache(q: Array, k: Array, v: Array, *, causal: bool = False, **options: Any) -> Any:
    """Causality is skipped as soon as a position is given."""
    return attend(q, k, v, causal=causal and options.get("q_start") is None, **options)


def always_causal_never_scaled(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """A wrapper with constants."""
    return attend(q, k, v, **{**options, "causal": True, "scale": 1.0})


def causal_by_ones(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Causality is a triangle of ones, added: right in the output, 1 too much in the log-sum-exp."""
    if options.get("causal") and options.get("bias") is None and q.shape[-2] == k.shape[-2]:
        triangle = np.tril(np.ones((q.shape[-2], k.shape[-2])))
        options = {**options, "causal": False, "bias": np.where(triangle > 0, triangle, -np.inf).astype(q.dtype)}
    return attend(q, k, v, **options)


def only_the_output(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The same, without a log-sum-exp."""
    return causal_by_ones(q, k, v, **options)[0]


def whole_splits_alone(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Long rows are cut into splits of 512 keys, and what is left over is forgotten."""
    length = k.shape[-2]
    kept = length if length <= 512 else length // 512 * 512
    mask = np.arange(length) < kept
    shown = options.pop("mask", True)
    return attend(q, k, v, mask=shown & mask[None, :], **options)


def cap_after_mask(q: Array, k: Array, v: Array, *, softcap: float | None = None, **options: Any) -> Any:
    """tanh makes -softcap of what was hidden as -inf."""
    if softcap is None:
        return attend(q, k, v, **options)[0]
    x, seen, v = _logits(q, k, v, **options)
    x = softcap * np.tanh(np.where(seen, x, -np.inf) / softcap)
    weights = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return (np.matmul(weights, v) / np.sum(weights, axis=-1, keepdims=True)).astype(q.dtype)


def clamped_sinks(q: Array, k: Array, v: Array, *, sinks: Array | None = None, **options: Any) -> Any:
    """Sinks shrink the output afterwards, by no more than e^10."""
    output, lse = attend(q, k, v, **options)
    if sinks is None:
        return output
    above = np.clip(sinks.astype(np.float64)[:, None] - lse, -10, 10)
    return (output / (1 + np.exp(above))[..., None]).astype(q.dtype)


def root_of_the_scale(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Queries and keys are each multiplied by the square root of the scale."""
    scale = options.get("scale")
    if scale is not None:
        root = np.sqrt(np.float64(scale)) if scale >= 0 else np.nan
        options["scale"] = root * root
    return attend(q, k, v, **options)


def weights_in_eight_bits(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Weights below 2^-10 become 0 after they have been summed."""
    x, seen, v = _logits(q, k, v, **options)
    weights = np.exp(np.where(seen, x, -np.inf) - np.max(x, axis=-1, keepdims=True))
    weights = weights / np.sum(weights, axis=-1, keepdims=True)
    return np.matmul(np.where(weights < 2.0**-10, 0, weights), v).astype(q.dtype)


def products_of_eleven_bits(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Queries and keys lose bits before they are multiplied."""
    q, k = (x.astype(np.float16).astype(x.dtype) for x in (q, k))
    return attend(q, k, v, **options)


def strides_ignored(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Views are read as if their elements lay one after the other."""

    def packed(x: Array) -> Array:
        memory = x if x.base is None or x.base.dtype != x.dtype else x.base
        return np.resize(np.ravel(memory, order="K"), x.shape) if not x.flags.c_contiguous else x

    return attend(*(packed(x) for x in (q, k, v)), **options)


def first_batch_entry_alone(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """All batch entries but the first stay 0."""
    output = attend(q, k, v, **options)[0].copy()
    output[1:] = 0
    return output


def divides_by_sizes(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Tiles are counted by a division."""
    assert (q.shape[-3] // k.shape[-3]) * (k.shape[-2] // k.shape[-2]) * (q.shape[-2] // q.shape[-2]) >= 0
    return attend(q, k, v, **options)


def rows_never_written(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """What memory held before is left in rows that see nothing."""
    output, lse = attend(q, k, v, **options)
    return np.where(np.isneginf(lse)[..., None], np.nan, output).astype(q.dtype), lse


def constant(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """0.75 everywhere."""
    return np.full((*q.shape[:-1], v.shape[-1]), 0.75, dtype=q.dtype)


def zeros(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """0 everywhere."""
    return np.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)


def shuffled_values(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The values of the next key."""
    return attend(q, k, np.roll(v, 1, axis=-2), **options)


def without_causal(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Everything is visible."""
    return attend(q, k, v, **{**options, "causal": False})


# ---- gradients ---------------------------------------------------------------------------------------------


def _backward(name: str, clause: str, **steps: Any) -> Fault:
    return Fault(name=name, clause=clause, kind="gradient", base=Backward, backward=True, steps=steps)


def _nan_alone(self: Any, weights: Array, products: Array) -> Array:
    found = np.sum(weights * products, axis=-1, keepdims=True)
    return np.full_like(found, np.nan) if weights.shape[-2:] == (1, 1) else found


def _exchanged(self: Any, parts: Array) -> Array:
    *batch, kv_heads, group, length, width = parts.shape
    turned = parts.reshape(*batch, group, kv_heads, length, width)
    return np.sum(np.swapaxes(turned, -3, -4), axis=-3) if group != kv_heads else np.sum(parts, axis=-3)


def _garbage_beyond(self: Any, weights: Array) -> Array:
    found = Backward.of_values(self, weights)
    if found.shape[-1] < self.k.shape[-1]:
        found[..., -1] = found[..., 0]
    return found


def _scaled_by_the_largest(self: Any, scores: Array) -> Array:
    found, peaks = Backward.of_queries(self, scores), np.max(np.abs(self.k), axis=(-3, -2, -1), keepdims=True)
    return found * (np.max(peaks) / peaks)


def _full_tiles_alone(self: Any, pairs: Array, x: Array) -> Array:
    rows = pairs.shape[-2] // 16 * 16 or pairs.shape[-2]
    return Backward.over_queries(self, pairs[..., :rows, :], x[..., :rows, :])


# What each report about gradients found.
GRADIENTS = {
    "B11": named("gradients of NaN in empty rows"),
    "B12": _backward("one pair has gradients of NaN", "D1", row_sum=_nan_alone),
    "B13": named("gradients of NaN in empty rows"),
    "B15": _backward("group size for head count", "D2", combined=_exchanged),
    "B17": _backward("garbage in the gradient of narrow values", "D1", of_values=_garbage_beyond),
    "B18": _backward("one level for all batch entries", "D1", of_queries=_scaled_by_the_largest),
    "B21": _backward("gradients of full tiles alone", "D1", over_queries=_full_tiles_alone),
}
