"""Probes of chapter S: scale, soft cap and their order; and of biases as arrays, B4, M17 and M18."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from refattn.conformance.case import Problem
from refattn.conformance.probe.caller import Caller, NotOffered, Raised, Seen, Unclear, planted, softmax
from refattn.conformance.probe.probes import Probes

PROBES = Probes()
# (d_k, heads, d_v); the last may be refused. Some implementations have multiples of 8 alone.
SIZES = ((16, 2, 16), (8, 2, 8), (16, 4, 16), (16, 2, 4))
SCALES = (0.25, -0.5, 0.0)
CAP = 2.0


@PROBES.add(
    "default scale",
    "S1",
    {
        "1/sqrt(d_k)": "scores are multiplied by 1/sqrt(d_k)",
        "none": "scores are not scaled",
        "1/d_k": "scores are divided by d_k, without a root",
        "1/sqrt(d_model)": "scores are divided by sqrt(H d_k), the root of the model's width",
        "1/sqrt(d_v)": "scores are divided by sqrt(d_v), the root of the values' width",
        "sqrt(d_k)": "scores are multiplied by sqrt(d_k) instead of divided",
        "constant": "scores are multiplied by a constant that does not depend on d_k",
    },
)
def default_scale(call: Caller) -> Seen | str:
    """One query and two keys with the raw scores 0 and 2, v = identity, no scale, with (d_k, H, d_v) of (16, 2, 16),
    (8, 2, 8), (16, 4, 16) and (16, 2, 4): half the logarithm of the ratio of the two weights."""
    measured: list[tuple[tuple[int, int, int], float]] = []
    for d_k, heads, d_v in SIZES:
        try:
            measured.append(((d_k, heads, d_v), call.ratio(d_k, heads, d_v)))
        except (NotOffered, Raised):
            if d_k == d_v:
                raise
    readings: dict[str, Callable[[int, int, int], float]] = {
        "1/sqrt(d_k)": lambda d, h, w: d**-0.5,
        "none": lambda d, h, w: 1.0,
        "1/d_k": lambda d, h, w: 1 / d,
        "1/sqrt(d_model)": lambda d, h, w: (d * h) ** -0.5,
        "1/sqrt(d_v)": lambda d, h, w: w**-0.5,
        "sqrt(d_k)": lambda d, h, w: d**0.5,
        "constant": lambda d, h, w: measured[0][1],
    }
    if not all(math.isfinite(one) and one for _, one in measured):
        raise Unclear("the ratio of the weights is no number, or does not depend on the scores")
    within = max(call.near, 4e-3)
    for name, reading in readings.items():
        if all(abs(one - reading(*sizes)) <= within * abs(reading(*sizes)) for sizes, one in measured):
            return Seen(name, "" if name != "constant" else f"scores are always multiplied by {measured[0][1]:.4g}")
    listed = ", ".join(f"{one:.4g} ({one * d**0.5:.4g}/sqrt(d_k)) at d_k={d}, H={h}" for (d, h, _), one in measured)
    return Seen("other", f"scores are multiplied by {listed}")


@PROBES.add(
    "scale option",
    "S2",
    {
        "honoured": "scale is what scores are multiplied by, negative and zero too",
        "ignored": "scale is ignored",
        "squared": "scale acts twice, as its square",
        "times default": "scale is multiplied onto the default scale",
        "sign lost": "a negative scale acts as a positive one",
        "zero means default": "scale=0 acts as no scale given",
        "NaN at zero": "scale=0 gives NaN",
        "NaN below zero": "a negative scale gives NaN",
        "NaN with causal": "a scale of 0 or less gives NaN where there is a causal rule",
        "some refused": "some finite scales are refused",
    },
)
def scale_option(call: Caller) -> Seen | str:
    """One query and two keys with the raw scores 0 and 2, v = identity, with scale=0.25, -0.5 and 0: half the
    logarithm of the ratio of the two weights. All again with four queries and keys whose scores are 0, causal."""
    if reason := call.lacks("scale"):
        raise NotOffered(reason)
    # The default scale at this width is none of these.
    default, found = call.factor(8), []
    for scale in SCALES:
        try:
            found.append(call.ratio(8, scale=scale))
        except Raised as refusal:
            return Seen("some refused", f"scale={scale:g} {refusal}")
    if call.close(found, SCALES) and not call.lacks("scale", "causal"):
        data = planted(np.zeros((4, 4)), call.dtype)
        rows = [call.weights(Problem(**data, scale=scale, causal=True)) for scale in SCALES]
        if np.all(np.isfinite(rows[0])) and not np.all(np.isfinite(rows[1:])):
            return "NaN with causal"
    return call.match(
        np.asarray(found),
        {
            "honoured": SCALES,
            "ignored": [default] * 3,
            "squared": [scale**2 for scale in SCALES],
            "times default": [scale * default for scale in SCALES],
            "sign lost": [abs(scale) for scale in SCALES],
            "zero means default": [*SCALES[:2], default],
            "NaN at zero": [*SCALES[:2], math.nan],
            "NaN below zero": [SCALES[0], math.nan, 0.0],
        },
    )


def _capped(call: Caller) -> tuple[Problem, np.ndarray[tuple[int, ...], np.dtype[np.float64]], float]:
    """Four keys whose scaled scores are about 0, 1, 4 and -4 under a cap of 2; their raw scores; the scale."""
    raw = np.asarray([[0.0, 4.0, 16.0, -16.0]])
    return Problem(**planted(raw, call.dtype), softcap=CAP), raw, call.factor()


@PROBES.add(
    "soft cap",
    "S3",
    {
        "c tanh(x / c)": "a scaled score x becomes c tanh(x / c)",
        "before the scale": "raw scores are capped, and scaled afterwards",
        "ignored": "softcap is ignored",
        "clipped": "scaled scores are clipped at -c and c",
        "c tanh(x)": "a scaled score x becomes c tanh(x), not divided by c",
        "tanh(x / c)": "a scaled score x becomes tanh(x / c), not multiplied by c",
    },
)
def soft_cap(call: Caller) -> str:
    """One query and four keys with the raw scores 0, 4, 16 and -16, v = identity, softcap=2: the weights."""
    if reason := call.lacks("softcap"):
        raise NotOffered(reason)
    problem, raw, f = _capped(call)
    x = raw * f
    return call.match(
        call.weights(problem),
        {
            "c tanh(x / c)": softmax(CAP * np.tanh(x / CAP)),
            "before the scale": softmax(f * CAP * np.tanh(raw / CAP)),
            "ignored": softmax(x),
            "clipped": softmax(np.clip(x, -CAP, CAP)),
            "c tanh(x)": softmax(CAP * np.tanh(x)),
            "tanh(x / c)": softmax(np.tanh(x / CAP)),
        },
    )


@PROBES.add(
    "soft cap and bias",
    "S5",
    {"bias after the cap": "the bias is added after the cap", "bias before the cap": "the bias goes through the cap"},
)
def soft_cap_and_bias(call: Caller) -> str:
    """The call of "soft cap" with a bias of 0, 3, -2 and 1: the weights."""
    if reason := call.lacks("softcap", "bias"):
        raise NotOffered(reason)
    problem, raw, f = _capped(call)
    bias = np.asarray([[0.0, 3.0, -2.0, 1.0]])
    return call.match(
        call.weights(replace(problem, bias=bias)),
        {
            "bias after the cap": softmax(CAP * np.tanh(raw * f / CAP) + bias),
            "bias before the cap": softmax(CAP * np.tanh((raw * f + bias) / CAP)),
        },
    )


@PROBES.add(
    "soft cap and mask",
    "S5",
    {
        "mask after the cap": "hidden pairs are hidden after the cap",
        "mask before the cap": "hidden scores go through the cap and come out finite: hidden keys keep weight",
        "mask ignored": "the mask is ignored where there is a cap",
    },
)
def soft_cap_and_mask(call: Caller) -> str:
    """The call of "soft cap" with a mask that hides the second and the third key: the weights."""
    if reason := call.lacks("softcap", "mask"):
        raise NotOffered(reason)
    problem, raw, f = _capped(call)
    x, shown = CAP * np.tanh(raw * f / CAP), np.asarray([[True, False, False, True]])
    return call.match(
        call.weights(replace(problem, shown=shown)),
        {
            "mask after the cap": softmax(np.where(shown, x, -np.inf)),
            "mask before the cap": softmax(np.where(shown, x, -CAP)),
            "mask ignored": softmax(x),
        },
    )


@PROBES.add(
    "bias",
    "B4",
    {
        "added after the scale": "the bias is added to the scaled scores, each head's own",
        "scaled": "the bias is added before the scale, or multiplied by it",
        "ignored": "bias is ignored",
        "subtracted": "the bias is subtracted",
        "first head's for all": "the bias of the first head serves all heads",
        "of the scores instead": "the bias takes the place of the scores",
    },
)
def bias(call: Caller) -> str:
    """One query and three keys with the raw scores 0, 4 and 8, two heads with a bias of 0, 2, -1 and of 1, -1, 3,
    v = identity: the weights."""
    if reason := call.lacks("bias"):
        raise NotOffered(reason)
    f, raw = call.factor(), np.asarray([[0.0, 4.0, 8.0]])
    summand, x = np.asarray([[[0.0, 2.0, -1.0]], [[1.0, -1.0, 3.0]]]), raw * f
    problem = Problem(**planted(raw, call.dtype), bias=summand)
    return call.match(
        call.weights(problem),
        {
            "added after the scale": softmax(x + summand),
            "scaled": softmax(x + f * summand),
            "ignored": softmax(x),
            "subtracted": softmax(x - summand),
            "first head's for all": softmax(x + summand[:1]),
            "of the scores instead": softmax(summand),
        },
    )


@PROBES.add(
    "bias of -inf",
    "M17",
    {
        "hides": "a bias of -inf hides its pair, and a row of them is an empty row",
        "hides, NaN in a row of them": "a bias of -inf hides its pair, but a row of nothing else is NaN",
        "hides, uniform in a row of them": "a bias of -inf hides its pair, but a row of nothing else has equal weights",
        "a large number": "a bias of -inf is replaced by a large negative number, which a row of nothing else outlives",
        "ignored": "a bias of -inf is ignored",
    },
)
def bias_of_minus_infinity(call: Caller) -> str:
    """Two queries over three keys with the raw scores 0, 4 and 8, v = identity; the bias is -inf at the first key of
    the first row, and all over the second: the weights."""
    if reason := call.lacks("bias"):
        raise NotOffered(reason)
    raw = np.asarray([[0.0, 4.0, 8.0]] * 2)
    x = raw[0] * call.factor()
    summand = np.asarray([[-np.inf, 0.0, 0.0], [-np.inf] * 3])
    first = softmax(np.where([True, False, False], -np.inf, x))
    return call.match(
        call.weights(Problem(**planted(raw, call.dtype), bias=summand)),
        {
            "hides": [first, [0.0] * 3],
            "hides, NaN in a row of them": [first, [math.nan] * 3],
            "hides, uniform in a row of them": [first, [1 / 3] * 3],
            "a large number": [first, softmax(x)],
            "ignored": [softmax(x)] * 2,
        },
    )


@PROBES.add(
    "bias of +inf",
    "P7",
    {
        "NaN": "a logit of +inf makes its row NaN",
        "a large number": "a logit of +inf counts as a large finite one, and takes all the weight",
    },
)
def bias_of_infinity(call: Caller) -> str:
    """One query and three keys with the raw scores 0, 4 and 8, v = identity, a bias of +inf at the first key: the
    weights."""
    if reason := call.lacks("bias"):
        raise NotOffered(reason)
    summand = np.asarray([[np.inf, 0.0, 0.0]])
    return call.match(
        call.weights(Problem(**planted(np.asarray([[0.0, 4.0, 8.0]]), call.dtype), bias=summand)),
        {"NaN": math.nan, "a large number": [1.0, 0.0, 0.0]},
    )


@PROBES.add(
    "large negative bias",
    "M18",
    {
        "an ordinary summand": "a large negative bias all over a row cancels, and hides nothing",
        "zeros": "a large negative bias all over a row is taken for a mask, and gives zeros",
        "NaN": "a large negative bias all over a row gives NaN",
        "equal weights": "a large negative bias drowns the scores: equal weights",
    },
)
def large_negative_bias(call: Caller) -> str:
    """One query and three keys with the raw scores 0, 4 and 8, v = identity, a bias of -8192 everywhere: the
    weights."""
    if reason := call.lacks("bias"):
        raise NotOffered(reason)
    raw = np.asarray([[0.0, 4.0, 8.0]])
    return call.match(
        call.weights(Problem(**planted(raw, call.dtype), bias=np.full((1, 3), -8192.0))),
        {
            "an ordinary summand": softmax(raw * call.factor()),
            "zeros": 0.0,
            "NaN": math.nan,
            "equal weights": 1 / 3,
        },
    )
