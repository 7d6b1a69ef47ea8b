"""Which pairs of query and key are visible, and what is added to their scores: pair by pair, by definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from flint import arb, fmpq

import oracle
from certify.call import Call
from certify.rounding import Exact, exact


def visible(call: Call, mask_alone: bool = False) -> np.ndarray:
    """Boolean (batch..., H, Lq, Lk): mask, causal and biases of -inf together, or the mask alone."""
    rule = oracle.everything() if call.mask is None else rule_of(call.mask)
    if call.causal and not mask_alone:
        rule = rule & oracle.causal()
    seen = np.zeros(call.pairs, dtype=bool)
    for index in np.ndindex(*call.pairs):
        pair = pair_of(call, index)
        seen[index] = rule(pair) and (mask_alone or added(call, pair) != -math.inf)
    return seen


def pair_of(call: Call, index: tuple[int, ...]) -> oracle.Pair:
    """The pair at an index of `pairs`, with its positions."""
    *batch, head, row, key = index
    entry = tuple(batch)
    q_start = 0 if call.q_start is None else call.q_start
    return oracle.Pair(
        entry, head, row, key, int(oracle.pick(q_start, entry)) + row, int(oracle.pick(call.k_start, entry)) + key
    )


def rule_of(mask: dict[str, Any]) -> oracle.Rule:
    """The rule that a mask's data describe."""
    kind, rest = mask["kind"], {name: value for name, value in mask.items() if name != "kind"}
    if kind == "not":
        return ~rule_of(rest["of"][0])
    if kind in ("and", "or"):
        first, second = (rule_of(one) for one in rest["of"])
        return first & second if kind == "and" else first | second
    rules: dict[str, Callable[..., oracle.Rule]] = {
        "causal": oracle.causal,
        "window": oracle.window,
        "chunks": oracle.chunks,
        "prefix": oracle.prefix,
        "documents": oracle.documents,
        "lengths": oracle.lengths,
        "padding": oracle.padding,
        "dense": oracle.dense,
        "blocks": oracle.blocks,
    }
    return rules[kind](**rest)


def added(call: Call, pair: oracle.Pair) -> Exact | float:
    """The sum of a pair's biases: exact, or a ball where a slope is irrational; -inf, +inf or NaN where a term is."""
    total: Exact = fmpq(0)
    special = 0.0
    for term in call.bias:
        value = _term(term, pair, call.heads)
        if isinstance(value, float):
            if value == -math.inf:
                return value
            special += value
        else:
            total = total + value
    return total if special == 0 else special


def _term(term: dict[str, Any], pair: oracle.Pair, heads: int) -> Exact | float:
    if term["kind"] == "alibi":
        return slope(pair.head, heads) * -abs(pair.query_position - pair.key_position)
    rule = oracle.relative(term["table"]) if term["kind"] == "relative" else oracle.array_bias(term["array"])
    value = rule(pair)
    return exact(value) if math.isfinite(value) else value


def slope(head: int, heads: int) -> Exact:
    """2^(-8(h+1)/P) for the first P heads, P the greatest power of two, then every other one of twice as many."""
    power = 1 << (heads.bit_length() - 1)
    exponent = fmpq(-8 * (head + 1), power) if head < power else fmpq(-8 * (2 * (head - power) + 1), 2 * power)
    if exponent.q == 1:
        return fmpq(1, 2 ** -int(exponent.p))
    return arb(2) ** arb(exponent)
