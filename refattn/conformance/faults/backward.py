"""Gradients written out plainly, in steps that can be replaced: what faults of derivatives are made of.

It shares no code with refattn's own, so that it is also a right implementation for the judge to acquit.
"""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array, quiet
from refattn.conformance.faults.pipeline import Plain


class Backward(Plain):
    """One call and the gradient of its output: the gradients of q, k, v, bias and sinks, by name."""

    def __init__(self, q: Array, k: Array, v: Array, gradient: Array, **options: Any) -> None:
        self.given = {"q": q, "k": k, "v": v}
        self.given |= {name: x for name in ("bias", "sinks") if (x := options.get(name)) is not None}
        super().__init__(q, k, v, **options)
        gradient = self.xp.astype(gradient, self.wide)
        self.gradient = gradient[None, :, :] if self.flat else gradient

    def gradients(self) -> dict[str, Array]:
        """The gradients, each in the shape and dtype of its argument."""
        with quiet(self.library):
            found = self.wide_gradients() if self.k_len and self.q_len else self.nothing()
            return {name: self.stored_as(name, x) for name, x in found.items()}

    def nothing(self) -> dict[str, Array]:
        """Zeros."""
        return {name: self.full(tuple(x.shape), 0.0) for name, x in self.given.items()}

    def wide_gradients(self) -> dict[str, Array]:
        """The gradients in the compute dtype."""
        seen = self.visible()
        x = self.hidden(self.logits(seen), seen)
        seen = seen & (x == x)
        sink = None if self.sinks is None else self.sink()
        weights, lse = self.softmax(x, seen, sink)
        weights = self.kept_weights(weights, seen)
        products = self.selected(self.row_products(), seen)
        row_sum = self.row_sum(weights, products)
        logits = self.selected(weights * (products - row_sum), seen)
        scores = self.selected(logits * self.slope(), seen)
        found = {
            "q": self.summed(self.of_queries(scores), "q"),
            "k": self.summed(self.over_group(self.of_keys(scores)), "k"),
            "v": self.summed(self.over_group(self.of_values(weights)), "v"),
        }
        if self.bias is not None:
            found["bias"] = self.summed(self.of_bias(logits), "bias")
        if sink is not None:
            found["sinks"] = self.of_sinks(sink, lse[..., None], row_sum)
        return found

    def kept_weights(self, weights: Array, seen: Array) -> Array:
        """Weights, 0 at invisible pairs."""
        return self.selected(weights, seen)

    def selected(self, x: Array, seen: Array) -> Array:
        """x, and 0 at invisible pairs."""
        return self.xp.where(seen, x, 0.0)

    def row_products(self) -> Array:
        """gradient . v for every pair."""
        return self.products(self.gradient, self.finite(self.v))

    def row_sum(self, weights: Array, products: Array) -> Array:
        """The sum over the keys that softmax subtracts, (..., H, Lq, 1)."""
        return self.xp.sum(weights * products, axis=-1, keepdims=True)

    def slope(self) -> Any:
        """That of the soft cap."""
        if self.softcap is None:
            return 1.0
        tanh = self.xp.tanh(self.scaled(self.scores()) / self.softcap)
        return 1.0 - tanh * tanh

    def of_queries(self, scores: Array) -> Array:
        """(..., H, Lq, d_k)."""
        return self.xp.matmul(scores, self.finite(self.k)) * self.factor()

    def of_keys(self, scores: Array) -> Array:
        """(..., H, Lk, d_k)."""
        return self.over_queries(scores, self.finite(self.q)) * self.factor()

    def of_values(self, weights: Array) -> Array:
        """(..., H, Lk, d_v)."""
        return self.over_queries(weights, self.gradient)

    def over_queries(self, pairs: Array, x: Array) -> Array:
        """pairs^T x."""
        return self.xp.matmul(self.xp.matrix_transpose(pairs), x)

    def of_bias(self, logits: Array) -> Array:
        """(..., H, Lq, Lk)."""
        return logits

    def of_sinks(self, sink: Array, lse: Array, row_sum: Array) -> Array:
        """(H,), or the shape of sinks."""
        share = self.xp.exp(sink - self.level(lse))
        whole = -share * row_sum  # (..., H, Lq, 1)
        whole = self.xp.sum(whole, axis=(*range(whole.ndim - 3), -2, -1))
        return self.xp.reshape(whole, tuple(self.given["sinks"].shape))

    def over_group(self, x: Array) -> Array:
        """The heads of a group summed: (..., Hkv, Lk, width)."""
        *batch, heads, length, width = x.shape
        parts = self.xp.reshape(x, (*batch, self.kv_heads, heads // self.kv_heads, length, width))
        return self.combined(parts)

    def combined(self, parts: Array) -> Array:
        """The heads of a group, axis -3, as one."""
        return self.xp.sum(parts, axis=-3)

    def summed(self, x: Array, name: str) -> Array:
        """x summed over the axes along which the argument was broadcast."""
        shape = tuple(self.given[name].shape)
        wanted = (1,) * (x.ndim - len(shape)) + shape
        axes = tuple(axis for axis in range(x.ndim) if wanted[axis] == 1 != x.shape[axis])
        return self.xp.reshape(self.xp.sum(x, axis=axes, keepdims=True) if axes else x, shape)

    def stored_as(self, name: str, x: Array) -> Array:
        """The gradient in the dtype of its argument."""
        return self.xp.astype(x, self.given[name].dtype)
