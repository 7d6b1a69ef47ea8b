"""Tiled attention on JAX: the dense pipeline, a tile at a time, inside `lax.map` over rows and `lax.scan` over keys.

The place of a tile is traced, so one compiled body serves all tiles, and memory is linear in the lengths, derivatives
included: they recompute a tile instead of storing it. What the mask answers for each tile is a constant table: a tile
that shows no pair is skipped. The rest of rows or keys that fills no tile is one of its own, so nothing is padded.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.frames import Frame
from refattn.partials import Partial, merge_two
from refattn_backends.tiles import KEYS, ROWS, cut, finished, identity, over_tile, spans, stacked
from refattn_backends.tiles import tiled as generic

ANSWERS = ("none", "mixed", "all")
Marked = tuple[Partial, Array]  # and the rows that `over_keys` marks


def tiled(call: Call, rows: int = ROWS, keys: int = KEYS) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq), in the compute dtype, sinks included."""
    q_len, k_len = map(len, call.tile)
    if 0 in call.scores_shape or (q_len <= 2 * rows and k_len <= 2 * keys):
        return generic(call, rows, keys)  # a handful of tiles needs no loop
    table, count = answers_of(call, rows, keys), q_len // rows
    parts = []
    if count:
        body = jax.checkpoint(lambda at: _row_tile(call, at[0], rows, at[1], keys))
        (output, lse), bare = lax.map(body, (rows * jnp.arange(count), jnp.asarray(table[:count])))
        parts.append((Partial(joined(output, -2), joined(lse, -1)), joined(bare, -1)))
    if q_len % rows:
        parts.append(_row_tile(call, count * rows, q_len % rows, table[-1], keys))
    return finished(call.library, *stacked(call, parts), call.sinks)


def answers_of(call: Call, rows: int, keys: int) -> Any:
    """What the mask says of each tile, as indices of ANSWERS: (tiles of rows, tiles of keys), known before values."""
    grid = [list(spans(whole, step)) for whole, step in zip(call.tile, (rows, keys))]
    if call.mask is None:
        return np.full((len(grid[0]), len(grid[1])), ANSWERS.index("all"), np.int32)
    starts = call.spans()
    return np.asarray([[ANSWERS.index(call.mask.answer(r, k, *starts)) for k in grid[1]] for r in grid[0]], np.int32)


def _row_tile(call: Call, start: Any, height: int, answers: Any, width: int) -> Marked:
    """`over_keys` of `height` rows from a traced one on; answers holds one index per tile of keys."""
    k_len, rows = len(call.tile[1]), start + jnp.arange(height)[:, None]
    part = call._replace(q=lax.dynamic_slice_in_dim(call.q, start, height, axis=-2))
    count, rest = divmod(k_len, width)

    def step(before: Marked, at: Array, answer: Array, width: int) -> Marked:
        def merged(masked: bool) -> Any:
            return lambda: _merged(call, before, over_tile(traced_cut(part, rows, at, width, masked=masked)))

        return lax.switch(answer, (lambda: before, merged(True), merged(False)))  # type: ignore[no-any-return]  # JAX is untyped here

    nothing = identity(cut(call, range(height), range(0), masked=False))
    whole = nothing, jnp.zeros(nothing.lse.shape, bool)
    if count:
        body = jax.checkpoint(lambda before, x: (step(before, x[0], x[1], width), None))
        whole, _ = lax.scan(body, whole, (width * jnp.arange(count), jnp.asarray(answers[:count])))
    return step(whole, jnp.asarray(count * width), jnp.asarray(answers[-1]), rest) if rest else whole


def _merged(call: Call, first: Marked, second: Marked) -> Marked:
    return merge_two(call.library, first[0], second[0]), first[1] | second[1]


def traced_cut(call: Call, rows: Array, start: Any, width: int, *, masked: bool) -> Call:
    """The call on all rows that q holds, whose indices are (R, 1), and `width` keys from a traced one on."""
    keys = start + jnp.arange(width)[None, :]
    k, v = (lax.dynamic_slice_in_dim(x, start, width, axis=-2) for x in (call.k, call.v))
    return _TracedCall(*call)._replace(
        k=k,
        v=v,
        scores_shape=(*call.scores_shape[:-2], rows.shape[0], width),
        tile=(rows, keys),
        mask=call.mask if masked else None,
        sinks=None,
    )


class _TracedCall(Call):
    """A call whose tile is given by the traced indices of its rows and keys."""

    def frame(self) -> Frame:
        frame = _TracedFrame(self.library, self.device, pairs=self.tile)
        for name in ("q_start", "k_start"):
            start = getattr(self, name)
            setattr(frame, name, start if isinstance(start, int) else frame.per_entry(start, name))
        return frame


class _TracedFrame(Frame):
    """A tile at a traced place, out of which no range can be cut."""

    def per_pair(self, x: Array, argument: str) -> Array:
        x = self.array(x, argument)
        x = jnp.reshape(x, (*(1,) * (2 - x.ndim), *x.shape))
        x = x if x.shape[-2] == 1 else jnp.take(x, self.rows[:, 0], axis=-2)
        return x if x.shape[-1] == 1 else jnp.take(x, self.keys[0, :], axis=-1)


def joined(x: Array, axis: int) -> Array:
    """Tiles stacked on the first axis as one long axis: (n, ..., R, ...) as (..., n * R, ...)."""
    x = jnp.moveaxis(x, 0, axis - 1)
    shape = list(x.shape)
    shape[axis - 1 :] = [shape[axis - 1] * shape[axis], *shape[len(shape) + axis + 1 :]]
    return jnp.reshape(x, shape)
