"""Chapter D: gradients of q, k, v, bias and sinks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from certify.call import Book, Call, dense, plain
from certify.draw import Draw

BOOK = Book("D")
FLAG = "gradient"


def with_gradient(draw: Draw, data: dict[str, Any], **options: Any) -> Call:
    """A call with a gradient of its output."""
    q, v = data["q"], data["v"]
    batch = np.broadcast_shapes(q.shape[:-3], data["k"].shape[:-3])
    gradient = draw.array(*batch, *q.shape[len(q.shape[:-3]) : -1], v.shape[-1])
    return Call(**{**data, **options, "grad_output": gradient})


def small(draw: Draw, q_len: int = 3, k_len: int = 4, **sizes: Any) -> dict[str, Any]:
    """Two heads of width 4, without a batch, unless sizes say otherwise."""
    return draw.qkv(q_len, k_len, **{"batch": (), "heads": 2, "d_k": 4, "d_v": 3, **sizes})


@BOOK.recipe("D1", "D8", flags=(FLAG,))
def all_keys(draw: Draw) -> Call:
    """The gradients of q, k and v, every key being visible."""
    return with_gradient(draw, small(draw))


@BOOK.recipe("D1", "D8", flags=(FLAG, "rank-2"))
def one_head(draw: Draw) -> Call:
    """Rank 2, and a width whose root is no rational number."""
    return with_gradient(draw, {name: x[0] for name, x in small(draw, 4, 5, heads=1, d_k=6).items()})


@BOOK.recipe("D1", "M4", flags=(FLAG, "positions"))
def causal(draw: Draw) -> Call:
    """Causal visibility, the first query at position 2: the gradient of a key sums over the queries that see it."""
    return with_gradient(draw, small(draw, 3, 5), causal=True, q_start=2)


@BOOK.recipe("D1", "S2", flags=(FLAG, "negative-scale"))
def negative_scale(draw: Draw) -> Call:
    """A given scale multiplies the gradients of q and k once."""
    return with_gradient(draw, small(draw), scale=-0.75)


@BOOK.recipe("D2", "G1", flags=(FLAG,))
def grouped_heads(draw: Draw) -> Call:
    """A key/value head sums the gradients of the two query heads that read it."""
    return with_gradient(draw, small(draw, heads=4, kv_heads=2))


@BOOK.recipe("D2", "A3", flags=(FLAG, "batch-broadcast"))
def shared_keys(draw: Draw) -> Call:
    """Keys and values that two batch entries share sum the gradients of both."""
    data, shared = small(draw, batch=(2,)), small(draw, batch=(1,))
    return with_gradient(draw, {**data, "k": shared["k"], "v": shared["v"]})


@BOOK.recipe("D2", "D7", flags=(FLAG,))
def bias_per_key(draw: Draw) -> Call:
    """A bias of one number per key sums the gradients of all rows of all heads."""
    return with_gradient(draw, small(draw), bias=plain(draw.array(4)))


@BOOK.recipe("D3", "P2", flags=(FLAG, "sink"))
def empty_rows(draw: Draw) -> Call:
    """Rows that see no key have gradients of exactly 0, and add none to keys, values and sinks."""
    shown = np.asarray([[False] * 4, [True, False, True, True], [False] * 4, [True] * 4])
    return with_gradient(draw, small(draw, 4), mask=dense(shown), sinks=draw.array(2))


@BOOK.recipe("D4", "M19", flags=(FLAG, "hidden-poison"))
def hidden_keys(draw: Draw) -> Call:
    """Keys that no query sees have gradients of exactly 0, whatever they hold."""
    data = small(draw, 3, 5)
    data["k"][..., 1, :], data["v"][..., 1, :] = math.nan, math.inf
    data["k"][..., 4, :], data["v"][..., 4, :] = -math.inf, math.nan
    return with_gradient(draw, data, mask=dense(np.asarray([[True, False, True, True, False]])))


@BOOK.recipe("D4", "D7", "M17", flags=(FLAG, "infinite-bias"))
def bias_of_minus_infinity(draw: Draw) -> Call:
    """Where the bias is -inf its gradient is exactly 0."""
    bias = draw.array(3, 4)
    bias[0, 1] = bias[2, 3] = -math.inf
    return with_gradient(draw, small(draw), bias=plain(bias))


@BOOK.recipe("D5", "S3", flags=(FLAG, "softcap"))
def softcap(draw: Draw) -> Call:
    """The slope of the cap shrinks the gradients of q and k."""
    return with_gradient(draw, small(draw, spread=2.0), softcap=1.5)


@BOOK.recipe("D6", "P3", flags=(FLAG, "sink"))
def sinks(draw: Draw) -> Call:
    """The gradient of a sink is minus its share of what the rows of its head are worth."""
    return with_gradient(draw, small(draw), sinks=draw.array(2))


@BOOK.recipe("D7", "D5", flags=(FLAG, "softcap", "head-mask"))
def bias_after_the_cap(draw: Draw) -> Call:
    """The bias has the gradient of the logits: neither the cap's slope nor the scale is in it."""
    return with_gradient(draw, small(draw), softcap=2.0, scale=0.75, bias=plain(draw.array(2, 3, 4)))


@BOOK.recipe("D7", "B3", flags=(FLAG, "relative-bias", "positions"))
def relative_table(draw: Draw) -> Call:
    """An entry of a table sums the gradients of the pairs at its distance, and the outermost those beyond."""
    table = {"kind": "relative", "table": draw.array(2, 5)}
    return with_gradient(draw, small(draw, 4, 6), bias=(table,), q_start=1)
