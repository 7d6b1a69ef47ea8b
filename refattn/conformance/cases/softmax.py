"""Chapter P: softmax over the keys, empty rows, sinks, log-sum-exp."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn import attention, attention_stages, attention_with_lse
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw, causal_pairs, indices
from refattn.dtypes import COMPUTED, FULL
from refattn.errors import SinkError

CASES = Chapter("softmax")


@CASES.problem("P1")
def over_the_keys(draw: Draw) -> Problem:
    """Softmax runs over the keys: with as many queries as keys the other axis fits too, and is wrong."""
    return Problem(**draw.qkv(6, 6, spread=1.5))


@CASES.problem("P1")
def rows_on_their_own(draw: Draw) -> Problem:
    """Each row has its own maximum and sum: rows whose logits lie far apart."""
    data = draw.qkv(4, 6)
    data["q"] = draw.exact(data["q"] * np.asarray([0.125, 1.0, 8.0, 4.0])[:, None])
    return Problem(**data)


@CASES.problem("P1")
def weights_sum_to_one(draw: Draw) -> Problem:
    """Weights are returned, and each row's sum to one."""
    return Problem(**draw.qkv(4, 6), causal=True, q_start=1, asks=("weights",))


@CASES.problem("P1")
def values_of_one(draw: Draw) -> Problem:
    """With values of one the output is one, for many keys of like weight."""
    data = draw.qkv(3, 64, batch=(1,), spread=0.125)
    data["v"] = np.ones_like(data["v"])
    return Problem(**data, coherent=True)


@CASES.problem("P2")
def empty_row(draw: Draw) -> Problem:
    """A row that sees no key has output 0, not NaN and not the mean of the values, and leaves the others alone."""
    shown = np.ones((4, 6), dtype=bool)
    shown[2] = False
    data = draw.qkv(4, 6)
    return Problem(**{**data, "v": draw.exact(data["v"] + 4.0)}, shown=shown)


@CASES.problem("P2")
def empty_row_of_one_head(draw: Draw) -> Problem:
    """One head that sees nothing is 0; the other heads are as ever."""
    shown = np.ones((4, 6, 6), dtype=bool)
    shown[2] = False
    return Problem(**draw.qkv(6, 6, heads=4), shown=shown)


@CASES.problem("P2")
def blast_radius(draw: Draw) -> Problem:
    """An empty row of one batch entry and head changes that row alone."""
    shown = np.ones((2, 2, 4, 6), dtype=bool)
    shown[0, 0, 0] = False
    return Problem(**draw.qkv(4, 6), shown=shown)


@CASES.problem("P2", "P4")
def log_sum_exp_of_an_empty_row(draw: Draw) -> Problem:
    """The log-sum-exp of an empty row is -inf: not 0, not +inf, not a large negative number."""
    return Problem(**draw.qkv(6, 4), causal=True, q_start=-2, asks=("lse",))


@CASES.problem("P2", "P4")
def log_sum_exp_without_keys(draw: Draw) -> Problem:
    """Without keys the output is 0 and the log-sum-exp -inf."""
    return Problem(**draw.qkv(4, 0), asks=("lse",))


@CASES.problem("P3")
def sinks(draw: Draw) -> Problem:
    """One logit per query head in the denominator: weights sum to less than one."""
    return Problem(**draw.qkv(4, 6, heads=4), sinks=draw.exact([-1.0, 0.0, 1.0, 2.5]))


@CASES.problem("P3", "S5")
def sinks_are_final_logits(draw: Draw) -> Problem:
    """A sink is neither scaled, capped nor biased: all three options are there, and would change it."""
    options: dict[str, Any] = {"scale": 0.125, "softcap": 1.5, "bias": draw.exact(draw.normal(4, 6) + 1.0)}
    return Problem(**draw.qkv(4, 6, spread=2.0), sinks=np.asarray([4.0, -2.0]), **options)


@CASES.problem("P3", "M13")
def sinks_with_causal(draw: Draw) -> Problem:
    """A sink is seen by every row, also under causal visibility and in groups of heads."""
    return Problem(
        **draw.ramp(6, 6, heads=4, kv_heads=2, step=1.0), causal=True, sinks=np.asarray([1.0, 4.0, -1.0, 2.0])
    )


@CASES.problem("P3")
def dominating_sink(draw: Draw) -> Problem:
    """A sink far above the logits takes the maximum; the output nearly vanishes, without overflow."""
    return Problem(**draw.qkv(4, 6), sinks=np.asarray([12.0, 200.0]))


