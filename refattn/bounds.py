"""How far a computed result may lie from the exact one by rounding alone: derived, per element, never guessed (N6).

`refattn.rounding` says what an implementation may round; docs/bounds.md derives what follows, formula by formula. With
u_a the unit roundoff of the arithmetic, u_s that of the storage type, A = |scale| |q|.|k| and m the row's largest
logit, the plainest model, "fused", perturbs each logit by at most

    ds = (e^(g(d_k) u_a + 2 u_a) - 1) A + 2 u_a |logit - m|, through the soft cap, plus rounding and adding the bias

and "unfused", which also stores scores and weights in the storage type, by 2 u_s |score| more. Perturbed weights are
p e^ds / sum(p e^ds), which bounds the output, the log-sum-exp and the weights without a first-order approximation.
g(n) is the growth of rounding errors in a sum of n terms: min(n, 4 sqrt(n)) for incoherent data, n for coherent data
(many equal terms) and for every order of summation. An infinite bound says "not judgeable": the model permits logit
errors, or errors of sums, so large that nothing can be concluded. There is no absolute tolerance anywhere.

Everything that is summed over keys is summed block by block: `weight_sums` and `output_sums` give what a block of one
head adds, and the bounds are made of whole sums. Host NumPy float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from refattn.arrays import Array
from refattn.rounding import MODELS, ROUNDOFF, Model, Rounding, rounding_model, wear

# The models are part of this module's surface.
__all__ = ["MODELS", "ROUNDOFF", "Model", "rounding_model"]

# exp() of twice as much, times a value, does not overflow; a logit error of that size is far beyond judgeable.
LARGEST_ERROR = 300.0
# Elements of the largest temporary array of distances: what a core's cache holds.
DISTANCES = 2**16
# Weights below this size are lost in so small a share of all that they are counted without looking at each of them.
NEGLIGIBLE = 2.0**-100
# Sums below are not near the largest number of any dtype that is computed in.
FAR = 1e30


class Rows(NamedTuple):
    """Exact results of query rows, non-finite data zero-filled: what the bounds read of them."""

    k_len: int
    d_k: int
    scale: float
    softcap: float | None
    some: Array  # (..., R) bool, whether a key is visible
    sink: Array  # (..., R), -inf for none
    largest: Array  # (..., R) largest visible logit, -inf for none
    level: Array  # (..., R) the weights are exp(logits - level) / total
    total: Array  # (..., R)
    lse: Array  # (..., R)
    output: Array  # (..., R, d_v)


class Block(NamedTuple):
    """Exact values of R of these rows, of one head, over K of the keys."""

    q: Array  # (R, d_k), finite
    k: Array  # (K, d_k), finite
    v: Array  # (K, d_v), as it is
    errors: Sequence[Array] | None  # of q, k and v
    visible: Array  # (R, K) bool
    scaled: Array  # (R, K) scores times scale
    capped: Array  # (R, K) after the soft cap
    bias: Array | None  # (R, K)
    logits: Array  # (R, K), -inf at invisible pairs


class Perturbation(NamedTuple):
    """What the logit errors of a model can do to the weights p of one block, all (R, K) and 0 at invisible pairs."""

    weights: Array  # p
    grown: Array  # p (e^ds - 1)
    raised: Array  # p e^ds
    lost: Array  # p (1 - e^-ds)


class Sums(NamedTuple):
    """What the bound of the output needs of all keys: sums that blocks of keys add to."""

    grown: Array  # (..., R)
    lost: Array  # (..., R)
    moved: Array  # (..., R, d_v) grown times |v - output|
    raised: Array  # (..., R, d_v) raised times |v|
    vanished: Array  # (..., R, d_v) what weights below the smallest number are worth, times |v|
    incoming: Array  # (..., R, d_v) raised times the error that came in with v


def reach(block: Block, scale: float) -> Array:
    """The largest sum of sizes on the way to a visible logit of each row, (R,); 0 where it is far from overflowing."""
    import numpy as np

    factor = max(1.0, abs(scale))
    q, k = np.abs(block.q), np.abs(block.k)
    bias = 0.0 if block.bias is None else np.abs(finite(block.bias))
    with np.errstate(over="ignore", invalid="ignore"):
        most = np.max(q, initial=0.0) * np.max(k, initial=0.0) * q.shape[-1] * factor + np.max(bias, initial=0.0)
        if most < FAR:
            return np.zeros(len(q))
        return np.max((q @ k.T) * factor + bias, axis=-1, where=block.visible, initial=0.0)


def score_error(rows: Rows, block: Block, model: Rounding) -> Array:
    """The largest error of each scaled score, (R, K)."""
    import numpy as np

    u, s = model.arithmetic, model.storage if model.stored else 0.0
    q, k = np.abs(block.q), np.abs(block.k)
    error = q @ k.T
    error *= abs(rows.scale)
    error = finite(error)
    error *= math.expm1(min(LARGEST_ERROR, model.of_sum(rows.d_k) + 2 * wear(u) + model.operands))
    if block.errors is not None:
        q_error, k_error, _ = block.errors
        error = error + abs(rows.scale) * (q_error @ (k + k_error).T + q @ k_error.T)
    if model.least_input or model.least_term:
        small = model.least_input * (np.sum(q, axis=-1)[:, None] + np.sum(k, axis=-1) + rows.d_k * model.least_input)
        error = error + abs(rows.scale) * finite(small + rows.d_k * model.least_term)
    return error + 2 * s * np.abs(finite(block.scaled)) + _lost_stored(model) if s else error


def logit_error(rows: Rows, block: Block, model: Rounding) -> Array:
    """The largest error of each visible logit, (R, K)."""
    import numpy as np

    u, s, lost = model.arithmetic, model.storage if model.stored else 0.0, _lost_stored(model)
    error = score_error(rows, block, model)
    if rows.softcap is not None:
        capped = finite(block.capped)
        # The slope of the cap anywhere within the error: its own slope is at most 1 / softcap.
        slope = np.minimum(1.0, 1 - (capped / rows.softcap) ** 2 + error / rows.softcap)
        error = error * slope + (4 * u + 2 * s) * np.abs(capped) + lost
    if block.bias is not None:
        capped, bias = finite(block.capped), finite(block.bias)
        error = error + u * np.abs(capped) + 3 * u * np.abs(bias)  # its slope, its distance or cast, and the addition
        error = error + s * (np.abs(capped + bias) + np.abs(bias)) + lost
    below = block.logits - _peak(rows)[:, None]  # infinite at invisible pairs, whose weight is 0
    below *= 2 * u
    error += np.abs(below, out=below)
    return np.fmin(error, LARGEST_ERROR, out=error)


def _lost_stored(model: Rounding) -> float:
    """What a number loses beyond its unit roundoff, where it is stored in the storage type."""
    return 2 * model.least if model.stored else 0.0


def perturbation(rows: Rows, block: Block, model: Rounding) -> Perturbation:
    """The effect of the largest logit errors on the weights of one block."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        weights = block.logits - rows.level[:, None]
        np.exp(weights, out=weights)
        weights /= rows.total[:, None]
        growth = logit_error(rows, block, model)
        np.expm1(growth, out=growth)
        grown = weights * growth
        growth += 1
        return Perturbation(weights, grown, weights + grown, np.divide(grown, growth, out=growth))


