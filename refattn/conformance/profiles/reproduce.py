"""How far a result is from what faults would give, on NumPy arrays, in units of the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from refattn.conformance.case import Problem
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import Plain
from refattn.conformance.judge import LOW, Result, error_over_bound, golden_of
from refattn.conformance.plain import rounded
from refattn.conformance.targets.function import FunctionTarget


def together(faults: Sequence[Fault]) -> Fault | None:
    """One fault that does what all of them do; None where two replace the same step, or wrap, or are planted."""
    if len(faults) == 1:
        return None if faults[0].patches else faults[0]
    steps: dict[str, Any] = {}
    for fault in faults:
        if fault.wrap or fault.patches or fault.base is not Plain or steps.keys() & fault.steps.keys():
            return None
        steps |= fault.steps
    lse = any(fault.lse for fault in faults)
    return Fault(name=" and ".join(f.name for f in faults), clause=faults[0].clause, kind="", steps=steps, lse=lse)


def ratio_against(faults: Sequence[Fault], problem: Problem, result: Result) -> float:
    """The largest error of the result against the answer of these faults, over the bound of the right answer.

    Infinite where the shape or dtype is another, and where the faults give no answer.
    """
    fault = together(faults)
    if fault is None:
        return math.inf
    imitation = FunctionTarget(fault.name, "numpy", fault.attention())
    # In float64 rounding adds nothing; a fault of rounding itself, and of the result's dtype, needs the dtype.
    own = any(one.clause in ("N1", "A4") for one in faults) and problem.dtype in imitation.dtypes
    dtype = problem.dtype if own else "float64"
    try:
        with np.errstate(all="ignore"):
            q, k, v = (imitation.array(getattr(problem, name), dtype) for name in "qkv")
            answer = imitation.compute(_in(problem, dtype), q, k, v, again=False)
    except Exception:  # noqa: BLE001  # faults that raise explain no number
        return math.inf
    expected = imitation.host(answer.output)
    expected_dtype = str(answer.output.dtype) if own else problem.dtype
    if expected.shape != np.shape(result.output) or expected_dtype != result.dtype:
        return math.inf
    golden, model = golden_of(problem), "unfused" if problem.dtype in LOW else "fused"
    bound = golden.bound(problem.dtype, model, problem.coherent)
    if bound.shape != expected.shape:
        return math.inf
    # What came has been rounded, which turns the largest numbers into infinities.
    ratio = error_over_bound(result.output, rounded(expected, problem.dtype), bound + np.abs(bound) * own)
    if result.lse is not None and answer.lse is not None:
        lse_bound = golden.lse_bound(problem.dtype, model, problem.coherent)
        ratio = max(ratio, error_over_bound(result.lse, imitation.host(answer.lse), lse_bound))
    return ratio


def _in(problem: Problem, dtype: str) -> Problem:
    from dataclasses import replace

    return replace(problem, dtype=dtype)
