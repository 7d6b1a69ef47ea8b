"""Chapter M, third part: what hidden keys hold must not matter, and what visible ones hold must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import attention_with_lse, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Convert, Problem
from refattn.conformance.expect import expect_equal
from refattn.conformance.plain import LARGEST, Draw, indices, known_output, published
from refattn.dtypes import COMPUTED

CASES = Chapter("non_influence")

KEEP = np.asarray([[True, True, False, True, True, False], [False, True, True, True, False, True]])
COUNTS = np.asarray([4, 3])
IDS = np.asarray([[0, 0, 0, 1, 1, 1], [2, 2, 3, 3, 3, 3]])


def mask_of_kind(name: str) -> tuple[Array, Callable[[Convert], Any]]:
    """Visible pairs of 4 queries and 6 keys by one kind of mask, plainly and as a Mask; each hides some keys wholly."""
    rows, keys = indices(4, 6)
    rules: dict[str, tuple[Array, Callable[[Convert], Any]]] = {
        "causal": (keys <= rows, lambda _: masks.causal()),
        "window": ((keys >= rows - 1) & (keys <= rows + 1), lambda _: masks.window(1, 1)),
        "chunks": (rows // 4 == keys // 4, lambda _: masks.chunks(4)),
        "prefix": (np.broadcast_to(keys < 3, (4, 6)), lambda _: masks.prefix(3)),
        "documents": (
            (np.asarray([0, 0, 0, 2])[:, None] == IDS[:, None, :])[:, None],
            lambda array: masks.documents(array(np.asarray([0, 0, 0, 2])), array(IDS)),
        ),
        "lengths": (keys < COUNTS[:, None, None, None], lambda array: masks.lengths(array(COUNTS))),
        "padding": (KEEP[:, None, None, :], lambda array: masks.padding(array(KEEP))),
        "dense": (np.broadcast_to(keys % 3 != 1, (4, 6)), lambda array: masks.dense(array(keys % 3 != 1))),
        "blocks": (
            np.broadcast_to(keys // 2 != 1, (4, 6)),
            lambda array: masks.blocks(array(np.asarray([[True, False, True]])), (4, 2)),
        ),
    }
    return rules[name]


# What of them conventions may have parameters for.
PARAMETERS: dict[str, dict[str, Any]] = {"window": {"window": (1, 1)}, "lengths": {"counts": COUNTS}}
MASK_KINDS = ("causal", "window", "chunks", "prefix", "documents", "lengths", "padding", "dense", "blocks")


def _poisoned(draw: Draw, shown: Array) -> dict[str, Any]:
    """Data whose wholly hidden keys hold NaN, infinities and the largest numbers, in k and in v."""
    data = draw.qkv(4, 6)
    hidden = ~np.any(np.broadcast_to(shown, (2, 2, 4, 6)), axis=-2)  # (batch, heads, Lk)
    largest = LARGEST[draw.dtype]
    for name, poison in (("k", (np.nan, np.inf, -np.inf, largest)), ("v", (-np.inf, np.nan, largest, np.inf))):
        for number, at in enumerate(np.argwhere(hidden)):
            data[name][tuple(at)] = poison[number % 4]
    return data


def _hidden_poison(kind: str) -> None:
    def build(draw: Draw) -> Problem:
        shown, mask = mask_of_kind(kind)
        start = 0 if kind in ("causal", "window", "chunks") else None
        return Problem(**_poisoned(draw, shown), shown=shown, mask=mask, q_start=start, **PARAMETERS.get(kind, {}))

    build.__name__ = f"behind_{kind}"
    build.__doc__ = (
        f"Keys and values hidden by {kind} influence nothing, whatever they hold: NaN, infinities, huge numbers."
    )
    CASES.problem("M19")(build)


for _kind in MASK_KINDS:
    _hidden_poison(_kind)


@CASES.problem("M19")
def behind_the_causal_option(draw: Draw) -> Problem:
    """Keys after the last query are hidden by causal=True, and hold poison."""
    shown = indices(4, 6)[1] <= indices(4, 6)[0]
    return Problem(**_poisoned(draw, shown), causal=True, q_start=0)


@CASES.problem("M19")
def published_poison(draw: Draw) -> Problem:
    """NaN in the third key and value, which the mask hides from both queries."""
    q, k, v = published(105, (1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    k[..., 2, :], v[..., 2, :] = np.nan, np.nan
    rows = [[-1.358437, -0.704413, 0.823605, 0.056019], [-1.316067, -0.014946, 0.926505, 0.03765]]
    known = known_output(draw, rows)
    shown = np.asarray([[True, True, False], [True, True, False]])
    return Problem(**draw.given(q, k, v), shown=shown, known=known)


def _one_poison(name: str, words: str, value: float) -> None:
    def build(draw: Draw) -> Problem:
        data = draw.qkv(4, 6)
        data[name][..., 2, :] = value
        return Problem(**data, shown=np.broadcast_to(np.arange(6) != 2, (4, 6)))

    build.__name__ = f"{words}_in_a_hidden_{'key' if name == 'k' else 'value'}"
    build.__doc__ = f"A hidden {'key' if name == 'k' else 'value'} that holds nothing but {value} influences nothing."
    CASES.problem("M19")(build)


for _words, _value in (("nan", np.nan), ("infinity", np.inf), ("minus_infinity", -np.inf)):
    _one_poison("k", _words, _value)
    _one_poison("v", _words, _value)


@CASES.problem("M19", "K4")
def unused_slots_of_a_cache(draw: Draw) -> Problem:
    """Cache slots beyond each entry's length hold NaN in keys and values."""
    data, counts = draw.qkv(1, 6), np.asarray([1, 4])
    unused = np.arange(6) >= counts[:, None]
    for name in ("k", "v"):
        data[name] = np.where(unused[:, None, :, None], np.nan, data[name])
    shown = indices(1, 6)[1] < counts[:, None, None, None]
    return Problem(**data, shown=shown, mask=lambda array: masks.lengths(array(counts)), counts=counts)


