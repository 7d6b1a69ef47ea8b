"""Attention by definition: pure-Python loops over host float64 values, written from the specification's text.

Nothing here shares code or method with refattn: every row is a list of Python floats, every mask a predicate
on one (query, key) pair. Slow, and meant to be checked by eye.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

NAN = math.nan
INF = math.inf


@dataclass(frozen=True)
class Pair:
    """One query row and one key of one head of one batch entry: indices, and absolute positions."""

    batch: tuple[int, ...]
    head: int
    row: int
    key: int
    query_position: int
    key_position: int


def pick(array: Any, index: tuple[int, ...]) -> Any:
    """The element of `array` at `index` of the shape that it broadcasts to, right-aligned."""
    array = np.asarray(array)
    own = index[len(index) - array.ndim :]
    return array[tuple(0 if size == 1 else at for size, at in zip(array.shape, own, strict=True))].item()


# ---- masks: each is a rule for one pair -------------------------------------------------------------------


class Rule:
    """A visibility rule; &, | and ~ combine rules pair by pair."""

    def __init__(self, test: Callable[[Pair], bool]) -> None:
        self.test = test

    def __call__(self, pair: Pair) -> bool:
        return self.test(pair)

    def __and__(self, other: Rule) -> Rule:
        return Rule(lambda p: self(p) and other(p))

    def __or__(self, other: Rule) -> Rule:
        return Rule(lambda p: self(p) or other(p))

    def __invert__(self) -> Rule:
        return Rule(lambda p: not self(p))


def everything() -> Rule:
    return Rule(lambda p: True)


def causal() -> Rule:
    return Rule(lambda p: p.key_position <= p.query_position)


def window(left: int | None, right: int | None) -> Rule:
    def inside(p: Pair) -> bool:
        not_too_old = left is None or p.query_position - left <= p.key_position
        not_too_new = right is None or p.key_position <= p.query_position + right
        return not_too_old and not_too_new

    return Rule(inside)


def lengths(n: Any) -> Rule:
    return Rule(lambda p: bool(p.key < pick(n, p.batch)))


def padding(keep: Any) -> Rule:
    return Rule(lambda p: bool(pick(keep, (*p.batch, p.key))))


def documents(q_ids: Any, k_ids: Any = None) -> Rule:
    keys = q_ids if k_ids is None else k_ids
    return Rule(lambda p: bool(pick(q_ids, (*p.batch, p.row)) == pick(keys, (*p.batch, p.key))))


def prefix(n: int) -> Rule:
    return Rule(lambda p: p.key_position < n)


def chunks(size: int) -> Rule:
    return Rule(lambda p: math.floor(p.query_position / size) == math.floor(p.key_position / size))


def dense(array: Any) -> Rule:
    return Rule(lambda p: bool(pick(array, (*p.batch, p.head, p.row, p.key))))


def blocks(array: Any, size: int) -> Rule:
    return Rule(lambda p: bool(pick(array, (*p.batch, p.head, p.row // size, p.key // size))))


# ---- biases -----------------------------------------------------------------------------------------------

Bias = Callable[[Pair], float]


def alibi_slopes(heads: int) -> list[float]:
    """Geometric for a power of two; otherwise the power below's, then every other of the power above's."""
    below = 1
    while 2 * below <= heads:
        below *= 2
    slopes = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    above = [2.0 ** (-8.0 * (h + 1) / (2 * below)) for h in range(2 * below)]
    return (slopes + above[0::2])[:heads]


def alibi(heads: int) -> Bias:
    slopes = alibi_slopes(heads)
    return lambda p: -slopes[p.head] * abs(p.query_position - p.key_position)


def relative(table: Any) -> Bias:
    table = np.asarray(table, dtype=np.float64)
    reach = (table.shape[1] - 1) // 2

    def entry(p: Pair) -> float:
        offset = min(max(p.key_position - p.query_position, -reach), reach)
        return float(table[p.head, offset + reach])

    return entry


def array_bias(array: Any) -> Bias:
    array = np.asarray(array, dtype=np.float64)
    return lambda p: float(pick(array, (*p.batch, p.head, p.row, p.key)))


def sum_of(*terms: Bias) -> Bias:
    return lambda p: sum(term(p) for term in terms)


# ---- attention --------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What attention gives, in float64: shapes as the specification says, rank 2 without a head axis."""

    output: np.ndarray
    weights: np.ndarray
    lse: np.ndarray
    visible: np.ndarray
    logits: np.ndarray


class Row(NamedTuple):
    weights: list[float]
    lse: float


def logit(query: list[float], key: list[float], scale: float, softcap: float | None, bias: float) -> float:
    """The logit of one visible pair."""
    if any(not math.isfinite(x) for x in key):
        return NAN
    score = 0.0
    for a, b in zip(query, key, strict=True):
        score += a * b
    score *= scale
    if softcap is not None:
        score = softcap * math.tanh(score / softcap)
    return score + bias