@CASES.problem("P3", dtypes=FULL)
def sinks_by_hand(draw: Draw) -> Problem:
    """Two scores of 0, values 1 and 3: a sink of ln 2 halves the mean, one of 25 leaves 4 / (2 + e^25), unclamped."""
    q, k, v = np.zeros((1, 2, 1, 1)), np.zeros((1, 2, 2, 1)), np.ones((1, 2, 2, 1))
    v[..., 1, :] = 3.0
    known = {"output": (np.asarray([1.0, 5.555e-11]), 5e-7)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=1.0, sinks=draw.exact([math.log(2.0), 25.0]), known=known)


@CASES.check("P3", "P4", dtypes=FULL)
def a_sink_is_a_factor(api: Api) -> None:
    """A sink multiplies the output without it by 1 / (1 + e^(sink - lse)), lse in the natural logarithm."""
    data, sinks = api.draw.qkv(4, 6, heads=4), np.asarray([-3.0, 0.0, 2.0, 9.0])
    plain, golden = golden_of(Problem(**data)), golden_of(Problem(**data, sinks=sinks))
    factor = 1 / (1 + np.exp(sinks[:, None] - plain.lse))
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    output = api.host(attention(q, k, v, sinks=api.array(sinks)))
    expect_within("output", output, plain.output * factor[..., None], golden.bound(api.dtype))


@CASES.problem("P3")
def no_sink(draw: Draw) -> Problem:
    """A sink of -inf is none."""
    return Problem(**draw.qkv(4, 6), sinks=np.asarray([-np.inf, 0.5]))


@CASES.problem("P3")
def non_finite_sinks(draw: Draw) -> Problem:
    """A sink of NaN or +inf makes the rows of its head NaN, and no others."""
    return Problem(**draw.qkv(4, 6, heads=4), sinks=np.asarray([np.nan, np.inf, 0.5, -0.5]))


@CASES.problem("P3", "P2", "P4")
def empty_row_with_a_sink(draw: Draw) -> Problem:
    """An empty row with a sink has output 0 and the sink as its log-sum-exp."""
    return Problem(**draw.qkv(6, 4), causal=True, q_start=-2, sinks=np.asarray([0.5, -1.5]))


@CASES.problem("P3", "A2")
def sink_of_rank_two(draw: Draw) -> Problem:
    """For rank 2 there is one sink."""
    data = draw.qkv(4, 6, batch=(), heads=1)
    return Problem(**{name: x if name == "dtype" else x[0] for name, x in data.items()}, sinks=np.asarray([0.75]))


@CASES.check("P3")
def sinks_that_are_refused(api: Api) -> None:
    """sinks is a floating array with one number per query head, and nothing else."""
    x = api.array(np.ones((2, 3, 4)))
    wrong = (np.ones(3), np.ones(1), np.ones((2, 1)), np.ones(2, dtype=np.int32))
    for values in wrong:
        sinks = api.array(values)
        expect_error(SinkError, "sinks", attention, x, x, x, sinks=sinks)


@CASES.problem("P4")
def log_sum_exp(draw: Draw) -> Problem:
    """The log-sum-exp is the natural logarithm, of scaled and capped logits."""
    return Problem(**draw.qkv(4, 6, spread=1.5), softcap=3.0, asks=("lse",))


@CASES.problem("P4", "M4", dtypes=FULL)
def causal_log_sum_exp(draw: Draw) -> Problem:
    """Under causal visibility the log-sum-exp counts the keys that are seen, and no constant is added to them."""
    return Problem(**draw.qkv(6, 6), causal=True, asks=("lse",))


@CASES.problem("P4", "P3")
def log_sum_exp_with_a_sink(draw: Draw) -> Problem:
    """The sink is part of the log-sum-exp."""
    return Problem(**draw.qkv(4, 6), sinks=np.asarray([1.0, 3.0]), asks=("lse",))


@CASES.problem("P4", "P6")
def level_of_minus_300(draw: Draw) -> Problem:
    """All scores near -300: only differences count, and a running maximum that stays at 0 loses everything."""
    q, v = np.ones((1, 1, 3, 1)), np.arange(1.0, 7.0).reshape(1, 1, 6, 1)
    k = draw.exact(-np.arange(300.0, 306.0).reshape(1, 1, 6, 1))
    known: dict[str, Any] = {}
    if draw.dtype != "bfloat16":
        known["output"] = np.asarray([[1.507347], [1.548058], [1.567067]]), 5e-7
        known["lse"] = np.asarray([-299.55981, -299.548086, -299.543807]), 5e-6
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, causal=True, scale=1.0, q_start=3, known=known)


@CASES.problem("P6", dtypes=FULL)
def level_of_minus_a_million(draw: Draw) -> Problem:
    """Scores of -2^20 that differ by 2: a maximum that starts at a finite sentinel gives 0."""
    q, k = np.full((1, 1, 1, 4), -512.0), np.full((1, 1, 2, 4), 1024.0)
    k[0, 0, 1, 3] = 1023.9921875
    known = {"output": (np.asarray([2.761594]), 5e-7)}
    v = np.asarray([[[[1.0], [3.0]]]])
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=0.5, known=known)


