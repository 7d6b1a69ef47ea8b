"""Probes of chapter M: mask, causal rule, alignment, starts, windows. All keys are equal, v is the identity."""

from __future__ import annotations

import numpy as np

from refattn import masks
from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.plain import causal_pairs, indices
from refattn.conformance.probe.caller import Caller, NotOffered, Seen, blank, softmax, uniform
from refattn.conformance.probe.probes import Probes

PROBES = Probes()
Q_LEN, K_LEN = 3, 8
# Each row sees some and misses some; no two rows or halves are alike.
PAIRS = np.asarray([[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1]], dtype=bool)
LEFT, RIGHT = 3, 1


@PROBES.add(
    "mask",
    "M1",
    {
        "True is visible": "a boolean mask selects before softmax, and True means visible",
        "True is hidden": "a boolean mask selects before softmax, and True means hidden",
        "added as 0 and 1": "the mask is added to the scores as numbers, 0 and 1",
        "after softmax": "the mask zeroes weights after softmax, which no longer sum to 1",
        "ignored": "the mask is ignored",
    },
)
def mask(call: Caller) -> str:
    """All scores 0, v = identity, Lq = 4, Lk = 6, and a boolean mask that shows and hides keys of each row, handed over
    as it is: the weights."""
    if reason := call.lacks("mask"):
        raise NotOffered(reason)
    return call.match(
        call.weights(Problem(**blank(4, 6, call.dtype), shown=PAIRS, literal=True)),
        {
            "True is visible": uniform(PAIRS),
            "True is hidden": uniform(~PAIRS),
            "added as 0 and 1": softmax(PAIRS),
            "after softmax": PAIRS / PAIRS.shape[-1],
            "ignored": uniform(np.ones_like(PAIRS)),
        },
    )


@PROBES.add(
    "mask of rank 3",
    "M15",
    {
        "heads": "the first axis of a mask of rank 3 is the heads",
        "batch": "the first axis of a mask of rank 3 is the batch",
    },
)
def mask_of_rank_three(call: Caller) -> str:
    """All scores 0, v = identity, two batch entries, two heads, a mask (2, 4, 6) of two patterns: the weights."""
    if reason := call.lacks("mask"):
        raise NotOffered(reason)
    pairs = np.stack([PAIRS, ~PAIRS])
    problem = Problem(**blank(4, 6, call.dtype, batch=2), shown=pairs, literal=True)
    return call.match(call.weights(problem), {"heads": uniform(pairs), "batch": uniform(pairs)[:, None]})


@PROBES.add(
    "mask of each entry",
    "M15",
    {
        "each its own": "each batch entry and each head has its own mask",
        "first entry's for all": "the mask of the first batch entry serves all",
        "first head's for all": "the mask of the first head serves all",
        "a group's first for the group": "the mask of a group's first head serves the group",
    },
)
def mask_of_each_entry(call: Caller) -> str:
    """All scores 0, v = identity, two batch entries, four heads in groups of two if that is offered, and a mask
    (2, 4, 4, 6) of eight patterns: the weights."""
    if reason := call.lacks("mask"):
        raise NotOffered(reason)
    pairs = np.stack([np.roll(PAIRS, n, axis=-1) for n in range(8)]).reshape(2, 4, *PAIRS.shape)
    data = blank(4, 6, call.dtype, batch=2, heads=4)
    if not call.lacks("mask", "gqa"):
        data |= {"k": data["k"][:, :2], "v": data["v"][:, :2]}
    return call.match(
        call.weights(Problem(**data, shown=pairs)),
        {
            "each its own": uniform(pairs),
            "first entry's for all": uniform(pairs)[:1],
            "first head's for all": uniform(pairs)[:, :1],
            "a group's first for the group": uniform(pairs)[:, [0, 0, 2, 2]],
        },
    )


def _lower(size: int, by: int = 0) -> Array:
    return np.tri(size, size, by, dtype=bool)


