"""Faults of the gradients, the output being right (chapter D), and of what a library differentiates by itself."""

from __future__ import annotations

from typing import Any

from refattn import pipeline
from refattn.arrays import Array
from refattn.conformance.faults.backward import Backward
from refattn.conformance.faults.fault import Fault, Patch
from refattn.conformance.faults.pipeline import Plain, diagonal_moved
from refattn.dtypes import LOW


def _dq_unscaled(self: Any, scores: Array) -> Array:
    return self.xp.matmul(scores, self.finite(self.k))


def _dk_unscaled(self: Any, scores: Array) -> Array:
    return self.over_queries(scores, self.finite(self.q))


def _dk_of_raw_queries(self: Any, scores: Array) -> Array:
    return self.over_queries(scores, self.q) * self.factor()


def _dk_scaled_twice(self: Any, scores: Array) -> Array:
    return Backward.of_keys(self, scores) * self.factor()


def _untransposed(self: Any, pairs: Array, x: Array) -> Array:
    return self.xp.matmul(pairs, x) if self.q_len == self.k_len else Backward.over_queries(self, pairs, x)


def _dk_untransposed(self: Any, scores: Array) -> Array:
    return _untransposed(self, scores, self.finite(self.q)) * self.factor()


def _dv_untransposed(self: Any, weights: Array) -> Array:
    return _untransposed(self, weights, self.gradient)