@CASES.problem("M19")
def huge_hidden_scores(draw: Draw) -> Problem:
    """Hidden keys whose finite scores tower over the visible ones do not move the maximum."""
    data = draw.qkv(4, 6)
    data["k"][..., 4:, :] = draw.exact(200.0 * np.sign(data["q"][..., :1, :]))
    return Problem(**data, shown=np.broadcast_to(np.arange(6) < 4, (4, 6)))


@CASES.problem("M19", "M17")
def behind_a_bias(draw: Draw) -> Problem:
    """Keys hidden by a bias of -inf hold poison."""
    shown = np.broadcast_to(indices(4, 6)[1] % 3 != 1, (4, 6))
    bias = np.where(shown, draw.normal(4, 6), -np.inf)
    return Problem(**_poisoned(draw, shown), bias=bias)


@CASES.problem("M19")
def poison_in_the_bias(draw: Draw) -> Problem:
    """A bias of NaN or +inf at a hidden pair influences nothing."""
    shown = np.broadcast_to(indices(4, 6)[1] < 4, (4, 6))
    bias = draw.normal(4, 6)
    bias[:, 4], bias[:, 5] = np.nan, np.inf
    return Problem(**draw.qkv(4, 6), bias=bias, shown=shown)


@CASES.problem("M20", "M19")
def poison_seen_by_some(draw: Draw) -> Problem:
    """Under causal visibility a NaN key spoils the rows that see it and no other."""
    data = draw.qkv(6, 6)
    data["k"][:, :, 3, 1] = np.nan
    return Problem(**data, causal=True)


