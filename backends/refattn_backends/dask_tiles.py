"""Tiled attention on Dask: one task per chunk of queries and chunk of keys, the partials merged as a tree (T2).

A task runs the NumPy tiles on its blocks, so it holds a tile of scores at a time, however large its chunks are. A pair
of chunks that the mask shows nothing of never enters the graph. Nothing is computed before the result is asked for.

Masks and biases travel with the tasks and are evaluated there, tile by tile. Where they or the starts hold Dask arrays,
Dask evaluates them, chunk pair by chunk pair, with smaller chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any

import dask.array as da
import numpy as np
from dask import delayed

from refattn import masks, registry
from refattn.arguments import Call
from refattn.arrays import Array, Shape, device_of, library_of, quiet
from refattn.biases import Bias, Sum, as_bias
from refattn.frames import Frame
from refattn.partials import Partial, merge
from refattn.visibility import Mask, Span
from refattn_backends.tiles import cut, finished, spans, unfinished
from refattn_backends.tiles import tiled as generic

CHUNK = 8192  # rows or keys of a task at most: q, k and v of 8 heads of width 64 are then 48 MiB of float32
EVALUATED = 512  # the same where Dask evaluates masks and biases, which a task then gets as arrays
FAN_IN = 4  # partials that one task merges
Slices = tuple[slice, ...]
Marked = tuple[Partial, Array | None]  # and the rows that `over_keys` marks, None for none


def tiled(call: Call) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq) as lazy arrays, in the compute dtype, sinks included."""
    if 0 in call.scores_shape:
        return generic(call)
    held = holds_dask(call)
    q, k, v = aligned(call, EVALUATED if held else CHUNK)
    leads = leads_of(q, k, v)
    shared = delayed(Shared(call, held))
    blocks = [x.to_delayed(optimize_graph=False) for x in (q, k, v)]
    scale = whole_block(call.scale) if isinstance(call.scale, da.Array) else call.scale
    tiles = tiles_of(call, q.chunks[-2], k.chunks[-2])
    seen = {at: _evaluated(call, rows, keys, answer != "all") for at, (rows, keys, answer) in tiles.items() if held}

    def partial(lead: tuple[int, ...], row: int) -> tuple[Any, Shape]:
        """What the rows of one chunk of entries and heads see, and the shape of their log-sum-exp."""
        at = slices(leads, lead)
        height = q.chunks[-2][row]
        sizes = (*(chunks[index] for chunks, index in zip(leads, lead, strict=True)), height)
        parts = []
        for key in range(k.numblocks[-2]):
            if (row, key) not in tiles:
                continue
            rows, keys, answer = tiles[row, key]
            arrays = [block_at(x, lead, index) for x, index in zip(blocks, (row, key, key), strict=True)]
            given = [None if x is None else whole_block(narrow(x, at)) for x in seen[row, key]] if held else None
            parts.append(delayed(_pair)(shared, (rows, keys), at, answer != "all", *arrays, scale, given))
        if not parts:
            parts = [delayed(_nothing)(sizes, v.shape[-1], call.compute)]
        while len(parts) > FAN_IN:
            parts = [delayed(_merged)(parts[start : start + FAN_IN]) for start in range(0, len(parts), FAN_IN)]
        sinks = None if call.sinks is None else whole_block(call.sinks[at[-1], 0, 0])
        return delayed(_whole)(parts, sinks), sizes

    outputs, lses = {}, {}
    counts = (*(len(chunks) for chunks in leads), q.numblocks[-2])
    for index in np.ndindex(*counts):
        part, sizes = partial(index[:-1], index[-1])
        outputs[index] = da.from_delayed(part[0], (*sizes, v.shape[-1]), dtype=call.compute)
        lses[index] = da.from_delayed(part[1], sizes, dtype=call.compute)
    output = da.block(nested((*counts, 1), lambda index: outputs[index[:-1]]))
    return Partial(output, da.block(nested(counts, lses.__getitem__)))


def leads_of(q: Array, k: Array, v: Array) -> tuple[tuple[int, ...], ...]:
    """The chunks of (batch..., H) for aligned arrays."""
    batch = (max(chunks, key=sum) for chunks in zip(*(x.chunks[:-3] for x in (q, k, v)), strict=True))
    return (*batch, q.chunks[-3])