def _over_strides(self: Any, x: Array) -> Array:
    *batch, heads, length, width = x.shape
    return self.xp.sum(self.xp.reshape(x, (*batch, heads // self.kv_heads, self.kv_heads, length, width)), axis=-4)


def _no_row_sum(self: Any, weights: Array, products: Array) -> Array:
    return 0.0 * Backward.row_sum(self, weights, products)


def _row_mean(self: Any, weights: Array, products: Array) -> Array:
    return self.xp.mean(products, axis=-1, keepdims=True)


def _of_some(names: str, combine: Any) -> Any:
    """Another way over the broadcast axes of these arguments alone."""

    def summed(self: Any, x: Array, name: str) -> Array:
        if name not in names.split():
            return Backward.summed(self, x, name)
        shape = tuple(self.given[name].shape)
        wanted = (1,) * (x.ndim - len(shape)) + shape
        axes = tuple(axis for axis in range(x.ndim) if wanted[axis] == 1 != x.shape[axis])
        return self.xp.reshape(combine(self.xp, x, axes), shape)

    return summed


def _first_of_axes(xp: Any, x: Array, axes: tuple[int, ...]) -> Array:
    return x[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))]


def _mean_of_axes(xp: Any, x: Array, axes: tuple[int, ...]) -> Array:
    return xp.mean(x, axis=axes, keepdims=True) if axes else x


def _as_they_are(self: Any, weights: Array, seen: Array) -> Array:
    return weights


def _nan_total(self: Any) -> float:
    return 0.0


def _some_rows_uniform(self: Any, weights: Array, seen: Array) -> Array:
    """A large finite number in place of -inf gives rows that see nothing the mean of all values."""
    some = self.xp.any(seen, axis=-1, keepdims=True)
    return self.xp.where(some, self.selected(weights, seen), 1.0 / self.k_len)


def _raw_products(self: Any) -> Array:
    return self.products(self.gradient, self.v)


def _unselected(self: Any, x: Array, seen: Array) -> Array:
    return x * self.xp.astype(seen, self.wide)


def _raw_keys(self: Any, scores: Array) -> Array:
    return self.xp.matmul(scores, self.k) * self.factor()


def _without_causal(self: Any) -> Array:
    causal, self.causal = self.causal, False
    seen = Plain.visible(self)
    self.causal = causal
    return seen


def _swapped(self: Any) -> dict[str, Array]:
    found = Backward.wide_gradients(self)
    return {**found, "k": found["v"], "v": found["k"]}


def _no_slope(self: Any) -> Any:
    return 1.0


def _slope_of_one_plus(self: Any) -> Any:
    slope = Backward.slope(self)
    return slope if self.softcap is None else 2.0 - slope


def _sink_sign(self: Any, sink: Array, lse: Array, row_sum: Array) -> Array:
    return -Backward.of_sinks(self, sink, lse, row_sum)


def _sink_without_sink(self: Any, x: Array, seen: Array, sink: Array | None) -> Any:
    weights, _ = Plain.softmax(self, x, seen, None)
    return weights, Plain.softmax(self, x, seen, sink)[1]


def _bias_before_softmax(self: Any, logits: Array) -> Array:
    return logits * self.factor()


def _sums_stored_low(self: Any, pairs: Array, x: Array) -> Array:
    total = self.rounded(self.over_one(pairs, x, 0))
    for row in range(1, self.q_len):
        total = self.rounded(total + self.over_one(pairs, x, row))
    return total


def _over_one(self: Any, pairs: Array, x: Array, row: int) -> Array:
    return self.xp.matrix_transpose(pairs[..., row : row + 1, :]) * x[..., row : row + 1, :]


def _in_float32(self: Any, q: Array) -> Any:
    return self.xp.float32


def _as_computed(self: Any, name: str, x: Array) -> Array:
    return x


def _zero_filled_late(call: Any, x: Array) -> tuple[Array, Array | None]:
    """What is not finite is left out after it was computed with: right, but for derivatives."""
    xp = call.library.xp
    return xp.where(xp.isfinite(x), x + 0.0 * x * x, 0.0), _FILLED(call, x)[1]


_FILLED = pipeline.zero_filled


def _fault(name: str, clause: str, **others: Any) -> Fault:
    return Fault(name=name, clause=clause, kind="gradients", base=Backward, backward=True, **others)


FAULTS = (
    _fault("scale missing from dq", "D1", steps={"of_queries": _dq_unscaled}),
    _fault("scale missing from dk", "D1", steps={"of_keys": _dk_unscaled}),
    _fault("scale twice in dk", "D1", steps={"of_keys": _dk_scaled_twice}),
    _fault("dk without the transpose", "D1", steps={"of_keys": _dk_untransposed}),
    _fault("dv without the transpose", "D1", steps={"of_values": _dv_untransposed}),
    _fault("row sum missing", "D1", steps={"row_sum": _no_row_sum}),
    _fault("row sum is a mean", "D1", steps={"row_sum": _row_mean}),
    _fault("gradients without causal", "D1", steps={"visible": _without_causal}),
    _fault("gradients see the next", "D1", steps={"causal_pairs": diagonal_moved(1)}),
    _fault("gradients miss the own key", "D1", steps={"causal_pairs": diagonal_moved(-1)}),
    _fault("dk and dv swapped", "D1", steps={"wide_gradients": _swapped}),
    _fault("gradients of another dtype", "D1", dtypes=LOW, steps={"stored_as": _as_computed}),
    _fault("first head of a group alone", "D2", steps={"combined": lambda self, parts: parts[..., 0, :, :]}),
    _fault("groups summed by stride", "D2", steps={"over_group": _over_strides}),
    _fault("mean over a group", "D2", steps={"combined": lambda self, parts: self.xp.mean(parts, axis=-3)}),
    _fault("bias gradient not summed", "D2", steps={"summed": _of_some("bias", _first_of_axes)}),
    _fault("mean over broadcast axes of a bias", "D2", steps={"summed": _of_some("bias", _mean_of_axes)}),
    _fault("shared batch entries not summed", "D2", steps={"summed": _of_some("k v", _first_of_axes)}),
    _fault(
        "gradients of NaN in empty rows",
        "D3",
        steps={"kept_weights": _as_they_are, "empty_total": _nan_total, "selected": lambda self, x, seen: x},
    ),
    _fault("empty rows have gradients", "D3", steps={"kept_weights": _some_rows_uniform}),
    _fault("gradients leak from queries", "D3", steps={"of_keys": _dk_of_raw_queries}),
    _fault("gradients leak from v", "D4", steps={"row_products": _raw_products, "selected": _unselected}),
    _fault("gradients leak from k", "D4", steps={"of_queries": _raw_keys}),
    _fault("no slope of the cap", "D5", steps={"slope": _no_slope}),
    _fault("slope of the cap has the other sign", "D5", steps={"slope": _slope_of_one_plus}),
    _fault("sign of the sinks' gradient", "D6", steps={"of_sinks": _sink_sign}),
    _fault("gradients without sinks", "D6", steps={"softmax": _sink_without_sink}),
    _fault("scale in the bias gradient", "D7", steps={"of_bias": _bias_before_softmax}),
    _fault(
        "gradients summed in 16 bits", "D8", dtypes=LOW, steps={"over_queries": _sums_stored_low, "over_one": _over_one}
    ),
    _fault("float64 gradients in float32", "D8", dtypes=("float64",), steps={"compute_in": _in_float32}),
    Fault(
        name="non-finite data are zeroed late",
        clause="D9",
        kind="gradients",
        dtypes=("float64",),
        libraries=("torch", "jax"),
        patches=(Patch(pipeline, "zero_filled", _zero_filled_late),),
    ),
)
