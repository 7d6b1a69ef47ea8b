"""Gradients on exact rationals and balls: the derivative of the sum of a given gradient times the output.

Of a pair with weight p it is p (d - D) by the logit, d being the product of the row's gradient with the value and D the
weighted mean of these over the keys; that times the slope of the soft cap, the scale and the key is the query's, and so
on. Every sum is made before the one rounding, and what no visible pair adds to stays the rational 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flint
import numpy as np
from flint import arb, fmpq

from certify.attend import PRECISIONS, Evaluation, RefusedError
from certify.call import Call
from certify.rounding import Exact, exact, rounded


@dataclass(frozen=True, kw_only=True)
class CertifiedGradients:
    """float64 arrays by the names of the arguments, in their shapes; a bias is the array of its only term.

    precision and rational are as in `Certified`.
    """

    values: dict[str, np.ndarray]
    precision: int
    rational: int


def certify_gradients(call: Call) -> CertifiedGradients:
    """The gradients of a call that has a `grad_output`. Raises RefusedError."""
    evaluation = Evaluation(call, None)
    for precision in PRECISIONS:
        with flint.ctx.workprec(precision):
            sums = _Sums(call)
            for index in np.ndindex(*call.pairs[:-1]):
                sums.add_row(evaluation, index)
            settled = {name: [rounded(x) for x in values.ravel()] for name, values in sums.arrays.items()}
        if all(x is not None for values in settled.values() for x in values):
            every = [x for values in sums.arrays.values() for x in values.ravel()]
            rational = sum(not isinstance(x, arb) for x in every)
            return CertifiedGradients(
                values={n: np.asarray(x, dtype=np.float64).reshape(sums.arrays[n].shape) for n, x in settled.items()},
                precision=0 if rational == len(every) else precision,
                rational=rational,
            )
    raise RefusedError(f"gradients are not settled by {PRECISIONS[-1]} bits")


class _Sums:
    """The gradients of all arguments while rows add to them: exact numbers in arrays of objects."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.arrays = {name: _zeros(np.shape(getattr(call, name))) for name in ("q", "k", "v")}
        if call.bias:
            (self.term,) = call.bias
            self.arrays["bias"] = _zeros(self.term["array" if self.term["kind"] == "array" else "table"].shape)
        if call.sinks is not None:
            self.arrays["sinks"] = _zeros(np.shape(call.sinks))

    def add_row(self, evaluation: Evaluation, index: tuple[int, ...]) -> None:
        """What one query row adds to every gradient."""
        *entry, head, _ = index
        kv = (*entry, head // (self.call.heads // evaluation.k.shape[-3]))
        assert self.call.grad_output is not None
        gradient = [exact(float(x)) for x in _of(self.call.grad_output, index)]
        seen = [j for j in range(evaluation.k.shape[-2]) if evaluation.seen[(*index, j)]]
        weights = evaluation.row(index).weights
        values = {j: [exact(float(x)) for x in evaluation.v[(*kv, j)]] for j in seen}
        products = {j: _dot(gradient, values[j]) for j in seen}
        row_sum = sum((weights[j] * products[j] for j in seen), fmpq(0))
        for j in seen:
            self._add("v", (*kv, j), [weights[j] * x for x in gradient])
            logit = weights[j] * (products[j] - row_sum)
            self._add_bias((*index, j), logit)
            raw = evaluation.score(index, (*kv, j), flint.ctx.prec)
            score = evaluation.scaled(logit * self._slope(evaluation.scaled(raw)))
            self._add("q", index, [score * exact(float(x)) for x in evaluation.k[(*kv, j)]])
            self._add("k", (*kv, j), [score * exact(float(x)) for x in evaluation.q[index]])
        if "sinks" in self.arrays and np.isfinite(evaluation.sinks[head]):
            share = 1 - sum((weights[j] for j in seen), fmpq(0))
            self._add_one("sinks", (head,), -share * row_sum)

    def _slope(self, scaled: Exact) -> Exact:
        if self.call.softcap is None:
            return fmpq(1)
        tanh = arb(scaled / exact(self.call.softcap)).tanh()
        return 1 - tanh * tanh

    def _add_bias(self, index: tuple[int, ...], logit: Exact) -> None:
        if "bias" not in self.arrays:
            return
        if self.term["kind"] == "array":
            self._add_one("bias", index, logit)
            return
        *_, head, row, key = index
        reach = self.arrays["bias"].shape[-1] // 2
        assert self.call.q_start is None or isinstance(self.call.q_start, int)
        distance = key - row - (self.call.q_start or 0)
        self._add_one("bias", (head, max(-reach, min(reach, distance)) + reach), logit)

    def _add(self, name: str, index: tuple[int, ...], numbers: list[Exact]) -> None:
        """Numbers along the last axis, at an index of the array that the argument broadcasts to."""
        for column, x in enumerate(numbers):
            self._add_one(name, (*index, column), x)

    def _add_one(self, name: str, index: tuple[int, ...], x: Exact) -> None:
        array = self.arrays[name]
        own = index[len(index) - array.ndim :]
        at = tuple(0 if size == 1 else i for size, i in zip(array.shape, own, strict=True))
        array[at] = array[at] + x


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    zeros = np.empty(shape, dtype=object)
    zeros.fill(fmpq(0))
    return zeros


def _of(array: np.ndarray, index: tuple[int, ...]) -> Iterator[Any]:
    """The row at an index; rank 2 has no head axis."""
    yield from array[index[len(index) - array.ndim + 1 :]]


def _dot(x: list[Exact], y: list[Exact]) -> Exact:
    return sum((a * b for a, b in zip(x, y, strict=True)), fmpq(0))