def tiles_of(
    call: Call, q_chunks: tuple[int, ...], k_chunks: tuple[int, ...]
) -> dict[tuple[int, int], tuple[range, range, str]]:
    """Rows, keys and the mask's answer for each pair of chunks, by their indices, that it may show anything of."""
    return {
        (row, key): (rows, keys, answer)
        for row, rows in enumerate(ranges(q_chunks))
        for key, keys in enumerate(ranges(k_chunks))
        if (answer := call.answer(rows, keys)) != "none"
    }


class Shared:
    """What all tasks of a call have in common, as one node of the graph."""

    def __init__(self, call: Call, held: bool) -> None:
        arrays: Any = dict.fromkeys(("library", "device", "q", "k", "v", "sinks", "scale"))  # these come block by block
        if held:
            arrays |= {"mask": None, "bias": None, "q_start": 0, "k_start": 0}
        self.call = call._replace(**arrays)


def _pair(
    shared: Shared,
    tile: tuple[range, range],
    at: Slices,
    masked: bool,
    q: Array,
    k: Array,
    v: Array,
    scale: Any,
    given: list[Array | None] | None,
) -> Marked:
    """The partial of one pair of blocks; given holds its mask (None: all is visible) and its biases, if evaluated."""
    part = narrow_call(shared, (tile, at, masked), (q, k, v), scale, given, as_bias)
    with quiet(part.library):
        whole = Partial(*registry.tiled(part.library.name)(part))
        if not part.library.xp.isnan(whole.lse).any():
            return whole, None
        return unfinished(part)  # NaN may be but for the keys of other blocks, or for a sink (P7)


def _merged(parts: list[Marked]) -> Marked:
    marks = [bare for _, bare in parts if bare is not None]
    return merge([part for part, _ in parts]), reduce(or_, marks) if marks else None


def _whole(parts: list[Marked], sinks: Array | None) -> Partial:
    """The result of a few partials over all keys."""
    part, bare = _merged(parts)
    library = library_of(part.output, "q")
    with quiet(library):
        return finished(library, part, bare, sinks)


def narrow_call(
    shared: Shared,
    where: tuple[tuple[range, range], Slices, bool],
    blocks: tuple[Array, Array, Array],
    scale: Any,
    given: list[Any] | None,
    made: Callable[[Any], Bias],
) -> Call:
    """The call on one pair of blocks, at a tile, entries and heads, masked or not.

    given holds its mask (None: all is visible) and what `made` makes its biases of, if Dask has evaluated them.
    """
    call, (tile, at, masked) = shared.call, where
    mask: Mask | None
    terms: list[Bias]
    if given is None:
        mask = _CutMask(call.mask, tile, at) if call.mask is not None and masked else None
        terms = [_CutBias(term, tile, at) for term in call.bias_terms()]
    else:
        mask = None if given[0] is None else masks.dense(given[0])
        terms = [made(x) for x in given[1:]]
    q, k, v = blocks
    library = library_of(q, "q")
    lead = [max(sizes) for sizes in zip(*(x.shape[:-3] for x in blocks), strict=True)]
    pairs = (q.shape[-2], k.shape[-2])
    return call._replace(
        library=library,
        device=device_of(library, q),
        q=q,
        k=k,
        v=v,
        scale=scale,
        scores_shape=(*lead, q.shape[-3], *pairs),
        tile=(range(pairs[0]), range(pairs[1])),
        mask=mask,
        bias=Sum(tuple(terms)) if terms else None,
    )


def _nothing(shape: Shape, width: int, dtype: Any) -> Marked:
    """The partial over no keys (T2)."""
    return Partial(np.zeros((*shape, width), dtype), np.full(shape, -np.inf, dtype)), None


class _CutMask(Mask):
    """A mask over all pairs of a call, asked about one block by the block's own indices."""

    def __init__(self, mask: Mask, tile: tuple[range, range], at: Slices) -> None:
        self.mask, self.block, self.at = mask, tile, at

    def evaluate(self, frame: Frame) -> Array:
        return narrow(self.mask.evaluate(_moved(frame, self.block)), self.at)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        return self.mask.answer(*_inside(self.block, (rows, keys)), q_start, k_start)


class _CutBias(Bias):
    """A bias over all pairs of a call, asked about one block by the block's own indices."""

    def __init__(self, bias: Bias, tile: tuple[range, range], at: Slices) -> None:
        self.bias, self.block, self.at = bias, tile, at

    def evaluate(self, frame: Frame, dtype: Any) -> Array:
        return narrow(self.bias.evaluate(_moved(frame, self.block), dtype), self.at)


