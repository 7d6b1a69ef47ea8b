"""Probes of precision (N1): sums whose result shows how many bits survive, overflow on the way, subnormal numbers.

A sum such as 2^t + 1 - 2^t is 1 as long as the accumulator has more than t bits, in whatever order; so is the
difference of two scores of 2^t and 2^t + 1. The largest t that survives is the number of bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.judge import judge
from refattn.conformance.probe.caller import WIDTH, Caller, NotOffered, Seen, Unclear, planted
from refattn.conformance.probe.probes import Probes
from refattn.dtypes import LOW

PROBES = Probes()
# Largest t that is tried: products and sums stay below the largest number of the dtype.
TRIED = {"bfloat16": 30, "float16": 14, "float32": 30, "float64": 60}
SIGNIFICAND = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
# Fewest bits that count as the precision of a dtype: a unit in the last place or two may go in folding the scale.
ENOUGH = {"float32": 20, "float64": 48}
TF32 = range(9, 13)
# All orders of a large number, 1, its opposite and 0.
ORDERS = tuple(itertools.permutations(range(4)))
LONG = 32


def _low(call: Caller) -> str:
    """The dtype of 16 bits that is probed: bfloat16 if the target has it."""
    for dtype in LOW:
        if dtype in call.dtypes:
            return dtype
    raise NotOffered(f"{call.target.name} has no dtype of 16 bits here")


def _surviving(kept: Array, shown: Array) -> int:
    """The number of leading rows in which something is kept; 0 for none. Raises Unclear if it is lost to a NaN."""
    lost = np.nonzero(~kept)[0]
    if lost.size and not np.all(np.isfinite(shown[lost[0]])):
        raise Unclear(f"2^{lost[0] + 1} overflows, or gives NaN")
    return int(lost[0]) if lost.size else len(kept)


def _factor(call: Caller, dtype: str, width: int = WIDTH) -> float:
    """The default scale at that width, measured in the main dtype."""
    if dtype not in call.dtypes:
        raise NotOffered(f"{call.target.name} has no {dtype} here")
    call.require_softmax()
    return call.factor(width)


def score_bits(call: Caller, dtype: str, *, inputs: bool) -> int:
    """Bits in which 2^t + 1 still differs from 2^t as a score; with `inputs` the key itself is 1 + 2^-t."""
    f, tried = _factor(call, dtype), TRIED[dtype]
    if inputs:  # a key of 1 + 2^-t must be one of the dtype
        tried = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}[dtype]
    data = planted(np.zeros((1, 2)), dtype, batch=tried)
    q, k = data["q"], data["k"]
    q[...] = 0.0
    for t in range(tried):
        q[t, :, :, 0], k[t, :, :, 0] = 2.0 ** (t + 1), 1.0
        if inputs:
            k[t, :, 1, 0] = 1 + 2.0 ** -(t + 1)
        else:
            q[t, :, :, 1], k[t, :, 1, 1] = 1.0, 1.0
    weights = call.weights(Problem(**data))[:, 0, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log(weights[:, 1] / weights[:, 0]) / f
    return _surviving(np.abs(shown - 1) < 0.5, weights)


def score_sum_bits(call: Caller, dtype: str) -> int:
    """Bits of the accumulator of q . k: components 2^t, 1, -2^t and 0, in all orders, one key for each."""
    f, tried = _factor(call, dtype, LONG), TRIED[dtype]
    zeros = np.zeros((tried, 2, len(ORDERS) + 1, LONG))
    q, k = np.ones((tried, 2, 1, LONG)), zeros
    q[..., -1], k[..., -1] = 0.0, 1.0  # no key is zero
    for t in range(tried):
        for key, order in enumerate(ORDERS):
            k[t, :, key, :4] = np.asarray([2.0 ** (t + 1), 1.0, -(2.0 ** (t + 1)), 0.0])[list(order)]
    v = np.broadcast_to(np.eye(len(ORDERS) + 1, LONG), zeros.shape).copy()
    weights = call.weights(Problem(q=q, k=k, v=v, dtype=dtype))[:, 0, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log(weights[:, :-1] / weights[:, -1:]) / f
    return _surviving(np.all(np.abs(shown - 1) < 0.5, axis=-1), weights)


def output_sum_bits(call: Caller, dtype: str) -> int:
    """Bits of the accumulator of the weighted sum: four equal weights over values 2^t, 1, -2^t and 0, in all orders."""
    if dtype not in call.dtypes:
        raise NotOffered(f"{call.target.name} has no {dtype} here")
    call.require_softmax()
    tried = TRIED[dtype]
    q, k, v = np.zeros((tried, 2, 1, LONG)), np.zeros((tried, 2, 4, LONG)), np.zeros((tried, 2, 4, LONG))
    k[..., -1] = 1.0
    for t in range(tried):
        for column, order in enumerate(ORDERS):
            v[t, :, :, column] = np.asarray([2.0 ** (t + 1), 1.0, -(2.0 ** (t + 1)), 0.0])[list(order)]
    output = call.output(Problem(q=q, k=k, v=v, dtype=dtype))[:, 0, 0, : len(ORDERS)]
    return _surviving(np.all(np.abs(output - 0.25) < 0.125, axis=-1), output)


def weight_bits(call: Caller, dtype: str) -> int:
    """Bits of the softmax: three equal keys weigh 1/3, and for keys with the raw scores 0, 4 and 8 w1^2 is w0 w2."""
    _factor(call, dtype)
    equal, ramp = (
        call.weights(Problem(**planted(np.asarray([raw]), dtype)))[0, 0, 0] for raw in ([0.0] * 3, [0.0, 4.0, 8.0])
    )
    error = max(np.max(np.abs(3 * equal - 1)), abs(ramp[1] ** 2 / (ramp[0] * ramp[2]) - 1))
    if not np.isfinite(error):
        raise Unclear("the weights are no numbers")
    return SIGNIFICAND[dtype] if error == 0 else min(SIGNIFICAND[dtype], int(-math.log2(error)))


STORED = {"float32": "in float32 or better", "storage type": "in the storage type"}


def _stored(bits: int, dtype: str) -> Seen:
    """Whether so many bits are those of float32 or of a dtype of 16 bits."""
    if bits <= SIGNIFICAND[dtype]:
        return Seen("storage type", f"in {dtype}: {bits} bits")
    enough = bits >= min(ENOUGH["float32"], TRIED[dtype])
    return Seen("float32" if enough else "other", f"{'at least ' * (bits == TRIED[dtype])}{bits} bits in {dtype}")


@PROBES.add("sums of scores in 16 bits", "N1", STORED)
def sums_of_scores(call: Caller) -> Seen:
    """In bfloat16, or else float16: q of ones, keys of 2^t, 1, -2^t and 0 in all 24 orders and one of zeros,
    v = identity, for t from 1: up to which t do all keys weigh exp(scale) as much as the last."""
    dtype = _low(call)
    return _stored(score_sum_bits(call, dtype), dtype)


@PROBES.add("stored scores in 16 bits", "N1", STORED)
def stored_scores(call: Caller) -> Seen:
    """In bfloat16, or else float16: q = (2^t, 1, 0, ...), keys (1, 0, 0, ...) and (1, 1, 0, ...), v = identity, for t
    from 1: up to which t does the second key weigh exp(scale) as much as the first."""
    dtype = _low(call)
    return _stored(score_bits(call, dtype, inputs=False), dtype)


@PROBES.add("sums of weights in 16 bits", "N1", STORED)
def sums_of_weights(call: Caller) -> Seen | str:
    """In bfloat16, or else float16: one key with the logit 0 and 64 with a logit near -10 ln 2 (-13 ln 2 in float16),
    the former first, then last, v = 1 at it and 0 elsewhere: the output, 1 if the small terms are lost."""
    dtype = _low(call)
    f, t, small = _factor(call, dtype), {"bfloat16": 10, "float16": 13}[dtype], 64
    raw = -round(t * math.log(2) / abs(f)) * math.copysign(1, f)
    right = 1 / (1 + small * math.exp(raw * f))
    for first in (True, False):
        at = 0 if first else small
        scores, v = np.full((1, small + 1), raw), np.zeros((small + 1, 16))
        scores[0, at], v[at] = 0.0, 1.0
        output = float(call.output(Problem(**planted(scores, dtype, v=v))).ravel()[0])
        if not math.isfinite(output):
            raise Unclear(f"the output is {output}")
        if output > (1 + right) / 2:
            return Seen("storage type", f"in {dtype}: terms of 2^-{t} are lost beside 1")
        if abs(output - right) > (1 - right) / 2:
            return Seen("other", f"the output is {output:.4g} instead of {right:.4g}")
    return "float32"


@PROBES.add("sums of the output in 16 bits", "N1", STORED)
def sums_of_the_output(call: Caller) -> Seen:
    """In bfloat16, or else float16: q = k = 0, four keys, values 2^t, 1, -2^t and 0 in all 24 orders, one column for
    each, for t from 1: up to which t is the output 1/4."""
    dtype = _low(call)
    return _stored(output_sum_bits(call, dtype), dtype)


def _weakest(call: Caller, dtype: str) -> tuple[str, dict[str, int]]:
    """In words the bits of each step, and by name."""
    steps: dict[str, Callable[[], int]] = {
        "products": lambda: score_bits(call, dtype, inputs=True),
        "logits": lambda: score_bits(call, dtype, inputs=False),
        "sums of scores": lambda: score_sum_bits(call, dtype),
        "sums of the output": lambda: output_sum_bits(call, dtype),
        "weights": lambda: weight_bits(call, dtype),
    }
    bits = {name: step() for name, step in steps.items()}
    return ", ".join(f"{name} {count}" for name, count in bits.items()), bits


@PROBES.add(
    "precision of float32",
    "N1",
    {
        "float32": "all steps have the precision of float32",
        "tf32-like products": "inputs of products are cut to about 11 bits, as TF32 does",
        "bfloat16-like products": "inputs of products are cut to 8 bits or fewer",
        "logits of few bits": "logits are stored in fewer bits than float32 has",
        "short sums": "sums are accumulated in fewer bits than float32 has",
        "weights of few bits": "the weights have fewer bits than float32 has",
    },
)
def precision_of_float32(call: Caller) -> Seen:
    """In float32: the calls of "sums of scores", "stored scores" and "sums of the output", and q = 2^t over the keys 1
    and 1 + 2^-t: up to which t each shows its 1. Weights of three keys, equal, and with the raw scores 0, 4 and 8: how
    near the former are to 1/3, and the square of the middle one to the product of the others."""
    words, bits = _weakest(call, "float32")
    words, enough = f"bits that survive: {words}", ENOUGH["float32"]
    if bits["logits"] < enough:
        return Seen("logits of few bits", words)
    if min(bits["sums of scores"], bits["sums of the output"]) < enough:
        return Seen("short sums", words)
    if bits["products"] < enough:
        kind = "tf32-like products" if bits["products"] in TF32 else "bfloat16-like products"
        return Seen(kind if bits["products"] < TF32.stop else "other", words)
    if bits["weights"] < enough:
        return Seen("weights of few bits", words)
    return Seen("float32", words)


@PROBES.add(
    "precision of float64",
    "N1",
    {
        "float64": "float64 is computed in float64",
        "float32": "float64 is computed in float32, in one of its steps at least",
    },
)
def precision_of_float64(call: Caller) -> Seen:
    """In float64: the calls of "precision of float32": how many bits survive in each."""
    words, bits = _weakest(call, "float64")
    words, least = f"bits that survive: {words}", min(bits.values())
    return Seen("float64" if least >= ENOUGH["float64"] else "float32" if 20 <= least <= 30 else "other", words)


@PROBES.add(
    "overflow in float16",
    "N1",
    {
        "none": "raw scores beyond 65504 do not overflow",
        "raw scores overflow": "raw scores beyond 65504 overflow before they are scaled",
    },
)
def overflow(call: Caller) -> Seen | str:
    """In float16: one query over two equal keys and a third of zeros, raw scores of 131072 and 0, v = identity: the
    weights, 1/2, 1/2 and 0 unless the raw scores overflowed."""
    if "float16" not in call.dtypes:
        raise NotOffered(f"{call.target.name} has no float16 here")
    call.require_softmax()
    if abs(call.factor()) * 2.0**17 > 65504:
        raise Unclear("the scaled scores would overflow too")
    data = planted(np.zeros((1, 3)), "float16")
    data["q"][..., 0], data["k"][..., :2, 0] = 512.0, math.copysign(256.0, call.factor())
    weights = call.weights(Problem(**data))
    if np.all(np.abs(weights - [0.5, 0.5, 0.0]) < 1e-2):
        return "none"
    return Seen(
        "raw scores overflow" if np.any(np.isnan(weights)) else "other", f"the weights are {weights.ravel()[:3]}"
    )


@PROBES.add(
    "subnormal numbers",
    "N6",
    {"kept": "subnormal numbers are kept", "flushed": "subnormal numbers are flushed to zero"},
)
def subnormal(call: Caller) -> Seen | str:
    """One key, whose value is a quarter of the smallest normal number: the output."""
    least = {"bfloat16": 2.0**-128, "float16": 2.0**-16, "float32": 2.0**-128, "float64": 2.0**-1024}[call.dtype]
    problem = Problem(**planted(np.zeros((1, 1)), call.dtype, v=np.full((1, 16), least)))
    if judge(problem, call.result(problem)).verdict == "pass" and np.all(call.output(problem) == least):
        return "kept"
    output = call.output(problem)
    return "flushed" if np.all(output == 0) else Seen("other", f"{least:.3g} becomes {output.ravel()[0]:.3g}")
