"""Online softmax on NumPy: rows of some heads over their tiles of keys.

Weights are kept relative to a level per row, 0 at first. Any level serves: it is changed, and the row computed again,
only when the sum of a row's weights leaves [1, MOST]. So the running maximum, its subtraction and the rescaling of
every tile fall away where logits are small, and are rare where they are not. A sum of at least 1 keeps the products of
weights and values from underflowing as well as the maximum does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn_backends.numpy_logits import Logits, take
from refattn_backends.numpy_products import by_inner, by_rows

MOST = 2.0**60  # leaves float32 room for 2**24 keys and for values up to 2**44
LARGE, SAMPLE = 20.0, 16  # a logit beyond, among every 16th of the first keys, tells that levels will be needed


class Rows:
    """The running output (h, n, d_v), sum of weights (h, n) and level (h, n, 1) of n rows of h heads."""

    def __init__(self, heads: int, count: int, width: int, dtype: Any) -> None:
        self._output = np.zeros((heads, count, width), dtype)
        self._total = np.zeros((heads, count), dtype)
        self._level = np.zeros((heads, count, 1), dtype)
        self._seen = np.zeros((heads, count), bool)
        self._levelled = False
        self._met: Array | None = None  # (h, n, 2 d_v)

    def add(self, at: slice, logits: Logits, v: Array, *, few: bool) -> None:
        """Some of the rows over more keys, with values v (h, K, d_v)."""
        x, seen = logits.all(), logits.seen
        if not self._seen[:, at].all():
            self._start(at, x)
        self._seen[:, at] |= seen
        if self._levelled:
            x -= self._level[:, at]
        weights = np.exp(x, out=x)
        sums = weights @ np.ones(weights.shape[-1], weights.dtype)  # a product outruns a sum
        total = self._total[:, at] + sums
        good = (total >= 1.0) & (sums <= MOST)  # False for NaN
        if not good.all():
            for head, wrong in enumerate(~good & seen):
                index = np.flatnonzero(wrong)
                if index.size:
                    again = self._relevel(head, at.start + index, logits.some(head, index))
                    weights[head, index], total[head, index] = again
        self._total[:, at] = total
        product = take("product", (*weights.shape[:-1], v.shape[-1]), weights.dtype)
        self._output[:, at] += (by_inner if few else by_rows)(weights, v, product)

    def meet(self, at: slice, logits: Logits, v: Array) -> None:
        """Notes which infinities, NaN counting as both, some of the rows see in values v (h, K, d_v) (M20).

        `add` then gets 0 in their place, so that they harm no row that does not see them.
        """
        index = np.flatnonzero(~np.isfinite(v).all(axis=(0, 2)))
        if not index.size:
            return
        v = v[:, index]
        marks = np.concatenate([np.isnan(v) | (v == infinity) for infinity in (np.inf, -np.inf)], axis=-1)
        if self._met is None:
            self._met = np.zeros((*self._total.shape, marks.shape[-1]), bool)
        self._met[:, at] |= logits.visible(index).astype(v.dtype) @ marks.astype(v.dtype) > 0.0

    def _start(self, at: slice, logits: Array) -> None:
        """Takes the greatest logit as the level of each row that has seen nothing yet and seems to need one.

        Row by row, so that no row's level depends on which others are computed with it.
        """
        sample = np.moveaxis(logits[..., ::SAMPLE], -1, 0).copy().max(axis=0)[..., None]  # rows so short are slow
        far = ~self._seen[:, at, None] & np.isfinite(sample) & ((sample < 0.0) | (sample > LARGE))
        if far.any():
            highest = logits.max(axis=-1, keepdims=True)
            np.copyto(self._level[:, at], highest, where=far & np.isfinite(highest))
            self._levelled = True

    def _relevel(self, head: int, rows: Array, logits: Array) -> tuple[Array, Array]:
        """Takes the rows' greatest logits as their levels and rescales what they have: new weights and totals."""
        highest, old, total = logits.max(axis=-1, keepdims=True), self._level[head, rows], self._total[head, rows]
        level = np.where(np.isneginf(highest), old, highest)
        shrink = np.where(total[:, None] > 0.0, np.exp(old - level), 1.0)
        self._output[head, rows] *= shrink
        self._level[head, rows] = level
        self._levelled = True
        weights = np.exp(logits - level)
        return weights, total * shrink[:, 0] + weights.sum(axis=-1)

    def finish(self) -> tuple[Array, Array, Array] | None:
        """Output (h, n, d_v), log-sum-exp (h, n), and which rows see keys whose logits are all -inf: 0 and -inf here.

        Other keys or a sink may make those harmless (P7). None if weights that are finite gave an output that is not.
        Then there were infinite values that nobody met (M20), or values too large for weights relative to a level.
        """
        nothing = self._total == 0.0
        self._total[nothing] = 1.0
        self._output /= self._total[..., None]
        if not np.isfinite(self._output).all() and not np.isfinite(self._output[np.isfinite(self._total)]).all():
            return None
        lse = np.where(nothing, -np.inf, np.log(self._total) + self._level[..., 0])  # P2
        broken = np.isnan(self._total)
        self._output[broken], lse[broken] = np.nan, np.nan
        if self._met is not None:
            up, down = np.split(self._met, 2, axis=-1)
            self._output[up] += np.inf
            self._output[down] -= np.inf
        return self._output, lse, nothing & self._seen
