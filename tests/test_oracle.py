"""The oracle itself, against figures worked by hand and against an independent implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import oracle

EXAMPLE = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = np.asarray([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def test_worked_example() -> None:
    """Three tokens: row 0 weighs 0.401, 0.198, 0.401 and gives 6.017, 3.983."""
    result = oracle.attention(EXAMPLE, EXAMPLE, VALUES)
    np.testing.assert_allclose(result.weights[0], [0.401, 0.198, 0.401], atol=5e-4)
    np.testing.assert_allclose(result.output[0], [6.017, 3.983], atol=5e-4)
    large, small = math.exp(math.sqrt(0.5)), 1.0
    assert result.lse[0] == pytest.approx(math.log(2 * large + small), rel=1e-15)


def test_worked_example_causal() -> None:
    """The second row of the causal example weighs 0.330, 0.670 and exactly 0."""
    result = oracle.attention(EXAMPLE, EXAMPLE, VALUES, causal_too=True)
    np.testing.assert_allclose(result.weights[1], [0.330, 0.670, 0.0], atol=5e-4)
    assert result.weights[1, 2] == 0.0


def test_zero_queries_average_what_they_see() -> None:
    """With zero queries the causal weights of row i are 1/(i+1) on the first i+1 keys."""
    weights = oracle.attention(np.zeros((6, 3)), draw(6, 3), draw(6, 2), causal_too=True).weights
    expected = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    np.testing.assert_allclose(weights, expected, rtol=1e-15)


@pytest.mark.parametrize("kind", ["plain", "mask", "bias", "scale", "causal", "grouped"])
def test_agrees_with_a_public_implementation(kind: str) -> None:
    """Where PyTorch's float64 kernel can express the call, the oracle agrees with it."""
    torch = pytest.importorskip("torch", reason="the comparison needs PyTorch")
    q, k, v = draw(2, 4, 5, 3), draw(2, 4, 6, 3), draw(2, 4, 6, 2)
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if kind == "mask":
        shown = draw(2, 4, 5, 6, seed=1) > -0.5
        shown[..., 0] = True
        mine, theirs = {"mask": oracle.dense(shown)}, {"attn_mask": torch.from_numpy(shown)}
    elif kind == "bias":
        bias = draw(5, 6, seed=2)
        mine, theirs = {"bias": oracle.array_bias(bias)}, {"attn_mask": torch.from_numpy(bias)}
    elif kind == "scale":
        mine, theirs = {"scale": 0.3}, {"scale": 0.3}
    elif kind == "causal":
        q = q[:, :, :1].repeat(6, axis=2) * np.arange(1, 7)[:, None]
        mine, theirs = {"causal_too": True}, {"is_causal": True}
    elif kind == "grouped":
        k, v, theirs = k[:, :2], v[:, :2], {"enable_gqa": True}
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **theirs).numpy()
    np.testing.assert_allclose(oracle.attention(q, k, v, **mine).output, expected, atol=1e-14)


def test_empty_rows_and_sinks() -> None:
    """A row without visible keys is zero with LSE -inf or its sink; a sink takes weight from visible keys."""
    q, k, v = draw(2, 3), draw(4, 3), draw(4, 2)
    nothing = oracle.attention(q, k, v, mask=~oracle.everything())
    assert not nothing.output.any() and not nothing.weights.any() and np.all(nothing.lse == -np.inf)
    sunk = oracle.attention(q, k, v, mask=~oracle.everything(), sinks=1.25)
    assert not sunk.output.any() and np.all(sunk.lse == 1.25)
    plain, shared = oracle.attention(q, k, v), oracle.attention(q, k, v, sinks=0.5)
    left = np.exp(plain.lse) / (np.exp(plain.lse) + math.exp(0.5))
    np.testing.assert_allclose(shared.weights.sum(-1), left, rtol=1e-14)
    np.testing.assert_allclose(shared.output, plain.output * left[:, None], rtol=1e-13)


def test_non_finite_numbers() -> None:
    """Invisible poison is nothing; visible poison makes its row NaN, or decides an output element."""
    q, k, v = draw(3, 2), draw(3, 2), draw(3, 2)
    poisoned_k, poisoned_v = k.copy(), v.copy()
    poisoned_k[2, 0] = np.nan
    poisoned_v[2] = [np.inf, np.nan]
    clean = oracle.attention(q, k, v, causal_too=True)
    bad_key = oracle.attention(q, poisoned_k, v, causal_too=True)
    bad_value = oracle.attention(q, k, poisoned_v, causal_too=True)
    for result in (bad_key, bad_value):
        np.testing.assert_array_equal(result.output[:2], clean.output[:2])
    assert np.isnan(bad_key.output[2]).all() and np.isnan(bad_key.weights[2]).all()
    assert bad_value.output[2, 0] == np.inf and np.isnan(bad_value.output[2, 1])
    bias = np.zeros((3, 3))
    bias[0], bias[1, 0], bias[2, 2] = -np.inf, np.inf, -np.inf
    biased = oracle.attention(q, poisoned_k, v, bias=oracle.array_bias(bias))
    assert not biased.output[0].any() and np.isnan(biased.output[1]).all() and np.isfinite(biased.output[2]).all()


