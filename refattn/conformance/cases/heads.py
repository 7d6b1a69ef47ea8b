"""Chapter G: heads in groups, splitting, merging, pooling."""

from __future__ import annotations

import numpy as np

from refattn import (
    AttentionWeights,
    attention,
    kv_head_of,
    merge_heads,
    multi_head_attention,
    pool_kv_heads,
    split_heads,
)
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw, precision
from refattn.dtypes import COMPUTED
from refattn.errors import HeadCountError, HeadSplitError, ShapeError

CASES = Chapter("heads")


@CASES.problem("G1")
def multi_head(draw: Draw) -> Problem:
    """MHA: as many key/value heads as query heads, each its own."""
    return Problem(**draw.qkv(4, 6, heads=4))


@CASES.problem("G1")
def grouped_query(draw: Draw) -> Problem:
    """GQA, 8 over 2: query head h reads key/value head h // 4; h % 2 would mix the groups."""
    return Problem(**draw.qkv(4, 6, heads=8, kv_heads=2))


@CASES.problem("G1")
def grouped_by_two(draw: Draw) -> Problem:
    """GQA, 6 over 3: groups of two, an odd number of them."""
    return Problem(**draw.qkv(4, 6, heads=6, kv_heads=3), causal=True, q_start=1)


@CASES.problem("G1")
def multi_query(draw: Draw) -> Problem:
    """MQA: one key/value head for all."""
    return Problem(**draw.qkv(4, 6, heads=4, kv_heads=1))


@CASES.problem("G1", "M5")
def grouped_decode(draw: Draw) -> Problem:
    """One new query in groups of 16 heads over 33 keys."""
    return Problem(**draw.ramp(1, 33, batch=(1,), heads=32, kv_heads=2, step=0.25), causal=True, q_start=32)


@CASES.problem("G2", "M15")
def grouped_masks(draw: Draw) -> Problem:
    """Masks and biases are per query head, also where heads share keys."""
    shown = draw.rng.random((4, 4, 6)) < 0.7
    return Problem(**draw.qkv(4, 6, heads=4, kv_heads=2), shown=shown, bias=draw.normal(4, 1, 6))


@CASES.check("G2", dtypes=COMPUTED)
def sharing_is_repeating(api: Api) -> None:
    """Sharing gives what repeating each key/value head H / Hkv times in a row gives."""
    data = api.draw.qkv(4, 6, heads=6, kv_heads=3)
    repeated = {**data, "k": np.repeat(data["k"], 2, axis=-3), "v": np.repeat(data["v"], 2, axis=-3)}
    golden = golden_of(Problem(**repeated))
    for arrays in (data, repeated):
        output = attention(*(api.array(arrays[name]) for name in ("q", "k", "v")))
        expect_within("output", api.host(output), golden.output, golden.bound(api.dtype))


@CASES.check("G1", "E1")
def head_counts_that_do_not_fit(api: Api) -> None:
    """H that is no multiple of Hkv is an error, Hkv > H too; k and v have the same heads."""
    q, k = api.array(np.ones((6, 3, 4))), api.array(np.ones((4, 3, 4)))
    expect_error(HeadCountError, "q", attention, q, k, k)
    expect_error(HeadCountError, "q", attention, k, q, q)
    expect_error(ShapeError, "v", attention, q, q, api.array(np.ones((3, 3, 4))))
    expect_error(HeadCountError, "heads", kv_head_of, 0, 6, 4)
    expect_error(HeadSplitError, "h", kv_head_of, 6, 6, 3)


@CASES.check("G1")
def which_head_reads_which(api: Api) -> None:
    """kv_head_of is h // (H / Hkv), for every head."""
    for heads, kv_heads in ((8, 8), (8, 2), (6, 3), (4, 1)):
        expected = [group for group in range(kv_heads) for _ in range(heads // kv_heads)]
        got = [kv_head_of(h, heads, kv_heads) for h in range(heads)]
        expect(got == expected, f"on {api.name} {heads} over {kv_heads} heads read {got}, expected {expected}")


@CASES.check("G3", dtypes=COMPUTED)
def splitting_and_merging(api: Api) -> None:
    """split_heads gives head h the h-th block of components, token by token, and merge_heads undoes it."""
    x = np.arange(2 * 3 * 8, dtype=np.float64).reshape(2, 3, 8)
    for heads in (1, 2, 4, 8):
        split = split_heads(api.array(x), heads)
        width = 8 // heads
        expected = np.stack([x[..., h * width : (h + 1) * width] for h in range(heads)], axis=1)
        expect_equal(f"{heads} heads", api.host(split), expected)
        expect_equal(f"{heads} heads, merged", api.host(merge_heads(split)), x)


@CASES.check("G3", "E1")
def widths_that_do_not_divide(api: Api) -> None:
    """D not divisible by H is an error, and so is H that is no positive int."""
    x = api.array(np.ones((2, 3, 8)))
    for heads in (3, 0, -2, 2.0, None):
        expect_error(HeadSplitError, "heads" if heads != 3 else "x", split_heads, x, heads)
    expect_error(HeadSplitError, "x", merge_heads, api.array(np.ones((2, 3))))
    expect_error(HeadSplitError, "w", pool_kv_heads, api.array(np.ones((6, 2, 2))), 4)


@CASES.check("G4", dtypes=COMPUTED)
def pooling(api: Api) -> None:
    """pool_kv_heads averages the heads of each group, groups of neighbours."""
    w = api.draw.normal(6, 4, 3)
    pooled = api.host(pool_kv_heads(api.array(w), 2))
    expected = np.stack([np.mean(w[:3], axis=0), np.mean(w[3:], axis=0)])
    size = np.stack([np.mean(np.abs(w[:3]), axis=0), np.mean(np.abs(w[3:]), axis=0)])
    wide = precision("float64" if api.dtype == "float64" else "float32")
    expect_within("pooled heads", pooled, expected, 5 * wide * size + precision(api.dtype) * np.abs(expected) * 1.01)
    expect_equal("pooled to as many", api.host(pool_kv_heads(api.array(w), 6)), w)


@CASES.check("G5")
def head_count_at_fixed_width(api: Api) -> None:
    """At d_model = 16 the head count changes the head axis and the head width, and nothing else."""
    x = api.array(api.draw.normal(2, 5, 16))
    weights = AttentionWeights(*(api.array(api.draw.normal(16, 16, spread=0.25)) for _ in range(4)))
    outputs = {}
    for heads in (2, 4):
        layer = multi_head_attention(x, weights, heads=heads, return_weights=True)
        expect_equal(f"output shape with {heads} heads", tuple(layer.output.shape), (2, 5, 16))
        expect_equal(f"weights' shape with {heads} heads", api.host(layer.weights).shape, (2, heads, 5, 5))
        expect_equal(f"split shape with {heads} heads", tuple(split_heads(x, heads).shape), (2, heads, 5, 16 // heads))
        outputs[heads] = api.host(layer.output)
    expect(float(np.max(np.abs(outputs[2] - outputs[4]))) > 1e-2, "2 and 4 heads must give different outputs")