def _moved(frame: Frame, block: tuple[range, range]) -> Frame:
    assert frame.tile is not None
    tile = _inside(block, frame.tile)
    return Frame(frame.library, frame.device, tile=tile, q_start=frame.q_start, k_start=frame.k_start)


def _inside(block: tuple[range, range], tile: tuple[range, range]) -> tuple[range, range]:
    rows, keys = (whole[part.start : part.stop] for whole, part in zip(block, tile, strict=True))
    return rows, keys


def narrow(x: Array, at: Slices) -> Array:
    """The entries and heads of one block, out of an array that broadcasts to (batch..., H, R, K)."""
    lead = x.shape[:-2]
    if not lead:
        return x
    picked = at[len(at) - len(lead) :]
    return x[(*(slice(None) if size == 1 else part for size, part in zip(lead, picked, strict=True)), ...)]


def holds_dask(call: Call) -> bool:
    """Whether a mask, a bias or a start can be evaluated by Dask alone."""
    parts: list[Any] = [] if call.mask is None else list(call.mask.parts())
    parts += call.bias_terms()
    arrays = [call.q_start, call.k_start, *(array for part in parts for array in part.arrays().values())]
    return any(isinstance(array, da.Array) for array in arrays)


def _evaluated(call: Call, rows: range, keys: range, masked: bool) -> list[Array | None]:
    """Mask (None: all is visible) and biases of one pair of chunks, as lazy arrays of all entries and heads."""
    frame = cut(call, rows, keys, masked=masked).frame()
    visible = call.mask.evaluate(frame) if masked and call.mask is not None else None
    return [visible, *(term.evaluate(frame, call.compute) for term in call.bias_terms())]


def aligned(call: Call, limit: int) -> tuple[Array, Array, Array]:
    """q, k and v with chunks that fit each other: whole rows, query heads in groups, at most `limit` rows or keys."""
    q, k, v = call.q, call.k, call.v
    heads = q.chunks[-3] if any(size % call.group for size in q.chunks[-3]) else None
    kv_heads = k.chunks[-3] if heads else tuple(size // call.group for size in q.chunks[-3])
    keys = _limited(k.chunks[-2], limit)
    wanted: list[dict[int, Any]] = [
        {-3: tuple(size * call.group for size in kv_heads), -2: _limited(q.chunks[-2], limit), -1: -1},
        {-3: kv_heads, -2: keys, -1: -1},
        {-3: kv_heads, -2: keys, -1: -1},
    ]
    for axis in range(q.ndim - 3):
        chunks = max((x.chunks[axis] for x in (q, k, v)), key=sum)
        for x, one in zip((q, k, v), wanted, strict=True):
            one[axis] = chunks if x.shape[axis] == sum(chunks) else -1
    q, k, v = (x.rechunk({axis % x.ndim: one[axis] for axis in one}) for x, one in zip((q, k, v), wanted, strict=True))
    return q, k, v


def _limited(chunks: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(len(part) for size in chunks for part in spans(range(size), limit))


def ranges(chunks: tuple[int, ...]) -> Iterator[range]:
    """The indices of each chunk of an axis."""
    return (range(end - size, end) for size, end in zip(chunks, accumulate(chunks), strict=True))


def slices(chunks: tuple[tuple[int, ...], ...], index: tuple[int, ...]) -> Slices:
    """Where a block lies: slices along the axes whose chunks are given, for its index on each."""
    whole = (list(ranges(sizes))[i] for sizes, i in zip(chunks, index, strict=True))
    return tuple(slice(part.start, part.stop) for part in whole)


def whole_block(x: Array) -> Any:
    """A whole Dask array as one value in the graph."""
    return x.rechunk(-1).to_delayed(optimize_graph=False).item()


def block_at(blocks: Any, lead: tuple[int, ...], index: int) -> Any:
    """The block of some entries and heads at one chunk of the sequence; axes of size 1 have but one block."""
    return blocks[(*(min(i, count - 1) for i, count in zip(lead, blocks.shape)), index, 0)]


def nested(counts: tuple[int, ...], item: Callable[[tuple[int, ...]], Any], index: tuple[int, ...] = ()) -> Any:
    """item at every index, in nested lists."""
    if len(index) == len(counts):
        return item(index)
    return [nested(counts, item, (*index, i)) for i in range(counts[len(index)])]
