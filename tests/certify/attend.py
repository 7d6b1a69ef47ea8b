"""Attention on exact rationals and balls: every output, weight and log-sum-exp as the float64 it rounds to.

Raw scores stay rationals, so that equal scores are recognised as equal; sums of exponentials and of weighted values
are accumulated before the one division; a row whose logits are all equal, and a column that is constant, are rational
altogether. Everything else is a ball whose precision is raised until it settles its rounding.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import flint
import numpy as np
from flint import arb, fmpq

from certify.call import Call
from certify.pairs import added, pair_of, visible
from certify.rounding import Exact, exact, rounded

PRECISIONS = (128, 256, 512, 1024, 2048, 4096)
NAN = math.nan


class RefusedError(Exception):
    """An input whose results no precision settles; another one must be drawn."""


class Logit(NamedTuple):
    """A visible pair's logit; logits with one key are equal, whatever their balls."""

    value: Exact
    key: Any


@dataclass(frozen=True, kw_only=True)
class Certified:
    """float64 arrays: output (..., H, Lq, d_v), lse (..., H, Lq), weights (..., H, Lq, Lk); rank 2 without H.

    precision is the largest number of bits that a ball took; rational counts the values that needed no ball.
    """

    output: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    visible: np.ndarray
    precision: int
    rational: int


class Row(NamedTuple):
    """One row's results: exact, balls, or NaN and infinities as floats."""

    weights: list[Exact | float]
    output: list[Exact | float]
    lse: Exact | float


def certify(call: Call, keys: tuple[int, int] | None = None) -> Certified:
    """The results of a call; over a range of keys alone and without sinks, if one is given. Raises RefusedError."""
    evaluation = Evaluation(call, keys)
    *lead, q_len, k_len = call.pairs
    output = np.zeros((*lead, q_len, call.v.shape[-1]))
    lse, weights = np.zeros((*lead, q_len)), np.zeros((*lead, q_len, k_len))
    most, rational = 0, 0
    for index in np.ndindex(*lead, q_len):
        values, precision, exactly = _settled(evaluation, index)
        weights[index], output[index], lse[index] = values[:k_len], values[k_len:-1], values[-1]
        most, rational = max(most, precision), rational + exactly
    # Rank 2 has no head axis.
    output, lse, weights, seen = (x[0] if call.q.ndim == 2 else x for x in (output, lse, weights, evaluation.seen))
    return Certified(
        output=output,
        lse=lse,
        weights=weights,
        visible=seen,
        precision=most,
        rational=rational,
    )


def _settled(evaluation: Evaluation, index: tuple[int, ...]) -> tuple[list[float], int, int]:
    """Weights, output and log-sum-exp of one row, the precision that took, and how many were rational."""
    for precision in PRECISIONS:
        with flint.ctx.workprec(precision):
            row = evaluation.row(index)
            values = [*row.weights, *row.output, row.lse]
            settled = [x if isinstance(x, float) else rounded(x) for x in values]
        if all(x is not None for x in settled):
            balls = any(isinstance(x, arb) for x in values)
            exactly = sum(not isinstance(x, arb) for x in values)
            return [float(x) for x in settled if x is not None], precision if balls else 0, exactly
    raise RefusedError(f"row {index} is not settled by {PRECISIONS[-1]} bits: {values}")