@PROBES.add(
    "causal",
    "M4",
    {
        "keys up to its own": "a query sees the keys up to its own position",
        "hides itself": "a query sees the keys before its own position only",
        "shows the next": "a query sees one key beyond its own position",
        "keys from its own on": "a query sees the keys from its own position on",
        "ignored": "causal is ignored",
    },
)
def causal(call: Caller) -> str:
    """All scores 0, v = identity, Lq = Lk = 6, causal: the weights, of rows that see a key."""
    if reason := call.lacks("causal"):
        raise NotOffered(reason)
    size = 6
    return _pattern(
        call,
        call.weights(Problem(**blank(size, size, call.dtype), causal=True, literal=True)),
        {
            "keys up to its own": _lower(size),
            "hides itself": _lower(size, -1),
            "shows the next": _lower(size, 1),
            "keys from its own on": ~_lower(size, -1),
            "ignored": np.ones((size, size), dtype=bool),
        },
    )


@PROBES.add(
    "causal alignment",
    "M5",
    {
        "top-left": "with Lq != Lk and no q_start, the first query sits at the first key",
        "bottom-right": "with Lq != Lk and no q_start, the last query sits at the last key",
        "ignored": "with Lq != Lk and no q_start, causal is ignored",
    },
    specified=("raises",),
)
def causal_alignment(call: Caller) -> Seen | str:
    """All scores 0, v = identity, causal without q_start, Lq = 3 and Lk = 8, then Lq = 8 and Lk = 3 if that is offered:
    the weights, of rows that see a key."""
    if reason := call.lacks("causal"):
        raise NotOffered(reason)
    found, seen = set[str](), list[str]()
    for q_len, k_len in ((Q_LEN, K_LEN), (K_LEN, Q_LEN)):
        try:
            weights = call.weights(Problem(**blank(q_len, k_len, call.dtype), causal=True, literal=True))
        except NotOffered:
            if not found:
                raise
            continue
        found.add(_aligned(call, weights, q_len, k_len))
        counts = np.count_nonzero(weights.reshape(-1, q_len, weights.shape[-1])[0], axis=-1)
        seen.append(f"{', '.join(map(str, counts))} of {k_len} keys")
    if len(found) == 1 and "other" not in found:
        (name,) = found
        return name if len(seen) > 1 else Seen(name, f"{name} with Lq < Lk; Lq > Lk is not offered")
    return Seen("other", f"with Lq != Lk and no q_start, queries see {'; and '.join(seen)}")


def _aligned(call: Caller, weights: Array, q_len: int, k_len: int) -> str:
    readings = {
        "top-left": causal_pairs(q_len, k_len),
        "bottom-right": causal_pairs(q_len, k_len, k_len - q_len),
        "ignored": np.ones((q_len, k_len), dtype=bool),
    }
    return _pattern(call, weights, readings)


@PROBES.add(
    "q_start",
    "M3",
    {
        "honoured": "query i sits at position q_start + i",
        "ignored": "q_start is ignored: the first query sits at the first key",
        "bottom-right": "q_start is ignored: the last query sits at the last key",
    },
)
def q_start(call: Caller) -> str:
    """All scores 0, v = identity, Lq = 3, Lk = 8, causal, q_start=2: the weights."""
    if reason := call.lacks("causal", "q_start"):
        raise NotOffered(reason)
    return _pattern(
        call,
        call.weights(Problem(**blank(Q_LEN, K_LEN, call.dtype), causal=True, q_start=2, literal=True)),
        {
            "honoured": causal_pairs(Q_LEN, K_LEN, 2),
            "ignored": causal_pairs(Q_LEN, K_LEN),
            "bottom-right": causal_pairs(Q_LEN, K_LEN, K_LEN - Q_LEN),
        },
    )


@PROBES.add("k_start", "M3", {"honoured": "key j sits at position k_start + j", "ignored": "k_start is ignored"})
def k_start(call: Caller) -> str:
    """All scores 0, v = identity, Lq = 3, Lk = 8, causal, q_start=4, k_start=2: the weights."""
    if reason := call.lacks("causal", "q_start", "k_start"):
        raise NotOffered(reason)
    return _pattern(
        call,
        call.weights(Problem(**blank(Q_LEN, K_LEN, call.dtype), causal=True, q_start=4, k_start=2, literal=True)),
        {"honoured": causal_pairs(Q_LEN, K_LEN, 2), "ignored": causal_pairs(Q_LEN, K_LEN, 4)},
    )