@CASES.check("M19", "N5", dtypes=COMPUTED)
def not_a_single_bit(api: Api) -> None:
    """In the dense core the same inputs with and without poison behind a mask give the same bits."""
    for kind in MASK_KINDS:
        shown, mask = mask_of_kind(kind)
        dirty = _poisoned(api.draw, shown)
        clean = {name: np.where(np.isfinite(dirty[name]), dirty[name], 1.0) for name in ("q", "k", "v")}
        results = [
            [api.host(x) for x in attention_with_lse(*arrays, mask=mask(api.array), q_start=0)]
            for arrays in ([api.array(data[name]) for name in ("q", "k", "v")] for data in (dirty, clean))
        ]
        for name, with_poison, without in zip(("output", "log-sum-exp"), *results, strict=True):
            expect_equal(f"{name} behind {kind}", with_poison, without)


@CASES.problem("M17")
def minus_infinity_hides(draw: Draw) -> Problem:
    """A bias of -inf makes a pair invisible: a causal matrix of 0 and -inf."""
    rows, keys = indices(6, 6)
    return Problem(**draw.ramp(6, 6), bias=np.where(keys <= rows, 0.0, -np.inf))


@CASES.problem("M17", "P2")
def minus_infinity_everywhere(draw: Draw) -> Problem:
    """A row whose every bias is -inf is empty, not NaN."""
    bias = np.zeros((4, 6))
    bias[2] = -np.inf
    return Problem(**draw.qkv(4, 6), bias=bias)


@CASES.problem("M18")
def large_negative_row(draw: Draw) -> Problem:
    """A row whose every bias is -1e4 keeps its softmax: the constant cancels, and nothing is hidden."""
    bias = np.zeros((4, 6))
    bias[1] = draw.exact(-1e4)
    return Problem(**draw.qkv(4, 6), bias=bias)


@CASES.problem("M18")
def row_of_minus_64(draw: Draw) -> Problem:
    """A row whose every bias is -64 keeps its softmax; an output of 0 is no mean of values near 8."""
    data, bias = draw.qkv(4, 6), np.zeros((4, 6))
    bias[1] = -64.0
    return Problem(**data | {"v": draw.exact(8.0 + 0.25 * data["v"])}, bias=bias)


@CASES.problem("M18")
def large_negative_bias(draw: Draw) -> Problem:
    """A bias of -20 is a summand like any other: it leaves a weight of about 1e-9 that a huge value shows."""
    data = draw.qkv(4, 6)
    data["v"][..., 5, :] = draw.exact(2.0**15)
    return Problem(**data, bias=np.where(np.arange(6) == 5, -12.0, 0.0) * np.ones((4, 1)))


@CASES.problem("M20")
def visible_nan_key(draw: Draw) -> Problem:
    """A visible key with one NaN component makes every row that sees it NaN, all of it."""
    data = draw.qkv(4, 6)
    data["k"][0, 1, 2, 3] = np.nan
    return Problem(**data)


@CASES.problem("M20")
def visible_nan_value(draw: Draw) -> Problem:
    """A visible NaN in v makes that output element NaN and leaves the other columns alone."""
    data = draw.qkv(4, 6)
    data["v"][0, 1, 2, 3] = np.nan
    return Problem(**data)


@CASES.problem("M20")
def visible_infinite_values(draw: Draw) -> Problem:
    """A visible +inf or -inf in v makes that element it, and NaN where both meet."""
    data = draw.qkv(4, 6)
    data["v"][0, 0, 1, 0], data["v"][0, 0, 2, 1] = np.inf, -np.inf
    data["v"][0, 0, 3, 2], data["v"][0, 0, 4, 2] = np.inf, -np.inf
    return Problem(**data)


@CASES.problem("M20")
def infinite_value_of_no_weight(draw: Draw) -> Problem:
    """A visible infinity counts whatever its weight, also where the weight is too small for any number."""
    data = draw.qkv(4, 6, spread=0.5)
    data["v"][..., 5, 0] = np.inf
    return Problem(**data, bias=np.where(np.arange(6) == 5, draw.exact(-3000.0), 0.0) * np.ones((4, 1)))


@CASES.problem("M21")
def nan_query(draw: Draw) -> Problem:
    """A NaN in a query row makes that row NaN and no other."""
    data = draw.qkv(4, 6)
    data["q"][1, 0, 3, 2] = np.nan
    return Problem(**data, causal=True, q_start=1)
