"""Conventions planted into the plain pipeline on purpose, beyond the catalogue's: what each probe must find."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import INF, Plain, shortened
from refattn.conformance.targets.function import FunctionTarget

Steps = dict[str, Callable[..., Any]]
Attention = Callable[..., Any]


def _factor(change: Callable[[float], float]) -> Steps:
    """Another reading of a scale that is given."""
    return {"factor": lambda run: run.default_scale() if run.scale is None else change(run.scale)}


def _refuses_negative(scale: float) -> float:
    if scale < 0:
        raise ValueError("scale must not be negative")
    return scale


def _zero_gives_nan(run: Any, x: Array) -> Array:
    return x * run.factor() if run.factor() else x * math.nan


def _nan_with_causal(run: Any, x: Array, seen: Array) -> Array:
    return np.where(seen, x, -INF if run.factor() > 0 or not run.causal else math.nan)


def _total(change: Callable[[Array, Array], Array]) -> Steps:
    """Another denominator with a sink: from the sum of exponentials and the sink, both relative to the maximum."""
    return {"sink_share": lambda run, sink, peak: change(sink, peak)}


def _log_sum(change: Callable[[Array, Array], Array]) -> Steps:
    return {"log_sum": lambda run, total, peak: change(np.log(total), peak)}


def _empty_log_sum(value: float) -> Steps:
    return {"lse": lambda run, lse: np.where(lse == -INF, value, lse)}


def _or(run: Any) -> Array:
    seen = Plain.causal_pairs(run) if run.causal else np.ones((1, run.k_len), dtype=bool)
    return (seen | run.mask) if run.causal and run.mask is not None else seen if run.mask is None else run.mask


def _as_if_unmasked(run: Any, x: Array, seen: Array) -> Array:
    return np.where(seen | ~np.any(seen, axis=-1, keepdims=True), x, -INF)


def _only(kept: Callable[[Array], Array]) -> Callable[..., Array]:
    """Values go into the product as they are where `kept` says so, hidden ones too."""
    return lambda run, weights, v: np.matmul(weights, np.where(kept(run.v), run.v, v))


def _last_bits(run: Any, weights: Array, v: Array) -> Array:
    """Rounding depends on the largest value, hidden or not."""
    return np.matmul(weights, v) * (1 + 2.0**-22 * (not np.all(np.isfinite(run.v))))


def _huge_hidden(run: Any, output: Array, seen: Array) -> Array:
    largest = np.max(np.abs(run.finite(run.v)))
    return Plain.output(run, output + (largest if largest > 1e6 else 0.0), seen)


def _weight_of_infinity(lost: bool) -> Callable[..., Array]:
    def restored(run: Any, output: Array, seen: Array) -> Array:
        if np.all(np.isfinite(run.v)):
            return output
        if not lost:
            return np.where(np.any(~np.isfinite(run.v), axis=-2, keepdims=True), math.nan, output)
        some = np.arange(run.q_len)[:, None] == 0
        return np.where(some, Plain.restored(run, output, seen), output)

    return restored


def _nan_keys_hidden(run: Any) -> Array:
    return Plain.visible(run) & np.all(np.isfinite(run.k), axis=-1)[..., None, :]


def _short(bits: int) -> Steps:
    return {"products": lambda run, q, k: Plain.products(run, shortened(q, bits), shortened(k, bits))}


def _in_float16(run: Any, weights: Array, v: Array) -> Array:
    total = np.zeros((*weights.shape[:-1], v.shape[-1]), dtype=np.float32)
    for j in range(v.shape[-2]):
        total = (total + weights[..., j : j + 1] * v[..., j : j + 1, :]).astype(np.float32)
        total = shortened(total, 13)
    return total


def _flushed(run: Any, output: Array, seen: Array) -> Array:
    output = Plain.output(run, output, seen)
    return np.where(np.abs(output) < np.finfo(np.float32).tiny, np.float32(0), output)


def _drops_after_peak(run: Any, x: Array, seen: Array, sink: Array | None) -> Any:
    """Keys far below a maximum that came before them are not counted."""
    if run.k_len > 200 and bool(np.any(x[..., :1] > x[..., -1:])):
        x = np.where(np.arange(run.k_len) < 128, x, -INF)
    return Plain.softmax(run, x, seen, sink)


def _returns(change: Callable[[Array], Array]) -> Callable[[Attention], Attention]:
    """The output changed as a whole."""

    def wrap(attention: Attention) -> Attention:
        def changed(q: Array, k: Array, v: Array, **options: Any) -> Any:
            output, lse = attention(q, k, v, **options)
            return change(output), lse

        return changed

    return wrap


def _refuses(condition: Callable[[Array, Array, Array], bool]) -> Callable[[Attention], Attention]:
    def wrap(attention: Attention) -> Attention:
        def refusing(q: Array, k: Array, v: Array, **options: Any) -> Any:
            if condition(q, k, v):
                raise ValueError("this is not supported")
            return attention(q, k, v, **options)

        return refusing

    return wrap


def _contiguous(*arrays: Array) -> bool:
    return all(x.flags.c_contiguous for x in arrays)


def _depends_on_batch(attention: Attention) -> Attention:
    def mixed(q: Array, k: Array, v: Array, **options: Any) -> Any:
        output, lse = attention(q, k, v, **options)
        return (np.broadcast_to(output[:1], output.shape).copy() if q.ndim == 4 and len(q) == 3 else output), lse

    return mixed


def _depends_on_rows(attention: Attention) -> Attention:
    def mixed(q: Array, k: Array, v: Array, **options: Any) -> Any:
        output, lse = attention(q, k, v, **options)
        return (output * 1.5 if q.shape[-2] == 33 else output), lse

    return mixed


# (probe, what it must find) -> steps of the pipeline, or what wraps it.
CONVENTIONS: dict[tuple[str, str], Steps | Callable[[Attention], Attention]] = {
    ("default scale", "sqrt(d_k)"): {"default_scale": lambda run: math.sqrt(run.d_k)},
    ("default scale", "constant"): {"default_scale": lambda run: 0.125},
    ("default scale", "other"): {"default_scale": lambda run: run.d_k**-0.25},
    ("scale option", "times default"): {"factor": lambda run: (1 if run.scale is None else run.scale) * run.d_k**-0.5},
    ("scale option", "NaN at zero"): {"scaled": _zero_gives_nan},
    ("scale option", "NaN with causal"): {"hidden": _nan_with_causal},
    ("scale option", "some refused"): _factor(_refuses_negative),
    ("scale option", "other"): _factor(lambda scale: scale + 1),
    ("soft cap and mask", "mask ignored"): {
        "hidden": lambda run, x, seen: x if run.softcap is not None else Plain.hidden(run, x, seen)
    },
    ("bias", "of the scores instead"): {"biased": lambda run, x, seen: 0 * x + run.summand()},
    ("bias of -inf", "ignored"): {
        "biased_pairs": lambda run: np.ones_like(run.bias, dtype=bool),
        "summand": lambda run: np.where(run.bias == -INF, 0.0, run.bias),
    },
    ("large negative bias", "equal weights"): {
        "biased": lambda run, x, seen: np.where(np.min(run.bias) < -1e3, run.bias, x + run.bias)
    },
    ("mask", "ignored"): {"masked_pairs": lambda run: np.ones_like(run.mask)},
    ("mask of each entry", "first head's for all"): {"masked_pairs": lambda run: run.mask[..., :1, :, :]},
    ("mask with causal", "or"): {"visible": _or},
    ("causal alignment", "other"): {
        "query_positions": lambda run: np.arange(run.q_len)[:, None] + (run.k_len > run.q_len) * 2
    },
    ("softmax", "no weights at all"): {"scores": lambda run: 0 * Plain.scores(run)},
    ("empty row", "as if unmasked"): {"hidden": _as_if_unmasked},
    ("empty row", "other"): {
        "output": lambda run, x, seen: Plain.output(run, np.where(np.any(seen, axis=-1)[..., None], x, 7.0), seen)
    },
    ("low logits", "equal weights"): {
        "level": lambda run, peak: peak,
        "hidden": lambda run, x, seen: np.where(
            np.max(x, axis=-1, keepdims=True) < -500, 0.0, Plain.hidden(run, x, seen)
        ),
    },
    ("sinks", "subtracted"): {"sink": lambda run: -Plain.sink(run)},
    ("sinks", "added without exp"): _total(lambda sink, peak: sink * np.exp(-peak)),
    ("sinks", "other"): _total(lambda sink, peak: 2 * np.exp(sink - peak)),
    ("log-sum-exp", "base 10"): {"lse": lambda run, lse: lse / math.log(10)},
    ("log-sum-exp", "negative"): {"lse": lambda run, lse: -lse},
    ("log-sum-exp", "without the maximum"): _log_sum(lambda log, peak: log),
    ("log-sum-exp", "no logarithm"): {"lse": lambda run, lse: np.exp(lse)},
    ("log-sum-exp", "of raw scores"): {
        "lse": lambda run, lse: np.log(np.sum(np.exp(np.matmul(run.q, np.swapaxes(run.k, -1, -2))), axis=-1))
    },
    ("log-sum-exp of an empty row", "NaN"): _empty_log_sum(math.nan),
    ("log-sum-exp of an empty row", "a large negative number"): _empty_log_sum(-1e4),
    ("log-sum-exp of an empty row", "other"): _empty_log_sum(3.0),
    ("head mapping", "other"): {"kv_head": lambda run, h: (h + 1) % run.kv_heads},
    ("hidden values", "NaN leaks"): {"weighted": _only(np.isnan)},
    ("hidden values", "infinity leaks"): {"weighted": _only(np.isinf)},
    ("hidden values", "huge numbers leak"): {"output": _huge_hidden},
    ("hidden values", "changes bits"): {"weighted": _last_bits},
    ("query of NaN", "zeros with causal"): {
        "output": lambda run, x, seen: Plain.output(
            run,
            np.where(np.any(np.isnan(run.q), axis=-1, keepdims=True) & ~np.all(seen, axis=-1)[..., None], 0.0, x),
            seen,
        )
    },
    ("visible infinity in k", "counts as zero"): {"scores": lambda run: run.products(run.q, run.finite(run.k))},
    ("log-sum-exp of a logit of +inf", "finite"): {"lse": lambda run, lse: np.where(np.isnan(lse), 88.0, lse)},
    ("visible NaN in k", "hidden"): {
        "visible": _nan_keys_hidden,
        "scores": lambda run: run.products(run.q, run.finite(run.k)),
    },
    ("visible infinity in v", "lost where the weight is 0"): {"restored": _weight_of_infinity(lost=True)},
    ("visible infinity in v", "NaN"): {"restored": _weight_of_infinity(lost=False)},
    ("axes of the output", "(..., tokens, heads, width)"): _returns(lambda output: np.swapaxes(output, -2, -3)),
    ("axes of the output", "other"): _returns(lambda output: output[..., ::-1, :].copy()),
    ("values of another width", "raises"): _refuses(lambda q, k, v: q.shape[-1] != v.shape[-1]),
    ("rank 2", "raises"): _refuses(lambda q, k, v: q.ndim == 2),
    ("sizes of zero", "some refused"): _refuses(lambda q, k, v: 0 in (*q.shape, *k.shape, *v.shape)),
    ("sizes of zero", "some wrong"): {"output": lambda run, x, seen: Plain.output(run, x + (not run.k_len), seen)},
    ("strides", "some refused"): _refuses(lambda *arrays: not _contiguous(*arrays)),
    ("dtype of the result", "other"): _returns(
        lambda output: output.astype(np.float32 if output.dtype == np.float16 else output.dtype)
    ),
    ("dtype of the result", "float64"): _returns(lambda output: output.astype(np.float64)),
    ("precision of float32", "bfloat16-like products"): _short(16),
    ("precision of float32", "weights of few bits"): {
        "weighted": lambda run, weights, v: Plain.weighted(run, shortened(weights, 8), v)
    },
    ("precision of float32", "short sums"): {"weighted": _in_float16},
    ("subnormal numbers", "flushed"): {"output": _flushed},
    ("many keys", "wrong where logits fall"): {"softmax": _drops_after_peak},
    ("alone and in a batch", "other values"): _depends_on_batch,
    ("a row alone", "other values"): _depends_on_rows,
    ("chunked prefill", "other values"): _depends_on_rows,
}


def planted(key: tuple[str, str]) -> FunctionTarget:
    """A fresh target with that convention, on NumPy."""
    change = CONVENTIONS[key]
    how: dict[str, Any] = {"wrap": change} if callable(change) else {"steps": change}
    fault = Fault(name=" ".join(key), clause="N6", kind="", lse=True, **how)
    return FunctionTarget(fault.name, "numpy", fault.attention())