@CASES.problem("P6", "P1")
def level_of_minus_64(draw: Draw) -> Problem:
    """All scores are -64: the output is the mean, and no guard against low scores may take the row for empty."""
    data = draw.qkv(2, 6, batch=(1,), d_k=1, d_v=4)
    data["q"], data["k"] = np.full_like(data["q"], -8.0), np.full_like(data["k"], 8.0)
    return Problem(**data | {"v": draw.exact(4.0 + 0.5 * data["v"])}, scale=1.0, coherent=True)


@CASES.problem("P5", "S2")
def zero_queries(draw: Draw) -> Problem:
    """With zero queries row i of causal attention has the weight 1/(i+1) on its first i+1 keys: v is the identity."""
    data = draw.qkv(6, 6, d_k=6)
    data["q"], data["v"] = np.zeros_like(data["q"]), np.broadcast_to(np.eye(6), data["v"].shape)
    return Problem(**data, causal=True, coherent=True, known=_causal_means())


@CASES.problem("P5")
def zero_keys(draw: Draw) -> Problem:
    """The same with zero keys."""
    data = draw.qkv(6, 6, d_k=6)
    data["k"], data["v"] = np.zeros_like(data["k"]), np.broadcast_to(np.eye(6), data["v"].shape)
    return Problem(**data, causal=True, coherent=True, known=_causal_means())


@CASES.problem("P5", "M6")
def visible_sets_show(draw: Draw) -> Problem:
    """With zero queries and v the identity the output is the visible set: a window of two and one ahead."""
    data = draw.qkv(6, 6, d_k=6)
    data["q"], data["v"] = np.zeros_like(data["q"]), np.broadcast_to(np.eye(6), data["v"].shape)
    rows, keys = indices(6, 6)
    return Problem(**data, shown=(keys >= rows - 1) & (keys <= rows + 1), coherent=True)


@CASES.problem("P6")
def constant_bias(draw: Draw) -> Problem:
    """A bias that is constant along each row changes nothing but the log-sum-exp."""
    return Problem(**draw.qkv(4, 6), bias=np.asarray([[0.0], [8.0], [-8.0], [64.0]]) * np.ones((1, 6)))


@CASES.problem("P6", "P4", "M17", dtypes=FULL)
def triangle_of_ones(draw: Draw) -> Problem:
    """A bias of 1 on and below the diagonal and -inf above is causal, and shows in the log-sum-exp alone."""
    return Problem(**draw.qkv(4, 4), bias=np.where(causal_pairs(4, 4), 1.0, -np.inf), asks=("lse",))


@CASES.check("P6", dtypes=COMPUTED)
def shift_of_the_log_sum_exp(api: Api) -> None:
    """A constant added to a row's logits is added to its log-sum-exp, and the output stays."""
    data, bias = api.draw.qkv(4, 6), np.asarray([[1.0], [-4.0], [16.0], [0.0]]) * np.ones((1, 6))
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    plain, shifted = golden_of(Problem(**data)), golden_of(Problem(**data, bias=bias))
    output, lse = (api.host(x) for x in attention_with_lse(q, k, v, bias=api.array(bias)))
    expect_within("output", output, plain.output, shifted.bound(api.dtype))
    expect_within("log-sum-exp", lse, plain.lse + bias[:, 0], shifted.lse_bound(api.dtype))


@CASES.problem("P7")
def infinite_bias(draw: Draw) -> Problem:
    """A visible logit of +inf makes its row NaN."""
    bias = np.zeros((4, 6))
    bias[1, 2], bias[3, 0] = np.inf, np.inf
    return Problem(**draw.qkv(4, 6), bias=bias)


@CASES.check("P7")
def logits_of_minus_infinity(api: Api) -> None:
    """A visible score that overflows to -inf has weight 0; a row of nothing else is NaN."""
    q, v = api.array(np.full((1, 2, 1), 1e30)), api.array(np.asarray([[[2.0], [4.0]]]))
    k = api.array(np.asarray([[[-1e30], [0.0]]]))
    weights = api.host(attention_stages(q, k, v, scale=1.0).weights)
    expect_equal("weights", weights, np.broadcast_to([0.0, 1.0], (1, 2, 2)))
    every = api.array(np.full((1, 2, 1), -1e30))
    expect(bool(np.all(np.isnan(api.host(attention_stages(q, every, v, scale=1.0).output)))), "the row must be NaN")


def _causal_means() -> dict[str, tuple[Any, float]]:
    """The weights 1/(i+1) of six rows, as the output that they are."""
    seen = causal_pairs(6, 6)
    return {"output": (seen / np.sum(seen, axis=-1, keepdims=True), math.ulp(1.0))}
