"""Chapter S: scores, scale, soft cap, and the order of the stages."""

from __future__ import annotations

import math

import numpy as np

from refattn import attention, attention_stages, three_tokens
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.expect import expect, expect_bits, expect_equal, expect_error, expect_within
from refattn.conformance.plain import Draw, indices, known_output, published
from refattn.dtypes import COMPUTED
from refattn.errors import ScaleError, SoftcapError

CASES = Chapter("scores")


@CASES.problem("S1")
def worked_example(draw: Draw) -> Problem:
    """Three tokens, d_k = 2: the first row has the weights 0.401, 0.198, 0.401 and the output 6.017, 3.983."""
    known = {
        "weights": (np.asarray([0.401, 0.198, 0.401]), 5e-4),
        "output": (np.asarray(three_tokens.OUTPUT), 5e-4),
    }
    return Problem(**draw.given(*_three_tokens()), known=known)


@CASES.problem("M4", "S1")
def worked_example_causal(draw: Draw) -> Problem:
    """The same three tokens with causal visibility: the second row has the weights 0.330, 0.670, 0."""
    known = {"weights": (np.asarray([[1.0, 0.0, 0.0], [0.330, 0.670, 0.0]]), 5e-4)}
    return Problem(**draw.given(*_three_tokens()), causal=True, known=known)


@CASES.problem("S1")
def width_of_one_head(draw: Draw) -> Problem:
    """The default scale is 1/sqrt(d_k) of one head, not of d_model = H d_k, and not 1/d_k."""
    return Problem(**draw.qkv(4, 6, heads=4, spread=2.0))


@CASES.problem("S1")
def two_keys_by_hand(draw: Draw) -> Problem:
    """Raw scores 2 and 0 over sqrt(4): the weights are those of 1 and 0, not of 2 and 0."""
    q, k, v = np.zeros((1, 1, 2, 4)), np.zeros((1, 1, 2, 4)), np.zeros((1, 1, 2, 4))
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 0, 0], v[0, 0, 1, 1] = 2.0, 1.0, 1.0, 1.0
    known = {"output": (np.asarray([0.731059, 0.268941, 0.0, 0.0]), 5e-7)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, known=known)


@CASES.problem("S1")
def wide_heads(draw: Draw) -> Problem:
    """With d_k = 64 a missing scale would saturate the softmax."""
    return Problem(**draw.qkv(4, 6, batch=(1,), d_k=64, d_v=8))


@CASES.problem("S1", "S2")
def far_key_of_a_great_value(draw: Draw) -> Problem:
    """A key that scores 8 less than the other, whose value is 0, shows the scale: 1 % in it is 8 % of the output."""
    q, k, v = np.zeros((1, 1, 1, 4)), np.zeros((1, 1, 2, 4)), np.zeros((1, 1, 2, 1))
    q[..., 0], k[..., 0, 0], v[..., 1, 0] = 4.0, 4.0, 1024.0
    known = {"output": (np.asarray([0.343399]), 5e-7)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, known=known)


