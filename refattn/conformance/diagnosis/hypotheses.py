"""Hypotheses: what a wrong kernel may do, each as a function from a problem to the answer that it would give.

A fault of the catalogue is run on the problem's own arrays, in its dtype, on NumPy; two at once are planted together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from refattn.backend import Backend
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.words import meaning
from refattn.conformance.faults import FAULTS, Fault
from refattn.conformance.faults.pipeline import Plain
from refattn.conformance.judge import Result
from refattn.conformance.plain import rounded
from refattn.conformance.targets.base import library_backend
from refattn.conformance.targets.function import FunctionTarget

Predict = Callable[[Problem], Result | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypothesis:
    """One or two faults, or a reading with fitted numbers."""

    names: tuple[str, ...]
    clauses: tuple[str, ...]
    # The answer that it would give; None where it would give none, or has nothing to say.
    predict: Predict = field(repr=False)
    says: Callable[[Problem], str] = field(repr=False)
    fitted: dict[str, Any] = field(default_factory=dict)
    # For a fault whose answers depend on the calls before: a prediction that remembers, to be asked in their order.
    begin: Callable[[], Predict] | None = field(default=None, repr=False)
    faults: tuple[Fault, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The names, joined."""
        return " and ".join(self.names)

    @property
    def quoted(self) -> str:
        """The names with their clauses, as sentences have them."""
        return " and ".join(f'"{name}" [{label}]' for name, label in zip(self.names, self.clauses))


class Imitation(FunctionTarget):
    """A fault called as a target would be: once, or twice with the calls around it where memory is the point."""

    def __init__(self, function: Callable[..., Any], *, whole: bool = False) -> None:
        # Made for each call, so nothing is asked twice: neither what NumPy can do nor what the signature takes.
        self.backend, self.dtypes = _numpy()
        self.name, self._function, self._whole = "imitation", function, whole

    def answer(self, problem: Problem) -> Result | None:
        """Its answer; None where it raises. Without NumPy's bfloat16 in float64, rounded once."""
        lacking = problem.dtype not in self.dtypes
        asked = replace(problem, dtype="float64") if lacking else problem
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a mean of nothing, say
                result = self.call(asked) if self._whole else self._once(asked)
        except Exception:  # noqa: BLE001  # a fault that raises here explains no number
            return None
        if lacking:
            own = result.dtype == "float64"
            output = rounded(result.output, problem.dtype) if own else result.output
            result = replace(result, output=output, dtype=problem.dtype if own else result.dtype)
        return result

    def _once(self, problem: Problem) -> Result:
        stored = {name: self._laid_out(getattr(problem, name), problem) for name in ("q", "k", "v")}
        answer = self.compute(problem, **stored, again=False)
        output, dtype = self._read(answer.output)
        lse, lse_dtype = (None, "") if answer.lse is None else self._read(answer.lse)
        return Result(output=output, dtype=dtype, lse=lse, lse_dtype=lse_dtype)


@cache
def _numpy() -> tuple[Backend, tuple[str, ...]]:
    backend = library_backend("numpy")
    return backend, tuple(backend.dtypes)


def of_fault(*faults: Fault) -> Hypothesis:
    """The hypothesis that a kernel has these faults. Raises ValueError for two that cannot be planted together."""
    planted = faults[0]
    for other in faults[1:]:
        planted = together(planted, other)
    remembers = planted.wrap is not None

    def begin() -> Predict:
        return Imitation(planted.attention(), whole=remembers).answer

    def predict(problem: Problem) -> Result | None:
        return begin()(problem)

    def says(problem: Problem) -> str:
        return "; and ".join(meaning(fault.name, problem) for fault in faults)

    return Hypothesis(
        names=tuple(fault.name for fault in faults),
        clauses=tuple(fault.clause for fault in faults),
        predict=predict,
        says=says,
        begin=begin if remembers else None,
        faults=faults,
    )


def together(first: Fault, second: Fault) -> Fault:
    """Both faults in one function. Raises ValueError where they replace the same step, or are of two algorithms."""
    if shared := first.steps.keys() & second.steps.keys():
        raise ValueError(f"{first.name!r} and {second.name!r} both replace {', '.join(shared)}")
    bases = [fault.base for fault in (first, second) if fault.base is not Plain]
    if len(set(bases)) > 1:
        raise ValueError(f"{first.name!r} and {second.name!r} are faults of two algorithms")
    wraps = [fault.wrap for fault in (first, second) if fault.wrap is not None]

    def wrapped(attention: Any) -> Any:
        for wrap in wraps:
            attention = wrap(attention)
        return attention

    return Fault(
        name=f"{first.name} and {second.name}",
        clause=first.clause,
        kind="",
        dtypes=tuple(dtype for dtype in first.dtypes if dtype in second.dtypes),
        base=bases[0] if bases else Plain,
        steps={**first.steps, **second.steps},
        wrap=wrapped if wraps else None,
        lse=True,
    )


@cache
def catalogue() -> tuple[Hypothesis, ...]:
    """All functions of the catalogue with wrong outputs, each alone, offering the log-sum-exp too."""
    return tuple(of_fault(replace(fault, lse=True)) for fault in FAULTS if not (fault.patches or fault.backward))


def pairs(first: Iterable[Hypothesis], second: Iterable[Hypothesis]) -> Iterable[Hypothesis]:
    """One fault out of each, planted together, where that can be; each pair once."""
    met, second = set(), tuple(second)
    for one in first:
        for other in second:
            key = frozenset((one.name, other.name))
            if len(key) < 2 or key in met:
                continue
            met.add(key)
            try:
                yield of_fault(*one.faults, *other.faults)
            except ValueError:
                continue