@PROBES.add(
    "starts of each entry",
    "M3",
    {"each its own": "each batch entry has its own q_start", "first entry's for all": "the first q_start serves all"},
)
def starts(call: Caller) -> str:
    """All scores 0, v = identity, two batch entries, Lq = 3, Lk = 8, causal, q_start=(1, 4): the weights."""
    if reason := call.lacks("causal", "q_start"):
        raise NotOffered(reason)
    problem = Problem(**blank(Q_LEN, K_LEN, call.dtype, batch=2), causal=True, q_start=np.asarray([1, 4]), literal=True)
    first, second = (uniform(causal_pairs(Q_LEN, K_LEN, start))[None] for start in (1, 4))
    return call.match(
        call.weights(problem), {"each its own": np.stack([first, second]), "first entry's for all": first}
    )


@PROBES.add(
    "mask with causal",
    "M13",
    {
        "and": "a pair is visible if both mask and causal show it",
        "or": "a pair is visible if mask or causal shows it",
        "mask ignored": "causal switches the mask off",
        "causal ignored": "a mask switches causal off",
    },
)
def mask_with_causal(call: Caller) -> str:
    """All scores 0, v = identity, Lq = Lk = 4, causal and a mask that hides keys before and after the diagonal: the
    weights."""
    if reason := call.lacks("causal", "mask"):
        raise NotOffered(reason)
    pairs = np.asarray([[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=bool)
    lower = _lower(4)
    return _pattern(
        call,
        call.weights(Problem(**blank(4, 4, call.dtype), causal=True, shown=pairs, literal=True)),
        {"and": pairs & lower, "or": pairs | lower, "mask ignored": lower, "causal ignored": pairs},
    )


@PROBES.add(
    "window",
    "M6",
    {
        "left + 1 + right keys": "a window of left and right shows left + 1 + right keys",
        "one more on the left": "a window shows one key more on the left",
        "one less on the left": "a window shows one key less on the left",
        "one more on the right": "a window shows one key more on the right",
        "one less on the right": "a window shows one key less on the right",
        "symmetric": "a window reaches as far to the left as to the right",
    },
)
def window(call: Caller) -> Seen | str:
    """All scores 0, v = identity, Lq = Lk = 8, and a parameter for windows that is asked for left = 3 and right = 1, or
    right = 0 where it has no right side: the weights."""
    if reason := call.lacks("mask"):
        raise NotOffered(reason)
    size, right = K_LEN, RIGHT
    try:
        weights = call.weights(_windowed(call, right))
    except NotOffered:
        right = 0
        weights = call.weights(_windowed(call, right))
    readings = {
        "left + 1 + right keys": _band(size, LEFT, right),
        "one more on the left": _band(size, LEFT + 1, right),
        "one less on the left": _band(size, LEFT - 1, right),
        "one more on the right": _band(size, LEFT, right + 1),
        "one less on the right": _band(size, LEFT, right - 1),
        "symmetric": _band(size, LEFT, LEFT),
    }
    found = _pattern(call, weights, readings)
    if found == "other" and np.all(np.isfinite(weights)):
        row = weights.reshape(-1, size, size)[0, size // 2] > 0
        return Seen(found, f"query {size // 2} sees the keys {', '.join(map(str, np.nonzero(row)[0]))}")
    return found


def _windowed(call: Caller, right: int) -> Problem:
    return Problem(
        **blank(K_LEN, K_LEN, call.dtype),
        mask=lambda _: masks.window(LEFT, right),
        shown=_band(K_LEN, LEFT, right),
        window=(LEFT, right),
        literal=True,
    )


def _band(size: int, left: int, right: int) -> Array:
    rows, keys = indices(size, size)
    return (keys >= rows - left) & (keys <= rows + right)


def _pattern(call: Caller, weights: Array, readings: dict[str, Array]) -> str:
    """The reading whose visible pairs have equal weights and whose others have none; empty rows may be anything."""
    for name, visible in readings.items():
        some = np.any(visible, axis=-1)
        if call.close(weights[..., some, :], uniform(visible[some])):
            return name
    return "other"
