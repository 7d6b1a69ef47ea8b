"""Tiled attention on NumPy: threads over (tile of rows, batch entry, heads), BLAS on one thread each.

A job stacks the rows of a head group, so that its keys are read once, takes several groups at a time, since a thread
that often returns to Python waits for others, and walks over tiles of keys with scratch that its thread keeps. Few
rows, as in decode, share the keys out instead, and the partials are merged. No row's arithmetic depends on which heads
share its job or on the number of threads. Rows that meet infinite values are computed again without them, and rows
whose values are too large for that take the generic tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from math import prod
from typing import NamedTuple

import numpy as np

from refattn.arguments import Call
from refattn.arrays import Array, quiet
from refattn.partials import Partial, merge_two
from refattn.pipeline import dense
from refattn_backends import workers
from refattn_backends.blas import one_thread
from refattn_backends.numpy_logits import Logits, take
from refattn_backends.numpy_options import options_of
from refattn_backends.numpy_softmax import Rows
from refattn_backends.pieces import Shown
from refattn_backends.tiles import cut, finished, over_keys, shown, spans
from refattn_backends.tiles import tiled as generic

ROWS, KEYS = 256, 384  # scores of one head: 384 KiB in float32; whole strips, and no power of two apart
HEADS = 8  # key/value heads of a job at most
EDGE = 128  # rows of a strip along the edge of a mask
# Multiplications for each of the two products that are not worth telling BLAS, and a second thread, of few rows too.
QUICK, SOLO, SOLO_FEW = 2**22, 2**25, 2**23
SCALES = 2.0**-32, 2.0**32  # beyond, queries times the scale may lose bits where scores times it do not
MANY, SMALL = 16, 2**19  # so many entries of up to so many multiplications per product would be cut into too small jobs
FEW, SPLIT = 64, 4096  # up to so many stacked rows a job takes a part of the keys, so many of them


class Job(NamedTuple):
    """One thread's work: rows, which part of the keys, batch entry, key/value heads."""

    rows: range
    part: int
    entry: tuple[int, ...]
    heads: slice