def weight_sums(rows: Rows, block: Block, model: Rounding) -> tuple[Array, Array]:
    """What one block adds to the sums of p (e^ds - 1) and of p (1 - e^-ds), (R,) each."""
    import numpy as np

    p = perturbation(rows, block, model)
    return np.sum(p.grown, axis=-1), np.sum(p.lost, axis=-1)


def output_sums(rows: Rows, block: Block, model: Rounding) -> Sums:
    """What one block adds to `Sums`."""
    import numpy as np

    p = perturbation(rows, block, model)
    v = finite(block.v)
    size = np.abs(v)
    incoming = np.zeros_like(rows.output) if block.errors is None else p.raised @ block.errors[2]
    return Sums(
        grown=np.sum(p.grown, axis=-1),
        lost=np.sum(p.lost, axis=-1),
        moved=_distances(p.grown, v, rows.output),
        raised=p.raised @ size,
        vanished=_vanished(rows, block, p.raised, size, model),
        incoming=incoming,
    )


def _vanished(rows: Rows, block: Block, raised: Array, size: Array, model: Rounding) -> Array:
    """At most what weights lose by lying below the smallest number, or all of them, times |v|, (R, d_v).

    Weights that are stored are normalised before that, the others after: then the largest is 1 as it is cast.
    """
    import numpy as np

    least = np.full(len(raised), model.least_weight)
    if not model.stored:
        least = least / _sum_over_largest(rows)
    if model.least_weight <= NEGLIGIBLE:
        all_seen = bool(np.all(block.visible))
        return least[:, None] * (np.sum(size, axis=0) if all_seen else block.visible.astype(np.float64) @ size)
    return np.minimum(raised, 2 * least[:, None]) @ size  # twice, because sums that are smaller raise all weights


