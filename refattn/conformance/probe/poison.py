"""Probes of non-finite data: what hidden keys, values and biases let through (M19), and what visible ones do (M20)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.plain import LARGEST
from refattn.conformance.probe.caller import WIDTH, Caller, NotOffered, Seen, Unclear, planted, softmax
from refattn.conformance.probe.probes import Probes

PROBES = Probes()
RAW = np.asarray([[0.0, 4.0, 8.0, -4.0], [6.0, 2.0, 1.0, 3.0], [2.0, -2.0, 0.0, 4.0], [1.0, 1.0, 4.0, 2.0]])
SHOWN = np.asarray([True, True, False, True])
# The clause asks for the same bits of the specification's dense core alone.
LEAKS = {
    "nothing leaks": "what is hidden changes no bit, be it NaN, infinity or huge",
    "changes bits": "what is hidden changes the last bits of the output",
    "NaN and infinity leak": "NaN and infinity in what is hidden reach the output",
    "NaN leaks": "NaN in what is hidden reaches the output, infinity does not",
    "infinity leaks": "infinity in what is hidden reaches the output, NaN does not",
    "huge numbers leak": "huge finite numbers in what is hidden change the output",
}


def _ways(call: Caller) -> Iterator[tuple[str, dict[str, Any], int, slice]]:
    """How a key is hidden: words, options, the hidden key, and the rows that do not see it."""
    if not call.lacks("mask"):
        yield "a mask", {"shown": SHOWN[None, :]}, 2, slice(None)
    if not call.lacks("causal"):
        yield "causal", {"causal": True, "literal": True}, 3, slice(0, 3)


def _poisons(dtype: str) -> dict[str, float]:
    """What is put there; the finite ones are harmless in products."""
    huge = 2.0 ** (math.floor(math.log2(LARGEST[dtype])) // 2 - 2)
    return {"NaN": math.nan, "+inf": math.inf, "-inf": -math.inf, "huge": huge}


def _leaks(call: Caller, name: str) -> Seen:
    """What comes through from array `name`, by poison and by way."""
    found: dict[str, list[str]] = {}
    changed, hidden = False, 0
    for way, options, key, rows in _ways(call):
        data = planted(RAW, call.dtype)
        try:
            clean = call.weights(Problem(**data, **options))[..., rows, :]
        except NotOffered:  # its causal rule is a mask
            continue
        if np.any(clean[..., key] != 0):  # it hides something else
            continue
        hidden += 1
        for poison, value in _poisons(call.dtype).items():
            array = data[name].copy()
            array[..., key, :] = value
            output = call.weights(Problem(**(data | {name: array}), **options))[..., rows, :]
            if not call.close(output, clean):
                found.setdefault(poison, []).append(way)
            changed |= not np.array_equal(output, clean, equal_nan=True)
    if not hidden:
        raise Unclear("neither mask nor causal hides what it should")
    return _leak(found, changed, f"a hidden row of {name}")


def _leak(found: dict[str, list[str]], changed: bool, what: str) -> Seen:
    if not found:
        return Seen("changes bits" if changed else "nothing leaks")
    words = "; ".join(f"{poison} behind {' and '.join(ways)}" for poison, ways in found.items())
    words = f"in {what} leaks: {words}"
    infinite = "+inf" in found or "-inf" in found
    if "NaN" in found:
        return Seen("NaN and infinity leak" if infinite else "NaN leaks", words)
    return Seen("infinity leaks" if infinite else "huge numbers leak", words)


@PROBES.add("hidden values", "M19", LEAKS, specified=("nothing leaks", "changes bits"))
def hidden_values(call: Caller) -> Seen:
    """Four queries over four keys with planted scores, v = identity, a key hidden by a mask, and one by causal; the
    row of v behind it is NaN, +inf, -inf, or huge: the weights, beside those with an ordinary row."""
    if call.lacks("mask") and (reason := call.lacks("causal")):
        raise NotOffered(reason)
    return _leaks(call, "v")


@PROBES.add("hidden keys", "M19", LEAKS, specified=("nothing leaks", "changes bits"))
def hidden_keys(call: Caller) -> Seen:
    """The calls of "hidden values" with the poison in k: the weights, beside those with an ordinary row."""
    if call.lacks("mask") and (reason := call.lacks("causal")):
        raise NotOffered(reason)
    return _leaks(call, "k")


@PROBES.add("hidden biases", "M19", LEAKS, specified=("nothing leaks", "changes bits"))
def hidden_biases(call: Caller) -> Seen:
    """The call of "hidden values" with a mask and a bias of 1, which is NaN, +inf, -inf or huge at the hidden key: the
    weights."""
    if reason := call.lacks("mask", "bias"):
        raise NotOffered(reason)
    data, bias, found, changed = planted(RAW, call.dtype), np.ones((1, 4)), {}, False
    shown = SHOWN[None, :]
    clean = call.weights(Problem(**data, bias=bias, shown=shown, literal=True))
    if np.any(clean[..., 2] != 0):
        raise Unclear("the mask does not hide what it should")
    for poison, value in _poisons(call.dtype).items():
        output = call.weights(Problem(**data, bias=np.where(shown, bias, value), shown=shown, literal=True))
        if not call.close(output, clean):
            found[poison] = ["a mask"]
        changed |= not np.array_equal(output, clean, equal_nan=True)
    return _leak(found, changed, "the bias at a hidden pair")


@PROBES.add(
    "visible NaN in k",
    "M20",
    {
        "NaN": "a visible key that holds NaN makes its rows NaN",
        "counts as zero": "a visible key that holds NaN counts as a key of zeros",
        "hidden": "a visible key that holds NaN is hidden",
    },
)
def visible_nan(call: Caller) -> str:
    """Four queries over four keys with planted scores, v = identity, NaN in every component of the third key: the
    weights."""
    data, x = planted(RAW, call.dtype), RAW * call.factor()
    data["k"][..., 2, :] = math.nan
    zero, hidden = x.copy(), x.copy()
    zero[:, 2], hidden[:, 2] = 0.0, -np.inf
    return call.match(
        call.weights(Problem(**data)),
        {"NaN": math.nan, "counts as zero": softmax(zero), "hidden": softmax(hidden)},
    )


@PROBES.add(
    "visible infinity in k",
    "M20",
    {
        "NaN": "a visible key with an infinite component makes its rows NaN",
        "by its sign": "a visible key with an infinite component is hidden where its logit is -inf, and else NaN",
        "counts as zero": "a visible key with an infinite component counts as a key of zeros",
    },
)
def visible_infinite_key(call: Caller) -> str:
    """Two queries, one the opposite of the other, over two equal keys, the first component of the second being -inf,
    v = identity: the weights."""
    data = planted(np.zeros((2, 2)), call.dtype)
    data["q"][..., 0], data["q"][..., 1] = 0.0, 0.0
    data["q"][..., 0, 0], data["q"][..., 1, 0] = math.copysign(1, call.factor()), -math.copysign(1, call.factor())
    data["k"][..., 1, 0] = -math.inf
    return call.match(
        call.weights(Problem(**data)),
        {"NaN": math.nan, "by its sign": [[1.0, 0.0], [math.nan] * 2], "counts as zero": 0.5},
    )


@PROBES.add(
    "visible infinity in v",
    "M20",
    {
        "inf": "a visible infinity in v is the output, whatever its weight",
        "NaN where the weight is 0": "a visible infinity in v is the output, but NaN where its weight has underflowed",
        "lost where the weight is 0": "a visible infinity in v is the output, but is lost where its weight underflowed",
        "counts as zero": "a visible infinity in v counts as 0",
        "NaN": "a visible infinity in v gives NaN",
    },
)
def visible_infinity(call: Caller) -> str:
    """Two queries over two keys, the first with equal weights, the second with the logits 512 and 0; v is 1 at the
    first key and +inf at the second: the output."""
    large = 2.0 ** math.ceil(math.log2(512 / abs(call.factor())))
    raw = np.asarray([[0.0, 0.0], [math.copysign(large, call.factor()), 0.0]])
    v = np.zeros((2, WIDTH))
    v[0], v[1] = 1.0, math.inf
    output: Array = call.output(Problem(**planted(raw, call.dtype, v=v)))[..., 0]
    return call.match(
        output,
        {
            "inf": [math.inf, math.inf],
            "NaN where the weight is 0": [math.inf, math.nan],
            "lost where the weight is 0": [math.inf, 1.0],
            "counts as zero": [0.5, 1.0],
            "NaN": math.nan,
        },
    )
