"""Golden gradients: those of a golden value in float64 on the host, each with a derived error bound (D8, N6).

With p the weights of a row, G the gradient of its output, dp = G . v and D = sum(p dp), a logit's gradient is
p (dp - D). docs/bounds.md derives what each rounding on the way can do to it, and to the sums that follow. An
implementation may compute D as that sum or, as fused kernels do, as G . output with the output as it was stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from refattn import bounds
from refattn.arrays import Array, Shape
from refattn.goldens import Golden
from refattn.rounding import Model, Rounding, rounding_model, wear


class Pairs(NamedTuple):
    """Exact values of one block of rows and keys of one head: (R, K), but for the first ones."""

    at: tuple[Any, ...]  # batch, query head, rows
    head: tuple[int, ...]  # batch, query head
    keys: slice
    block: bounds.Block
    gradient: Array  # (R, d_v) of the output
    weights: Array
    products: Array  # gradient . v
    slope: Array | None  # of the soft cap


class Sums:
    """What comes of pairs, per query head: gradients, or bounds of them before they are stored.

    Those of the logits, an (Lq, Lk) array, are kept for a bias alone.
    """

    def __init__(self, lead: Shape, k_len: int, d_k: int, d_v: int, *, bias: bool) -> None:
        import numpy as np

        *heads, _ = lead
        self.q, self.k, self.v = np.zeros((*lead, d_k)), np.zeros((*heads, k_len, d_k)), np.zeros((*heads, k_len, d_v))
        self.logits: Any = np.zeros((*lead, k_len)) if bias else None
        self.sinks = np.zeros(lead)


class GoldenGradients:
    """The gradients of sum(grad_output * output) for a golden value of all rows, by the names of their arguments.

    shapes are those of the arguments "q", "k", "v", and "bias" and "sinks" where there are such; values are float64
    of these shapes, NaN where a row adds to them that is NaN.
    """

    def __init__(self, exact: Golden, grad_output: Array, shapes: dict[str, Shape]) -> None:
        import numpy as np

        self._exact, self._shapes = exact, shapes
        self._rows = exact.results(...)
        self._seen = exact.visible_pairs()
        gradient = np.reshape(np.asarray(grad_output, dtype=np.float64), self._rows.output.shape)
        lost = np.any(self._seen, axis=-1) & ~np.all(np.isfinite(gradient), axis=-1)  # an empty row adds 0 (D3)
        self._gradient, self._broken = bounds.finite(gradient), exact.is_nan | lost
        self._lead: Shape = self._rows.output.shape[:-1]
        self._row_sum = np.zeros(self._lead)  # D
        for pairs in self._pairs():
            self._row_sum[pairs.at] += np.sum(pairs.weights * pairs.products, axis=-1)
        self._sums = self._new()
        for pairs in self._pairs():
            logits = pairs.weights * (pairs.products - self._row_sum[pairs.at][:, None])
            scores = self._rows.scale * (logits if pairs.slope is None else logits * pairs.slope)
            self._add(self._sums, pairs, scores, pairs.weights, logits)
        self._sink = np.exp(self._rows.sink - self._rows.level) / self._rows.total
        self._sums.sinks = -self._sink * self._row_sum
        self.values = {
            name: np.where(
                self._reached(name, self._broken),
                np.nan,
                np.where(self._reached(name), self._summed(name, self._sums), 0.0),
            )
            for name in shapes
        }

    def bounds(self, dtype: str, model: str | Model = "fused", coherent: bool = False) -> dict[str, Array]:
        """The largest error of each element that the model allows, by name; as for `Golden.bound`.

        0 where every pair that would matter is invisible, infinite where nothing can be judged.
        """
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):  # what overflows has no bound
            return self._bounds(dtype, model, coherent)

    def _bounds(self, dtype: str, model: str | Model, coherent: bool) -> dict[str, Array]:
        """`bounds`, under its caller's floating-point settings."""
        import numpy as np

        chosen = rounding_model(dtype, model, coherent)
        u = wear(chosen.arithmetic)
        lse = np.reshape(self._exact.lse_bound(dtype, model, coherent), self._lead)  # rank 2 has no head axis
        loose = ~np.isfinite(lse) | self._broken
        for pairs in self._pairs():  # G . v, its distance from D or that times the scale beyond the arithmetic's range
            size = 2 * max(1.0, abs(self._rows.scale)) * np.abs(pairs.gradient) @ np.abs(bounds.finite(pairs.block.v)).T
            loose[pairs.at] |= np.any((size > chosen.largest) & pairs.block.visible, axis=-1)
        output = np.reshape(self._exact.bound(dtype, model, coherent), self._rows.output.shape)
        loose |= ~np.all(np.isfinite(output), axis=-1)
        lse = np.where(loose, 0.0, lse)
        row_sum = self._row_sum_error(chosen, lse, output)
        errors, sizes = self._new(), self._new()
        for pairs in self._pairs():
            weights, grown, products = self._pair_errors(pairs, chosen, lse)
            gap = np.abs(pairs.products - self._row_sum[pairs.at][:, None])
            moved = products + row_sum[pairs.at][:, None]
            logits = pairs.weights * gap
            e = weights * gap + grown * moved + math.expm1(2 * u + _stored(chosen)) * grown * (gap + moved)
            scores, error = logits, e
            if pairs.slope is not None:
                steep = self._slope_error(pairs, chosen)
                scores, error = logits * pairs.slope, e * pairs.slope + (logits + e) * steep
            error = error + _stored(chosen) * scores
            scale = abs(self._rows.scale)
            lost = np.minimum(scale * (scores + error), 2 * chosen.least_weight * max(1.0, scale))
            self._add(errors, pairs, scale * error + lost, weights, e, size=True)
            self._add(sizes, pairs, scale * (scores + error), grown, logits + e, size=True)
        sink = np.minimum(bounds.sink_error(self._rows, chosen) + lse + 3 * u + _stored(chosen), bounds.LARGEST_ERROR)
        sunk = self._sink * np.exp(sink)
        errors.sinks = self._sink * np.expm1(sink) * np.abs(self._row_sum) + sunk * row_sum
        sizes.sinks = sunk * (np.abs(self._row_sum) + row_sum)
        return {name: self._bound(name, errors, sizes, chosen, loose) for name in self._shapes}

    def _pairs(self) -> Iterator[Pairs]:
        """All blocks of rows and keys that see each other."""
        import numpy as np

        for at, keys, block in self._exact.blocks():
            rows, gradient = self._exact.results(at), self._gradient[at]
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # invisible values may be huge
                weights = np.exp(block.logits - rows.level[:, None]) / rows.total[:, None]
                products = np.where(block.visible, gradient @ bounds.finite(block.v).T, 0.0)
            slope = None if rows.softcap is None else 1 - (bounds.finite(block.capped) / rows.softcap) ** 2
            yield Pairs(at, at[:-1], keys, block, gradient, weights, products, slope)

    def _new(self) -> Sums:
        widths = self._rows.d_k, self._rows.output.shape[-1]
        return Sums(self._lead, self._exact.k_len, *widths, bias="bias" in self._shapes)

    def _add(self, sums: Sums, pairs: Pairs, scores: Array, weights: Array, logits: Array, size: bool = False) -> None:
        """What pairs add to the gradients, or with `size` to the sum of the sizes of all terms."""
        import numpy as np

        q, k, gradient = pairs.block.q, pairs.block.k, pairs.gradient
        if size:
            q, k, gradient = np.abs(q), np.abs(k), np.abs(gradient)
        sums.q[pairs.at] += scores @ k
        sums.k[pairs.head][pairs.keys] += scores.T @ q
        sums.v[pairs.head][pairs.keys] += weights.T @ gradient
        if sums.logits is not None:
            sums.logits[(*pairs.at, pairs.keys)] = logits

    def _pair_errors(self, pairs: Pairs, model: Rounding, lse: Array) -> tuple[Array, Array, Array]:
        """The largest error of each weight, the largest it can be, and the largest error of gradient . v."""
        import numpy as np

        u, rows = wear(model.arithmetic), self._exact.results(pairs.at)
        with np.errstate(over="ignore", invalid="ignore"):
            error = bounds.logit_error(rows, pairs.block, model) + lse[pairs.at][:, None] + 3 * u + _stored(model)
            size = np.abs(pairs.gradient) @ np.abs(bounds.finite(pairs.block.v)).T
            products = math.expm1(model.of_sum(pairs.gradient.shape[-1]) + u + model.operands) * size
        weights = pairs.weights * np.expm1(np.minimum(error, bounds.LARGEST_ERROR))
        # What is left of a weight below the smallest number may be 0, whatever it meets next.
        weights += np.minimum(pairs.weights + weights, 2 * model.least_weight)
        products = np.where(pairs.block.visible, products + _stored(model) * np.abs(pairs.products), 0.0)
        return weights, pairs.weights + weights, products

    def _row_sum_error(self, model: Rounding, lse: Array, output: Array) -> Array:
        """The largest error of D, whichever of the two ways it is computed, (..., H, R)."""
        import numpy as np

        u = wear(model.arithmetic)
        moved, size = np.zeros(self._lead), np.zeros(self._lead)
        for pairs in self._pairs():
            weights, grown, products = self._pair_errors(pairs, model, lse)
            moved[pairs.at] += np.sum(weights * np.abs(pairs.products) + grown * products, axis=-1)
            size[pairs.at] += np.sum(grown * (np.abs(pairs.products) + products), axis=-1)
        by_keys = moved + math.expm1(min(1.0, model.of_sum(self._exact.k_len) + 2 * u + _stored(model))) * size
        gradient, output = np.abs(self._gradient), np.where(np.isfinite(output), output, 0.0)
        size = np.sum(gradient * (np.abs(self._rows.output) + output), axis=-1)
        by_width = np.sum(gradient * output, axis=-1)
        by_width += math.expm1(min(1.0, model.of_sum(gradient.shape[-1]) + u + _stored(model))) * size
        return np.maximum(by_keys, by_width) + _stored(model) * np.abs(self._row_sum)

    def _slope_error(self, pairs: Pairs, model: Rounding) -> Array:
        """The largest error of the soft cap's slope: what the score's own error makes of it, and its roundings."""
        import numpy as np

        rows = self._exact.results(pairs.at)
        cap = float(rows.softcap or 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            come = bounds.score_error(rows, pairs.block, model) / cap
        share = np.abs(bounds.finite(pairs.block.capped)) / cap
        if cap < model.smallest:  # which stands for it in the arithmetic
            return np.ones_like(share)
        return np.minimum(1.0, come) + (10 * share + 3) * model.arithmetic + 4 * share * _stored(model)

    def _bound(self, name: str, errors: Sums, sizes: Sums, model: Rounding, loose: Array) -> Array:
        """The bound of one gradient as it is stored."""
        import numpy as np

        u, value = wear(model.arithmetic), self.values[name]
        met, open_ = self._reached(name), self._reached(name, loose)
        casts = model.weight if name in "qkv" else 0.0
        relative = math.expm1(min(bounds.LARGEST_ERROR, model.of_sum(self._terms(name)) + 3 * u + casts))
        with np.errstate(over="ignore"):
            computed = self._summed(name, errors) + relative * self._summed(name, sizes)
            if model.stored:  # each query head's part on its own, before they are summed
                computed = computed + model.storage * self._summed(name, self._sizes_of(self._sums))
            bound = computed * (1 + model.storage) + model.storage * np.abs(value) + 2 * model.least
            open_ = open_ | (self._summed(name, sizes) > model.largest)
        bound = np.where(met, bound * model.reference, 0.0)
        return np.where(open_ | np.isnan(bound), np.inf, bound)

    def _terms(self, name: str) -> int:
        """How many terms one element sums."""
        shape, (*heads, q_len) = self._shapes[name], self._lead
        if name == "bias":
            return math.prod(self._lead) * self._exact.k_len // max(1, math.prod(shape))
        repeated = math.prod(heads) // max(1, math.prod(shape if name == "sinks" else shape[:-2]))
        return max(1, repeated) * (self._exact.k_len if name == "q" else q_len)

    def _reached(self, name: str, rows: Array | None = None) -> Array:
        """Which elements a visible pair adds to, of any row or of some, (..., H, R) bool."""
        import numpy as np

        pairs, marks = self._seen if rows is None else self._seen & rows[..., None], self._new()
        marks.q[...] = np.any(pairs, axis=-1)[..., None]
        marks.k[...] = marks.v[...] = np.any(pairs, axis=-2)[..., None]
        marks.logits = pairs.astype(np.float64) if name == "bias" else None
        sunk = np.isfinite(self._rows.sink) | (self._broken if rows is None else rows)  # NaN is -inf there
        marks.sinks = np.any(pairs, axis=-1) & sunk
        return np.asarray(self._summed(name, marks) > 0)

    def _sizes_of(self, sums: Sums) -> Sums:
        """The sizes of sums."""
        import numpy as np

        found = self._new()
        for name, x in vars(sums).items():
            setattr(found, name, None if x is None else np.abs(x))
        return found

    def _summed(self, name: str, sums: Sums) -> Array:
        """One of the sums, over the heads of a group and whatever is broadcast, in the argument's shape."""
        import numpy as np

        shape = self._shapes[name]
        x = sums.logits if name == "bias" else getattr(sums, name)
        if name in ("k", "v") and len(shape) > 2 and shape[-3]:
            batch, (heads, *rest) = x.shape[:-3], x.shape[-3:]
            x = np.sum(x.reshape(*batch, shape[-3], heads // shape[-3], *rest), axis=-3)
        if name == "sinks":
            return np.sum(x, axis=(*range(x.ndim - 2), -1)).reshape(shape)
        extra = x.ndim - len(shape)
        axes = tuple(a for a in range(x.ndim) if a < extra or (shape[a - extra] == 1 and x.shape[a] != 1))
        return np.sum(x, axis=axes, keepdims=True).reshape(shape)


def _stored(model: Rounding) -> float:
    """What storing a number on the way does to it."""
    return wear(model.storage) if model.stored else 0.0