def output_bound(rows: Rows, sums: Sums, model: Rounding) -> Array:
    """The bound of each output element, (..., R, d_v); 0 for empty rows, infinite where not judgeable."""
    import numpy as np

    own = np.abs(rows.output)
    least_sum = 1 - _lost(rows, sums.lost, model)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        moved = sums.moved + _sink(rows, model)[0][..., None] * own + sums.incoming
        terms = rows.k_len * model.least_term * (1 + own) + model.least_input
        relative = math.expm1(min(LARGEST_ERROR, _output_wear(rows.k_len, model)))
        computed = (moved + relative * sums.raised + sums.vanished + terms) / least_sum
        bound = computed * (1 + model.storage) + model.storage * own + 2 * model.least
        full = np.isnan(bound) | (sums.raised * _sum_over_largest(rows)[..., None] > model.largest)
    bound = np.where(full, np.inf, np.where(rows.some[..., None], bound * model.reference, 0.0))
    return np.where(judgeable(rows, sums.grown, model)[..., None], bound, np.inf)


def lse_bound(rows: Rows, grown: Array, lost: Array, model: Rounding) -> Array:
    """The bound of each log-sum-exp, (..., R), stored in the accumulation type; 0 for rows with nothing to sum."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return _lse_bound(rows, grown, lost, model)


def _lse_bound(rows: Rows, grown: Array, lost: Array, model: Rounding) -> Array:
    """`lse_bound`, under its caller's floating-point settings."""
    import numpy as np

    u, lse = model.arithmetic, finite(rows.lse)
    moved = np.log1p(grown + _sink(rows, model)[0])
    moved = np.maximum(moved, -np.log1p(-_lost(rows, lost, model)))
    # Of the factor that rescales a tile the output sees nothing, since it divides by the same; the logarithm does.
    rescaled = 2 * _tiles(rows.k_len, model) * wear(u) + rows.k_len * model.least_term
    rounding = _sum_wear(rows.k_len, model) + rescaled + u * (3 * np.abs(lse) + 2 * np.abs(_peak(rows)) + 4)
    bound = np.where(np.isfinite(rows.lse), (moved + rounding) * model.reference, 0.0)
    return np.where(judgeable(rows, grown, model), bound, np.inf)


def weights_bound(rows: Rows, block: Block, grown: Array, lost: Array, model: Rounding) -> Array:
    """The bound of each weight of a block, (R, K), where judgeable; 0 at invisible pairs."""
    import numpy as np

    p = perturbation(rows, block, model)
    lost = _lost(rows, lost, model)[:, None]
    grown = (grown + _sink(rows, model)[0])[:, None]
    stored = model.storage if model.stored else model.arithmetic
    total = _sum_wear(rows.k_len, model) + 3 * wear(model.arithmetic) + wear(stored)
    relative = math.expm1(min(LARGEST_ERROR, total)) + rows.k_len * model.least_term
    with np.errstate(over="ignore"):
        # A weight gains most where the others lose, and loses most where they gain.
        gained, given_up = (p.grown + p.weights * lost) / (1 - lost), (p.lost + p.weights * grown) / (1 + grown)
        bound = np.maximum(gained, given_up) + relative * p.raised / (1 - lost) + model.least
    return np.where(block.visible, bound * model.reference, 0.0)


