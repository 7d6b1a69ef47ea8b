"""How far a computed result may lie from the exact one by rounding alone: derived, per element, never guessed (N6).

With u_a the unit roundoff of the accumulation type, u_s that of the storage type, A = |scale| |q|.|k| and m the row's
largest logit, an implementation that rounds as the named model says perturbs each logit by at most

    ds = (g(d_k) + 2) u_a A + 2 u_a |logit - m|, through the soft cap, plus the cast and the addition of the bias

and "unfused", which also stores scores and weights in the storage type, by 2 u_s |score| more. Perturbed weights are
p e^ds / sum(p e^ds), which bounds the output, the log-sum-exp and the weights without a first-order approximation.
g(n) is the growth of rounding errors in a sum of n terms: min(n, 4 sqrt(n)) for incoherent data, n for coherent data
(many equal terms) and for every order of summation. An infinite bound says "not judgeable": the model permits logit
errors so large that nothing can be concluded. There is no absolute tolerance anywhere.

All functions work on blocks of rows of one head, host NumPy float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from refattn.arrays import Array

MODELS = ("fused", "unfused")
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
# The smallest numbers that every implementation keeps: many flush subnormal numbers to zero, but not float16's.
LEAST = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126, "float64": 2.0**-1022}
# Keys per tile; each tile rescales what came before it once.
TILE = 32
# exp() of more overflows; a logit error of that size is far beyond judgeable.
LARGEST_ERROR = 700.0


class Rows(NamedTuple):
    """Exact values of R query rows of one head over Lk keys, non-finite data zero-filled: what the bounds read."""

    visible: Array  # (R, Lk) bool
    size: Array  # (R, Lk) |scale| * |q|.|k|
    scaled: Array  # (R, Lk) scores times scale
    capped: Array  # (R, Lk) after the soft cap
    bias: Array | None  # (R, Lk), 0 at invisible pairs
    logits: Array  # (R, Lk), -inf at invisible pairs
    sink: float | None
    lse: Array  # (R,)
    weights: Array  # (R, Lk)
    v: Array  # (Lk, d_v)
    output: Array  # (R, d_v)
    d_k: int
    softcap: float | None
    incoming: Array | float  # (R, Lk) error of the scaled scores that came in with q and k
    v_error: Array | None  # (Lk, d_v) error that came in with v


@dataclass(frozen=True)
class Model:
    """How an implementation rounds: unit roundoffs, and whether scores and weights are stored in the storage type."""

    storage: float
    accumulation: float
    least: float
    unfused: bool
    coherent: bool

    @property
    def weight_roundings(self) -> int:
        """How often a weight is rounded to the storage type."""
        if self.storage == self.accumulation:
            return 0
        return 2 if self.unfused else 1

    @property
    def reference(self) -> float:
        """Factor that adds the golden value's own error, which obeys the same bound in float64."""
        return 1 + ROUNDOFF["float64"] / self.accumulation

    def growth(self, n: int) -> float:
        """g(n)."""
        return float(n) if self.coherent else min(float(n), 4 * math.sqrt(n))


def rounding_model(dtype: str, model: str = "fused", coherent: bool = False) -> Model:
    """The model of that name for a storage dtype: accumulation is in float32, or in float64 for float64."""
    if dtype not in ROUNDOFF or model not in MODELS:
        raise ValueError(f"no error bound for dtype {dtype!r} and model {model!r}; there are {[*ROUNDOFF]}, {MODELS}")
    accumulation = "float64" if dtype == "float64" else "float32"
    unfused = model == "unfused" and dtype != accumulation
    return Model(ROUNDOFF[dtype], ROUNDOFF[accumulation], LEAST[dtype], unfused, coherent)


class Perturbation(NamedTuple):
    """What the logit errors of a model can do to the weights of R rows."""

    error: Array  # (R, Lk) largest logit errors, 0 at invisible pairs
    grown: Array  # (R, Lk) p (e^ds - 1)
    sink_grown: Array  # (R,) the same of the sink
    raised: Array  # (R, Lk) largest weights
    least_sum: Array  # (R,) smallest sum of perturbed weights
    judgeable: Array  # (R,) bool


def logit_error(rows: Rows, model: Model) -> Array:
    """The largest error of each logit, (R, Lk), 0 at invisible pairs."""
    import numpy as np

    u, s = model.accumulation, model.storage if model.unfused else 0.0
    error = rows.incoming + (model.growth(rows.d_k) + 2) * u * rows.size + 2 * s * np.abs(rows.scaled)
    if rows.softcap is not None:
        # The slope of the cap anywhere within the error: its own slope is at most 1 / softcap.
        slope = np.minimum(1.0, 1 - (rows.capped / rows.softcap) ** 2 + error / rows.softcap)
        error = error * slope + (4 * u + 2 * s) * np.abs(rows.capped)
    if rows.bias is not None:
        error = error + u * np.abs(rows.capped) + 2 * u * np.abs(rows.bias)
        error = error + s * (np.abs(rows.capped + rows.bias) + np.abs(rows.bias))
    below = np.where(rows.visible, finite(rows.logits) - _largest(rows)[:, None], 0.0)
    return np.where(rows.visible, np.minimum(error + 2 * u * np.abs(below), LARGEST_ERROR), 0.0)


