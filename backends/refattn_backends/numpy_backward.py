"""The gradients of tiled attention on NumPy: weights again from the log-sum-exp, five products for each tile of pairs.

A job takes a tile of rows of one head group over all its keys. It has the tile's pairs as columns, (K, T * G), so that
keys and values are read as they lie, and the rows, which are few, turned around. Jobs that run at once add to different
sums over rows, and those that add to the same one follow each other, so that no sum's order depends on the threads.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from refattn.arguments import Call
from refattn.arrays import Array, quiet
from refattn.gradients import sink_gradient, summed_to
from refattn.partials import Partial
from refattn.pipeline import zero_filled
from refattn_backends import workers
from refattn_backends.numpy_bias_sums import BiasSums, summable
from refattn_backends.numpy_logits import Options, take
from refattn_backends.numpy_options import options_of
from refattn_backends.numpy_products import by_rows
from refattn_backends.numpy_tiles import at_work, scalable, tiled
from refattn_backends.pieces import KEPT, Shown
from refattn_backends.tiles import shown, spans

ROWS, KEYS = 480, 480  # pairs of one head: two arrays of 900 KiB in float32 at once
EDGE = 240  # rows of a strip along the edge of a mask
FEW = 2**12  # pairs of a head: with no more, all heads are done sooner at once than one by one
JOBS = 16  # so many jobs at once, as far as there are heads and rows for them


class Job(NamedTuple):
    """One thread's work: rows, whose sums over rows they add to, batch entry, key/value head."""

    rows: range
    part: int
    entry: tuple[int, ...]
    head: int


def backward(call: Call, gradient: Array) -> dict[str, Any] | None:
    """All gradients in the compute dtype, as `refattn.attention_vjp` rounds them; None for what others must do.

    That is queries, keys and gradients that are not finite where something is visible, biases whose pairs several
    heads or entries share, scales far from 1, queries at the ends of their range, no pairs or widths, and heads of few
    pairs.
    """
    if 0 in (*call.scores_shape, call.q.shape[-1], call.v.shape[-1]) or not scalable(call.q, call.scale):
        return None
    if prod(call.scores_shape[-2:]) <= FEW or not summable(call):
        return None
    call = call._replace(v=zero_filled(call, call.v)[0])
    return gradients_from(call, gradient, tiled(call))


def gradients_from(call: Call, gradient: Array, forward: Partial) -> dict[str, Any] | None:
    """The backward pass alone: what `backward` gives, from the call's output and log-sum-exp, sinks included."""
    output, lse = forward
    empty: Array = np.isneginf(lse)
    if not np.isfinite(output).all():  # nor is something visible, or a sink
        return None
    if not np.isfinite(gradient).all():
        gradient = np.where(empty[..., None], 0.0, gradient)  # D3
        if not np.isfinite(gradient).all():
            return None
    if (~np.isfinite(call.q) & ~empty[..., None]).any():  # which a cap or a sink may hide from the output
        return None
    with at_work(call) as threads:
        row_sum = np.vecdot(gradient, output)  # (..., H, Lq)
        sums = _Sums(call, gradient, np.where(empty, 0.0, lse), row_sum, threads)
        sums.run()
        wide = {"q": sums.q_sum, "k": sums.k_sums[0], "v": sums.v_sums[0]}
        found: dict[str, Any] = {name: summed_to(np, x, getattr(call, name).shape) for name, x in wide.items()}  # D2
        found["bias"] = sums.bias_sums[0].gradients()
        if call.sinks is not None:
            found["sinks"] = sink_gradient(call, call.sinks, lse[..., None], row_sum[..., None])
    return found


