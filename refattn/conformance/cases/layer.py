"""Chapter L: the layer, against projections and attention computed plainly."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import AttentionWeights, multi_head_attention
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.plain import causal_pairs
from refattn.conformance.tracked import Arithmetic, Tracked, merge, split
from refattn.dtypes import COMPUTED
from refattn.errors import HeadCountError, HeadSplitError, LayerError

CASES = Chapter("layer")

ALL = np.ones((1, 1), dtype=bool)


def _parameters(api: Api, *shapes: tuple[int, int] | tuple[int] | None) -> list[Array | None]:
    """Host parameters in the order of AttentionWeights; None stays None."""
    return [None if shape is None else api.draw.normal(*shape, spread=shape[0] ** -0.5) for shape in shapes]


def _weights(api: Api, parameters: list[Array | None]) -> Any:
    return AttentionWeights(*(None if x is None else api.array(x) for x in parameters))


def _exact_layer(
    api: Api, x: Array, source: Array, parameters: list[Array | None], heads: int, kv_heads: int, visible: Array = ALL
) -> tuple[Tracked, Any]:
    """Output with its error bound, and the golden attention inside."""
    w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o = parameters + [None] * (8 - len(parameters))
    at = Arithmetic(api.dtype)
    q = split(at.linear(at.exact(x), w_q, b_q), heads)
    k, v = (split(at.linear(at.exact(source), w, b), kv_heads) for w, b in ((w_k, b_k), (w_v, b_v)))
    attended, golden = at.attention(q, k, v, visible)
    output = merge(attended)
    return (output if w_o is None else at.linear(output, w_o, b_o)), golden


def _check(api: Api, what: str, output: Array, exact: Tracked) -> None:
    expect(api.dtype_of(output) == api.dtype, f"{what} has dtype {api.dtype_of(output)}, expected {api.dtype}")
    expect_within(what, api.host(output), exact.value, exact.error)


@CASES.check("L1", dtypes=COMPUTED)
def projections_and_heads(api: Api) -> None:
    """x W_Q, x W_K, x W_V, attention per head, concatenation and W_O, with biases, d_v other than d_k."""
    x = api.draw.normal(2, 6, 8)
    parameters = _parameters(api, (8, 12), (8, 12), (8, 6), (6, 10), (12,), (12,), (6,), (10,))
    layer = multi_head_attention(api.array(x), _weights(api, parameters), heads=3)
    _check(api, "output", layer.output, _exact_layer(api, x, x, parameters, 3, 3)[0])
    expect(layer.weights is None and layer.cache is None, "weights and cache are None unless asked for")


@CASES.check("L1", "A1")
def shapes_of_a_small_layer(api: Api) -> None:
    """2 x 3 tokens of width 8, d_k = 4: scores 2 x 3 x 3, output 2 x 3 x 4."""
    x, parameters = api.draw.normal(2, 3, 8), _parameters(api, (8, 4), (8, 4), (8, 4))
    layer = multi_head_attention(api.array(x), _weights(api, parameters), heads=1, return_weights=True)
    expect_equal("shape of the output", tuple(layer.output.shape), (2, 3, 4))
    expect_equal("shape of the weights", api.host(layer.weights).shape, (2, 1, 3, 3))
    sums = np.sum(api.host(layer.weights), axis=-1)
    expect_within("sums of weights", sums, np.ones((2, 1, 3)), 16 * 2.0**-24)


@CASES.check("L1", "L5", "M4")
def shapes_of_a_causal_layer(api: Api) -> None:
    """2 x 10 tokens of width 64 in 4 heads, causal: weights 2 x 4 x 10 x 10, exactly 0 above the diagonal."""
    x, parameters = api.draw.normal(2, 10, 64), _parameters(api, (64, 64), (64, 64), (64, 64), (64, 64))
    layer = multi_head_attention(api.array(x), _weights(api, parameters), heads=4, causal=True, return_weights=True)
    expect_equal("shape of the output", tuple(layer.output.shape), (2, 10, 64))
    weights = api.host(layer.weights)
    expect_equal("shape of the weights", weights.shape, (2, 4, 10, 10))
    above = np.broadcast_to(~causal_pairs(10, 10), weights.shape)
    expect_equal("weights above the diagonal", weights[above], np.zeros(int(np.sum(above))))
    expect(bool(np.all(weights[~above] > 0)), "weights on and below the diagonal must be positive")


@CASES.check("L2", "G1", dtypes=COMPUTED)
def shared_heads(api: Api) -> None:
    """kv_heads key/value heads serve all query heads; without it there is one each."""
    x = api.draw.normal(2, 6, 8)
    parameters = _parameters(api, (8, 8), (8, 4), (8, 4), (8, 8))
    layer = multi_head_attention(api.array(x), _weights(api, parameters), heads=4, kv_heads=2)
    _check(api, "output", layer.output, _exact_layer(api, x, x, parameters, 4, 2)[0])


@CASES.check("L3", dtypes=COMPUTED)
def cross_attention(api: Api) -> None:
    """With context, keys and values come from it and queries from x; widths and lengths may differ."""
    x, context = api.draw.normal(2, 4, 8), api.draw.normal(2, 7, 6)
    parameters = _parameters(api, (8, 8), (6, 8), (6, 8), (8, 8))
    layer = multi_head_attention(api.array(x), _weights(api, parameters), heads=2, context=api.array(context))
    _check(api, "output", layer.output, _exact_layer(api, x, context, parameters, 2, 2)[0])


@CASES.check("L5", dtypes=COMPUTED)
def returned_weights(api: Api) -> None:
    """return_weights gives (..., H, Lq, Lk) and leaves the output as it was, to the bit; an empty row has weights 0."""
    x, parameters = api.draw.normal(2, 6, 8), _parameters(api, (8, 8), (8, 8), (8, 8), (8, 8))
    weights, shown = _weights(api, parameters), np.ones((2, 6, 6), dtype=bool)
    shown[1, 3] = False
    plain = multi_head_attention(api.array(x), weights, heads=2, mask=api.array(shown))
    layer = multi_head_attention(api.array(x), weights, heads=2, mask=api.array(shown), return_weights=True)
    expect_equal("output", api.host(layer.output), api.host(plain.output))
    golden = _exact_layer(api, x, x, parameters, 2, 2, shown)[1]
    expect_within("weights", api.host(layer.weights), golden.weights, golden.weights_bound(api.dtype, coherent=True))


@CASES.check("L6", dtypes=COMPUTED)
def single_head(api: Api) -> None:
    """heads = 1 with d_k = 3, d_v = 5 and no W_O: single-head attention over [batch, tokens, width], causal or not."""
    x, parameters = api.draw.normal(2, 4, 6), _parameters(api, (6, 3), (6, 3), (6, 5))
    for causal in (False, True):
        layer = multi_head_attention(api.array(x), _weights(api, parameters), heads=1, causal=causal)
        visible = causal_pairs(4, 4) if causal else ALL
        _check(api, f"output, causal={causal}", layer.output, _exact_layer(api, x, x, parameters, 1, 1, visible)[0])


@CASES.check("G4", "L2")
def pooled(api: Api) -> None:
    """Pooling keys, values and biases, head by head, changes nothing where the heads of each group are equal."""
    few = _parameters(api, (8, 16), (8, 8), (8, 8), (16, 8), (16,), (8,), (8,), (8,))
    many = [_each_twice(w, 2) if name in ("w_k", "w_v", "b_k", "b_v") else w for name, w in _named(few)]
    weights = _weights(api, many).pooled(heads=4, kv_heads=2)
    for (name, expected), w in zip(_named(few), weights, strict=True):
        expect_equal(name, api.host(w), expected)
    x = api.draw.normal(2, 4, 8)
    layer = multi_head_attention(api.array(x), weights, heads=4, kv_heads=2)
    _check(api, "output", layer.output, _exact_layer(api, x, x, many, 4, 4)[0])
    expect_error(HeadSplitError, "kv_heads", weights.pooled, heads=2, kv_heads=0)


def _named(parameters: list[Array | None]) -> list[tuple[str, Array]]:
    return [*zip(AttentionWeights._fields, parameters, strict=True)]


def _each_twice(x: Array, heads: int) -> Array:
    """A matrix or a bias whose heads stand twice in a row."""
    return np.repeat(x.reshape(*x.shape[:-1], heads, -1), 2, axis=-2).reshape(*x.shape[:-1], -1)


@CASES.check("L1", "E1")
def layers_that_do_not_fit(api: Api) -> None:
    """Parameters of a wrong shape, kind or dtype are errors that name them."""
    x, square = api.array(np.ones((2, 5, 8))), api.array(np.ones((8, 8)))
    good = AttentionWeights(square, square, square, square)
    wrong: list[tuple[str, Any]] = [
        ("w_q", good._replace(w_q=api.array(np.ones((6, 8))))),
        ("w_k", good._replace(w_k=api.array(np.ones((8, 6))))),
        ("w_v", good._replace(w_v=api.array(np.ones((8, 7))))),
        ("w_o", good._replace(w_o=api.array(np.ones((6, 8))))),
        ("b_q", good._replace(b_q=api.array(np.ones(4)))),
        ("b_o", good._replace(b_o=api.array(np.ones((8, 1))))),
        ("weights", (square, square, square)),
    ]
    for argument, weights in wrong:
        expect_error(LayerError, argument, multi_head_attention, x, weights, heads=2)
    for heads in (0, -1, 2.0, None):
        expect_error(LayerError, "heads", multi_head_attention, x, good, heads=heads)
    expect_error(HeadCountError, "heads", multi_head_attention, x, good, heads=4, kv_heads=3)
    expect_error(LayerError, "rope", multi_head_attention, x, good, heads=2, rope="half")
