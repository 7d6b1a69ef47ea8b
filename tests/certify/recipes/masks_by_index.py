"""Chapter M, second part: what indices decide, how masks combine, and what hidden and visible poison does."""

from __future__ import annotations

import math

import numpy as np

from certify.call import BASE, Book, Call, dense, plain
from certify.draw import Draw
from certify.recipes.masks import BOOK as POSITIONS

BOOK = Book("M", POSITIONS.recipes)

NAN, INF = math.nan, math.inf
# Larger than any number of a sensible input, and held by every dtype.
HUGE = 61440.0


@BOOK.recipe("M9")
def documents(draw: Draw) -> Call:
    """Packed documents see their own tokens alone, under the causal rule."""
    return Call(**draw.ramp(5, 5), causal=True, mask={"kind": "documents", "q_ids": [0, 0, 1, 1, 1]})


@BOOK.recipe("M9", flags=("ragged",))
def documents_of_queries_and_keys(draw: Draw) -> Call:
    """Queries and keys have ids of their own, per entry and in any order; an id without keys is an empty row."""
    mask = {
        "kind": "documents",
        "q_ids": [[0, 1, 0, 2], [5, 5, 7, 7]],
        "k_ids": [[1, 0, 0, 1, 3, 0], [7, 5, 7, 7, 5, 5]],
    }
    return Call(**draw.qkv(4, 6, batch=(2,), heads=2), mask=mask)


@BOOK.recipe("M10", flags=("ragged",))
def lengths(draw: Draw) -> Call:
    """A count per entry: key index below it, not up to it; no query row is masked."""
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), mask={"kind": "lengths", "n": [3, 5]})


@BOOK.recipe("M10", "P2", flags=("ragged",))
def length_of_nothing(draw: Draw) -> Call:
    """An entry of length 0 has empty rows, and one of full length hides nothing."""
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), mask={"kind": "lengths", "n": [0, 6]})


@BOOK.recipe("M10", "M5", flags=("ragged", "positions"))
def aligned_with_each_length(draw: Draw) -> Call:
    """Padded caches: each entry is aligned with its own length."""
    data = draw.ramp(2, 6, batch=(2,), heads=2)
    return Call(**data, causal=True, mask={"kind": "lengths", "n": [3, 5]}, q_start=[1, 3])


@BOOK.recipe("M11", flags=("ragged",))
def padding(draw: Draw) -> Call:
    """keep, one row per entry, is True where a key is real."""
    keep = np.asarray([[True, True, True, True, False, False], [True, False, True, True, True, False]])
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), mask={"kind": "padding", "keep": keep})


@BOOK.recipe("M11")
def padding_for_all(draw: Draw) -> Call:
    """keep of one axis holds for every entry."""
    return Call(
        **draw.ramp(4, 6), mask={"kind": "padding", "keep": np.asarray([False, True, True, False, True, False])}
    )


@BOOK.recipe("M12")
def any_pairs(draw: Draw) -> Call:
    """dense(array) shows just the pairs where the array is True."""
    return Call(**draw.qkv(4, 6), mask=dense(draw.shown(4, 6)))


@BOOK.recipe("M12")
def blocks(draw: Draw) -> Call:
    """blocks(array, 2): each element of the array stands for 2 x 2 pairs."""
    array = np.asarray([[True, False, True], [False, True, True]])
    return Call(**draw.qkv(4, 6), mask={"kind": "blocks", "array": array, "size": 2})


@BOOK.recipe("M12")
def blocks_that_do_not_fit(draw: Draw) -> Call:
    """The last blocks may hang over: 5 pairs in blocks of 2."""
    array = np.asarray([[True, False, False], [True, True, False], [False, True, True]])
    return Call(**draw.qkv(5, 5), mask={"kind": "blocks", "array": array, "size": 2})


@BOOK.recipe("M13")
def mask_and_causal(draw: Draw) -> Call:
    """mask and causal combine by AND: neither replaces the other."""
    return Call(**draw.ramp(5, 5), causal=True, mask=dense(draw.shown(5, 5)))


