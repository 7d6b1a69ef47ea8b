"""Derivatives of attention in closed form: the pipeline of `refattn.pipeline` once more, and back.

With P the weights, S the scaled scores, X the logits and G the gradient of the output,

    dP = G v^T        dX = P (dP - rowsum(P dP))        dS = dX cap'(S)
    dq = scale dS k   dk = scale dS^T q                 dv = P^T G

summed over whatever was broadcast. Weights are recomputed in at least float32, and each gradient is rounded once. A
tiled path calls `pair_gradients` on a tile at a time, with rowsum(P dP) of all keys (T1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import registry
from .arguments import Call, check_call
from .arrays import Array, Shape, describe, in_rows, quiet, same_device, same_library
from .biases import Bias, Plain, Relative
from .dtypes import is_float
from .errors import GradientError
from .heads import stack_groups, unstack_groups
from .pipeline import path_named, recorded_in, run_stages, weighted_sum, zero_filled


class Gradients(NamedTuple):
    """The gradients of one call, each with the shape and dtype of its argument; float8 gives float32.

    bias is None without one and for ALiBi, the gradient of the table for `relative`, and a tuple with an entry per
    term for a sum. sinks is None without sinks.
    """

    q: Array
    k: Array
    v: Array
    bias: Any
    sinks: Array | None


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    grad_output: Array,
    *,
    causal: bool = False,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    q_start: Any = None,
    k_start: Any = 0,
    path: str = "dense",
) -> Gradients:
    """The gradients of sum(grad_output * attention(...)) by q, k, v, the bias and the sinks  # D1

    grad_output is a floating array of the output's shape, (..., H, Lq, d_v); everything else is as in `attention`.
    Axes that were broadcast are summed over, and so are the query heads of a group (D2). Rows that see no key (D3) and
    pairs that are invisible (D4) get exact zeros and add none, whatever they hold, grad_output included. A row whose
    visible data are not finite makes gradients NaN, of its own query and of the keys that it sees.
    path="tiled" recomputes the weights tile by tile from the log-sum-exp, and holds no (Lq, Lk) array (T1, T4).
    Raises what `attention` raises, GradientError (D1) for another grad_output, and PathError (E4) where the backend of
    q's library has tiles without derivatives.

    The output is a mean of the two values; the keys differ, and so the query has a gradient:

    >>> import numpy as np, refattn
    >>> q, k, v = np.zeros((1, 1)), np.asarray([[1.0], [-1.0]]), np.asarray([[2.0], [6.0]])
    >>> gradients = refattn.attention_vjp(q, k, v, np.ones((1, 1)))
    >>> gradients.q, gradients.v
    (array([[-2.]]), array([[0.5],
           [0.5]]))
    """
    path_named(path)  # E4
    call = check_call(
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_start=q_start,
        k_start=k_start,
    )
    with quiet(call.library, call.device):
        gradient = check_gradient(call, grad_output)
        backward = _backward if path == "dense" else registry.tiled_vjp(call.library.name)
        wide = backward(call, gradient)
    xp = call.library.xp
    dtypes = {"q": call.result, "k": call.result, "v": call.result}  # D8: rounded here, and nowhere before
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    if sinks is not None:
        dtypes["sinks"], shapes["sinks"] = sinks.dtype, tuple(sinks.shape)
    arrays = {name: xp.reshape(xp.astype(wide[name], dtypes[name], copy=False), shapes[name]) for name in dtypes}
    terms = tuple(_as_given(xp, *pair) for pair in zip(call.bias_terms(), wide["bias"]))
    return Gradients(**{"sinks": None, **arrays}, bias=terms if len(terms) > 1 else next(iter(terms), None))


def check_gradient(call: Call, gradient: Any) -> Array:
    """grad_output with a head axis, in the compute dtype. Raises GradientError (D1)."""
    same_library(call.library, gradient, "grad_output")
    same_device(call.library, call.device, gradient, "grad_output")
    shape: Shape = (*call.scores_shape[call.one_head : -1], call.v.shape[-1])
    if not is_float(gradient.dtype) or tuple(gradient.shape) != shape:
        raise GradientError("grad_output", f"a floating array of the output's shape {shape}", describe(gradient))
    gradient = in_rows(call.library, call.library.xp.astype(gradient, call.compute, copy=False), met=call.v)
    return gradient[None, ...] if call.one_head else gradient


class Pairs(NamedTuple):
    """What the forward pass knows of all pairs of a call, or of a tile of it."""

    weights: Array  #: (..., H, Lq, Lk)
    visible: Array | None  #: broadcastable to that; None if all are
    capped: Array  #: (..., H, Lq, Lk)


class Parts(NamedTuple):
    """What pairs give, in the compute dtype: q, k and v with the batch axes and heads of their arguments (D2)."""

    q: Array
    k: Array
    v: Array
    logits: Array  #: (..., H, Lq, Lk)
    row_sum: Array  #: (..., H, Lq, 1), rowsum(P dP)


def _backward(call: Call, gradient: Array) -> dict[str, Any]:
    """All gradients in the compute dtype, q, k and v with their own batch axes; bias is a list, one per term."""
    if 0 in call.scores_shape:
        return zero_gradients(call)
    xp = call.library.xp
    seen: dict[str, Array] = {}
    _, lse = run_stages(call, recorded_in(seen))
    parts = pair_gradients(call, Pairs(seen["weights"], seen["visible"], seen["capped"]), gradient)
    found: dict[str, Any] = {"q": parts.q, "k": parts.k, "v": parts.v}
    found["bias"] = [_term_gradient(call, term, parts.logits) for term in call.bias_terms()]
    if call.sinks is not None:
        visible = seen["visible"]
        reached = None if visible is None else xp.any(visible, axis=-1, keepdims=True)
        found["sinks"] = sink_gradient(call, call.sinks, lse[..., None], parts.row_sum, reached)
    return found


def pair_gradients(call: Call, pairs: Pairs, gradient: Array, row_sum: Array | None = None) -> Parts:
    """The gradients that come of the given pairs, those of a tile if rowsum(P dP) over all keys is given."""
    xp, visible = call.library.xp, pairs.visible
    weights = _selected(call, pairs.weights, visible)  # (..., H, Lq, Lk)  D4
    (k, _), (v, _) = zero_filled(call, call.k), zero_filled(call, call.v)
    q, _ = zero_filled(call, call.q)  # what a broken query breaks is in the weights of its row already (M21)
    gradient, broken = zero_filled(call, gradient)

    product = _selected(call, _row_products(call, gradient, v), visible)
    if broken is not None:
        product = _selected(call, xp.where(lost_rows(xp, broken), float("nan"), product), visible)
    if row_sum is None:
        row_sum = xp.sum(weights * product, axis=-1, keepdims=True)  # (..., H, Lq, 1); 0 for empty rows (D3)
    logits = _selected(call, weights * (product - row_sum), visible)
    scores = logits
    if call.softcap is not None:
        share = pairs.capped / call.softcap  # the tanh
        scores = _selected(call, logits * (1.0 - share) * (1.0 + share), visible)  # D5
    scores = scores * call.scale

    found = {
        "q": weighted_sum(call, scores, k),
        "k": _over_queries(call, scores, q),
        "v": _over_queries(call, weights, gradient),
    }
    if broken is not None:
        seen = _selected(call, xp.ones_like(weights), visible)
        met = _over_queries(call, seen, xp.astype(~xp.isfinite(broken), call.compute)) > 0.0
        found["v"] = xp.where(met, float("nan"), found["v"])
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        found[name] = summed_to(xp, found[name], tuple(x.shape))  # D2
    return Parts(**found, logits=logits, row_sum=row_sum)


def lost_rows(xp: Any, gradient: Array) -> Array:
    """The rows whose gradient is not finite, (..., H, Lq, 1)."""
    return ~xp.all(xp.isfinite(gradient), axis=-1, keepdims=True)


def _selected(call: Call, x: Array, visible: Array | None) -> Array:
    """x, and 0 at invisible pairs: selected, since 0 times NaN is NaN  # D4"""
    return x if visible is None else call.library.xp.where(visible, x, 0.0)


