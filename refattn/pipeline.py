"""Attention, stage by stage: the page to read first.

    raw scores  ->  times scale  ->  soft cap  ->  plus bias  ->  visibility  ->  softmax  ->  weighted sum of values

`attention` runs these stages in this order (S5), on whatever Array API library its arguments come from (A7), in at
least float32 (N1), and branches on no array value, so that it can be traced (N2). The one look at values, on host
arrays alone, skips the restoration of non-finite data where there is none, which changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import registry
from .arguments import Call, check_call
from .arrays import Array, describe, is_one_of, quiet
from .errors import PathError
from .heads import stack_groups, unstack_groups
from .softmax import softmax


class Stages(NamedTuple):
    """Every intermediate of one call, in the compute dtype; values at invisible pairs are unspecified.

    The weights are a diagnostic, not an explanation: different weights can give one output (X1), and equal weights
    different outputs (X2).
    """

    scores: Array  #: (..., H, Lq, Lk)  q . k
    scaled: Array  #: (..., H, Lq, Lk)  times scale
    capped: Array  #: (..., H, Lq, Lk)  after the soft cap
    biased: Array  #: (..., H, Lq, Lk)  plus bias
    visible: Array  #: (..., H, Lq, Lk)  boolean; False where the bias is -inf
    logits: Array  #: (..., H, Lq, Lk)  -inf where invisible
    lse: Array  #: (..., H, Lq)       natural log-sum-exp of the logits and the sink
    weights: Array  #: (..., H, Lq, Lk)  softmax
    output: Array  #: (..., H, Lq, d_v)  in the result's dtype


def attention(
    q: Array,
    k: Array,
    v: Array,
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
) -> Array:
    """Scaled dot-product attention: softmax(scale * q k^T + bias, over visible keys) v (Vaswani et al., 2017).

    Parameters
    ----------
    q, k, v
        (..., H, Lq, d_k), (..., Hkv, Lk, d_k) and (..., Hkv, Lk, d_v) of one library, device and dtype: bfloat16,
        float16, float32, float64, or float8 as storage (A1, A2, A4, A7). Rank 2 is one head. H is a multiple of Hkv
        (G1); the axes before the heads broadcast (A3).
    causal
        A query sees the keys at positions up to its own (M4), besides what `mask` says (M13).
    mask
        A Mask of `refattn.masks`, or a boolean array, True = visible, that broadcasts to (..., H, Lq, Lk) (M1, M15).
    bias
        A Bias of `refattn.biases`, a floating array that broadcasts to (..., H, Lq, Lk), or a sum (B4). -inf hides
        the pair (M17).
    scale
        A finite real number or a 0-d array; 1/sqrt(d_k) by default (S1, S2).
    softcap
        c > 0 caps the scaled scores by c * tanh(x / c) (S3); None does not.
    sinks
        (H,) logits, one per query head, in the denominator only (P3).
    q_start, k_start
        Positions of the first query and key: ints, or one per batch entry (M3). q_start is needed where positions
        are read and Lq != Lk or k_start is given (M5).
    path
        "dense", the specification itself; other names are those of installed fast paths (E4).

    Returns
    -------
    output : array
        (..., H, Lq, d_v) in the library, device and dtype of q (float32 for float8). A row that sees no key is 0
        (P2); an invisible key influences nothing, whatever it holds (M19).

    Raises
    ------
    RefattnError
        A subclass per broken rule, also a ValueError or TypeError, before anything is computed (E1, E2, E3).

    Examples
    --------
    Three tokens, two of which the causal rule shows to the second:

    >>> import numpy as np, refattn
    >>> q = k = np.zeros((3, 2))
    >>> v = np.asarray([[0.0], [6.0], [9.0]])
    >>> refattn.attention(q, k, v, causal=True)
    array([[0.],
           [3.],
           [5.]])
    """
    return attention_with_lse(
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
        path=path,
    )[0]


def attention_with_lse(
    q: Array,
    k: Array,
    v: Array,
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
) -> tuple[Array, Array]:
    """`attention` and its log-sum-exp: output (..., H, Lq, d_v) and lse (..., H, Lq) in the compute dtype (P4).

    Arguments and errors are those of `attention`. The log-sum-exp is natural, of the final logits and the sink; -inf
    in a row that sees no key and has no sink (P2).

    >>> import numpy as np, refattn
    >>> q = k = v = np.zeros((3, 2))
    >>> refattn.attention_with_lse(q, k, v, causal=True)[1].round(3)  # log 1, log 2, log 3
    array([0.   , 0.693, 1.099])
    """
    compute = path_named(path)
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
    output, lse = compute(call)
    return _finish(call, output, call.result), _finish(call, lse, None)


def attention_stages(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    q_start: Any = None,
    k_start: Any = 0,
) -> Stages:
    """Every intermediate of `attention`, for reading and for comparing; the output is `attention`'s, bit for bit (S5).

    All stages are in the compute dtype and, `lse` and `output` apart, of shape (..., H, Lq, Lk). The output is in the
    dtype of q. Arguments and errors are those of `attention`, without `path`.

    >>> import numpy as np, refattn
    >>> q = k = v = np.zeros((3, 2))
    >>> refattn.attention_stages(q, k, v, causal=True).logits
    array([[  0., -inf, -inf],
           [  0.,   0., -inf],
           [  0.,   0.,   0.]])
    """
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
    seen: dict[str, Array] = {}
    with quiet(call.library, call.device):
        output, lse = run_stages(call, recorded_in(seen))
        visible = seen["visible"]
        if visible is None:
            visible = call.library.xp.ones(call.scores_shape, dtype=call.library.xp.bool, device=call.device)
        seen["visible"] = call.library.xp.broadcast_to(visible, call.scores_shape)
        stages = {name: _finish(call, seen[name], None) for name in Stages._fields if name in seen}
        return Stages(**stages, lse=_finish(call, lse, None), output=_finish(call, output, call.result))


def run_stages(call: Call, stage: Callable[[str, Any], Any]) -> tuple[Array, Array]:
    """The pipeline of chapters S, M and P on a checked call: output and lse. `stage` is shown each intermediate."""
    xp = call.library.xp
    visible, summands = visibility(call)
    stage("visible", visible)  # (..., H, Lq, Lk) after broadcasting, or None: all are

    if 0 in call.scores_shape:
        nothing = xp.zeros(call.scores_shape, dtype=call.compute, device=call.device)
        for name in ("scores", "scaled", "capped", "biased", "logits", "weights"):
            stage(name, nothing)
        return without_pairs(call)

    empty = empty_rows(call, visible)
    x = logits_of(call, visible, summands, stage, empty)
    weights, lse = softmax(xp, x, visible, call.sinks, empty)  # (..., H, Lq, Lk), (..., H, Lq)
    del x
    stage("weights", weights)
    if visible is not None and empty is not None:
        # M19, D9: invisible weights are 0, or NaN in NaN rows; selected, so are their derivatives. A NaN sink stays.
        weights = xp.where(visible | (empty & xp.isnan(lse[..., None])), weights, 0.0)
    v, value_broken = zero_filled(call, call.v)
    output = weighted_sum(call, weights, v)  # (..., H, Lq, d_v)
    if empty is not None:  # D9: 0 already, but for a NaN sink; selected, it keeps the row's gradient from the values
        output = xp.where(empty & ~xp.isnan(lse[..., None]), 0.0, output)
    return (output if value_broken is None else restored(call, output, visible, value_broken)), lse


def recorded_in(seen: dict[str, Array]) -> Callable[[str, Any], Any]:
    """A `stage` of `run_stages` that keeps every value by its name, and changes none."""

    def stage(name: str, value: Any) -> Any:
        seen[name] = value
        return value

    return stage


def logits_of(
    call: Call,
    visible: Array | None,
    summands: list[Array],
    stage: Callable[[str, Any], Any],
    empty: Array | None,
) -> Array:
    """The stages up to the logits of each pair, (..., H, Lq, Lk), for what `visibility` found.

    empty are the rows that see no key, where something may differentiate this.
    """
    xp = call.library.xp
    k, key_broken = zero_filled(call, call.k)
    x = stage("scores", raw_scores(call, k, key_broken, empty))  # (..., H, Lq, Lk)
    if empty is not None:
        x = xp.where(visible, x, 0.0)  # M19, D9: an invisible score that has overflowed would make derivatives NaN
    x = stage("scaled", x * call.scale)  # S1, S2
    if call.softcap is not None:
        x = xp.tanh(x / call.softcap) * call.softcap  # S3: after the scale, before bias and mask
    x = stage("capped", x)
    for summand in summands:
        x = x + summand  # B4, M18
    x = stage("biased", x)
    if visible is not None:
        x = xp.where(visible, x, -float("inf"))  # M2: selected before softmax, never multiplied
    return stage("logits", x)


def empty_rows(call: Call, visible: Array | None) -> Array | None:
    """The rows that see no key, (..., H, Lq, 1) after broadcasting, where something may differentiate such pairs."""
    if visible is None or call.library.host:
        return None
    return ~call.library.xp.any(visible, axis=-1, keepdims=True)


def visibility(call: Call) -> tuple[Array | None, list[Array]]:
    """Which pairs are visible (None: all), and what the bias adds to them; -inf is taken out of the sum (M17)."""
    if call.mask is None and call.bias is None:
        return None, []
    xp, frame = call.library.xp, call.frame()
    visible = None if call.mask is None else call.mask.evaluate(frame)
    summands = []
    for term in call.bias_terms():
        summand = term.evaluate(frame, call.compute)
        hidden = summand == -float("inf")
        visible = ~hidden if visible is None else visible & ~hidden
        summands.append(xp.where(hidden, 0.0, summand))
    return visible, summands


def zero_filled(call: Call, x: Array) -> tuple[Array, Array | None]:
    """x with 0 for NaN and infinities, and x again if it may hold any, for the restoration (M19, M20).

    Selecting after the products would not do: 0 * NaN is NaN, forwards and in derivatives.
    """
    xp = call.library.xp
    finite = xp.isfinite(x)
    if call.library.host and finite.all():
        return x, None
    return xp.where(finite, x, 0.0), x


def raw_scores(call: Call, k: Array, key_broken: Array | None, empty: Array | None) -> Array:
    """q . k for every pair, NaN where the key has a non-finite component (M20); empty rows may be left at 0."""
    xp, q = call.library.xp, call.q
    if not k.shape[-1]:
        return xp.zeros(call.scores_shape, dtype=call.compute, device=call.device)  # A6
    nan_rows = None
    if not call.library.host:  # D9: derivatives by k multiply a hidden pair's query, NaN perhaps, by 0
        nan = xp.isnan(q)
        nan_rows = xp.sum(xp.where(nan, q, 0.0), axis=-1, keepdims=True)  # (..., H, Lq, 1): 0 or NaN
        q = xp.where(nan if empty is None else nan | empty, 0.0, q)
    q = stack_groups(xp, q, call.group)  # (..., Hkv, G * Lq, d_k)  G1, G2
    scores = unstack_groups(xp, xp.matmul(q, xp.matrix_transpose(k)), call.group)
    if nan_rows is not None:
        scores = scores + nan_rows  # M21: added, so that the NaN's own derivative is NaN
    if tuple(scores.shape) != call.scores_shape:
        scores = xp.broadcast_to(scores, call.scores_shape)  # A3: v may bring batch axes of its own
    if key_broken is None:
        return scores
    broken = ~xp.all(xp.isfinite(key_broken), axis=-1)
    nan_keys = xp.where(broken, float("nan"), xp.zeros_like(key_broken[..., 0]))[..., None, :]  # (..., Hkv, 1, Lk)
    grouped = stack_groups(xp, scores, call.group) + nan_keys
    return unstack_groups(xp, grouped, call.group)


def weighted_sum(call: Call, weights: Array, v: Array) -> Array:
    """Each row's weighted sum of values, (..., H, Lq, d_v); one product, always in the library's own order (N4)."""
    xp = call.library.xp
    return unstack_groups(xp, xp.matmul(stack_groups(xp, weights, call.group), v), call.group)


def restored(call: Call, output: Array, visible: Array | None, v: Array) -> Array:
    """The output with NaN, +inf or -inf where a visible value element is that; NaN where both infinities meet (M20)."""
    xp = call.library.xp
    up = xp.isnan(v) | (v == float("inf"))  # NaN counts as both infinities
    down = xp.isnan(v) | (v == -float("inf"))
    marks = xp.astype(xp.concat((up, down), axis=-1), call.compute)  # (..., Hkv, Lk, 2 d_v)
    if visible is None:
        visible = xp.ones((1, 1), dtype=xp.bool, device=call.device)
    seen = xp.astype(xp.broadcast_to(visible, call.scores_shape), call.compute)
    met = weighted_sum(call, seen, marks) > 0.0  # (..., H, Lq, 2 d_v)
    output = xp.where(met[..., : v.shape[-1]], output + float("inf"), output)
    return xp.where(met[..., v.shape[-1] :], output - float("inf"), output)


def without_pairs(call: Call) -> tuple[Array, Array]:
    """No rows, or rows over no keys: output 0, log-sum-exp the sink or -inf (P2); NaN if the sink says so (P3)."""
    xp, shape = call.library.xp, call.scores_shape[:-1]
    lse = xp.full(shape, -float("inf"), dtype=call.compute, device=call.device)
    if call.sinks is not None:
        sinks = call.sinks[..., 0]  # (H, 1)
        lse = xp.maximum(lse, xp.where(sinks == float("inf"), float("nan"), sinks))
    if call.library.name == "dask":  # which cannot reshape axes of size zero, and does not differentiate
        output = xp.zeros((*shape, call.v.shape[-1]), dtype=call.compute, device=call.device)
    else:  # products over no pair, so that autograd finds the way from the zeros to each argument
        output = weighted_sum(call, raw_scores(call, call.k, None, None), call.v)
    return xp.where(xp.isnan(lse)[..., None], float("nan"), output), lse


def dense(call: Call) -> tuple[Array, Array]:
    """The specification itself: the stages above on all pairs at once."""
    with quiet(call.library, call.device):
        return run_stages(call, _forget)


def path_named(path: str) -> Callable[[Call], tuple[Array, Array]]:
    """The way of computing of that name. Raises PathError (E4)."""
    if not is_one_of(path, ("dense", "tiled")):
        raise PathError("path", "'dense' or 'tiled'", describe(path))
    return dense if path == "dense" else tiled


def tiled(call: Call) -> tuple[Array, Array]:
    """What the backend plugin of the arrays' library makes of a call, tile by tile (T1), in linear memory (T4)."""
    with quiet(call.library, call.device):
        return registry.tiled(call.library.name)(call)


def _forget(_: str, value: Array) -> Array:
    return value


def _finish(call: Call, x: Array, dtype: Any) -> Array:
    """One rounding to the result's dtype (N1); rank 2 loses the head axis again (A2)."""
    if call.one_head:
        x = x[0, ...]
    return x if dtype is None else call.library.xp.astype(x, dtype, copy=False)
