"""Probes of sinks and of the log-sum-exp (P3, P4)."""

from __future__ import annotations

import math

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.probe.caller import Caller, NotOffered, Seen, planted, softmax
from refattn.conformance.probe.probes import Probes
from refattn.dtypes import LOW

PROBES = Probes()
RAW = np.asarray([[0.0, 4.0, 8.0]])
# Raw scores of three rows that differ in maximum, mean and number of near keys.
ROWS = np.asarray([[0.0, 4.0, 8.0], [6.0, 6.0, 1.0], [-8.0, -4.0, -12.0]])
SINKS = np.asarray([2.0, -1.0])
CAP = 2.0
LSE = ("lse",)


def _with_sink(x: Array, sink: Array) -> Array:
    """Weights with a sink (H, 1, 1) in the denominator alone."""
    sink = np.broadcast_to(sink, (*np.broadcast_shapes(x.shape[:-1], sink.shape[:-1]), 1))
    x = np.broadcast_to(x, (*sink.shape[:-1], x.shape[-1]))
    return softmax(np.concatenate((x, sink), axis=-1))[..., :-1]


@PROBES.add(
    "sinks",
    "P3",
    {
        "in the denominator": "a sink adds exp(sink) to the denominator, each head its own",
        "ignored": "sinks are ignored",
        "scaled": "sinks are multiplied by the scale",
        "in the numerator": "a sink's weight goes to the values",
        "first head's for all": "the sink of the first head serves all heads",
        "subtracted": "the sign of a sink is turned",
        "a wrong sigmoid": "weights are multiplied by sigmoid(sink - lse), with the wrong sign",
        "added without exp": "the sink itself, not its exponential, is added to the denominator",
    },
)
def sinks(call: Caller) -> str:
    """One query over three keys with the raw scores 0, 4 and 8, two heads with the sinks 2 and -1, v = identity: the
    weights."""
    if reason := call.lacks("sinks"):
        raise NotOffered(reason)
    f = call.factor()
    x, sink = RAW * f, SINKS[:, None, None]
    right, plain = _with_sink(x, sink), softmax(x)
    missing = 1 - np.sum(right, axis=-1, keepdims=True)
    lse = np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
    return call.match(
        call.weights(Problem(**planted(RAW, call.dtype), sinks=SINKS)),
        {
            "in the denominator": right,
            "ignored": plain,
            "scaled": _with_sink(x, sink * f),
            "in the numerator": right + missing / 3,
            "first head's for all": _with_sink(x, sink[:1]),
            "subtracted": _with_sink(x, -sink),
            "a wrong sigmoid": plain / (1 + np.exp(lse - sink)),
            "added without exp": np.exp(x) / (np.sum(np.exp(x), axis=-1, keepdims=True) + sink),
        },
    )


@PROBES.add(
    "sinks and soft cap",
    "P3",
    {"not capped": "sinks do not go through the soft cap", "capped": "sinks go through the soft cap"},
)
def sinks_and_cap(call: Caller) -> str:
    """The call of "sinks" with softcap=2: the weights."""
    if reason := call.lacks("sinks", "softcap"):
        raise NotOffered(reason)
    x, sink = CAP * np.tanh(RAW * call.factor() / CAP), SINKS[:, None, None]
    return call.match(
        call.weights(Problem(**planted(RAW, call.dtype), sinks=SINKS, softcap=CAP)),
        {"not capped": _with_sink(x, sink), "capped": _with_sink(x, CAP * np.tanh(sink / CAP))},
    )


@PROBES.add(
    "log-sum-exp",
    "P4",
    {
        "natural": "the natural logarithm of the sum of exponentials",
        "base 2": "the logarithm to base 2 of the sum of exponentials",
        "base 10": "the logarithm to base 10 of the sum of exponentials",
        "negative": "the natural logarithm with its sign turned",
        "the maximum": "the largest logit, without the sum",
        "without the maximum": "the logarithm of the sum after the maximum was subtracted",
        "no logarithm": "the sum of exponentials itself",
        "of raw scores": "the log-sum-exp of scores before the scale",
        "shifted by row": "the log-sum-exp plus something of each row's own",
    },
)
def log_sum_exp(call: Caller) -> Seen | str:
    """Three queries over three keys with planted scores: the log-sum-exp."""
    x = ROWS * call.factor()
    lse = call.lse(Problem(**planted(ROWS, call.dtype), asks=LSE))
    right, peak = _lse(x), np.max(x, axis=-1)
    found = call.match(
        lse,
        {
            "natural": right,
            "base 2": right / math.log(2),
            "base 10": right / math.log(10),
            "negative": -right,
            "the maximum": peak,
            "without the maximum": right - peak,
            "no logarithm": np.exp(right),
            "of raw scores": _lse(ROWS),
        },
    )
    shift = lse - right
    if found == "other" and np.all(np.isfinite(shift)):
        listed = ", ".join(f"{one:.4g}" for one in shift.reshape(-1, 3)[0])
        return Seen("shifted by row", f"the log-sum-exp is off by {listed} in three rows")
    return found