def judgeable(rows: Rows, grown: Array, model: Rounding) -> Array:
    """Whether the errors of a row's logits and sums are so small that something follows from them, (..., R) bool."""
    return (grown + _sink(rows, model)[0] <= math.expm1(1.0)) & (_output_wear(rows.k_len, model) <= 1.0)


def _sink(rows: Rows, model: Rounding) -> tuple[Array, Array]:
    """How much the weight of the sink can grow and shrink by, (..., R) each; 0 where there is none."""
    import numpy as np

    error = np.minimum(sink_error(rows, model), LARGEST_ERROR)
    weight = np.exp(rows.sink - rows.level) / rows.total
    return weight * np.expm1(error), weight * -np.expm1(-error)


def sink_error(rows: Rows, model: Rounding) -> Array:
    """The largest error of each sink as a logit, (..., R)."""
    import numpy as np

    sink, u = finite(rows.sink), model.arithmetic + (model.storage if model.stored else 0.0)
    with np.errstate(over="ignore"):
        return u * np.abs(sink) + 2 * model.arithmetic * np.abs(sink - _peak(rows))


def _lost(rows: Rows, lost: Array, model: Rounding) -> Array:
    """How far below 1 the sum of the perturbed weights and the sink's can lie, (..., R), below 1 where judgeable."""
    import numpy as np

    lost = lost + _sink(rows, model)[1]
    return np.where(rows.some & (lost < 1), lost, 0.0)


def _distances(grown: Array, v: Array, output: Array) -> Array:
    """The sum over keys of grown times |v - output|, (R, d_v), without an array (R, K, d_v)."""
    import numpy as np

    sums, columns = np.empty(output.shape), np.ascontiguousarray(v.T)  # (R, d_v), (d_v, K)
    step = max(1, DISTANCES // max(1, v.size))
    space = np.empty((min(step, len(output)), *columns.shape))
    with np.errstate():  # which also ends what setbufsize begins
        np.setbufsize(16)  # rows as they are: what broadcasts would be copied into a larger buffer first
        for start in range(0, len(output), step):
            rows = slice(start, start + step)
            distance = np.subtract(columns, output[rows, :, None], out=space[: len(output[rows])])
            np.abs(distance, out=distance)
            sums[rows] = np.matmul(distance, grown[rows, :, None])[..., 0]
    return sums


def _tiles(k_len: int, model: Rounding) -> int:
    """How often a running sum over the keys is rescaled at most."""
    return math.ceil(k_len / model.tile)


def _sum_wear(k_len: int, model: Rounding) -> float:
    """The wear of one sum over the keys, of its rescaling per tile, and of exp, the division and the last product."""
    return model.of_sum(k_len) + _tiles(k_len, model) * wear(model.sums) + 3 * wear(model.arithmetic)


def _output_wear(k_len: int, model: Rounding) -> float:
    """That of the weighted sum and of the sum it is divided by, and that of a weight and its value."""
    return 2 * _sum_wear(k_len, model) + model.weight


def _sum_over_largest(rows: Rows) -> Array:
    """The sum of the softmax where its largest term is 1, (..., R), at least 1."""
    import numpy as np

    return np.maximum(1.0, rows.total * np.exp(rows.level - _peak(rows)))


def _peak(rows: Rows) -> Array:
    """The largest logit or sink of each row, 0 where there is none, (..., R)."""
    import numpy as np

    return finite(np.maximum(rows.largest, rows.sink))


def finite(x: Array) -> Array:
    """x with 0 in place of NaN and infinities, x itself where it has none."""
    import numpy as np

    kept = np.isfinite(x)
    return x if np.all(kept) else np.where(kept, x, 0.0)