class _Sums:
    """A call cut into jobs, and the sums that these add to."""

    def __init__(self, call: Call, gradient: Array, lse: Array, row_sum: Array, threads: int) -> None:
        self.call, self.threads, self.batch = call, threads, call.scores_shape[:-3]
        heads, q_len, _ = call.scores_shape[-3:]
        self.gradient, self.lse, self.row_sum, self.kv_heads = gradient, lse, row_sum, heads // call.group
        # Invisible data that are not finite: every weight that they have is 0.
        q, k, v = (zero_filled(call, x)[0] for x in (call.q, call.k, call.v))
        self.overflow = _may_overflow(q, k, abs(call.scale)) or _may_overflow(gradient, v)
        self.q, self.k, self.v = (np.broadcast_to(x, (*self.batch, *x.shape[-3:])) for x in (q, k, v))
        self.row_tiles = list(spans(range(q_len), max(1, ROWS // call.group)))
        self.parts = max(1, min(KEPT, len(self.row_tiles), JOBS // (prod(self.batch) * self.kv_heads)))
        self.shown = Shown(call, max(1, EDGE // call.group))
        self.q_sum = np.empty(self.q.shape, call.compute)
        self.k_sums, self.v_sums = (
            [np.zeros(x.shape, call.compute) for _ in range(self.parts)] for x in (self.k, self.v)
        )
        self.bias_sums = [BiasSums(call) for _ in range(self.parts)]

    def run(self) -> None:
        """Runs all jobs; the sums of the first part are then those of all."""
        for tiles in spans(range(len(self.row_tiles)), self.parts):
            jobs = [
                Job(self.row_tiles[tile], part, entry, head)
                for part, tile in enumerate(tiles)
                for entry in np.ndindex(*self.batch)
                for head in range(self.kv_heads)
            ]
            workers.share(self._run, jobs, self.threads)
        every: tuple[list[Any], ...] = (self.k_sums, self.v_sums, self.bias_sums)
        for sums in every:
            while len(sums) > 1:
                sums[0] += sums.pop(1)

    def _run(self, job: Job) -> None:
        with quiet(self.call.library):
            self._job(job)

    def _job(self, job: Job) -> None:
        call, rows, heads = self.call, job.rows, slice(job.head, job.head + 1)
        at_head = (*job.entry, job.head)
        keys = _Keys(*(x[at_head][None] for x in (self.k, self.v, self.k_sums[job.part], self.v_sums[job.part])))
        q, gradient, lse, row_sum = (self._stacked(x, job) for x in (self.q, self.gradient, self.lse, self.row_sum))
        tile = _Tile(q * call.scale, gradient, lse, row_sum, call.group, overflow=self.overflow)
        width = KEYS * max(1, ROWS // q.shape[1])
        tiles = shown(call, rows, range(call.scores_shape[-1]), width)
        for piece in (piece for tile_keys in tiles for piece in self.shown.pieces(rows, tile_keys)):
            at = slice(*((row - rows.start) * call.group for row in (piece.rows.start, piece.rows.stop)))
            part = _Keys(*(x[:, piece.keys.start : piece.keys.stop] for x in keys))
            logits, slope = tile.add_weights(at, part, options_of(call, piece, job.entry, heads))
            if call.bias is not None:
                self.bias_sums[job.part].add(piece, job.entry, self._heads(job), tile.by_pair(logits)[0])
            tile.add_scores(at, part, logits if slope is None else np.multiply(logits, slope, out=logits))
        place = self._place(self.q_sum, job).swapaxes(0, 1)
        np.multiply(tile.q_sum.reshape(place.shape), call.scale, out=place)

    def _stacked(self, x: Array, job: Job) -> Array:
        """A job's rows of an array (..., H, Lq, ...), the heads of a group next to each other: (1, T * G, ...)."""
        x = self._place(x, job).swapaxes(0, 1)
        return x.reshape(1, -1, *x.shape[2:])

    def _place(self, x: Array, job: Job) -> Array:
        """A job's rows (G, T, ...) of an array (..., H, Lq, ...), a view."""
        return x[job.entry][self._heads(job), job.rows.start : job.rows.stop]

    def _heads(self, job: Job) -> slice:
        """The query heads of a job."""
        return slice(job.head * self.call.group, (job.head + 1) * self.call.group)


class _Keys(NamedTuple):
    """Keys and values (1, K, width) of one head, and the sums for them, which are views."""

    k: Array
    v: Array
    k_sum: Array
    v_sum: Array


class _Tile:
    """Rows of a head group: scaled queries (1, n, d_k), gradients of the output (1, n, d_v), two numbers (1, n) each.

    With overflow, invisible pairs may have scores or products that are not finite.
    """

    def __init__(self, q: Array, gradient: Array, lse: Array, row_sum: Array, group: int, *, overflow: bool) -> None:
        self._q, self._gradient, self._lse, self._row_sum = q, gradient, lse, row_sum
        self._group, self._overflow = group, overflow
        self._q_columns, self._gradient_columns = (np.ascontiguousarray(x.mT) for x in (q, gradient))
        self.q_sum = np.zeros_like(q)  # not yet scaled

    def add_weights(self, at: slice, keys: _Keys, options: Options) -> tuple[Array, Array | None]:
        """Adds to the sums for values: gradients of some rows' logits, and the slope of the cap, (1, K, n), scratch."""
        gradient, dtype = self._gradient[:, at], self._q.dtype
        shape = (1, keys.k.shape[1], gradient.shape[1])
        x = by_rows(keys.k, self._q_columns[..., at], take("logits", shape, dtype))
        slope = None if options.softcap is None else _capped(x, options.softcap)
        visible = None if options.visible is None else np.ascontiguousarray(np.moveaxis(options.visible, -1, 1))
        Options(None, [np.moveaxis(y, -1, 1) for y in options.summands], visible).apply(self.by_pair(x))
        x -= self._lse[:, None, at]
        weights = np.exp(x, out=x)
        keys.v_sum[...] += by_rows(weights, gradient, take("sum", keys.v.shape, dtype))
        x = by_rows(keys.v, self._gradient_columns[..., at], take("products", shape, dtype))
        x -= self._row_sum[:, None, at]
        x *= weights
        if self._overflow and visible is not None:
            for pairs in (x,) if slope is None else (x, slope):
                np.copyto(self.by_pair(pairs), 0.0, where=~visible)  # D4: 0 times infinity is NaN
        return x, slope

    def add_scores(self, at: slice, keys: _Keys, scores: Array) -> None:
        """Adds to the sums for keys and queries, of the gradients of some rows' scaled scores (1, K, n)."""
        q = self._q[:, at]
        keys.k_sum[...] += by_rows(scores, q, take("sum", keys.k.shape, q.dtype))
        self.q_sum[:, at] += by_rows(scores.mT, keys.k, take("sum", q.shape, q.dtype))

    def by_pair(self, x: Array) -> Array:
        """(1, K, n) as (1, K, T, G), a view."""
        return x.reshape(*x.shape[:2], -1, self._group)


def _capped(x: Array, softcap: float) -> Array:
    """Caps scaled scores in place: the slope of the cap, in scratch."""
    x /= softcap
    np.tanh(x, out=x)
    slope = np.multiply(x, x, out=take("slope", x.shape, x.dtype))
    np.subtract(1.0, slope, out=slope)
    x *= softcap
    return slope


def _may_overflow(a: Array, b: Array, scale: float = 1.0) -> bool:
    """Whether rows of a times rows of b may leave the range of their dtype."""
    largest = prod([float(max(x.max(), -x.min())) for x in (a, b)]) * a.shape[-1] * max(1.0, float(scale))
    return bool(largest > float(np.finfo(a.dtype).max) / 2)
