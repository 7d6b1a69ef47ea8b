"""The tiled backward pass on JAX: the tiles of `tiles_backward` inside `lax.scan` over rows and, in it, over keys.

As in `jax_tiles` the place of a tile is traced, so one compiled body serves all tiles; what the mask answers for each
is a constant table, and the rest of rows or keys that fills no tile is one of its own. The sums over rows are carried
along whole, since every tile of keys adds to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from refattn.arguments import Call
from refattn.arrays import Array
from refattn_backends.jax_tiles import answers_of, joined, traced_cut
from refattn_backends.tiles import KEYS, ROWS
from refattn_backends.tiles_backward import as_terms, forward, of_rank_two, of_term, of_tile, sinks_found
from refattn_backends.tiles_backward import tiled_vjp as generic


class _OfRows(NamedTuple):
    """What belongs to the rows of a tile: the gradient of q, and which of them see a key, (..., H, R, 1)."""

    q: Array
    reached: Array


class _OfKeys(NamedTuple):
    """What all rows add to: the gradients of k, v and the terms of the bias, None for one without an array."""

    k: Array
    v: Array
    terms: tuple[Array | None, ...]


def tiled_vjp(call: Call, gradient: Array, rows: int = ROWS, keys: int = KEYS) -> dict[str, Any]:
    """All gradients in the compute dtype, for that of the output, as `tiles_backward.tiled_vjp` gives them."""
    q_len, k_len = map(len, call.tile)
    if 0 in call.scores_shape or (q_len <= 2 * rows and k_len <= 2 * keys):
        return generic(call, gradient, rows, keys)  # a handful of tiles needs no loop
    call, lse, row_sum = forward(call, gradient)
    given = (gradient, lse, row_sum)
    table, count = answers_of(call, rows, keys), q_len // rows
    sums, parts = _nothing(call), []
    if count:
        sums, stacked = lax.scan(
            lambda sums, at: _row_tile(call, given, sums, at[0], rows, at[1], keys),
            sums,
            (rows * jnp.arange(count), jnp.asarray(table[:count])),
        )
        parts.append(_OfRows(*(joined(x, -2) for x in stacked)))
    if q_len % rows:
        sums, rest = _row_tile(call, given, sums, count * rows, q_len % rows, table[-1], keys)
        parts.append(rest)
    of_q, reached = (jnp.concat(x, axis=-2) for x in zip(*parts, strict=True))
    found = {"q": of_q, "k": sums.k, "v": sums.v, "bias": as_terms(call, sums.terms)}
    return found | sinks_found(call, gradient, lse, row_sum, reached)


def _nothing(call: Call) -> _OfKeys:
    """The sums over no rows; those of biases have rank 2 or more."""
    arrays = [next(iter(term.arrays().values()), None) for term in call.bias_terms()]
    of_terms = tuple(None if x is None else jnp.zeros(of_rank_two(x), call.compute) for x in arrays)
    return _OfKeys(jnp.zeros(call.k.shape, call.compute), jnp.zeros(call.v.shape, call.compute), of_terms)


def _row_tile(
    call: Call, given: tuple[Array, ...], sums: _OfKeys, start: Any, height: int, answers: Any, width: int
) -> tuple[_OfKeys, _OfRows]:
    """`height` rows from a traced one on, over all keys; answers holds one index per tile of keys.

    given are the gradient of the output, the log-sum-exp and the row sums of all rows.
    """
    rows = start + jnp.arange(height)[:, None]
    q, *own = (lax.dynamic_slice_in_dim(x, start, height, axis=-2) for x in (call.q, *given))
    part = call._replace(q=q)
    count, rest = divmod(len(call.tile[1]), width)

    def tile(at: Array, size: int, masked: bool) -> tuple[_OfKeys, _OfRows]:
        return _tile(traced_cut(part, rows, at, size, masked=masked), own)

    def step(before: tuple[_OfKeys, _OfRows], at: Array, answer: Array, size: int) -> tuple[_OfKeys, _OfRows]:
        shapes = jax.eval_shape(lambda: tile(at, size, masked=False))
        of_keys, of_rows = lax.switch(
            answer,
            (
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                lambda: tile(at, size, masked=True),
                lambda: tile(at, size, masked=False),
            ),
        )
        sums, known = before
        terms = tuple(
            None if x is None else _added(x, one, start, at) for x, one in zip(sums.terms, of_keys.terms, strict=True)
        )
        sums = _OfKeys(_added(sums.k, of_keys.k, at, 0), _added(sums.v, of_keys.v, at, 0), terms)
        return sums, _OfRows(known.q + of_rows.q, known.reached | of_rows.reached)

    nobody = jnp.zeros((*call.scores_shape[:-2], height, 1), bool)
    found = sums, _OfRows(jnp.zeros(q.shape, call.compute), nobody)
    if count:
        places = (width * jnp.arange(count), jnp.asarray(answers[:count]))
        found, _ = lax.scan(lambda before, x: (step(before, x[0], x[1], width), None), found, places)
    return step(found, jnp.asarray(count * width), jnp.asarray(answers[-1]), rest) if rest else found


def _tile(cut: Call, own: list[Array]) -> tuple[_OfKeys, _OfRows]:
    """What one tile adds; own is what `_row_tile` is given, of its rows."""
    parts, visible = of_tile(cut, *own)
    reached = jnp.broadcast_to(jnp.any(visible, axis=-1, keepdims=True), (*cut.scores_shape[:-1], 1))
    of_terms = tuple(of_term(cut, term, parts.logits) for term in cut.bias_terms())
    return _OfKeys(parts.k, parts.v, of_terms), _OfRows(parts.q, reached)


def _added(x: Array, part: Array, row: Any, key: Any) -> Array:
    """x with a part added at a row and a key, where the part is not as long as x."""
    starts = [0] * (x.ndim - 2)
    starts += [0 if size == whole else at for size, whole, at in zip(part.shape[-2:], x.shape[-2:], (row, key))]
    before = lax.dynamic_slice(x, starts, part.shape)
    return lax.dynamic_update_slice(x, before + part, starts)
