"""The tiled backward pass on Dask: one task per chunk of queries and chunk of keys, its parts summed as trees.

A task runs the generic tiles on its blocks, so it holds a tile of scores at a time, and gives a part of the gradient of
each array that it read. All parts of one block, whatever rows, keys, entries or heads they come of, are summed (D2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dask.array as da
import numpy as np
from dask import delayed

from refattn.arguments import Call
from refattn.arrays import Array, quiet
from refattn.biases import Bias, Plain, Relative
from refattn.frames import Frame
from refattn_backends.dask_tiles import (
    CHUNK,
    EVALUATED,
    FAN_IN,
    Shared,
    Slices,
    aligned,
    block_at,
    holds_dask,
    leads_of,
    narrow,
    narrow_call,
    nested,
    slices,
    tiles_of,
    whole_block,
)
from refattn_backends.tiles import cut
from refattn_backends.tiles_backward import KEYS, ROWS, Sums, as_terms, forward, of_rank_two, sinks_found
from refattn_backends.tiles_backward import tiled_vjp as generic

Chunks = tuple[tuple[int, ...], ...]


def tiled_vjp(call: Call, gradient: Array) -> dict[str, Any]:
    """All gradients as lazy arrays in the compute dtype, for that of the output, as `tiles_backward` gives them."""
    if 0 in call.scores_shape:
        return generic(call, gradient)
    call, lse, row_sum = forward(call, gradient)
    held = holds_dask(call)
    q, k, v = aligned(call, EVALUATED if held else CHUNK)
    leads = leads_of(q, k, v)
    places = dict(enumerate((*leads, q.chunks[-2], -1)))
    arrays = [q, k, v, *(x.rechunk(places) for x in (gradient, lse, row_sum))]
    blocks = [x.to_delayed(optimize_graph=False) for x in arrays]
    shared = delayed(Shared(call, held))
    scale = whole_block(call.scale) if isinstance(call.scale, da.Array) else call.scale
    terms = call.bias_terms()
    with_arrays = {number: term for number, term in enumerate(terms) if term.arrays()}

    sums: dict[Any, _BlockSum] = {name: _BlockSum(x.chunks, call.compute) for name, x in zip("qkv", (q, k, v))}
    sums["reached"] = _BlockSum((*leads, q.chunks[-2], (1,)), call.compute)
    for number, term in with_arrays.items():
        sums[number] = _BlockSum(_chunks_of(term, leads, q.chunks[-2], k.chunks[-2]), call.compute)
    for (row, key), (rows, keys, answer) in tiles_of(call, q.chunks[-2], k.chunks[-2]).items():
        seen = _given(call, rows, keys, answer != "all") if held else None
        for lead in np.ndindex(*map(len, leads)):
            at = slices(leads, lead)
            given = None if seen is None else [_narrowed(x, at) for x in seen]
            own = [block_at(x, lead, index) for x, index in zip(blocks, (row, key, key, row, row, row), strict=True)]
            parts = delayed(_pair_vjp)(shared, (rows, keys), at, answer != "all", own, scale, given)
            for name, index in {"q": (row, 0), "k": (key, 0), "v": (key, 0), "reached": (row, 0)}.items():
                sums[name].add((*lead, *index), parts[name])
            for number, term in with_arrays.items():
                index = (*lead, row, key) if isinstance(term, Plain) else (lead[-1], 0)
                sums[number].add(index, parts[number])
    found: dict[str, Any] = {name: sums[name].whole() for name in "qkv"}
    found["bias"] = as_terms(call, (sums[number].whole() if number in sums else None for number in range(len(terms))))
    return found | sinks_found(call, gradient, lse, row_sum, sums["reached"].whole() > 0.0)


class _BlockSum:
    """An array as a sum of parts, each of which covers one block of it."""

    def __init__(self, chunks: Chunks, dtype: Any) -> None:
        self.chunks, self.dtype = chunks, dtype
        self.parts: dict[tuple[int, ...], list[Any]] = {}

    def add(self, index: tuple[int, ...], part: Any) -> None:
        """Adds a part to the block at that index, or to the only one along an axis."""
        index = tuple(min(i, len(sizes) - 1) for i, sizes in zip(index[-len(self.chunks) :], self.chunks, strict=True))
        self.parts.setdefault(index, []).append(part)

    def whole(self) -> Array:
        """The array, lazily."""
        return da.block(nested(tuple(map(len, self.chunks)), self._block))

    def _block(self, index: tuple[int, ...]) -> Array:
        shape = tuple(sizes[i] for i, sizes in zip(index, self.chunks, strict=True))
        parts = self.parts.get(index)
        if not parts:
            return da.zeros(shape, dtype=self.dtype, chunks=-1)
        while len(parts) > 1:
            parts = [delayed(sum)(parts[start : start + FAN_IN]) for start in range(0, len(parts), FAN_IN)]
        return da.from_delayed(parts[0], shape, dtype=self.dtype)


def _chunks_of(term: Bias, leads: Chunks, rows: tuple[int, ...], keys: tuple[int, ...]) -> Chunks:
    """The blocks in which the gradient of a term comes: those of the pairs, on the axes that it has."""
    if isinstance(term, Relative):
        return (leads[-1], (term.table.shape[1],))
    assert isinstance(term, Plain)
    shape = of_rank_two(term.array)
    axes = (*leads, rows, keys)[-len(shape) :]
    return tuple(chunks if size == sum(chunks) else (1,) for size, chunks in zip(shape, axes, strict=True))


def _given(call: Call, rows: range, keys: range, masked: bool) -> list[Any]:
    """Mask (None: all is visible) and what biases are made of, of one pair of chunks, as lazy arrays of all heads."""
    frame = cut(call, rows, keys, masked=masked).frame()
    visible = call.mask.evaluate(frame) if masked and call.mask is not None else None
    found: list[Any] = [visible]
    for term in call.bias_terms():
        if isinstance(term, Relative):
            found.append((_Read, term.table, term.columns(frame)))
        else:
            found.append((Plain if isinstance(term, Plain) else _Fixed, term.evaluate(frame, call.compute)))
    return found


def _narrowed(x: Any, at: Slices) -> Any:
    """The entries and heads of one block, as values in the graph."""
    if x is None:
        return None
    if not isinstance(x, tuple):
        return whole_block(narrow(x, at))
    if x[0] is _Read:
        return (_Read, whole_block(x[1][at[-1], :]), whole_block(narrow(x[2], at)))
    return (x[0], whole_block(narrow(x[1], at)))


class _Fixed(Bias):
    """Summands of each pair that come of no array."""

    def __init__(self, summand: Array) -> None:
        self.summand = summand

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        return frame.xp.astype(frame.per_pair(self.summand, "bias"), dtype, copy=False)


class _Read(Relative):
    """A table whose column for each pair is known."""

    def __init__(self, table: Array, read: Array) -> None:
        super().__init__(table)
        self.read = read

    def columns(self, frame: Frame) -> Array:
        return frame.per_pair(self.read, "relative(table)")


def _made(parts: tuple[Any, ...]) -> Bias:
    kind, *arrays = parts
    bias: Bias = kind(*arrays)
    return bias


def _pair_vjp(
    shared: Shared,
    tile: tuple[range, range],
    at: Slices,
    masked: bool,
    blocks: list[Array],
    scale: Any,
    given: list[Any] | None,
) -> dict[Any, Array]:
    """What one pair of blocks adds to each gradient, by name, and by number for the terms of the bias.

    blocks are those of q, k, v, the gradient of the output, the log-sum-exp and the row sums.
    """
    q, k, v, *own = blocks
    call = narrow_call(shared, (tile, at, masked), (q, k, v), scale, given, _made)._replace(sinks=None)
    with quiet(call.library):
        sums = Sums(call, ROWS, KEYS)
        sums.add_all(*own)
        found = sums.found()
        bias: Iterable[Array | None] = found.pop("bias")
        return {**found, "reached": sums.reached.whole(), **dict(enumerate(bias))}