@PROBES.add(
    "log-sum-exp of an empty row",
    "P4",
    {
        "-inf": "-inf",
        "0": "0",
        "+inf": "+inf",
        "NaN": "NaN",
        "a large negative number": "a large negative number instead of -inf",
    },
)
def of_an_empty_row(call: Caller) -> Seen | str:
    """The call of "log-sum-exp" with a mask that hides all keys of the first row: its log-sum-exp."""
    if reason := call.lacks("mask"):
        raise NotOffered(reason)
    shown = np.asarray([[False] * 3, [True] * 3, [True] * 3])
    lse = call.lse(Problem(**planted(ROWS, call.dtype), shown=shown, asks=LSE))[..., 0]
    found = call.match(lse, {"-inf": -np.inf, "0": 0.0, "+inf": np.inf, "NaN": math.nan})
    if found == "other":
        words = f"{float(lse.ravel()[0]):.6g} instead of -inf"
        return Seen("a large negative number" if np.all(lse < -500) else found, words)
    return found


@PROBES.add(
    "log-sum-exp of a logit of +inf",
    "P4",
    {"NaN": "NaN, as the row is", "+inf": "+inf, where the row is NaN", "finite": "a finite number"},
)
def of_infinity(call: Caller) -> Seen | str:
    """The call of "log-sum-exp" with a bias of +inf at the first key: the log-sum-exp."""
    if reason := call.lacks("bias"):
        raise NotOffered(reason)
    bias = np.asarray([[np.inf, 0.0, 0.0]] * 3)
    lse = call.lse(Problem(**planted(ROWS, call.dtype), bias=bias, asks=LSE))
    if np.all(np.isfinite(lse)):
        return Seen("finite", f"{float(lse.ravel()[0]):.6g} instead of NaN")
    return call.match(lse, {"NaN": math.nan, "+inf": np.inf})


@PROBES.add(
    "log-sum-exp and sinks",
    "P4",
    {"with the sink": "the log-sum-exp includes the sink", "without the sink": "the log-sum-exp leaves out the sink"},
)
def with_sinks(call: Caller) -> str:
    """The call of "log-sum-exp" with the sinks 2 and -1: the log-sum-exp, whatever its base."""
    if reason := call.lacks("sinks"):
        raise NotOffered(reason)
    x = ROWS * call.factor()
    lse = call.lse(Problem(**planted(ROWS, call.dtype), sinks=SINKS, asks=LSE))
    sink = np.broadcast_to(SINKS[:, None, None], (2, 3, 1))
    with_it = _lse(np.concatenate((np.broadcast_to(x, (2, 3, 3)), sink), axis=-1))
    for unit in (1.0, math.log(2), math.log(10), -1.0):
        found = call.match(lse, {"with the sink": with_it / unit, "without the sink": _lse(x) / unit})
        if found != "other":
            return found
    return "other"


@PROBES.add(
    "dtype of the log-sum-exp",
    "P4",
    {
        "the compute dtype": "float32 or wider, whatever the dtype of q",
        "the dtype of q": "the log-sum-exp is as narrow as q",
    },
)
def dtype_of_log_sum_exp(call: Caller) -> Seen | str:
    """Three queries over three keys in the narrowest dtype of 16 bits that the target has, and in its others."""
    found = {}
    for dtype in call.dtypes:
        result = call.result(Problem(**planted(ROWS, dtype), asks=LSE))
        if result.lse is None:
            raise NotOffered("it returns no log-sum-exp")
        found[dtype] = result.lse_dtype
    narrow = {dtype: got for dtype, got in found.items() if got in LOW}
    lost = {dtype: got for dtype, got in found.items() if dtype == "float64" and got != "float64"}
    if not (narrow or lost):
        return "the compute dtype"
    words = ", ".join(f"{got} for {dtype}" for dtype, got in (narrow | lost).items())
    return Seen("the dtype of q" if all(a == b for a, b in found.items()) else "other", f"it is {words}")


def _lse(x: Array) -> Array:
    peak = np.max(x, axis=-1)
    return peak + np.log(np.sum(np.exp(x - peak[..., None]), axis=-1))