def _row_products(call: Call, gradient: Array, v: Array) -> Array:
    """The gradient of each weight: gradient . v, (..., H, Lq, Lk)."""
    xp = call.library.xp
    if not v.shape[-1]:
        return xp.zeros(call.scores_shape, dtype=call.compute, device=call.device)  # A6
    rows = stack_groups(xp, gradient, call.group)
    return unstack_groups(xp, xp.matmul(rows, xp.matrix_transpose(v)), call.group)


def _over_queries(call: Call, pairs: Array, x: Array) -> Array:
    """Sums over all queries that read a key/value head: pairs^T x, (..., Hkv, Lk, width)  # D2"""
    xp = call.library.xp
    if not x.shape[-1]:
        shape = (*call.scores_shape[:-3], call.scores_shape[-3] // call.group, call.scores_shape[-1], 0)
        return xp.zeros(shape, dtype=call.compute, device=call.device)  # A6
    pairs = xp.matrix_transpose(stack_groups(xp, pairs, call.group))  # (..., Hkv, Lk, G * Lq)
    return xp.matmul(pairs, stack_groups(xp, x, call.group))


def sink_gradient(call: Call, sinks: Array, lse: Array, row_sum: Array, reached: Array | None = None) -> Array:
    """(H, 1, 1): a sink takes its share of the row's weight, and has no value; reached tells which rows see a key  # D6

    None for reached means all, or that no sink is NaN or infinite, whose share of an empty row is NaN.
    """
    xp = call.library.xp
    level = xp.where(lse == -float("inf"), 0.0, lse)  # -inf only where the sink is -inf too
    given = -xp.exp(sinks - level) * row_sum  # (..., H, Lq, 1)
    return summed_to(xp, given if reached is None else xp.where(reached, given, 0.0), tuple(sinks.shape))


def _term_gradient(call: Call, term: Bias, logits: Array) -> Array | None:
    """The gradient of one term of the bias; None where it holds no array  # D7"""
    xp = call.library.xp
    if isinstance(term, Plain):
        return summed_to(xp, logits, tuple(term.array.shape))
    return _table_gradient(call, term, logits) if isinstance(term, Relative) else None


def _table_gradient(call: Call, term: Relative, logits: Array) -> Array:
    """(H, 2R + 1): each entry's pairs are those at its distance."""
    xp, heads, columns = call.library.xp, call.scores_shape[-3], []
    read = term.columns(call.frame())
    for entry in range(term.table.shape[1]):
        at_entry = xp.where(read == entry, logits, 0.0)
        columns.append(xp.reshape(summed_to(xp, at_entry, (heads, 1, 1)), (heads, 1)))
    return xp.concat(columns, axis=1)


def summed_to(xp: Any, x: Array, shape: Shape) -> Array:
    """x summed over the axes that broadcasting from `shape` to its own shape repeated  # D2"""
    extra = x.ndim - len(shape)
    axes = tuple(a for a in range(x.ndim) if a < extra or (shape[a - extra] == 1 and x.shape[a] != 1))
    return xp.reshape(xp.sum(x, axis=axes, keepdims=True) if axes else x, shape)


def zero_gradients(call: Call) -> dict[str, Any]:
    """Zeros: there are no pairs (D3)."""
    xp = call.library.xp

    def zeros(x: Array) -> Array:
        return xp.zeros(tuple(x.shape), dtype=call.compute, device=call.device)

    found: dict[str, Any] = {name: zeros(x) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    found["bias"] = [next((zeros(x) for x in term.arrays().values()), None) for term in call.bias_terms()]
    if call.sinks is not None:
        found["sinks"] = zeros(call.sinks)
    return found


def _as_given(xp: Any, term: Bias, gradient: Array | None) -> Array | None:
    """The gradient of one term in the dtype of its array."""
    for x in term.arrays().values():
        return xp.astype(gradient, x.dtype, copy=False)
    return None