def test_rows_of_minus_infinity_are_nan() -> None:
    """A visible score of -inf has weight 0; a row that sees nothing else is NaN."""
    q, k, v = np.asarray([[1e200], [1.0]]), np.asarray([[-1e200], [1.0]]), draw(2, 2)
    both = oracle.attention(q, k, v, scale=1.0)
    np.testing.assert_array_equal(both.weights[0], [0.0, 1.0])
    alone = oracle.attention(q, k[:1], v[:1], scale=1.0)
    assert np.isnan(alone.output[0]).all() and np.isfinite(alone.output[1]).all()


MASK_PICTURES = {
    "causal": (oracle.causal(), 2, 0, ["xxx..", "xxxx.", "xxxxx"]),
    "window": (oracle.window(1, 0), 2, 0, [".xx..", "..xx.", "...xx"]),
    "window_open": (oracle.window(None, 1), 0, 0, ["xx...", "xxx..", "xxxx."]),
    "chunks": (oracle.chunks(2), -1, -2, ["xx...", "..xx.", "..xx."]),
    "prefix": (oracle.prefix(2), 7, -1, ["xxx..", "xxx..", "xxx.."]),
    "lengths": (oracle.lengths(3), 7, 9, ["xxx..", "xxx..", "xxx.."]),
    "padding": (oracle.padding([True, False, True, True, False]), 0, 0, ["x.xx."] * 3),
    "documents": (oracle.documents([0, 1, 1], [0, 0, 1, 1, 2]), 5, 5, ["xx...", "..xx.", "..xx."]),
    "blocks": (
        oracle.blocks([[True, False, True], [False, True, False]], 2),
        0,
        0,
        ["xx..x", "xx..x", "..xx."],
    ),
    "sink_tokens": (
        (oracle.window(0, 0) | oracle.prefix(1)) & oracle.causal(),
        1,
        0,
        ["xx...", "x.x..", "x..x."],
    ),
    "not": (~oracle.causal(), 0, 0, [".xxxx", "..xxx", "...xx"]),
}


@pytest.mark.parametrize("name", MASK_PICTURES)
def test_masks_draw_what_the_specification_says(name: str) -> None:
    """Each kind of mask shows exactly the pairs that its definition names."""
    rule, q_start, k_start, picture = MASK_PICTURES[name]
    result = oracle.attention(draw(3, 2), draw(5, 2), draw(5, 1), mask=rule, q_start=q_start, k_start=k_start)
    assert ["".join("x" if seen else "." for seen in row) for row in result.visible] == picture


def test_alibi_slopes() -> None:
    """Powers of two are geometric; other counts interleave the slopes of the next power."""
    assert oracle.alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert oracle.alibi_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert oracle.alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    assert oracle.alibi_slopes(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


def test_relative_table_is_clipped() -> None:
    """Offsets key - query beyond the table's reach take its last entries."""
    bias = oracle.relative([[10.0, 20.0, 30.0]])
    row = [bias(oracle.Pair((), 0, 2, j, 2, j)) for j in range(5)]
    assert row == [10.0, 10.0, 20.0, 30.0, 30.0]


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope_scores_depend_on_differences_only(style: str) -> None:
    """Rotated scores do not change when both positions move together, and lengths never change."""
    x = draw(2, 6)
    near = oracle.rope(x, [3, 5], style=style)
    far = oracle.rope(x, [103, 105], style=style)
    assert near[0] @ near[1] == pytest.approx(far[0] @ far[1], rel=1e-12)
    np.testing.assert_allclose(np.linalg.norm(far, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-14)
    np.testing.assert_array_equal(oracle.rope(x, [1, 2], style=style, width=4)[:, 4:], x[:, 4:])
    pairs = {"half": [0, 2], "interleaved": [0, 1]}[style]
    turned = oracle.rope(np.eye(1, 4), [1], style=style)[0]
    np.testing.assert_allclose(turned[pairs], [math.cos(1), math.sin(1)], rtol=1e-15)
