"""Chapter B: ALiBi, relative biases, sums of biases, rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import attention, attention_stages, biases, masks, rope
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Convert, Problem
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw, positions, precision
from refattn.conformance.tracked import pair_sums, turned, turning_error
from refattn.dtypes import COMPUTED, FULL
from refattn.errors import BiasError, RotaryError

CASES = Chapter("biases")

# Published slopes: for 4 heads 2^-2, 2^-4, ...; for 6 those of 4 heads and every second one of 8.
SLOPES = {
    4: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8],
    6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3],
}


def _alibi(heads: int, q_len: int, k_len: int, q_start: Any = 0) -> dict[str, Any]:
    query, key = positions(q_len, k_len, q_start)
    slopes = np.asarray(SLOPES[heads])
    bias = slopes[:, None, None] * -np.abs(query - key)
    return {"bias": bias, "bias_of": lambda _: biases.alibi(heads), "slopes": slopes}


@CASES.problem("B1", "B2")
def alibi(draw: Draw) -> Problem:
    """slope_h times minus the distance is added, on both sides of the query."""
    return Problem(**draw.qkv(6, 6, heads=4), **_alibi(4, 6, 6))


@CASES.problem("B1", "M3")
def alibi_over_a_cache(draw: Draw) -> Problem:
    """Distances are of positions: four queries at the end of six keys, causal."""
    return Problem(**draw.qkv(4, 6, heads=4), causal=True, q_start=2, **_alibi(4, 4, 6, 2))


@CASES.problem("B1", "P4")
def alibi_has_no_offset(draw: Draw) -> Problem:
    """The distance of a query to its own key is 0: an offset cancels in the output and shows in the log-sum-exp."""
    return Problem(**draw.qkv(6, 6, heads=4), causal=True, asks=("lse",), **_alibi(4, 6, 6))


@CASES.problem("B2")
def alibi_for_six_heads(draw: Draw) -> Problem:
    """6 heads have the slopes of 4, then every second slope of 8."""
    return Problem(**draw.qkv(4, 6, heads=6), q_start=1, **_alibi(6, 4, 6, 1))


@CASES.problem("B3")
def relative(draw: Draw) -> Problem:
    """A table by clipped distance, key minus query: R = 2, so that distances beyond are clipped on both sides."""
    return _relative(draw, 6, 6, 0)


@CASES.problem("B3", "M3")
def relative_over_a_cache(draw: Draw) -> Problem:
    """Distances are of positions, per batch entry too."""
    return _relative(draw, 4, 6, np.asarray([1, 2]))


def _relative(draw: Draw, q_len: int, k_len: int, q_start: Any) -> Problem:
    table = draw.normal(2, 5, spread=2.0)
    query, key = positions(q_len, k_len, q_start)
    distance = np.clip(key - query, -2, 2) + 2
    bias = table[:, distance] if distance.ndim == 2 else np.moveaxis(table[:, distance[:, 0]], 0, 1)

    def bias_of(array: Convert) -> Any:
        return biases.relative(array(table))

    start = None if isinstance(q_start, int) else q_start
    return Problem(**draw.qkv(q_len, k_len), bias=bias, bias_of=bias_of, q_start=start)


@CASES.problem("B4")
def bias_per_head(draw: Draw) -> Problem:
    """A bias array (H, Lq, Lk) differs per head."""
    return Problem(**draw.qkv(4, 6), bias=draw.normal(2, 4, 6, spread=2.0))


@CASES.problem("B4")
def bias_per_key(draw: Draw) -> Problem:
    """A bias (batch, 1, 1, Lk) holds for all queries and heads."""
    return Problem(**draw.qkv(4, 6), bias=draw.normal(2, 1, 1, 6, spread=2.0))


@CASES.problem("B4", "M17")
def biases_add(draw: Draw) -> Problem:
    """A table and two arrays add with +; -inf in one of them hides. All are quarters, so that the sum is exact."""
    table, first = (np.round(4 * draw.normal(*shape)) / 4 for shape in ((4, 3), (6, 6)))
    second = np.where(np.eye(6) > 0, -np.inf, 0.5)
    query, key = positions(6, 6)

    def bias_of(array: Convert) -> Any:
        return biases.relative(array(table)) + array(first) + array(second)

    bias = table[:, np.clip(key - query, -1, 1) + 1] + first + second
    return Problem(**draw.qkv(6, 6, heads=4), bias=bias, bias_of=bias_of)


@CASES.check("B4", "E1")
def biases_that_are_refused(api: Api) -> None:
    """A bias is a floating array or a Bias with the right number of heads, and nothing else."""
    x = api.array(np.ones((2, 4, 8)))
    wrong: list[tuple[str, Any]] = [
        ("bias", api.array(np.ones((4, 4), dtype=bool))),
        ("bias", api.array(np.ones((4, 4), dtype=np.int32))),
        ("bias", 1.0),
        ("bias", "alibi"),
        ("alibi", biases.alibi(3)),
        ("relative", biases.relative(api.array(np.ones((4, 3))))),
    ]
    for argument, bias in wrong:
        expect_error(BiasError, argument, attention, x, x, x, bias=bias)
    for heads in (0, -1, 2.0, None):
        expect_error(BiasError, "alibi", biases.alibi, heads)
    for shape in ((2, 4), (5,), (1, 2, 3)):
        table = api.array(np.ones(shape))
        expect_error(BiasError, "relative", biases.relative, table)


@CASES.check("B5", dtypes=COMPUTED)
def rotary(api: Api) -> None:
    """Pair i turns by position * base^(-2i/width), in both styles, with other bases, and in a part of the width."""
    x = api.draw.normal(2, 3, 5, 8)
    where = np.asarray([0, 1, 2, 17, 100])
    for style in ("half", "interleaved"):
        for base, width in ((10000.0, 8), (500.0, 8), (10000.0, 4), (10000.0, 0)):
            out = api.host(rope(api.array(x), api.array(where), style=style, base=base, width=width))
            expected = turned(x, where, style, base, width)
            bound = turning_error(pair_sums(x, style, width), where, api.dtype)
            what = f"rope, {style}, base {base:g}, width {width}"
            expect_within(what, out, expected, bound)
            expect_equal(f"{what}, components beyond", out[..., width:], x[..., width:])
    default = rope(api.array(x), api.array(where), style="half")
    named = rope(api.array(x), api.array(where), style="half", base=1e4, width=8)
    expect_equal("default base and width", api.host(default), api.host(named))


@CASES.check("B5", "E1")
def rotary_arguments(api: Api) -> None:
    """The style is named and never guessed; width is even and fits, base is positive, positions fit."""
    x, where = api.array(np.ones((2, 5, 8))), api.array(np.arange(6))
    for style in ("neox", None, ""):
        expect_error(RotaryError, "style", rope, x, where, style=style)
    for base in (0.0, -1.0, float("nan"), float("inf"), "10000"):
        expect_error(RotaryError, "base", rope, x, where, style="half", base=base)
    for width in (3, 10, -2, 4.0):
        expect_error(RotaryError, "width", rope, x, where, style="half", width=width)
    expect_error(RotaryError, "positions", rope, x, api.array(np.arange(4)), style="half")
    expect_error(RotaryError, "positions", rope, x, "0123", style="half")


@CASES.check("B6", dtypes=FULL)
def rotary_is_relative(api: Api) -> None:
    """Scores of rotated queries and keys depend on position differences only; those of unequal differences differ."""
    data = api.draw.qkv(6, 6)
    where = np.arange(6)
    for style in ("half", "interleaved"):

        def scores(shift: int, stretch: int = 1, style: str = style) -> Array:
            at = api.array(stretch * where + shift)
            q, k = (rope(api.array(data[name]), at, style=style) for name in ("q", "k"))
            return api.host(attention_stages(q, k, api.array(data["v"])).scores)

        size = np.sum(np.abs(data["q"]), axis=-1)[..., :, None] * np.sum(np.abs(data["k"]), axis=-1)[..., None, :]
        bound = 2 * size * precision(api.dtype) * (8 * 40 + 40)
        expect_within(f"scores shifted by 37, {style}", scores(37), scores(0), bound)
        expect(float(np.max(np.abs(scores(0, 2) - scores(0)))) > 1e-2, f"{style}: twice the distance, the same scores")


@CASES.check("B7", "M16", dtypes=FULL)
def rotary_positions(api: Api) -> None:
    """Positions are (L,), or a row per batch entry: with left padding they count kept keys from 0."""
    data = api.draw.qkv(6, 6)
    keep = np.asarray([[True] * 6, [False, False, True, True, True, True]])
    where = np.maximum(np.cumsum(keep, axis=-1) - 1, 0)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    q_turned, k_turned = (rope(x, api.array(where), style="half") for x in (q, k))
    padded = api.host(attention(q_turned, k_turned, v, causal=True, mask=masks.padding(api.array(keep))))
    parts = {name: data[name][1, :, 2:] for name in ("q", "k", "v")}
    alone = [rope(api.array(parts[name]), api.array(np.arange(4)), style="half") for name in ("q", "k")]
    expect_equal("rotated queries of the padded entry", api.host(q_turned)[1, :, 2:], api.host(alone[0]))
    unpadded = {"q": api.host(alone[0]), "k": api.host(alone[1]), "v": parts["v"]}
    golden = golden_of(Problem(dtype=api.dtype, causal=True, **unpadded))
    expect_within("padded output", padded[1, :, 2:], golden.output, golden.bound(api.dtype))
    per_row = api.host(rope(q, api.array(np.stack([np.arange(6), np.arange(6) + 3])), style="half"))
    expect_equal("entry 0", per_row[0], api.host(rope(q, api.array(np.arange(6)), style="half"))[0])
    expect_equal("entry 1", per_row[1], api.host(rope(q, api.array(np.arange(6) + 3), style="half"))[1])