class Evaluation:
    """One call, row by row, at the precision that is set."""

    def __init__(self, call: Call, keys: tuple[int, int] | None) -> None:
        self.call, self.seen = call, visible(call)
        if keys is not None:
            self.seen[..., : keys[0]] = self.seen[..., keys[1] :] = False
        lifted = (x[None] if call.q.ndim == 2 else x for x in (call.q, call.k, call.v))
        self.q, self.k, self.v = (np.broadcast_to(x, (*call.batch, *x.shape[-3:])) for x in lifted)
        sinks = None if call.sinks is None or keys is not None else np.broadcast_to(call.sinks, (call.heads,))
        self.sinks = [-math.inf] * call.heads if sinks is None else [float(x) for x in sinks]
        self.turned = functools.cache(self._turned)
        self.score = functools.cache(self._score)

    def row(self, index: tuple[int, ...]) -> Row:
        """The results of one query row."""
        *entry, head, _ = index
        kv = (*entry, head // (self.call.heads // self.k.shape[-3]))
        seen = [j for j in range(self.k.shape[-2]) if self.seen[(*index, j)]]
        sink = self.sinks[head]
        nan_row = Row([NAN] * self.k.shape[-2], [NAN] * self.v.shape[-1], NAN)
        if math.isnan(sink) or sink == math.inf:
            return nan_row
        if not seen:
            lse = exact(sink) if math.isfinite(sink) else sink
            return Row([fmpq(0)] * self.k.shape[-2], [fmpq(0)] * self.v.shape[-1], lse)
        logits = {j: self.logit(index, kv, j) for j in seen}
        finite = {j: logit for j, logit in logits.items() if logit is not None}
        if len(finite) < len(seen):
            return nan_row
        return self._finite_row(finite, sink, kv)

    def _finite_row(self, logits: dict[int, Logit], sink: float, kv: tuple[int, ...]) -> Row:
        groups: dict[Any, list[int]] = {}
        for j, logit in logits.items():
            groups.setdefault(logit.key, []).append(j)
        # One exponential for each logit that there is; the largest is subtracted, which changes no quotient.
        values = {key: logits[members[0]].value for key, members in groups.items()}
        sizes = {key: len(members) for key, members in groups.items()}
        if math.isfinite(sink):
            values.setdefault(("rational", exact(sink)), exact(sink))
            sizes[("rational", exact(sink))] = sizes.get(("rational", exact(sink)), 0) + 1
        peak = max(values.values(), key=float)
        alike = len(values) == 1
        grown: dict[Any, Exact] = {key: fmpq(1) if alike else arb(x - peak).exp() for key, x in values.items()}
        total = sum((size * grown[key] for key, size in sizes.items()), fmpq(0))
        weights: list[Exact | float] = [fmpq(0)] * self.k.shape[-2]
        for key, members in groups.items():
            for j in members:
                weights[j] = grown[key] / total
        if total == 1:
            lse: Exact = peak
        else:
            lse = arb(total).log() + peak
        output = [self._mixed(groups, grown, total, math.isfinite(sink), kv, c) for c in range(self.v.shape[-1])]
        return Row(weights, output, lse)

    def _mixed(
        self,
        groups: dict[Any, list[int]],
        grown: dict[Any, Exact],
        total: Exact,
        sunk: bool,
        kv: tuple[int, ...],
        column: int,
    ) -> Exact | float:
        """One output element: a visible NaN or infinity decides it, whatever its weight."""
        values = {key: [float(self.v[(*kv, j, column)]) for j in members] for key, members in groups.items()}
        special = {x for group in values.values() for x in group if not math.isfinite(x)}
        if special:
            return next(iter(special)) if len(special) == 1 else NAN
        sums = {key: sum((exact(x) for x in group), fmpq(0)) for key, group in values.items()}
        means = {sums[key] / len(group) for key, group in values.items()}
        if len(means) == 1 and (not sunk or means == {fmpq(0)}):
            return means.pop()  # the same mean wherever the weight goes
        return sum((grown[key] * x for key, x in sums.items()), fmpq(0)) / total

    def logit(self, index: tuple[int, ...], kv: tuple[int, ...], j: int) -> Logit | None:
        """The logit of a visible pair; None for NaN, or +inf, which makes the row NaN as well."""
        bias = added(self.call, pair_of(self.call, (*index, j)))
        query, key = self.q[index], self.k[(*kv, j)]
        if isinstance(bias, float) or not (np.isfinite(query).all() and np.isfinite(key).all()):
            return None
        raw = self.score(index, (*kv, j), flint.ctx.prec)
        value = self._capped(self.scaled(raw)) + bias
        if isinstance(value, fmpq):
            return Logit(value, ("rational", value))
        # Cap and scale are one to one, so equal raw scores and equal biases are what equal logits come from.
        known = isinstance(raw, fmpq) and isinstance(bias, fmpq) and self.call.scale != 0
        return Logit(value, (raw, bias) if known else j)

    def scaled(self, raw: Exact) -> Exact:
        """A raw score, or a sum of such, times the scale."""
        if self.call.scale is not None:
            return raw * exact(self.call.scale)
        width = self.q.shape[-1]
        root = math.isqrt(width)
        if width == 0 or raw == 0:
            return raw
        return raw / root if root * root == width else raw / arb(width).sqrt()

    def _capped(self, x: Exact) -> Exact:
        if self.call.softcap is None or (isinstance(x, fmpq) and x == 0):
            return x
        cap = exact(self.call.softcap)
        return arb(x / cap).tanh() * cap

    def _score(self, query: tuple[int, ...], key: tuple[int, ...], precision: int) -> Exact:
        """q . k, both turned where positions are rotary; precision is part of what is remembered."""
        pairs = zip(self.turned("q", query, precision), self.turned("k", key, precision))
        return sum((a * b for a, b in pairs), fmpq(0))

    def _turned(self, name: str, index: tuple[int, ...], precision: int) -> list[Exact]:
        x = [exact(float(component)) for component in getattr(self, name)[index]]
        rotary = self.call.rotary
        if rotary is None:
            return x
        positions = np.asarray(rotary[f"{name}_positions"])
        place = positions[index[-1]] if positions.ndim == 1 else positions[(*index[:-2], index[-1])]
        return turned(x, int(place), rotary["style"], rotary["base"], rotary["width"])


def turned(x: list[Exact], position: int, style: str, base: float, width: int | None) -> list[Exact]:
    """The first `width` components of x turned pair by pair, pair i by position * base^(-2i/width)."""
    width = len(x) if width is None else width
    out = list(x)
    for i in range(width // 2 if position else 0):
        first, second = (i, i + width // 2) if style == "half" else (2 * i, 2 * i + 1)
        sine, cosine = (position * arb(exact(base)) ** arb(fmpq(-2 * i, width))).sin_cos()
        out[first] = x[first] * cosine - x[second] * sine
        out[second] = x[second] * cosine + x[first] * sine
    return out