def tiled(call: Call) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq), in the compute dtype, sinks included."""
    if 0 in call.scores_shape or not call.q.shape[-1] or not SCALES[0] <= abs(call.scale) <= SCALES[1]:
        return generic(call)
    (heads, q_len, k_len), width = call.scores_shape[-3:], max(call.q.shape[-1], call.v.shape[-1])
    small = q_len * k_len <= ROWS * KEYS and heads * q_len * k_len * width <= SMALL
    if small and prod(call.scores_shape[:-3]) >= MANY:
        return Partial(*dense(call))  # no entry has more pairs than a tile
    with at_work(call) as threads:
        tiles = _Tiled(call, threads)
        whole = tiles.run()
        return finished(call.library, whole, tiles.bare if tiles.bare.any() else None, call.sinks)


@contextmanager
def at_work(call: Call) -> Iterator[int]:
    """How many threads a call is worth: the less each does between two calls of NumPy, the more they wait in line."""
    work, few = prod(call.scores_shape) * max(call.q.shape[-1], call.v.shape[-1]), has_few_rows(call)
    with quiet(call.library), nullcontext() if work <= QUICK else one_thread():
        yield 1 if work <= (SOLO_FEW if few else SOLO) else workers.count()


def has_few_rows(call: Call) -> bool:
    """Whether a job takes all rows and a part of the keys, as in decode."""
    return bool(call.scores_shape[-2] * call.group <= FEW)


def scalable(q: Array, scale: float) -> bool:
    """Whether queries may be multiplied by the scale in place of scores: none becomes infinite or loses bits."""
    factor, limits, size = abs(scale), np.finfo(q.dtype), np.abs(q)
    if not SCALES[0] <= factor <= SCALES[1]:
        return False
    low, high = 2.0 * float(limits.tiny) / factor, float(limits.max) / max(2.0 * factor, 1.0)
    if size.min() >= low and size.max() <= high:
        return True
    lost = (size < low) & (size > 0.0) | (size > high) & (size < np.inf)
    return not lost.any()


class _Tiled:
    """A call cut into jobs, its keys as columns, and the results."""

    def __init__(self, call: Call, threads: int) -> None:
        batch, (heads, q_len, k_len), group = call.scores_shape[:-3], call.scores_shape[-3:], call.group
        self.call, self.threads, self.batch, self.kv_heads = call, threads, batch, heads // group
        self.few = has_few_rows(call)
        self.row_tiles = list(spans(range(q_len), max(1, ROWS // group)))
        self.parts = list(spans(range(k_len), SPLIT if self.few else k_len))
        self.shown = Shown(call, max(1, EDGE // group))
        columns = call.k.mT if self.few else _columns(call.k, threads)
        self.q, self.columns, self.v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (call.q, columns, call.v))
        self.aside: Array | None = None  # the values as they are, where v has 0 for those that are not finite
        shape, width = (*batch, heads, q_len), call.v.shape[-1]
        self.results = [
            Partial(np.empty((*shape, width), call.compute), np.empty(shape, call.compute)) for _ in self.parts
        ]
        self.bare = np.zeros(shape, bool)  # the rows that `over_keys` marks

    def run(self) -> Partial:
        """The results of all jobs together.

        What some could not make is made with the infinite values set aside, and else by the generic tiles.
        """
        failed = self._failed(self._jobs())
        if failed:
            self.aside, rest = self.v, np.where(np.isfinite(self.call.v), self.call.v, 0.0)
            self.v = np.broadcast_to(rest, self.v.shape)
            failed = self._failed(failed)
        for rows, part in {(job.rows, job.part) for job in failed}:
            (output, lse), bare = over_keys(cut(self.call, rows, self.parts[part], masked=True), rows)
            self.results[part].output[..., rows.start : rows.stop, :] = output
            self.results[part].lse[..., rows.start : rows.stop] = lse
            self.bare[..., rows.start : rows.stop] |= bare
        return reduce(partial(merge_two, self.call.library), self.results)

    def _failed(self, jobs: list[Job]) -> list[Job]:
        """Runs the jobs: those that could not be done."""
        made = workers.share(self._run, jobs, self.threads)
        return [job for job, done in zip(jobs, made, strict=True) if not done]

    def _jobs(self) -> list[Job]:
        units = len(self.row_tiles) * len(self.parts) * prod(self.batch) * self.kv_heads
        step = max(1, min(HEADS, units // (2 * self.threads)))  # enough jobs for every thread
        return [
            Job(rows, part, entry, slice(head, min(head + step, self.kv_heads)))
            for rows in reversed(self.row_tiles)  # causal: the long ones first
            for part in range(len(self.parts))
            for entry in np.ndindex(*self.batch)
            for head in range(0, self.kv_heads, step)
        ]

    def _run(self, job: Job) -> bool:
        """Whether the job could be done; its results are then in place."""
        with quiet(self.call.library):
            made = self._job(job)
        if made is None:
            return False
        for whole, tile in zip(self.results[job.part], made, strict=False):
            self._place(whole, job)[...] = self._tile(tile, job)
        if made[2].any():
            np.copyto(self._place(self.bare, job), True, where=self._tile(made[2], job))  # other parts may set it too
        return True

    def _place(self, x: Array, job: Job) -> Array:
        """A job's place (h, G, T, ...) in an array (..., H, Lq, ...), a view."""
        return self._grouped(x[job.entry])[job.heads, :, job.rows.start : job.rows.stop]

    def _tile(self, x: Array, job: Job) -> Array:
        """(h, T * G, ...) as (h, G, T, ...)."""
        return x.reshape(len(x), len(job.rows), self.call.group, *x.shape[2:]).swapaxes(1, 2)

    def _job(self, job: Job) -> tuple[Array, Array, Array] | None:
        """What `Rows.finish` says of the rows (h, T * G), the heads of a group next to each other."""
        call, group, rows, part = self.call, self.call.group, job.rows, self.parts[job.part]
        q = self._grouped(self.q[job.entry])[job.heads, :, rows.start : rows.stop].swapaxes(1, 2)  # (h, T, G, d_k)
        if not scalable(q, call.scale):
            return None
        columns, v = self.columns[job.entry][job.heads], self.v[job.entry][job.heads]
        scaled = np.multiply(q, call.scale, out=take("q", q.shape, q.dtype)).reshape(len(q), -1, q.shape[-1])
        state = Rows(len(q), scaled.shape[1], v.shape[-1], q.dtype)
        for tile in shown(call, rows, part, len(part) if self.few else KEYS):
            for piece in self.shown.pieces(rows, tile):
                at = slice((piece.rows.start - rows.start) * group, (piece.rows.stop - rows.start) * group)
                keys, options = slice(piece.keys.start, piece.keys.stop), options_of(call, piece, job.entry, job.heads)
                logits = Logits(scaled[:, at], columns[..., keys], group, options, few=self.few)
                if self.aside is not None:
                    state.meet(at, logits, self.aside[job.entry][job.heads][:, keys])
                state.add(at, logits, v[:, keys], few=self.few)
        return state.finish()

    def _grouped(self, x: Array) -> Array:
        """(H, ...) as (Hkv, G, ...)."""
        return x.reshape(self.kv_heads, self.call.group, *x.shape[1:])


def _columns(k: Array, threads: int) -> Array:
    """Keys (..., Lk, d_k) as columns (..., d_k, Lk), one that is not finite all NaN, so that its scores are (M20)."""
    k_len, d_k = k.shape[-2:]
    pitch = (k_len // 16 | 1) * 16 + 16  # rows an odd number of cache lines apart do not compete for the same sets
    columns = np.empty((*k.shape[:-2], d_k, pitch), k.dtype)[..., :k_len]

    def fill(index: tuple[int, ...]) -> None:
        columns[index] = k[index].T
        finite = np.isfinite(k[index])
        if not finite.all():
            columns[index][:, ~finite.all(axis=-1)] = np.nan

    workers.share(fill, list(np.ndindex(*k.shape[:-2])), threads)
    return columns