def softmax_row(logits: list[float | None], sink: float) -> Row:
    """The weights of one row and its LSE; None is an invisible pair, a sink of -inf is no sink."""
    shown = [x for x in logits if x is not None]
    entries = [*shown, sink]
    if any(math.isnan(x) or x == INF for x in entries):
        return Row([0.0 if x is None else NAN for x in logits], NAN)
    largest = max(entries)
    if largest == -INF:
        # Nothing to divide by: an empty row when no key is visible, otherwise 0/0.
        return Row([0.0 if x is None else NAN for x in logits], NAN if shown else -INF)
    total = math.fsum(math.exp(x - largest) for x in entries)
    weights = [0.0 if x is None else math.exp(x - largest) / total for x in logits]
    return Row(weights, largest + math.log(total))


def weighted_sum(weights: list[float], shown: list[bool], values: list[float], row_is_nan: bool) -> float:
    """One output element: a visible non-finite value decides it, whatever its weight."""
    if row_is_nan:
        return NAN
    finite, special = [0.0], []
    for weight, seen, value in zip(weights, shown, values, strict=True):
        if seen and math.isfinite(value):
            finite.append(weight * value)
        elif seen:
            special.append(value)
    if special:
        return special[0] if all(x == special[0] for x in special) else NAN  # NaN equals nothing, itself included
    return math.fsum(finite)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal_too: bool = False,
    mask: Rule | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    q_start: Any = 0,
    k_start: Any = 0,
) -> Result:
    """Attention of q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k), v (..., Hkv, Lk, d_v); rank 2 has no heads."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    rank = q.ndim
    if rank == 2:
        q, k, v = q[None], k[None], v[None]
    heads, q_len, d_k = q.shape[-3:]
    kv_heads, k_len, d_v = v.shape[-3:]
    batch_shape = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, batch_shape + x.shape[-3:]) for x in (q, k, v))
    factor = scale if scale is not None else (1.0 if d_k == 0 else 1.0 / math.sqrt(d_k))

    rows_shape = (*batch_shape, heads, q_len)
    output = np.zeros((*rows_shape, d_v))
    weights = np.zeros((*rows_shape, k_len))
    logits = np.full((*rows_shape, k_len), NAN)
    visible = np.zeros((*rows_shape, k_len), dtype=bool)
    lse = np.zeros(rows_shape)
    for index in np.ndindex(*rows_shape):
        *batch_list, head, i = index
        batch = tuple(batch_list)
        kv_head = head // (heads // kv_heads)
        keys, values = k[batch][kv_head].tolist(), v[batch][kv_head].tolist()
        row: list[float | None] = []
        for j in range(k_len):
            position = pick(q_start, batch) + i
            pair = Pair(batch, head, i, j, position, pick(k_start, batch) + j)
            seen = (mask is None or mask(pair)) and (not causal_too or pair.key_position <= position)
            added = 0.0 if bias is None else bias(pair)
            if not seen or added == -INF:
                row.append(None)
                continue
            row.append(logit(q[index].tolist(), keys[j], factor, softcap, added))
            logits[(*index, j)] = row[-1]
        sink = -INF if sinks is None else float(np.broadcast_to(sinks, (heads,))[head])
        result = softmax_row(row, sink)
        shown = [x is not None for x in row]
        row_is_nan = math.isnan(result.lse)
        weights[index], lse[index], visible[index] = result.weights, result.lse, shown
        for c in range(d_v):
            output[(*index, c)] = weighted_sum(result.weights, shown, [x[c] for x in values], row_is_nan)
    if rank == 2:
        return Result(output[0], weights[0], lse[0], visible[0], logits[0])
    return Result(output, weights, lse, visible, logits)


# ---- rotary positions -------------------------------------------------------------------------------------


def rope(x: Any, positions: Any, *, style: str, base: float = 10000.0, width: int | None = None) -> np.ndarray:
    """Rotate the first `width` components of x (..., L, D); pair c by position * base^(-2c/width)."""
    x = np.asarray(x, dtype=np.float64)
    out: np.ndarray = x.copy()
    size = x.shape[-1] if width is None else width
    for index in np.ndindex(*x.shape[:-1]):
        # positions is (L,) or (batch, L): the head axis, -3 of x, is not one of its axes
        position = pick(positions, (*index[:-2], index[-1]))
        for c in range(size // 2):
            first, second = (c, c + size // 2) if style == "half" else (2 * c, 2 * c + 1)
            angle = position * base ** (-2.0 * c / size)
            a, b = x[(*index, first)], x[(*index, second)]
            out[(*index, first)] = a * math.cos(angle) - b * math.sin(angle)
            out[(*index, second)] = b * math.cos(angle) + a * math.sin(angle)
    return out
