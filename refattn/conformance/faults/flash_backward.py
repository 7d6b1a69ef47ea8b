"""Faults of a backward pass as fused kernels have it: weights from the forward pass's log-sum-exp, tile by tile."""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.backward import Backward
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import Plain, diagonal_moved

# Numbers of queries or keys that such a kernel takes at a time.
TILES = (16, 32, 64, 128)


class FromLogSumExp(Backward):
    """The log-sum-exp and the row sums are those of a right forward pass, whatever the backward pass sees."""

    def __init__(self, q: Array, k: Array, v: Array, gradient: Array, **options: Any) -> None:
        super().__init__(q, k, v, gradient, **options)
        right = Plain(q, k, v, **options)
        seen = right.visible()
        x = right.hidden(right.logits(seen), seen)
        sink = None if self.sinks is None else self.sink()
        self.known_weights, self.known_lse = right.softmax(x, seen & (x == x), sink)

    def softmax(self, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
        """Weights that need not sum to 1."""
        return self.xp.exp(x - self.level(self.known_lse)[..., None]), self.known_lse

    def row_sum(self, weights: Array, products: Array) -> Array:
        """gradient . output."""
        return super().row_sum(self.known_weights, self.row_products())


def _without_causal(self: Any) -> Array:
    return self.key_positions() == self.key_positions()


def _last(length: int, tile: int) -> slice:
    """What the last tile holds."""
    return slice((length - 1) // tile * tile, length)


def _last_keys_alone(tile: int) -> Any:
    def of_queries(self: Any, scores: Array) -> Array:
        keys = _last(self.k_len, tile)
        return self.xp.matmul(scores[..., keys], self.finite(self.k)[..., keys, :]) * self.factor()

    return of_queries


def _last_queries_alone(tile: int) -> Any:
    def over_queries(self: Any, pairs: Array, x: Array) -> Array:
        rows = _last(self.q_len, tile)
        return Backward.over_queries(self, pairs[..., rows, :], x[..., rows, :])

    return over_queries


def _fault(name: str, clause: str, base: type[Plain] = Backward, **others: Any) -> Fault:
    return Fault(name=name, clause=clause, kind="gradients", base=base, backward=True, **others)


FAULTS = (
    *(
        _fault(f"{name}, by the log-sum-exp", "D1", FromLogSumExp, steps={"causal_pairs": pairs})
        for name, pairs in (
            ("gradients without causal", _without_causal),
            ("gradients see the next", diagonal_moved(1)),
            ("gradients miss the own key", diagonal_moved(-1)),
        )
    ),
    *(
        _fault(f"dq of the last {tile} keys alone", "D1", steps={"of_queries": _last_keys_alone(tile)})
        for tile in TILES
    ),
    *(
        _fault(f"dk and dv of the last {tile} queries alone", "D1", steps={"over_queries": _last_queries_alone(tile)})
        for tile in TILES
    ),
)
