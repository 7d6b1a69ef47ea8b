"""Pictures of a user's own call, each a whole SVG file: the weights of one head, and who sees whom under a mask.

Weights are labelled as what they are, a diagnostic: they show where a query reads, not why (X1, X2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.arguments import check_call
from refattn.arrays import Array, as_size, describe, is_array
from refattn.clauses import clause
from refattn.conformance.reports.heatmap import Axis, Kind, Scale, heatmap, shrunk
from refattn.conformance.reports.page import styles
from refattn.conformance.reports.pictures import MOST, ON_ONE_SIDE, visibility_picture
from refattn.errors import InputsError, NotAnArrayError
from refattn.goldens import golden_visible
from refattn.on_host import host

WEIGHTS = (*(Kind(shade, "") for shade in ON_ONE_SIDE), Kind("z", "hidden", "dot"), Kind("bad", "NaN", "cross"))
HIDDEN, NAN = len(ON_ONE_SIDE), len(ON_ONE_SIDE) + 1


def weights_svg(q: Array, k: Array, v: Array, *, entry: int = 0, head: int = 0, **options: Any) -> str:
    """SVG of the weights of one head, entry counting through the batch; see `refattn.testing.weights_svg`."""
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if not is_array(x):
            raise NotAnArrayError(argument, "an array", describe(x))
    given = {name: host(x) if is_array(x) else x for name, x in options.items()}
    call = check_call(host(q, "q"), host(k, "k"), host(v, "v"), **given)
    leading = call.scores_shape[:-2]
    for argument, index, count in (("entry", entry, math.prod(leading[:-1])), ("head", head, leading[-1])):
        number = as_size(index)
        if number is None or number >= count:
            raise InputsError(argument, f"an index below {count}", describe(index) if number is None else number)
    if 0 in call.scores_shape:
        raise InputsError("q", "at least one query and one key", f"scores of shape {call.scores_shape}")
    at = (*(int(i) for i in np.unravel_index(entry, leading[:-1])), head) if leading[:-1] else (head,)
    frame = call.frame()
    visible = np.ones((1, 1), dtype=bool) if call.mask is None else call.mask.evaluate(frame)
    visible = np.broadcast_to(visible, call.scores_shape)[at]
    bias = None
    if call.bias is not None:
        bias = np.broadcast_to(call.bias.evaluate(frame, np.float64), call.scores_shape)[at]
        visible = visible & ~np.isneginf(bias)
    heads = [np.broadcast_to(x, (*leading[:-1], *x.shape[-3:])) for x in (call.q, call.k, call.v)]
    one_q, one_k, one_v = (x[(*at[:-1], h)] for x, h in zip(heads, (head, head // call.group, head // call.group)))
    sinks = None if call.sinks is None else call.sinks[head].reshape(1)
    scale = float(call.scale)
    golden = golden_visible(
        one_q, one_k, one_v, visible, bias=bias, scale=scale, softcap=call.softcap, sinks=sinks, weights=True
    )
    return _drawn(golden.weights, visible, _in_words(entry, head, leading))


def mask_svg(visible: Array) -> str:
    """SVG of who sees whom, of a boolean matrix (Lq, Lk), True = visible, that is not empty."""
    return visibility_picture(host(visible, "visible"), "mask", style=styles("map.css")).svg


def _in_words(entry: int, head: int, leading: tuple[int, ...]) -> str:
    words = [f"batch entry {entry}"] if math.prod(leading[:-1]) > 1 else []
    return ", ".join([*words, f"head {head} of {leading[-1]}"])


def _drawn(weights: Array, visible: Array, which: str) -> str:
    """Of a larger matrix, each cell is the largest weight of its block."""
    shares, rows, columns = shrunk(visible, MOST)
    starts = (np.arange(0, weights.shape[0], rows), np.arange(0, weights.shape[1], columns))
    largest = np.maximum.reduceat(np.maximum.reduceat(weights, starts[0], axis=0), starts[1], axis=1)
    finite = largest[np.isfinite(largest)]
    top = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    cells = np.rint(np.where(np.isfinite(largest), largest, 0.0) / top * (len(ON_ONE_SIDE) - 1)).astype(int)
    cells[np.isnan(largest)] = NAN
    cells[shares == 0] = HIDDEN
    lines = [f"Attention weights of {which}."]
    if rows * columns > 1:
        lines.append(f"A cell is the largest weight of {rows} x {columns} pairs.")
    lines += ["A diagnostic: where a query reads, not why.", f"X1: {clause('X1').text}", f"X2: {clause('X2').text}"]
    return heatmap(
        cells,
        WEIGHTS,
        name="weights",
        title=lines[0],
        says=f"{weights.shape[0]} queries, {weights.shape[1]} keys, largest weight {top:.3g}. {' '.join(lines[1:])}",
        axes=(Axis("query", step=rows), Axis("key", step=columns)),
        scale=Scale(tuple(range(len(ON_ONE_SIDE))), "0", f"{top:.3g}"),
        style=styles("map.css"),
        footer=lines,
    )
