"""Attention written out plainly on any array library, in steps that can be replaced: what faults are made of.

It shares no code with refattn's own pipeline, so that it is also a right implementation for the judge to acquit.
`Tiled` computes the softmax tile by tile, `Split` merges two halves of the keys, `Unfused` stores scores and weights
in the dtype of q.
"""

from __future__ import annotations

import math
from typing import Any

from refattn.arrays import Array, device_of, library_of, quiet
from refattn.dtypes import compute_dtype

INF = float("inf")


def shortened(x: Array, bits: int) -> Array:
    """x with so many bits fewer in its significand, rounded to nearest; needs no narrower dtype."""
    xp = library_of(x, "x").xp
    wide = x * (2.0**bits + 1)
    return xp.where(xp.isfinite(wide), wide - (wide - x), x)


class Plain:
    """One call. Arrays q, k, v are in the compute dtype, with a head axis; k and v have the heads of q."""

    def __init__(self, q: Array, k: Array, v: Array, **options: Any) -> None:
        self.library = library_of(q, "q")
        self.xp, self.device = self.library.xp, device_of(self.library, q)
        self.result, self.wide = q.dtype, self.compute_in(q)
        self.flat = q.ndim == 2
        q, k, v = ((x[None, :, :] if self.flat else x) for x in self.arguments(q, k, v))
        self.heads, self.q_len, self.d_k = q.shape[-3:]
        self.kv_heads, self.k_len = k.shape[-3:-1]
        self.causal, self.mask, self.bias = (options.get(name) for name in ("causal", "mask", "bias"))
        self.scale, self.softcap, self.sinks = (options.get(name) for name in ("scale", "softcap", "sinks"))
        self.q_start, self.k_start = options.get("q_start"), options.get("k_start", 0)
        self.q, self.k, self.v = (self.xp.astype(x, self.wide) for x in (q, k, v))
        if self.heads != self.kv_heads:
            chosen = self.integers([self.kv_head(h) for h in range(self.heads)])
            self.k, self.v = (self.xp.take(x, chosen, axis=-3) for x in (self.k, self.v))

    def run(self) -> tuple[Array, Array]:
        """Output and log-sum-exp."""
        with quiet(self.library):
            seen = self.visible()
            output, lse = self.attend(self.hidden(self.logits(seen), seen), seen)
            output, lse = self.output(output, seen), self.lse(lse)
        return (output[0, ...], lse[0, ...]) if self.flat else (output, lse)

    # ---- before the scores

    def arguments(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """The arrays as they are read from memory."""
        return q, k, v

    def compute_in(self, q: Array) -> Any:
        """The dtype of everything between the arguments and the result."""
        return compute_dtype(self.xp, q.dtype)

    def kv_head(self, h: int) -> int:
        """The key/value head of a query head."""
        return int(h // (self.heads // self.kv_heads))

    def visible(self) -> Array:
        """Which pairs count, broadcastable to (..., H, Lq, Lk): causal, mask, and a bias of -inf."""
        seen = self.xp.ones((1, self.k_len), dtype=self.xp.bool, device=self.device)
        if self.causal:
            seen = self.causal_pairs()
        if self.mask is not None:
            seen = seen & self.masked_pairs()
        if self.bias is not None:
            seen = seen & self.biased_pairs()
        return seen

    def causal_pairs(self) -> Array:
        """Key position <= query position."""
        return self.key_positions() <= self.query_positions()

    def masked_pairs(self) -> Array:
        """The mask as visible pairs."""
        return self.mask

    def biased_pairs(self) -> Array:
        """Where the bias is not -inf."""
        return self.bias != -INF

    def query_positions(self) -> Array:
        """(..., Lq, 1)."""
        return self.integers(range(self.q_len))[:, None] + self.start(0 if self.q_start is None else self.q_start)

    def key_positions(self) -> Array:
        """(..., 1, Lk)."""
        return self.integers(range(self.k_len))[None, :] + self.start(self.k_start)

    def start(self, start: Any) -> Any:
        """A start as an int, or (batch, 1, 1, 1)."""
        if isinstance(start, int):
            return start
        return self.xp.reshape(self.integers([int(one) for one in start.reshape(-1)]), (*start.shape, 1, 1, 1))

    # ---- from scores to logits

    def logits(self, seen: Array) -> Array:
        """Scores, scale, soft cap, bias: in this order."""
        x = self.scaled(self.scores())
        x = x if self.softcap is None else self.capped(x)
        return x if self.bias is None else self.biased(x, seen)

    def scores(self) -> Array:
        """q . k, NaN where a key has a non-finite component."""
        scores = self.products(self.q, self.finite(self.k))
        broken = ~self.xp.all(self.xp.isfinite(self.k), axis=-1)[..., None, :]
        return self.stored(self.xp.where(broken, float("nan"), scores))

    def products(self, q: Array, k: Array) -> Array:
        """(..., H, Lq, Lk)."""
        return self.xp.matmul(q, self.xp.matrix_transpose(k))

    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.default_scale() if self.scale is None else self.scale

    def default_scale(self) -> float:
        """1/sqrt(d_k)."""
        return 1 / math.sqrt(self.d_k) if self.d_k else 1.0

    def scaled(self, x: Array) -> Array:
        """Scores times scale."""
        return self.stored(x * self.factor())

    def capped(self, x: Array) -> Array:
        """c tanh(x / c)."""
        return self.stored(self.xp.tanh(x / self.softcap) * self.softcap)

    def biased(self, x: Array, seen: Array) -> Array:
        """Plus the bias, where the pair is visible."""
        return self.stored(x + self.xp.where(seen, self.summand(), 0.0))

    def summand(self) -> Array:
        """What is added to the capped scores."""
        return self.xp.astype(self.bias, self.wide)

    def hidden(self, x: Array, seen: Array) -> Array:
        """-inf at invisible pairs."""
        return self.xp.where(seen, x, -INF)

    def stored(self, x: Array) -> Array:
        """How scores and weights are kept."""
        return x

    # ---- softmax and the weighted sum

    def attend(self, x: Array, seen: Array) -> tuple[Array, Array]:
        """Output, but for non-finite values, and log-sum-exp, from logits (..., H, Lq, Lk)."""
        sink = None if self.sinks is None else self.sink()
        if not self.k_len:
            x = self.xp.concat((x, self.full((*x.shape[:-1], 1), -INF)), axis=-1)  # a key that weighs nothing
            self.v = self.full((*self.v.shape[:-2], 1, self.v.shape[-1]), 0.0)
        weights, lse = self.softmax(x, seen, sink)
        return self.weighted(self.stored(weights), self.finite(self.v)), lse

    def sink(self) -> Array:
        """(H, 1, 1)."""
        return self.xp.reshape(self.xp.astype(self.sinks, self.wide), (-1, 1, 1))

    def softmax(self, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
        """Weights and log-sum-exp."""
        peak = self.level(self.peak(x, sink))
        weights = self.xp.exp(x - peak)
        total = self.sum(weights)
        if sink is not None:
            total = total + self.sink_share(sink, peak)
        nothing = total == 0.0
        some = self.xp.any(seen, axis=-1, keepdims=True)
        total = self.xp.where(nothing & some, float("nan"), total)  # nothing but visible logits of -inf
        return weights / self.xp.where(nothing & ~some, self.empty_total(), total), self.log_sum(total, peak)[..., 0]

    def peak(self, x: Array, sink: Array | None) -> Array:
        """The largest logit of each row, (..., H, Lq, 1)."""
        peak = self.xp.max(x, axis=-1, keepdims=True)
        return peak if sink is None else self.xp.maximum(peak, sink)

    def level(self, peak: Array) -> Array:
        """What is subtracted from a row before the exponential."""
        return self.xp.where(peak == -INF, 0.0, peak)

    def sum(self, weights: Array) -> Array:
        """The sum over the keys, (..., H, Lq, 1)."""
        return self.xp.sum(weights, axis=-1, keepdims=True)

    def sink_share(self, sink: Array, peak: Array) -> Array:
        """What a sink adds to the denominator."""
        return self.xp.exp(sink - peak)

    def empty_total(self) -> float:
        """What the weights of a row that sees nothing are divided by."""
        return 1.0

    def log_sum(self, total: Array, peak: Array) -> Array:
        """The log-sum-exp, (..., H, Lq, 1)."""
        return self.xp.log(total) + peak

    def weighted(self, weights: Array, v: Array) -> Array:
        """The weighted sum of values, (..., H, Lq, d_v)."""
        return self.xp.matmul(weights, v)

    # ---- the result

    def output(self, output: Array, seen: Array) -> Array:
        """The output in the result's dtype, with what visible non-finite values make of it."""
        return self.xp.astype(self.restored(output, seen), self.result)

    def restored(self, output: Array, seen: Array) -> Array:
        """NaN, +inf or -inf where a visible value is that, NaN where both infinities meet."""
        xp, v = self.xp, self.v[..., None, :, :]  # (..., H, 1, Lk, d_v)
        if bool(xp.all(xp.isfinite(v))):
            return output
        pairs = seen[..., None]
        up, down, nan = (xp.any(pairs & met, axis=-2) for met in (v == INF, v == -INF, xp.isnan(v)))
        output = xp.where(up, INF, xp.where(down, -INF, output))
        return xp.where(nan | (up & down), float("nan"), output)

    def lse(self, lse: Array) -> Array:
        """The log-sum-exp as it is returned."""
        return lse

    # ---- small help

    def finite(self, x: Array) -> Array:
        """x with 0 for NaN and infinities."""
        return self.xp.where(self.xp.isfinite(x), x, 0.0)

    def integers(self, values: Any) -> Array:
        """A 1-D array of ints."""
        return self.xp.asarray([*values], dtype=self.xp.int64, device=self.device)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """An array of one value in the compute dtype."""
        return self.xp.full(shape, value, dtype=self.wide, device=self.device)

    def rounded(self, x: Array) -> Array:
        """x rounded to the dtype of q, in the compute dtype."""
        return self.xp.astype(self.xp.astype(x, self.result), self.wide)


def diagonal_moved(by: int) -> Any:
    """A step `causal_pairs` that shows so many keys more than those up to the query's own."""
    return lambda run: run.key_positions() <= run.query_positions() + by


class Unfused(Plain):
    """Scores and weights are stored in the dtype of q, as an eager implementation has them."""

    def stored(self, x: Array) -> Array:
        """Rounded to the dtype of q."""
        return self.rounded(x)


class Tiled(Plain):
    """Online softmax over tiles of keys; the last tile is filled up with keys of zeros, whose logits are hidden."""

    tile = 64

    def attend(self, x: Array, seen: Array) -> tuple[Array, Array]:
        """Output and log-sum-exp, tile by tile."""
        rows, v = tuple(x.shape[:-1]), self.finite(self.v)
        peak, total = self.full((*rows, 1), self.first_peak()), self.full((*rows, 1), 0.0)
        output = self.full((*rows, self.v.shape[-1]), 0.0)
        for start in self.tiles():
            keys = slice(start, min(start + self.tile, self.k_len))
            part, values = x[..., keys], v[..., keys, :]
            missing = self.tile - part.shape[-1]
            part = self.xp.concat((part, self.full((*rows, missing), self.beyond())), axis=-1)
            values = self.xp.concat((values, self.full((*v.shape[:-2], missing, v.shape[-1]), 0.0)), axis=-2)
            peak, total, output = self.step(part, values, peak, total, output)
        return self.finished(x, seen, peak, total, output)

    def tiles(self) -> range:
        """The first key of each tile."""
        return range(0, self.k_len, self.tile)

    def first_peak(self) -> float:
        """The running maximum before the first tile."""
        return -INF

    def beyond(self) -> float:
        """The logit of a key after the last."""
        return -INF

    def step(self, x: Array, v: Array, peak: Array, total: Array, output: Array) -> tuple[Array, Array, Array]:
        """Running maximum, sum and output after one more tile."""
        higher = self.xp.maximum(peak, self.xp.max(x, axis=-1, keepdims=True))
        weights = self.xp.exp(x - self.level(higher))
        shrink = self.shrink(peak, higher)
        total = total * self.sum_shrink(shrink) + self.sum(weights)
        return higher, total, output * self.output_shrink(shrink) + self.weighted(weights, v)

    def shrink(self, peak: Array, higher: Array) -> Array:
        """What came before is multiplied by it."""
        return self.xp.exp(peak - self.level(higher))

    def sum_shrink(self, shrink: Array) -> Array:
        """The same for the running sum."""
        return shrink

    def output_shrink(self, shrink: Array) -> Array:
        """The same for the running output."""
        return shrink

    def finished(self, x: Array, seen: Array, peak: Array, total: Array, output: Array) -> tuple[Array, Array]:
        """The sink, the division, and the log-sum-exp."""
        level = self.level(peak)
        if self.sinks is not None:
            higher = self.xp.maximum(peak, self.sink())
            level = self.level(higher)
            shrink = self.shrink(peak, higher)
            total, output = total * shrink + self.sink_share(self.sink(), level), output * shrink
        nothing = total == 0.0
        total = self.xp.where(nothing & self.xp.any(seen, axis=-1, keepdims=True), float("nan"), total)
        return output / self.xp.where(total == 0.0, 1.0, total), self.log_sum(total, level)[..., 0]


class Split(Plain):
    """Two halves of the keys on their own, without sinks, merged; the sink comes last."""

    def attend(self, x: Array, seen: Array) -> tuple[Array, Array]:
        """Output and log-sum-exp of the merged halves."""
        if self.k_len < 2:
            return super().attend(x, seen)
        half, v = self.k_len // 2, self.finite(self.v)
        parts = []
        for keys in (slice(0, half), slice(half, None)):
            part = x[..., keys]
            weights, lse = Plain.softmax(self, part, part != -INF, None)
            parts.append((self.weighted(weights, v[..., keys, :]), self.part_lse(lse)))
        output, lse = self.merged(*parts)
        lost = ~self.xp.isnan(lse) & (lse == -INF) & self.xp.any(seen, axis=-1)  # visible logits of -inf alone
        lse = self.xp.where(lost, float("nan"), lse)
        if self.sinks is not None:
            output, lse = self.with_sink(output, lse)
        return self.xp.where(self.xp.isnan(lse)[..., None], float("nan"), output), lse

    def with_sink(self, output: Array, lse: Array) -> tuple[Array, Array]:
        """The sink is one more part, with an output of zero."""
        sink = self.sink()[..., 0]
        sink = self.xp.where(sink == INF, float("nan"), sink) + self.xp.zeros_like(lse)
        lse = self.xp.where(self.xp.isnan(lse) & self.xp.isfinite(sink), -INF, lse)
        return self.merged((self.finite(output), lse), (self.xp.zeros_like(output), sink))

    def part_lse(self, lse: Array) -> Array:
        """The log-sum-exp of a half as it is handed over."""
        return lse

    def merged(self, first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        """Outputs weighted by their shares of the sum of exponentials."""
        level = self.level(self.xp.maximum(first[1], second[1]))
        shares = [self.share(lse, level) for _, lse in (first, second)]
        total = shares[0] + shares[1]
        divisor = self.xp.where(total == 0.0, 1.0, total)[..., None]
        output = (first[0] * shares[0][..., None] + second[0] * shares[1][..., None]) / divisor
        return output, self.xp.log(total) + level

    def share(self, lse: Array, level: Array) -> Array:
        """The weight of a half in the merge, up to a common factor."""
        return self.xp.exp(lse - level)
