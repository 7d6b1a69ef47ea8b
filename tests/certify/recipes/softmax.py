"""Chapter P: rows, empty rows, sinks, log-sum-exp, shifts, infinite logits."""

from __future__ import annotations

import math

import numpy as np

from certify.call import BASE, Book, Call, dense, plain
from certify.draw import Draw

BOOK = Book("P")


@BOOK.recipe("P1")
def rows_on_their_own(draw: Draw) -> Call:
    """Softmax runs over the keys of each query: a square of queries and keys shows the wrong axis."""
    return Call(**draw.qkv(4, 4, spread=2.0))


@BOOK.recipe("P1", flags=("constant-values",))
def weights_sum_to_one(draw: Draw) -> Call:
    """With one value for all keys the output is that value, exactly."""
    data = draw.qkv(4, 6)
    data["v"][:] = data["v"][..., :1, :]
    return Call(**data)


@BOOK.recipe("P2")
def empty_rows(draw: Draw) -> Call:
    """A row that sees no key has weights 0, output 0 and log-sum-exp -inf, beside rows that see some."""
    shown = draw.shown(4, 6)
    shown[0], shown[2], shown[1, 0] = False, False, True
    return Call(**draw.qkv(4, 6), mask=dense(shown))


@BOOK.recipe("P2", flags=("head-mask",))
def empty_rows_of_one_head(draw: Draw) -> Call:
    """One head sees nothing, the other all."""
    shown = np.zeros((2, 1, 1), dtype=bool)
    shown[1] = True
    return Call(**draw.qkv(4, 6, heads=2, kv_heads=2), mask=dense(shown))


@BOOK.recipe("P3", flags=("sink",))
def sinks(draw: Draw) -> Call:
    """A sink per head takes weight and gives no value."""
    data = draw.qkv(4, 6)
    return Call(**data, sinks=draw.array(data["q"].shape[-3]))


@BOOK.recipe("P3", flags=("sink", "softcap"))
def sinks_are_final_logits(draw: Draw) -> Call:
    """Sinks are neither scaled, capped nor biased."""
    data = draw.qkv(4, 6)
    sinks = draw.array(data["q"].shape[-3], spread=4.0)
    return Call(**data, scale=0.25, softcap=1.0, bias=plain(np.full((1, 6), 2.0)), sinks=sinks)


@BOOK.recipe("P3", "P4", flags=("sink", "wide-logits"))
def large_sinks(draw: Draw) -> Call:
    """A sink far above all logits takes nearly everything; one far below takes nearly nothing."""
    data = draw.qkv(4, 6)
    sinks = np.where(np.arange(data["q"].shape[-3]) % 2 == 0, 24.0, -24.0)
    return Call(**data, sinks=sinks)


@BOOK.recipe("P3", flags=("sink",), kinds=BASE)
def sinks_that_are_none(draw: Draw) -> Call:
    """A sink of -inf is none at all."""
    data = draw.qkv(4, 6)
    sinks = draw.array(data["q"].shape[-3])
    sinks[0] = -math.inf
    return Call(**data, sinks=sinks, causal=True, q_start=-1)


@BOOK.recipe("P3", flags=("sink", "visible-non-finite"), kinds=BASE)
def sinks_that_are_not_numbers(draw: Draw) -> Call:
    """A sink of NaN or +inf makes the rows of its head NaN, and no others."""
    data = draw.qkv(3, 4, heads=3)
    return Call(**data, sinks=np.asarray([math.nan, 0.5, math.inf]))


@BOOK.recipe("P4", "P2", flags=("sink",))
def empty_rows_with_sinks(draw: Draw) -> Call:
    """An empty row with a sink has output 0, and the sink for its log-sum-exp."""
    data = draw.qkv(4, 6)
    return Call(**data, sinks=draw.array(data["q"].shape[-3]), causal=True, q_start=-2)


@BOOK.recipe("P4")
def natural_logarithm(draw: Draw) -> Call:
    """The log-sum-exp is natural and of the final logits: scale, bias and mask are in it."""
    shown = draw.shown(4, 6) | (np.arange(6) == 5)
    return Call(**draw.qkv(4, 6), scale=0.5, bias=plain(draw.array(1, 6)), mask=dense(shown))


@BOOK.recipe("P4", "P5", flags=("uniform-weights",), kinds=BASE)
def logarithms_of_counts(draw: Draw) -> Call:
    """With all scores zero the log-sum-exp of a row is the logarithm of the number of keys that it sees."""
    data = draw.qkv(5, 5)
    return Call(**data | {"q": np.zeros_like(data["q"])}, causal=True)


@BOOK.recipe("P5", flags=("uniform-weights",))
def zero_queries(draw: Draw) -> Call:
    """With zero queries row i of causal attention weighs its first i + 1 keys alike."""
    data = draw.qkv(5, 5)
    return Call(**data | {"q": np.zeros_like(data["q"])}, causal=True)


@BOOK.recipe("P5", flags=("uniform-weights",))
def zero_keys(draw: Draw) -> Call:
    """With zero keys as well."""
    data = draw.qkv(5, 5)
    return Call(**data | {"k": np.zeros_like(data["k"])}, causal=True)


@BOOK.recipe("P5", flags=("uniform-weights", "exact-zero"))
def values_that_cancel(draw: Draw) -> Call:
    """With zero queries, values that are opposite in pairs have the mean 0, exactly."""
    data = draw.qkv(2, 6)
    data["v"][..., 3:, :] = -data["v"][..., :3, :]
    return Call(**data | {"q": np.zeros_like(data["q"])})


@BOOK.recipe("P6", flags=("shift",))
def shifted_rows(draw: Draw) -> Call:
    """A constant bias per row changes its log-sum-exp alone."""
    return Call(**draw.qkv(4, 6), bias=plain(np.asarray([[-64.0], [0.0], [16.0], [96.0]])))


@BOOK.recipe("P6", "P3", flags=("shift", "sink"))
def shifted_rows_with_a_sink(draw: Draw) -> Call:
    """With a sink a constant bias does not cancel."""
    data = draw.qkv(4, 6)
    bias = plain(np.asarray([[-4.0], [0.0], [1.0], [8.0]]))
    return Call(**data, bias=bias, sinks=draw.array(data["q"].shape[-3]))


@BOOK.recipe("P7", flags=("infinite-bias",), kinds=BASE)
def plus_infinity(draw: Draw) -> Call:
    """A visible bias of +inf makes its row NaN; a hidden one does nothing."""
    bias = np.zeros((4, 6))
    bias[1, 2] = bias[2, 5] = math.inf
    return Call(**draw.qkv(4, 6), bias=plain(bias), causal=True, q_start=2)
