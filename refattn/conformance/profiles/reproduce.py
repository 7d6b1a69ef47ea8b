"""How far a result is from what faults would give, on NumPy arrays, in units of the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from refattn.conformance.case import Problem
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import Plain
from refattn.conformance.judge import LOW, Result, error_over_bound, golden_of
from refattn.conformance.plain import rounded
from refattn.conformance.targets.function import FunctionTarget
from refattn.goldens import Golden

# Clauses whose faults are ones of rounding or of a dtype, and show in the dtype of the call alone.
OF_A_DTYPE = ("N1", "A4")


class Imitation:
    """One or several faults, as one function. Raises ValueError if they cannot be planted together."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        fault = _together(faults)
        self.names = tuple(one.name for one in faults)
        self._target = FunctionTarget(fault.name, "numpy", fault.attention())
        self._of_a_dtype = any(one.clause in OF_A_DTYPE for one in faults)

    def ratio(self, problem: Problem, result: Result, golden: Golden | None = None) -> float:
        """The largest error of a result against what these faults give, over the bound of the right answer.

        Infinite where the shape or dtype is another, and where the faults give no answer. golden is the right answer,
        if it is at hand.
        """
        # In float64 rounding adds nothing of its own.
        own = self._of_a_dtype and problem.dtype in self._target.dtypes
        asked = problem if own else replace(problem, dtype="float64")
        try:
            with np.errstate(all="ignore"):
                q, k, v = (self._target.array(getattr(problem, name), asked.dtype) for name in "qkv")
                answer = self._target.compute(asked, q, k, v, again=False)
        except Exception:  # noqa: BLE001  # faults that raise explain no number
            return math.inf
        expected = self._target.host(answer.output)
        dtype = str(answer.output.dtype) if own else problem.dtype
        golden, model = golden or golden_of(problem), "unfused" if problem.dtype in LOW else "fused"
        if not np.shape(result.output) == expected.shape == golden.output.shape or dtype != result.dtype:
            return math.inf
        # What came has been rounded, which turns the largest numbers into infinities.
        expected = rounded(expected, dtype)
        ratio = error_over_bound(result.output, expected, golden.bound(problem.dtype, model, problem.coherent))
        if result.lse is not None and answer.lse is not None:
            bound = golden.lse_bound(problem.dtype, model, problem.coherent)
            ratio = max(ratio, error_over_bound(result.lse, self._target.host(answer.lse), bound))
        return ratio


def _together(faults: Sequence[Fault]) -> Fault:
    """One fault that does what all of them do."""
    steps: dict[str, Any] = {}
    if len(faults) == 1 and not faults[0].patches:
        return faults[0]
    for fault in faults:
        if fault.wrap or fault.patches or fault.base is not Plain or steps.keys() & fault.steps.keys():
            raise ValueError(f"{fault.name!r} cannot be planted together with others")
        steps |= fault.steps
    name = " and ".join(fault.name for fault in faults)
    return Fault(name=name, clause=faults[0].clause, kind="", steps=steps, lse=any(fault.lse for fault in faults))
