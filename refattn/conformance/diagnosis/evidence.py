"""What is known of one call: the problem, what came, the verdict; and how far what came is from a prediction."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF
from refattn.conformance.case import Problem
from refattn.conformance.judge import Judgement, Result, golden_of, ratios_of
from refattn.dtypes import LOW
from refattn.goldens import Golden

# A prediction fits up to so many times the bound: it has a rounding error of its own, and so has what came.
FITS = 2.0
# And it must be so much nearer than the right answer is.
NEARER = 3.0
# What is so many times the bound off cannot be the right answer, whichever prediction it is close to.
FAR = 8.0


class Evidence:
    """One call and its answer. `wide` allows scores and weights to be stored in the dtype of q."""

    def __init__(
        self,
        problem: Problem,
        result: Result,
        judged: Judgement,
        *,
        case: str = "",
        clauses: tuple[str, ...] = (),
        wide: bool = False,
    ) -> None:
        self.problem, self.result, self.judged = problem, result, judged
        self.case, self.clauses, self.wide = case, clauses, wide and problem.dtype in LOW

    @property
    def failed(self) -> bool:
        """Whether the answer is wrong."""
        return self.judged.verdict == "fail"

    @property
    def about(self) -> str:
        """The label of the clause that the verdict is about first of all."""
        return self.judged.fault or (self.clauses[0] if self.clauses else "")

    @property
    def size(self) -> int:
        """About how much work one prediction is."""
        return int(math.prod(self.problem.q.shape[:-1]) * (self.problem.k.shape[-2] + 1))

    @cached_property
    def golden(self) -> Golden:
        """The right answer."""
        return golden_of(self.problem)

    @cached_property
    def bound(self) -> Array:
        """The bound of the output."""
        return self.golden.bound(self.problem.dtype, self._model, self.problem.coherent)

    @cached_property
    def lse_bound(self) -> Array:
        """The bound of the log-sum-exp."""
        return self.golden.lse_bound(self.problem.dtype, self._model, self.problem.coherent)

    @property
    def _model(self) -> str:
        return "unfused" if self.wide else "fused"

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """What can be wrong beside the numbers."""
        return form_of(self.result, self.problem.dtype)

    @cached_property
    def right(self) -> Ratios:
        """How far what came is from the right answer."""
        return self.ratios(self.right_answer)

    @cached_property
    def right_answer(self) -> Result:
        """The right answer as a target would give it."""
        return Result(output=self.golden.output, dtype=self.problem.dtype, lse=self.golden.lse, lse_dtype="float64")

    def ratios(self, predicted: Result) -> Ratios:
        """How far what came is from a prediction, in units of the bound, output and log-sum-exp."""
        return self._apart(self.result, predicted)

    def changes(self, predicted: Result) -> Ratios:
        """How far a prediction is from the right answer: what it does not move it does not explain."""
        if np.shape(predicted.output) != self.golden.output.shape:
            return Ratios(math.inf, 0.0)
        output = worst(predicted.output, self.golden.output, self.bound)
        if self.result.lse is None or predicted.lse is None:
            return Ratios(output, 0.0)
        return Ratios(output, worst(predicted.lse, self.golden.lse, self.lse_bound))

    def comparable(self, predicted: Result) -> bool:
        """Whether a prediction has the form of what came; a log-sum-exp that did not come has none."""
        asked = replace(predicted, lse=None) if self.result.lse is None else predicted
        return form_of(asked, self.problem.dtype) == self.form

    def fits(self, predicted: Result) -> bool:
        """Whether a prediction explains what came, and the right answer does not."""
        if not self.comparable(predicted):
            return False
        place = self.judged.place
        if place is not None and place.ratio > FAR and (place.what == "output" or predicted.lse is not None):
            return self._close(predicted) or self._explains(predicted)
        return self._explains(predicted)

    def _explains(self, predicted: Result) -> bool:
        ratios, right = self.ratios(predicted), self.right
        if self.judged.fault and self.judged.place is None:  # of form, whose numbers may be right
            return self.form != form_of(self.right_answer, self.problem.dtype) and ratios.within(FITS)
        changes = self.changes(predicted)
        if right.output > 1:
            explained = changes.output > 1 and ratios.output <= min(FITS, right.output / NEARER)
            return explained and (ratios.lse <= FITS or right.lse <= FITS)
        return changes.lse > 1 and ratios.output <= FITS and ratios.lse <= min(FITS, right.lse / NEARER)

    def contradicts(self, predicted: Result) -> bool:
        """Whether a right answer speaks against a fault that should have made it wrong."""
        if not self.comparable(predicted):
            return True
        # Most predictions are nearly what came, and then no bound has to be derived.
        return not self._close(predicted) and not self.ratios(predicted).within(1 + FITS)

    def _close(self, predicted: Result) -> bool:
        """Whether a prediction is what came but for the last digit."""
        pairs = [(self.result.output, predicted.output)]
        if self.result.lse is not None and predicted.lse is not None:
            pairs.append((self.result.lse, predicted.lse))
        near = ROUNDOFF[self.problem.dtype]
        return all(x.shape == y.shape and np.allclose(x, y, rtol=near, atol=0.0, equal_nan=True) for x, y in pairs)

    def _apart(self, actual: Result, predicted: Result) -> Ratios:
        output = self._ratio(actual.output, predicted.output, self.bound)
        if actual.lse is None or predicted.lse is None:
            return Ratios(output, 0.0)
        return Ratios(output, self._ratio(actual.lse, predicted.lse, self.lse_bound))

    def _ratio(self, actual: Array, predicted: Array, bound: Array) -> float:
        """The largest difference in units of the bound, widened by the rounding of what is larger than expected."""
        if np.shape(actual) != np.shape(predicted):
            return math.inf
        size = np.abs(np.where(np.isfinite(predicted), predicted, 0.0))
        if size.ndim == self.golden.output.ndim:
            size = np.broadcast_to(np.max(size, axis=-1, keepdims=True, initial=0.0), size.shape)
        if bound.shape != actual.shape:  # a wrong shape has no bound of its own
            bound = np.full(actual.shape, np.max(bound, initial=0.0))
        # Beyond 64 keys, both being sums of so many terms in orders of their own.
        roundings = max(2.0, math.sqrt(self.golden.k_len) / 4)
        return worst(actual, predicted, bound + roundings * ROUNDOFF[self.problem.dtype] * size)


class Ratios(NamedTuple):
    """Differences in units of the bound."""

    output: float
    lse: float

    def within(self, limit: float) -> bool:
        """Whether both are at most that."""
        return self.output <= limit and self.lse <= limit


def worst(actual: Array, expected: Array, bound: Array) -> float:
    """The largest error in units of the bound; where nothing can be judged there is none."""
    ratios = ratios_of(actual, expected, bound)
    return float(np.max(np.where(np.isnan(ratios), 0.0, ratios), initial=0.0))


def form_of(result: Result, dtype: str) -> tuple[Any, ...]:
    """Shape, dtype, side effects: what a prediction must have in common with what came."""
    least = "float64" if dtype == "float64" else "float32"
    short = result.lse is not None and ROUNDOFF.get(result.lse_dtype, 1.0) > ROUNDOFF[least]
    unstable = result.repeated is False
    return np.shape(result.output), result.dtype, result.library, result.changed, unstable, short
