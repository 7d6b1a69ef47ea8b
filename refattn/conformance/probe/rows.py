"""Probes of the softmax (chapter P): its axis, rows that see nothing, extreme logits, keys of zeros."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.conformance.case import Problem
from refattn.conformance.probe.caller import Caller, NotOffered, Seen, blank, planted, softmax
from refattn.conformance.probe.probes import Probes
from refattn.dtypes import FULL

PROBES = Probes()
V = np.asarray([[1.0, -2.0], [4.0, 0.5], [-3.0, 8.0]])
RAW = np.asarray([[0.0, 4.0, 8.0], [6.0, -2.0, 1.0]])


@PROBES.add(
    "softmax",
    "P1",
    {
        "over keys": "softmax runs over the keys, each query and head on its own",
        "over queries": "softmax runs over the queries",
        "over heads": "softmax runs over the heads",
        "not divided": "exponentials are not divided by their sum",
        "no weights at all": "the output does not depend on the scores",
    },
)
def axis(call: Caller) -> str:
    """Two heads of two queries and three keys with planted scores, v = identity: the weights."""
    f = call.likely_factor()  # one query does not show a softmax over others
    x = np.stack([RAW, -RAW[::-1]]) * f
    weights = call.weights(Problem(**planted(x / f, call.dtype)))
    peak = np.max(x, axis=-1, keepdims=True)
    other = call.weights(Problem(**planted(0 * x, call.dtype)))
    return call.match(
        weights,
        {
            "over keys": softmax(x),
            "over queries": softmax(np.swapaxes(x, -1, -2)).swapaxes(-1, -2),
            "over heads": np.moveaxis(softmax(np.moveaxis(x, 0, -1)), -1, 0),
            "not divided": np.exp(x - peak),
            "no weights at all": other,
        },
    )


@PROBES.add(
    "empty row",
    "P2",
    {
        "zeros": "a row that sees no key has the output 0",
        "NaN": "a row that sees no key is NaN",
        "mean of v": "a row that sees no key has equal weights: the mean of all values",
        "as if unmasked": "a row that sees no key has the weights that it would have without mask",
    },
)
def empty_row(call: Caller) -> Seen | str:
    """Two queries over three keys with planted scores, and a mask that hides all keys of the first: its output."""
    if reason := call.lacks("mask"):
        raise NotOffered(reason)
    shown = np.asarray([[False] * 3, [True] * 3])
    row = call.output(Problem(**planted(RAW, call.dtype, v=np.pad(V, ((0, 0), (0, 14)))), shown=shown))[..., :1, :2]
    found = call.match(
        row,
        {
            "zeros": 0.0,
            "NaN": math.nan,
            "mean of v": np.mean(V, axis=0),
            "as if unmasked": softmax(RAW[0] * call.factor()) @ V,
        },
    )
    return Seen(found, f"a row that sees no key gives {row.ravel()[0]:.6g}" if found == "other" else "")


def _two_keys(call: Caller, raw: float) -> dict[str, Any]:
    """One query over two keys with the raw scores raw and raw + 4, of two terms that are exact in 16 bits."""
    data = planted([[0.0, 0.0]], call.dtype)
    data["q"][..., 0, :2] = 1.0
    data["k"][..., 0], data["k"][..., 1, 1] = raw, 4.0
    return data


@PROBES.add(
    "large logits",
    "P1",
    {"no overflow": "the row maximum is subtracted: large logits do not overflow", "overflow": "large logits overflow"},
)
def large_logits(call: Caller) -> str:
    """One query over two keys, whose logits are near 1000 and differ by 1, v = identity: the weights."""
    f = call.factor()
    big = 2.0 ** round(math.log2(1000 / abs(f)))
    weights = call.weights(Problem(**_two_keys(call, big)))
    if not np.all(np.isfinite(weights)) or np.all(weights == 0):
        return "overflow"
    expected = softmax([[big * f, (big + 4.0) * f]])
    if not call.close(weights, expected) and call.dtype in FULL:
        return "other"
    return "no overflow"


@PROBES.add(
    "low logits",
    "P6",
    {
        "ordinary": "a row of very negative logits has an ordinary softmax",
        "zeros": "a row of very negative logits counts as empty, or underflows to zeros",
        "NaN": "a row of very negative logits gives NaN",
        "equal weights": "a row of very negative logits has equal weights",
    },
)
def low_logits(call: Caller) -> str:
    """One query over two keys, whose logits are near -1000 and differ by 1, v = identity: the weights."""
    f = call.factor()
    low = -(2.0 ** round(math.log2(1000 / abs(f))))
    return call.match(
        call.weights(Problem(**_two_keys(call, low))),
        {"ordinary": softmax([[0.0, 4.0 * f]]), "zeros": 0.0, "NaN": math.nan, "equal weights": 0.5},
    )


@PROBES.add(
    "keys of zeros",
    "P5",
    {"ordinary": "a key of zeros is a key like any other", "hidden": "a key of zeros is taken for padding"},
)
def keys_of_zeros(call: Caller) -> str:
    """One query over three keys, the second being zero, v = identity: the weights."""
    raw = np.asarray([[4.0, 0.0, -4.0]])
    x = raw * call.factor()
    data, hidden = planted(raw, call.dtype), softmax(np.where(raw == 0, -np.inf, x))
    data["k"][..., 1, :] = 0.0
    return call.match(call.weights(Problem(**data)), {"ordinary": softmax(x), "hidden": hidden})


@PROBES.add(
    "query of NaN",
    "M21",
    {
        "its row alone": "a NaN in a query makes its own row NaN, and no other",
        "zeros in its row": "a NaN in a query makes its own row zeros, as if it saw no key",
        "zeros with causal": "a NaN in a query gives zeros where causal hides keys from its row, and NaN elsewhere",
        "other rows too": "a NaN in a query spoils other rows",
    },
)
def query_of_nan(call: Caller) -> str:
    """Two queries over three keys with planted scores, v = identity, and the same with NaN in the first query: the
    weights of both rows. Again with three queries whose scores are 0, causal."""
    data = planted(RAW, call.dtype)
    clean = call.weights(Problem(**data))[..., 1, :]
    data["q"][..., 0, 0] = math.nan
    weights = call.weights(Problem(**data))
    if not call.close(weights[..., 1, :], clean):
        return "other rows too"
    found = call.match(weights[..., 0, :], {"its row alone": math.nan, "zeros in its row": 0.0})
    if found == "its row alone" and not call.lacks("causal"):
        data = blank(3, 3, call.dtype)
        data["q"][..., 0, 0] = math.nan
        row = call.weights(Problem(**data, causal=True))[..., 0, :]
        return call.match(row, {"its row alone": math.nan, "zeros with causal": 0.0})
    return found


@PROBES.add(
    "many keys",
    "T1",
    {
        "all count": "of 257 keys every one counts, wherever the largest logit is",
        "some do not count": "of 257 equal keys some do not count",
        "wrong where logits grow": "257 equal keys count alike, but not where the largest logit comes late",
        "wrong where logits fall": "257 equal keys count alike, but not where the largest logit comes first",
    },
)
def many_keys(call: Caller) -> Seen | str:
    """One query over 257 keys whose raw scores are 0, or j / 16 for key j, or that in reverse; v marks each block of
    17 keys by a column: the weights of the blocks."""
    call.require_softmax()
    count, block = 257, 17
    ramp = np.arange(count) / 16 * np.sign(call.factor())
    v = np.eye(16)[np.arange(count) // block]
    for name, raw in {
        "some do not count": 0 * ramp,
        "wrong where logits grow": ramp,
        "wrong where logits fall": ramp[::-1],
    }.items():
        output = call.output(Problem(**planted(raw[None], call.dtype, v=v)))
        if not call.close(output, softmax(raw * call.factor()) @ v):
            return name
    return "all count"
