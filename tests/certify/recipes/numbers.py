"""Chapter N: large and small numbers, full significance, odd sizes."""

from __future__ import annotations

import numpy as np

from certify.call import BASE, Book, Call
from certify.draw import Draw

BOOK = Book("N")


@BOOK.recipe("N1", flags=("wide-logits",))
def scores_beyond_float16(draw: Draw) -> Call:
    """Raw scores beyond 65504 with scaled ones below it, far apart: float16 would overflow before the scale."""
    data = draw.qkv(2, 4, batch=(1,), heads=1, d_k=64)
    data["q"][:], data["k"][:] = 64.0, 64.0
    data["k"][..., 1, :], data["k"][..., 2, :], data["k"][..., 3, :] = 63.0, 62.0, 63.5
    return Call(**data)


@BOOK.recipe("N1", flags=("wide-logits",))
def close_scores_near_a_thousand(draw: Draw) -> Call:
    """Scores near a thousand, close to each other: their exponentials overflow unless the maximum is subtracted."""
    data = draw.qkv(3, 5)
    data["q"][..., 0], data["k"][..., 0] = 32.0, 64.0
    return Call(**data)


@BOOK.recipe("N1", flags=("wide-logits",))
def close_scores_below_minus_a_thousand(draw: Draw) -> Call:
    """Scores near minus a thousand: their exponentials vanish unless the maximum is subtracted."""
    data = draw.qkv(3, 5)
    data["q"][..., 0], data["k"][..., 0] = -32.0, 64.0
    return Call(**data)


@BOOK.recipe("N1", flags=("long-row", "uniform-weights"))
def sum_of_many_weights(draw: Draw) -> Call:
    """80 like weights: a sum in 8 or 11 bits stops growing or loses what it adds."""
    data = draw.qkv(1, 80, batch=(1,), heads=1, d_k=4)
    return Call(**data | {"q": np.zeros_like(data["q"]), "v": np.abs(data["v"])})


@BOOK.recipe("N1", flags=("long-row",))
def sum_of_unlike_weights(draw: Draw) -> Call:
    """120 weights of different sizes and positive values: the sum keeps all its bits."""
    data = draw.qkv(1, 120, batch=(1,), heads=1, d_k=3)
    return Call(**data | {"v": np.abs(data["v"])})


@BOOK.recipe("N1", "N6", flags=("exact-zero",), kinds=BASE)
def scores_that_cancel(draw: Draw) -> Call:
    """Products that cancel exactly: large terms whose sum is small, and equal scores from different keys."""
    data = draw.qkv(3, 4)
    half = data["q"].shape[-1] // 2
    data["q"][..., half:] = data["q"][..., :half]
    data["k"][..., half:] = -data["k"][..., :half]
    data["v"][..., 2:, :] = -data["v"][..., :2, :]
    return Call(**data)


@BOOK.recipe("N1", flags=("underflow", "wide-logits"))
def weights_that_vanish(draw: Draw) -> Call:
    """Logits that are 0, -90, -110, -720, -745 and -800 below the largest: the weights leave float32, then float64."""
    data = draw.qkv(2, 6, batch=(1,), heads=2, d_k=1)
    below = np.asarray([0.0, 90.0, 110.0, 720.0, 744.0, 800.0])
    data["q"][:], data["k"][..., 0] = -1.0, below
    return Call(**data, scale=1.0)


@BOOK.recipe("N1", flags=("underflow", "wide-logits"), kinds=BASE)
def all_but_one_vanish(draw: Draw) -> Call:
    """Logits tens of thousands apart leave one key all the weight, exactly in every dtype."""
    data = draw.qkv(2, 4, batch=(1,), heads=2, d_k=1)
    data["q"][:], data["k"][..., 0] = 128.0, np.asarray([0.0, 128.0, 256.0, -256.0])
    return Call(**data)


@BOOK.recipe("N6", flags=("subnormal",), kinds=BASE)
def least_numbers_of_float16(draw: Draw) -> Call:
    """Values of a few times 2^-24, subnormal in float16, keep their place."""
    data = draw.qkv(3, 4)
    return Call(**data | {"v": np.sign(data["v"]) * np.ldexp(np.ceil(4 * np.abs(data["v"])), -24)})


@BOOK.recipe("N6", flags=("subnormal",), kinds=(("float32", 1), ("float64", 1)))
def subnormal_values(draw: Draw) -> Call:
    """Values below the smallest normal number of their dtype: a result may flush them to 0, and may not be NaN."""
    data = draw.qkv(3, 4)
    return Call(**data | {"v": np.sign(data["v"]) * np.ldexp(1.0, -140 if draw.kind == "float32" else -1060)})


@BOOK.recipe("N6", flags=("subnormal", "uniform-weights"), kinds=(("float32", 1), ("float64", 1)))
def subnormal_scores(draw: Draw) -> Call:
    """Products of tiny numbers are scores of nearly 0: all keys weigh the same to the last bit."""
    data = draw.qkv(3, 4)
    small = -130 if draw.kind == "float32" else -1030
    return Call(**data | {name: np.sign(data[name]) * np.ldexp(1.0, small) for name in ("q", "k")})


@BOOK.recipe("N6", flags=("negative-zero",), kinds=BASE)
def negative_zeros(draw: Draw) -> Call:
    """-0 counts as 0, in queries, keys and values."""
    data = draw.qkv(3, 4)
    for name in ("q", "k", "v"):
        data[name][..., 0, :] = -0.0
    return Call(**data, causal=True, q_start=1)


@BOOK.recipe("N6", flags=("constant-values",), kinds=BASE)
def largest_values(draw: Draw) -> Call:
    """Values of 61440 and its half: their weighted sum must not overflow before the division."""
    data = draw.qkv(3, 4)
    return Call(**data | {"v": np.where(data["v"] > 0, 61440.0, 30720.0)})


@BOOK.recipe("N6", flags=("wide-logits",))
def unequal_channels(draw: Draw) -> Call:
    """Channels of very unequal size, as trained models have them."""
    data = draw.qkv(3, 5)
    gains = np.ldexp(1.0, np.arange(data["q"].shape[-1]) % 4 - 2)
    return Call(**data | {"q": data["q"] * gains, "k": data["k"] * gains}, causal=True, q_start=2)


@BOOK.recipe("N6")
def odd_sizes(draw: Draw) -> Call:
    """Sizes that fit no tile: 9 queries, 17 keys, width 7."""
    return Call(**draw.qkv(9, 17, batch=(1,), heads=1, d_k=7), causal=True, q_start=8)


@BOOK.recipe("N1", "N6", flags=("long-row",))
def width_of_129(draw: Draw) -> Call:
    """Dot products of 129 terms, one more than a common width."""
    return Call(**draw.qkv(1, 2, batch=(1,), heads=1, d_k=129))