def perturbation(rows: Rows, model: Model) -> Perturbation:
    """The effect of the largest logit errors on the weights."""
    import numpy as np

    error = logit_error(rows, model)
    grown = rows.weights * np.expm1(error)
    least_sum = np.sum(rows.weights * np.exp(-error), axis=-1)
    sink_grown = np.zeros_like(least_sum)
    if rows.sink is not None and math.isfinite(rows.sink):
        u = model.accumulation + (model.storage if model.unfused else 0.0)
        sink_error = u * abs(rows.sink) + 2 * model.accumulation * np.abs(rows.sink - _largest(rows))
        sink_weight = np.exp(rows.sink - finite(rows.lse))
        sink_grown = sink_weight * np.expm1(np.minimum(sink_error, LARGEST_ERROR))
        least_sum = least_sum + sink_weight * np.exp(-sink_error)
    some = np.any(rows.visible, axis=-1)
    least_sum = np.where(some & (least_sum > 0), least_sum, 1.0)
    raised = rows.weights * np.exp(error) / least_sum[:, None]
    judgeable = np.sum(grown, axis=-1) + sink_grown <= math.expm1(1.0)
    return Perturbation(error, grown, sink_grown, raised, least_sum, judgeable)


def output_bound(rows: Rows, model: Model) -> Array:
    """The bound of each output element, (R, d_v); 0 for empty rows, infinite where not judgeable."""
    import numpy as np

    p = perturbation(rows, model)
    k_len, size, own = rows.v.shape[0], np.abs(rows.v), np.abs(rows.output)
    spread = np.abs(rows.v[None, :, :] - rows.output[:, None, :])  # (R, Lk, d_v)
    moved = np.matmul(p.grown[:, None, :], spread)[:, 0, :] + p.sink_grown[:, None] * own
    moved = moved / p.least_sum[:, None]
    if rows.v_error is not None:
        moved = moved + p.raised @ rows.v_error
    relative = _row_error(k_len, model) * 2 * model.accumulation + model.weight_roundings * model.storage
    underflow = max(model.weight_roundings, 1) * model.least * (rows.visible.astype(float) @ size)
    computed = moved + relative * (p.raised @ size) + underflow
    bound = computed * (1 + model.storage) + model.storage * own + model.least
    bound = np.where(np.any(rows.visible, axis=-1)[:, None], bound, 0.0)
    return np.where(p.judgeable[:, None], bound * model.reference, np.inf)


def lse_bound(rows: Rows, model: Model) -> Array:
    """The bound of each log-sum-exp, (R,), stored in the accumulation type; 0 for rows with nothing to sum."""
    import numpy as np

    p, u = perturbation(rows, model), model.accumulation
    lse = finite(rows.lse)
    moved = np.log1p(np.sum(p.grown, axis=-1) + p.sink_grown)
    moved = np.maximum(moved, -np.log(p.least_sum))
    rounding = u * (_row_error(rows.v.shape[0], model) + 3 * np.abs(lse) + 2 * np.abs(_largest(rows)) + 4)
    bound = np.where(np.isfinite(rows.lse), moved + rounding, 0.0)
    return np.where(p.judgeable, bound * model.reference, np.inf)


def weights_bound(rows: Rows, model: Model) -> Array:
    """The bound of each weight, (R, Lk); 0 at invisible pairs."""
    import numpy as np

    p = perturbation(rows, model)
    stored = model.storage if model.unfused else model.accumulation
    relative = (_row_error(rows.v.shape[0], model) + 3) * model.accumulation + stored
    bound = (p.raised - rows.weights) + relative * p.raised + model.least
    return np.where(p.judgeable[:, None], np.where(rows.visible, bound * model.reference, 0.0), np.inf)


def _row_error(k_len: int, model: Model) -> float:
    """Roundings of one sum over the keys, of the rescaling per tile, and of exp, the division and the last product."""
    return model.growth(k_len) + math.ceil(k_len / TILE) + 3


def _largest(rows: Rows) -> Array:
    """The largest finite logit or sink of each row, 0 where there is none, (R,)."""
    import numpy as np

    sink = -math.inf if rows.sink is None else rows.sink
    return finite(np.max(np.where(rows.visible, rows.logits, -np.inf), axis=-1, initial=sink))


def finite(x: Array) -> Array:
    """x with 0 in place of NaN and infinities."""
    import numpy as np

    return np.where(np.isfinite(x), x, 0.0)