@BOOK.recipe("M13", flags=("window",))
def not_and_or(draw: Draw) -> Call:
    """(window(1, 0) | prefix(1)) & ~chunks(3)."""
    near = {"kind": "or", "of": [{"kind": "window", "left": 1, "right": 0}, {"kind": "prefix", "n": 1}]}
    return Call(
        **draw.ramp(5, 5), mask={"kind": "and", "of": [near, {"kind": "not", "of": [{"kind": "chunks", "size": 3}]}]}
    )


@BOOK.recipe("M15", flags=("head-mask",))
def mask_per_head(draw: Draw) -> Call:
    """A mask of rank 3 differs per head, not per entry: here both axes have the size 2."""
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), mask=dense(draw.shown(2, 4, 6)))


@BOOK.recipe("M15")
def mask_per_entry(draw: Draw) -> Call:
    """A mask (batch, 1, Lq, Lk) differs per entry."""
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), mask=dense(draw.shown(2, 1, 4, 6)))


@BOOK.recipe("M15")
def mask_per_key(draw: Draw) -> Call:
    """A mask (1, Lk) holds for every query."""
    return Call(**draw.ramp(4, 6), mask=dense(np.asarray([[True, False, True, True, False, False]])))


@BOOK.recipe("M15")
def mask_per_query(draw: Draw) -> Call:
    """A mask (Lq, 1) shows a query all keys or none."""
    return Call(**draw.qkv(4, 6), mask=dense(np.asarray([[True], [False], [True], [False]])))


@BOOK.recipe("M16", "M11", flags=("left-padding", "ragged"))
def left_padding(draw: Draw) -> Call:
    """Padding in the first slots hides them and moves nothing; pad queries are rows like others, some empty."""
    keep = np.asarray([[False, False, True, True, True], [True, True, True, True, True]])
    return Call(**draw.ramp(5, 5, batch=(2,), heads=2, d_k=4), causal=True, mask={"kind": "padding", "keep": keep})


@BOOK.recipe("M16", "B1", flags=("left-padding", "ragged", "alibi"))
def left_padding_with_alibi(draw: Draw) -> Call:
    """Distances under left padding are those of slots."""
    keep = np.asarray([[False, False, True, True, True], [False, True, True, True, True]])
    data = draw.qkv(5, 5, batch=(2,), heads=2, d_k=4)
    return Call(**data, causal=True, mask={"kind": "padding", "keep": keep}, bias=({"kind": "alibi"},))


@BOOK.recipe("M16", "M3", flags=("positions", "window"))
def common_shift(draw: Draw) -> Call:
    """A common shift of both starts changes nothing."""
    mask = {"kind": "window", "left": 2, "right": 0}
    return Call(**draw.ramp(4, 6, up=False), causal=True, mask=mask, q_start=102, k_start=100)


@BOOK.recipe("M17", flags=("infinite-bias",))
def bias_of_minus_infinity(draw: Draw) -> Call:
    """A bias of -inf hides its pair; the others are ordinary summands."""
    bias = np.where(draw.shown(4, 6), draw.array(4, 6), -INF)
    return Call(**draw.qkv(4, 6), bias=plain(bias))


@BOOK.recipe("M17", "P2", flags=("infinite-bias",))
def row_of_minus_infinity(draw: Draw) -> Call:
    """A row whose every bias is -inf is empty: 0, 0 and -inf, not NaN."""
    bias = np.zeros((4, 6))
    bias[1] = -INF
    return Call(**draw.qkv(4, 6), bias=plain(bias))


@BOOK.recipe("M17", "M19", flags=("infinite-bias", "hidden-poison"))
def minus_infinity_at_poison(draw: Draw) -> Call:
    """Where the bias is -inf it is never added, not even to a NaN score."""
    data = draw.qkv(4, 6)
    data["k"][..., 2, :], data["v"][..., 2, :] = NAN, INF
    return Call(**data, bias=plain(np.where(np.arange(6) == 2, -INF, draw.array(4, 6))))


@BOOK.recipe("M18", flags=("large-negative-bias",))
def large_negative_bias(draw: Draw) -> Call:
    """A row whose every bias is -9984 keeps its softmax; a single such bias leaves its key no weight."""
    bias = np.zeros((4, 6))
    bias[1], bias[2, :3] = -9984.0, -9984.0
    return Call(**draw.qkv(4, 6), bias=plain(bias))


@BOOK.recipe("M18", flags=("large-negative-bias",))
def bias_far_below(draw: Draw) -> Call:
    """A bias of -61440, near the least float16, hides nothing: alone in a row it cancels."""
    return Call(**draw.qkv(4, 6), bias=plain(np.full((4, 1), -HUGE)))


