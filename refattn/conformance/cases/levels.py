"""Chapters P and N: how high the scores lie, how their mass is spread, and data that forgives too much."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.conformance.case import Chapter, Problem
from refattn.conformance.plain import Draw

CASES = Chapter("levels")


@CASES.problem("P6", dtypes=("float16", "float32"))
def raw_scores_far_below_zero(draw: Draw) -> Problem:
    """Raw scores of -57344 and 128 more, scaled to -896 and -894: a maximum that starts at -50000 loses both."""
    q, k = np.full((1, 1, 2, 4), -512.0), np.full((1, 1, 2, 4), 28.0)
    k[0, 0, 1, 3] = 27.75
    return Problem(dtype=draw.dtype, q=q, k=k, v=np.asarray([[[[1.0], [3.0]]]]), scale=2.0**-6)


@CASES.problem("P6")
def far_below_a_hidden_key(draw: Draw) -> Problem:
    """Rows whose visible scores lie 120 below that of a hidden key: it must not set the maximum."""
    data = draw.qkv(4, 6)
    data["q"][..., 0], data["k"][..., 0] = 8.0, -16.0
    data["k"][..., 2, 0] = 26.5
    data["v"] = np.broadcast_to(np.arange(1.0, 9.0), data["v"].shape)
    return Problem(**data, shown=np.broadcast_to(np.arange(6) != 2, (4, 6)))


@CASES.problem("N1", dtypes=("float16",))
def negative_scores_beyond_float16(draw: Draw) -> Problem:
    """Raw scores of -262144 and -258048 exceed float16, the scaled ones do not: as infinities both would be lost."""
    q, k, v = np.full((1, 1, 2, 64), -64.0), np.full((1, 1, 2, 64), 64.0), np.ones((1, 1, 2, 4))
    k[..., 1, :], v[..., 1, :] = 63.0, 2.0
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=2.0**-12)


@CASES.problem("N1", "P1")
def small_weights_carry_half(draw: Draw) -> Problem:
    """One key has about half the weight and 4095 share the rest, 2^-13 each: with values of one the output is one."""
    data = draw.qkv(2, 4096, batch=(1,), heads=1, d_k=4, d_v=1, spread=0.125)
    data["q"][..., 0], data["k"][..., 0], data["k"][..., 0, 0] = 4.0, 0.0, 4.15625
    data["v"] = np.ones_like(data["v"])
    return Problem(**data, coherent=True)


@CASES.problem("N6", "M4", "S1")
def inputs_of_one_sign(draw: Draw) -> Problem:
    """64 causal rows of numbers between 0.5 and 1: wrong answers lie close to the right one, and must still fail."""
    q, k, v = (0.5 + 0.5 * draw.rng.random((1, 1, 64, 64)) for _ in range(3))
    return Problem(**draw.given(q, k, v), causal=True)


def heavy_tails(draw: Draw) -> dict[str, Any]:
    """q, k and v of two batch entries with channels of very unequal size, the second's keys four times as large."""
    data = draw.qkv(16, 16, heads=4, kv_heads=1, d_k=64, spread=0.25)
    gains = np.exp2(np.round(1.5 * draw.rng.standard_normal(64)))
    gains[::16] *= 8.0
    data["q"], data["v"] = draw.exact(data["q"] / gains), draw.exact(data["v"] * gains)
    data["k"] = draw.exact(data["k"] * gains * np.asarray([1.0, 4.0])[:, None, None, None])
    return data


@CASES.problem("N6", "A3", "G1")
def heavy_tails_in_a_batch(draw: Draw) -> Problem:
    """Two batch entries of channels of very unequal size, wide heads, four over one: each entry is as it is alone."""
    return Problem(**heavy_tails(draw), causal=True)


@CASES.problem("M18", "P2", "M17")
def far_below_a_hidden_number(draw: Draw) -> Problem:
    """Visible keys whose bias is -32768 keep all weight: a hidden key that is put at -10000 instead would take it."""
    data = draw.qkv(4, 6)
    bias, shown = np.full((4, 6), -32768.0), np.broadcast_to(np.arange(6) % 3 != 1, (4, 6))
    return Problem(**data, bias=bias, shown=shown)
