"""The tiled backward pass for any Array API library: weights of one tile at a time, recomputed from the log-sum-exp.

The forward pass is the plugin's own. It gives each row's log-sum-exp and, as the product of its output and the gradient
of that, rowsum(P dP) over all keys. Each tile is a call of its own, whose logits and gradients are those of the
specification; only which tiles are looked at, and the summing, is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from refattn import registry
from refattn.arguments import Call
from refattn.arrays import Array, Shape, quiet
from refattn.biases import Bias, Plain, Relative
from refattn.gradients import Pairs, Parts, lost_rows, pair_gradients, sink_gradient, summed_to, zero_gradients
from refattn.pipeline import empty_rows, logits_of, recorded_in, visibility, zero_filled
from refattn_backends.tiles import cut, shown, spans

ROWS, KEYS = 256, 256  # the largest tile, of which some eight arrays are held at a time


def tiled_vjp(call: Call, gradient: Array, rows: int = ROWS, keys: int = KEYS) -> dict[str, Any]:
    """All gradients of a call in the compute dtype: q, k and v with their own batch axes, bias as a list of terms.

    gradient is that of the output, (..., H, Lq, d_v) in the compute dtype. rows and keys are the largest tile.
    """
    if 0 in call.scores_shape:
        return zero_gradients(call)
    with quiet(call.library):
        call, lse, row_sum = forward(call, gradient)
        sums = Sums(call, rows, keys)
        sums.add_all(gradient, lse, row_sum)
        return sums.found() | sinks_found(call, gradient, lse, row_sum, sums.reached.whole() > 0.0)


def forward(call: Call, gradient: Array) -> tuple[Call, Array, Array]:
    """The call with finite values, and each row's log-sum-exp and rowsum(P dP), both (..., H, Lq, 1).

    A value that is not finite counts as 0 in the gradients of weights, and nothing else reads it. The row sum is that
    of a finite gradient; a row that sees no key has 0 (D3).
    """
    call = call._replace(v=zero_filled(call, call.v)[0])
    output, lse = registry.tiled(call.library.name)(call)
    finite, _ = zero_filled(call, gradient)
    return call, lse[..., None], call.library.xp.sum(finite * output, axis=-1, keepdims=True)


def sinks_found(call: Call, gradient: Array, lse: Array, row_sum: Array, reached: Array) -> dict[str, Array]:
    """The gradient of the sinks by name, if there are some; reached tells which rows see a key."""
    if call.sinks is None:
        return {}
    xp = call.library.xp
    row_sum = xp.where(lost_rows(xp, gradient), float("nan"), row_sum)
    return {"sinks": sink_gradient(call, call.sinks, lse, row_sum, reached)}


def of_tile(call: Call, gradient: Array, lse: Array, row_sum: Array) -> tuple[Parts, Array]:
    """What one tile adds to the gradients, and which of its pairs are visible, broadcastable to all.

    gradient, lse and row_sum are those of its rows, the last two (..., H, R, 1).
    """
    xp = call.library.xp
    seen: dict[str, Array] = {}
    visible, summands = visibility(call)
    logits = logits_of(call, visible, summands, recorded_in(seen), empty_rows(call, visible))
    weights = xp.exp(logits - lse)  # NaN in a row that sees no key, as anything may be at invisible pairs
    parts = pair_gradients(call, Pairs(weights, visible, seen["capped"]), gradient, row_sum)
    return parts, xp.ones((1, 1), dtype=xp.bool, device=call.device) if visible is None else visible


def of_term(call: Call, term: Bias, logits: Array) -> Array | None:
    """What a tile adds to the gradient of a term: a table, or an array of rank 2 or more cut to the tile; else None."""
    if isinstance(term, Plain):
        shape = tuple(min(sizes) for sizes in zip(of_rank_two(term.array)[-2:], call.scores_shape[-2:], strict=True))
        return summed_to(call.library.xp, logits, (*of_rank_two(term.array)[:-2], *shape))
    return _of_table(call, term, logits) if isinstance(term, Relative) else None


def as_terms(call: Call, sums: Iterable[Array | None]) -> list[Array | None]:
    """The gradient of each term of the bias, in the shape of its array; None for one that holds none."""
    found: list[Array | None] = []
    for term, x in zip(call.bias_terms(), sums, strict=True):
        shapes = [tuple(array.shape) for array in term.arrays().values()]
        found.append(None if x is None else call.library.xp.reshape(x, shapes[0]))
    return found


def _of_table(call: Call, term: Relative, logits: Array) -> Array:
    """(H, 2R + 1): sums over each distance of the tile first, then over the distances that read an entry."""
    xp = call.library.xp
    height, width = logits.shape[-2:]
    columns = term.columns(call.frame())  # (..., R, K); those of each distance stand in the last row and column
    read = xp.concat((columns[..., -1, :], xp.flip(columns[..., :-1, -1], axis=-1)), axis=-1)  # (..., R + K - 1)
    # Row i moved right by R - 1 - i, so that distances stand above each other: rows of R + K, read as of R + K - 1.
    lead = tuple(logits.shape[:-2])
    gap = xp.zeros((*lead, height, height), dtype=logits.dtype, device=call.device)
    moved = xp.concat((xp.flip(logits, axis=-2), gap), axis=-1)
    moved = xp.reshape(moved, (*lead, height * (height + width)))[..., :-height]
    of_distance = xp.sum(xp.reshape(moved, (*lead, height, height + width - 1)), axis=-2)  # (..., H, R + K - 1)
    entries = xp.arange(term.table.shape[1], device=call.device)
    chosen = xp.where(read[..., None] == entries, of_distance[..., None], 0.0)
    return summed_to(xp, xp.sum(chosen, axis=-2), tuple(term.table.shape))


def of_rank_two(x: Array) -> Shape:
    """The shape of an array with an axis of rows and one of keys, of size 1 where it lacks them."""
    return (*(1,) * (2 - x.ndim), *x.shape)


class TileSum:
    """A sum over tiles of arrays (..., n, m) that each cover a piece of the last two axes, kept piece by piece."""

    def __init__(self, call: Call, shape: Shape, steps: tuple[int, int]) -> None:
        self.call, self.shape = call, shape
        self.pieces: dict[tuple[int, int], Array] = {}
        self.steps = max(1, steps[0]), max(1, steps[1])

    def add(self, starts: tuple[int, int], part: Array) -> None:
        """Adds a part that begins there."""
        at = starts[0] // self.steps[0], starts[1] // self.steps[1]
        self.pieces[at] = self.pieces[at] + part if at in self.pieces else part

    def whole(self) -> Array:
        """All pieces side by side, 0 where nothing was added."""
        xp, lines = self.call.library.xp, []
        counts = [max(1, -(-size // step)) for size, step in zip(self.shape[-2:], self.steps, strict=True)]
        for row in range(counts[0]):
            line = [self._piece((row, key)) for key in range(counts[1])]
            lines.append(line[0] if len(line) == 1 else xp.concat(line, axis=-1))
        return lines[0] if len(lines) == 1 else xp.concat(lines, axis=-2)

    def _piece(self, at: tuple[int, int]) -> Array:
        if at in self.pieces:
            return self.pieces[at]
        sizes = (
            min(step, size - index * step) for size, step, index in zip(self.shape[-2:], self.steps, at, strict=True)
        )
        return self.call.library.xp.zeros((*self.shape[:-2], *sizes), dtype=self.call.compute, device=self.call.device)


class Sums:
    """The gradients of a call as sums over its tiles."""

    def __init__(self, call: Call, rows: int, keys: int) -> None:
        self.call, self.rows, self.keys = call, rows, keys
        self.terms = call.bias_terms()
        steps = {"q": rows, "k": keys, "v": keys}
        shapes = {name: tuple(getattr(call, name).shape) for name in steps}
        self.sums = {name: TileSum(call, shapes[name], (steps[name], shapes[name][-1])) for name in steps}
        self.reached = TileSum(call, (*call.scores_shape[:-1], 1), (rows, 1))  # by how many tiles
        self.of_terms = [self._of_term(term) for term in self.terms]

    def _of_term(self, term: Bias) -> TileSum | None:
        if isinstance(term, Plain):
            return TileSum(self.call, of_rank_two(term.array), (self.rows, self.keys))
        return TileSum(self.call, shape := tuple(term.table.shape), shape) if isinstance(term, Relative) else None

    def add_all(self, gradient: Array, lse: Array, row_sum: Array) -> None:
        """All tiles that the mask shows a pair of; gradient, lse and row_sum are those of all rows."""
        call = self.call
        for rows in spans(call.tile[0], self.rows):
            start = rows.start - call.tile[0].start
            given = [x[..., start : start + len(rows), :] for x in (gradient, lse, row_sum)]
            for keys in shown(call, rows, call.tile[1], self.keys):
                answer = call.answer(rows, keys)
                if answer != "none":
                    self._add(cut(call, rows, keys, masked=answer != "all"), *given)

    def _add(self, tile: Call, gradient: Array, lse: Array, row_sum: Array) -> None:
        xp = tile.library.xp
        row, key = (part.start - whole.start for part, whole in zip(tile.tile, self.call.tile, strict=True))
        parts, visible = of_tile(tile, gradient, lse, row_sum)
        self.sums["q"].add((row, 0), parts.q)
        self.sums["k"].add((key, 0), parts.k)
        self.sums["v"].add((key, 0), parts.v)
        for pieces, term in zip(self.of_terms, self.terms, strict=True):
            if pieces is not None:
                shared = [size == 1 or isinstance(term, Relative) for size in pieces.shape[-2:]]
                starts = 0 if shared[0] else row, 0 if shared[1] else key
                pieces.add(starts, of_term(tile, term, parts.logits))
        some = xp.astype(xp.any(visible, axis=-1, keepdims=True), tile.compute)
        self.reached.add((row, 0), xp.broadcast_to(some, (*tile.scores_shape[:-1], 1)))

    def found(self) -> dict[str, Any]:
        """The sums by name; bias is a list with an entry per term, None for one without an array."""
        bias = as_terms(self.call, (None if pieces is None else pieces.whole() for pieces in self.of_terms))
        return {**{name: pieces.whole() for name, pieces in self.sums.items()}, "bias": bias}
