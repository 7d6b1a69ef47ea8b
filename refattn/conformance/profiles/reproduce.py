"""Whether faults give what a result is: run on NumPy arrays, and compared as far as rounding may reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF
from refattn.conformance.case import Problem
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import Plain
from refattn.conformance.judge import LOW, Result, error_over_bound
from refattn.conformance.plain import rounded
from refattn.conformance.targets.function import FunctionTarget
from refattn.goldens import Golden

# Clauses whose faults are ones of rounding or of a dtype, and show in the dtype of the call alone.
OF_A_DTYPE = ("N1", "A4")
# How many times its own rounding a result may differ from what faults give, and how many times nearer it must be to
# that than to the right answer.
FITS, NEARER = 1.0, 3.0


class Answer(NamedTuple):
    """What faults make of a problem, in float64, and the name of the dtype that the output had."""

    output: Array
    lse: Array
    dtype: str


class Imitation:
    """One or several faults, as one function. Raises ValueError if they cannot be planted together."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        fault = replace(_together(faults), lse=True)
        self.names = tuple(one.name for one in faults)
        self._target = FunctionTarget(fault.name, "numpy", fault.attention())
        self._of_a_dtype = any(one.clause in OF_A_DTYPE for one in faults)

    def gives(self, problem: Problem, result: Result, golden: Golden) -> bool:
        """Whether these faults give this result, and the right answer, golden, is another.

        Rounding is measured: by the bound of the right answer, and by what the dtype changes in the faults' own.
        """
        exact, own = self._answer(problem, "float64"), self._answer(problem, self._own_dtype(problem.dtype))
        if exact is None or own is None:
            return False
        if not np.shape(result.output) == exact.output.shape == golden.output.shape:
            return False
        if result.dtype != (own.dtype if self._of_a_dtype else problem.dtype):
            return False
        model, dtype = "unfused" if problem.dtype in LOW else "fused", problem.dtype
        largest = float(np.max(np.abs(problem.v), initial=0.0, where=np.isfinite(problem.v)))
        bound = golden.bound(dtype, model, problem.coherent)
        bound = bound + _rounding(exact.output, own.output, ROUNDOFF[dtype]) + 32 * _unit(dtype) * largest
        lse_bound = golden.lse_bound(dtype, model, problem.coherent)
        lse_bound = lse_bound + _rounding(exact.lse, own.lse, _unit(dtype))
        # What overflows on the way does so in the dtype of the call alone.
        for expected in (own,) if self._of_a_dtype else (exact, own):
            ratios = [_ratios(result.output, rounded(expected.output, dtype), golden.output, bound)]
            if result.lse is not None:
                ratios.append(_ratios(result.lse, expected.lse, golden.lse, lse_bound))
            off, right = (max(pair) for pair in zip(*ratios))
            if off <= FITS and NEARER * off < right:
                return True
        return False

    def _own_dtype(self, dtype: str) -> str:
        """The dtype of a call, or float32 where NumPy lacks it."""
        return dtype if dtype in self._target.dtypes else "float32"

    def _answer(self, problem: Problem, dtype: str) -> Answer | None:
        """The faults' answer in a dtype; None where they raise."""
        asked = replace(problem, dtype=dtype)
        try:
            with np.errstate(all="ignore"):
                q, k, v = (self._target.array(getattr(problem, name), dtype) for name in "qkv")
                answer = self._target.compute(asked, q, k, v, again=False)
        except Exception:  # noqa: BLE001  # faults that raise explain no number
            return None
        return Answer(self._target.host(answer.output), self._target.host(answer.lse), str(answer.output.dtype))


def _unit(dtype: str) -> float:
    """The unit roundoff of the compute dtype."""
    return ROUNDOFF["float64" if dtype == "float64" else "float32"]


def _rounding(exact: Array, own: Array, unit: float) -> Array:
    """What a dtype changes in an answer, four times, and the rounding of the answer itself."""
    with np.errstate(invalid="ignore", over="ignore"):
        off = 4 * np.abs(own - exact) + 2 * unit * np.abs(exact)
    return np.where(np.isfinite(off), off, 0.0)


def _ratios(actual: Array, predicted: Array, right: Array, bound: Array) -> tuple[float, float]:
    """Error over bound against what is predicted, and against the right answer; infinite where nothing follows."""
    ratios = (error_over_bound(actual, other, bound) for other in (predicted, right))
    off, true = (math.inf if math.isnan(ratio) else ratio for ratio in ratios)
    return off, true


def _together(faults: Sequence[Fault]) -> Fault:
    """One fault that does what all of them do."""
    steps: dict[str, Any] = {}
    if len(faults) == 1 and not faults[0].patches:
        return faults[0]
    for fault in faults:
        if fault.wrap or fault.patches or fault.base is not Plain or steps.keys() & fault.steps.keys():
            raise ValueError(f"{fault.name!r} cannot be planted together with others")
        steps |= fault.steps
    return Fault(name=" and ".join(fault.name for fault in faults), clause=faults[0].clause, kind="", steps=steps)