@BOOK.recipe("M19", flags=("hidden-poison",))
def hidden_keys(draw: Draw) -> Call:
    """Hidden keys may hold NaN, infinities and huge numbers."""
    data = draw.qkv(4, 6)
    data["k"][..., 3, :], data["k"][..., 4, :], data["k"][..., 5, :] = NAN, INF, -HUGE
    return Call(**data, mask=dense(np.tile(np.arange(6) < 3, (4, 1))))


@BOOK.recipe("M19", flags=("hidden-poison",))
def hidden_values(draw: Draw) -> Call:
    """Hidden values may hold NaN, infinities and huge numbers: 0 times NaN is not 0."""
    data = draw.qkv(4, 6)
    data["v"][..., 3, :], data["v"][..., 4, :], data["v"][..., 5, :] = NAN, -INF, HUGE
    return Call(**data, mask=dense(np.tile(np.arange(6) < 3, (4, 1))))


@BOOK.recipe("M19", flags=("hidden-poison",))
def poison_after_the_query(draw: Draw) -> Call:
    """Under the causal rule a NaN in the last key and value reaches the last query alone."""
    data = draw.qkv(5, 5)
    data["k"][..., 4, 0], data["v"][..., 4, 1] = NAN, NAN
    return Call(**data, causal=True)


@BOOK.recipe("M19", flags=("hidden-poison",))
def hidden_bias(draw: Draw) -> Call:
    """What a bias holds at hidden pairs does not matter: NaN, +inf, huge."""
    bias = draw.array(4, 6)
    bias[:, 3], bias[:, 4], bias[:, 5] = NAN, INF, HUGE
    return Call(**draw.qkv(4, 6), bias=plain(bias), mask=dense(np.tile(np.arange(6) < 3, (4, 1))))


@BOOK.recipe("M19", "P2", flags=("hidden-poison",))
def nothing_but_poison(draw: Draw) -> Call:
    """Rows that see nothing are 0 though everything is NaN."""
    data = draw.qkv(3, 4)
    data["k"][:], data["v"][:] = NAN, NAN
    return Call(**data, mask=dense(np.zeros((3, 4))))


@BOOK.recipe("M20", flags=("visible-non-finite",), kinds=BASE)
def visible_key(draw: Draw) -> Call:
    """A visible key with one NaN or infinity makes the rows that see it NaN, and no others."""
    data = draw.qkv(4, 6)
    data["k"][..., 4, 1], data["k"][..., 5, 0] = INF, NAN
    shown = np.tile(np.arange(6) < 4, (4, 1))
    shown[1, 4] = shown[2, 5] = True
    return Call(**data, mask=dense(shown))


@BOOK.recipe("M20", flags=("visible-non-finite",), kinds=BASE)
def visible_value(draw: Draw) -> Call:
    """A visible NaN or infinity among the values decides its element of the output, whatever its weight."""
    data = draw.ramp(4, 6)
    data["v"][..., 0, 0], data["v"][..., 1, 1], data["v"][..., 2, 2] = INF, -INF, NAN
    return Call(**data, causal=True, q_start=0)


@BOOK.recipe("M20", flags=("visible-non-finite",), kinds=BASE)
def infinities_that_meet(draw: Draw) -> Call:
    """Both infinities in one column, visible, give NaN."""
    data = draw.qkv(3, 3)
    data["v"][..., 0, 0], data["v"][..., 1, 0] = INF, -INF
    return Call(**data, causal=True)


@BOOK.recipe("M21", flags=("visible-non-finite",), kinds=BASE)
def query_of_nan(draw: Draw) -> Call:
    """A NaN in a query row makes that row NaN and no other."""
    data = draw.qkv(4, 6)
    data["q"][..., 1, 2] = NAN
    return Call(**data, causal=True, q_start=2)


@BOOK.recipe("M21", "P2", flags=("visible-non-finite",), kinds=BASE)
def empty_row_of_nan(draw: Draw) -> Call:
    """A NaN query that sees no key has an empty row like any other."""
    data = draw.qkv(4, 6)
    data["q"][..., 0, :] = NAN
    return Call(**data, causal=True, q_start=-1)