@CASES.problem("S2")
def negative_scale(draw: Draw) -> Problem:
    """A negative scale prefers the keys that point away."""
    q, k, v = published(115, (1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    rows = [[-0.091022, 0.016275, 0.02301, -0.767887], [-0.13017, 0.052717, 0.072887, -0.251823]]
    known = known_output(draw, rows)
    return Problem(**draw.given(q, k, v), scale=-0.5, known=known)


@CASES.problem("S2")
def zero_scale(draw: Draw) -> Problem:
    """With a scale of 0 every visible key weighs the same."""
    return Problem(**draw.qkv(6, 6), scale=0.0, causal=True, coherent=True)


@CASES.problem("S2")
def scale_of_one(draw: Draw) -> Problem:
    """A given scale replaces the default; 1 means raw scores."""
    return Problem(**draw.qkv(4, 6, spread=0.7), scale=1.0)


@CASES.problem("S2")
def odd_scale(draw: Draw) -> Problem:
    """A scale need not be a power of two."""
    return Problem(**draw.qkv(4, 6), scale=0.7)


@CASES.check("S2", dtypes=COMPUTED)
def scale_as_an_array(api: Api) -> None:
    """A 0-d floating array of q's library is a scale, whose value nobody looks at."""
    data = api.draw.qkv(4, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    expect_bits(api, attention(q, k, v, scale=api.array(np.asarray(0.25))), attention(q, k, v, scale=0.25))
    nan = attention_stages(q, k, v, scale=api.array(np.asarray(math.nan)))
    expect(bool(np.all(np.isnan(api.host(nan.scaled)))), "a 0-d array holding NaN must make every scaled score NaN")


@CASES.check("S2")
def scales_that_are_refused(api: Api) -> None:
    """A scale that is no finite real number, and no 0-d floating array of q's library, is an error."""
    x = api.array(np.ones((1, 3, 4)))
    for scale in (math.nan, math.inf, -math.inf, "1", 1j, True, api.array(np.ones(1)), api.array(np.asarray(1))):
        expect_error(ScaleError, "scale", attention, x, x, x, scale=scale)


@CASES.problem("S3")
def soft_cap(draw: Draw) -> Problem:
    """Scaled scores x become c tanh(x / c)."""
    return Problem(**draw.qkv(4, 6, spread=2.0), softcap=2.0)


@CASES.problem("S3")
def soft_cap_by_hand(draw: Draw) -> Problem:
    """Scores 12, 3 and 0 capped at 2; a cap that is accepted and ignored gives 1.000142."""
    q, k = np.asarray([[[[3.0, 0.0]]]]), np.asarray([[[[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]]]])
    v = np.asarray([[[[1.0], [2.0], [4.0]]]])
    known = {"output": (np.asarray([1.628383]), 5e-7)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=1.0, softcap=2.0, known=known)


@CASES.problem("S3")
def generous_soft_cap(draw: Draw) -> Problem:
    """A cap far above the scores changes them little, and by the right little."""
    return Problem(**draw.qkv(4, 6, spread=1.5), softcap=30.0)


@CASES.check("S4", dtypes=COMPUTED)
def domain_of_the_soft_cap(api: Api) -> None:
    """None switches the cap off; 0, negative numbers, NaN, infinity and what is no number are errors."""
    x = api.array(api.draw.normal(1, 3, 4))
    expect_bits(api, attention(x, x, x, softcap=None), attention(x, x, x))
    for softcap in (0, 0.0, -1.0, math.nan, math.inf, "2", True):
        expect_error(SoftcapError, "softcap", attention, x, x, x, softcap=softcap)


@CASES.problem("S5", "S3")
def cap_before_bias(draw: Draw) -> Problem:
    """The bias is added after the cap, so that it may exceed it."""
    bias = draw.exact(3.0 * draw.normal(4, 6))
    return Problem(**draw.qkv(4, 6, spread=1.5), softcap=1.0, bias=bias)


@CASES.problem("S5", "M2")
def cap_before_mask(draw: Draw) -> Problem:
    """Hidden keys stay hidden under a cap; a mask before the cap leaks e^-c / (1 + e^-c)."""
    q, k, v = np.asarray([[[[1.0]]]]), np.asarray([[[[0.0], [5.0]]]]), np.asarray([[[[1.0], [3.0]]]])
    shown = np.asarray([[True, False]])
    known = {"output": (np.asarray([1.0]), 0.0)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=1.0, softcap=1.0, shown=shown, known=known)


@CASES.problem("S5", "S3")
def cap_after_scale(draw: Draw) -> Problem:
    """The cap applies to scaled scores: with a small scale they lie far below it, raw ones far above."""
    return Problem(**draw.qkv(4, 6, spread=4.0), softcap=4.0, scale=0.0625)


@CASES.problem("S5", "B4")
def bias_is_not_scaled(draw: Draw) -> Problem:
    """The bias is added after the scale; scaled along with the scores it would be diluted."""
    q, k, v = published(117, (1, 1, 2, 16), (1, 1, 3, 16), (1, 1, 3, 4))
    bias = np.asarray([[0.0, 2.0, -1.0], [1.0, 0.0, 3.0]])
    rows = [[0.692107, 0.444248, 0.426481, 1.035567], [-0.145379, -0.301663, -0.037485, 1.290045]]
    known = known_output(draw, rows)
    return Problem(**draw.given(q, k, v), bias=bias, known=known)


@CASES.problem("S5", "N6")
def everything_at_once(draw: Draw) -> Problem:
    """All options together follow the order of the stages."""
    rows, keys = indices(4, 6)
    return Problem(
        **draw.qkv(4, 6, heads=4, kv_heads=2),
        causal=True,
        shown=(rows + keys) % 4 != 1,
        bias=draw.normal(4, 4, 6),
        scale=0.5,
        softcap=3.0,
        sinks=draw.normal(4),
        q_start=2,
    )


@CASES.check("S5", "N4", dtypes=COMPUTED)
def stages_can_be_read(api: Api) -> None:
    """attention_stages gives every intermediate, each following from the one before; its output is attention's."""
    data = api.draw.qkv(4, 6, spread=1.5)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    shown = np.arange(6)[None, :] <= np.arange(4)[:, None] + 1
    bias = api.draw.normal(4, 6)
    options = {"mask": api.array(shown), "bias": api.array(bias), "softcap": 2.0, "scale": 0.75}
    stages = attention_stages(q, k, v, **options)
    expect_bits(api, stages.output, attention(q, k, v, **options))
    host = {name: api.host(x) for name, x in stages._asdict().items()}
    expect_equal("visible", host["visible"], np.broadcast_to(shown, (2, 2, 4, 6)))
    unit = 2.0**-53 if api.dtype == "float64" else 2.0**-24
    size = np.matmul(np.abs(data["q"]), np.swapaxes(np.abs(data["k"]), -1, -2))
    capped = 2 * np.tanh(host["scaled"] / 2)
    biased = host["capped"] + bias
    lse = np.log(np.sum(np.exp(host["logits"]), axis=-1))
    weights = np.exp(host["logits"] - lse[..., None])
    steps = {
        "scores": (np.matmul(data["q"], np.swapaxes(data["k"], -1, -2)), 9 * unit * size),
        "scaled": (0.75 * host["scores"], unit * np.abs(host["scores"])),
        "capped": (capped, 8 * unit * np.abs(capped) + 8 * unit),
        "biased": (biased, 2 * unit * np.abs(biased)),
        "logits": (host["biased"], np.zeros((2, 2, 4, 6))),
        "weights": (weights, 32 * unit * weights),
    }
    # What a stage holds at hidden pairs is its own affair, until the logits hide them.
    for name, (expected, bound) in steps.items():
        expect_within(name, host[name][..., shown], expected[..., shown], bound[..., shown])
    for name, hidden in (("logits", -np.inf), ("weights", 0.0)):
        expect(bool(np.all(host[name][..., ~shown] == hidden)), f"{name} at hidden pairs must be {hidden}")
    expect_within("lse", host["lse"], lse, 16 * unit * (1 + np.abs(lse)))


@CASES.check("S6")
def why_the_scale(api: Api) -> None:
    """Unit-variance components give scores with a standard deviation near sqrt(d_k), 8 for 64, and saturated rows."""
    data = api.draw.qkv(64, 64, batch=(1,), heads=1, d_k=64)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    stages, unscaled = attention_stages(q, k, v), attention_stages(q, k, v, scale=1.0)
    raw, scaled = float(np.std(api.host(stages.scores))), float(np.std(api.host(stages.scaled)))
    expect(7 < raw < 9, f"the standard deviation of raw scores is {raw:.2f}, expected about 8")
    expect(7 / 8 < scaled < 9 / 8, f"the standard deviation of scaled scores is {scaled:.3f}, expected about 1")
    largest = [float(np.mean(np.max(api.host(one.weights), axis=-1))) for one in (stages, unscaled)]
    expect(largest[0] < 0.3 < 0.7 < largest[1], f"mean largest weights, scaled and not, are {largest}")


def _three_tokens() -> list[Array]:
    """q, k and v of the worked example as one batch entry of one head."""
    return [x[None, None] for x in three_tokens.inputs()]
