"""Which case catches a fault, and by how much: the fault against the cases of its own clause alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from refattn.arrays import Array
from refattn.conformance.case import Case, Problem
from refattn.conformance.cases import all_cases
from refattn.conformance.faults.fault import Fault
from refattn.conformance.records import DEFAULT_SEED, Record
from refattn.conformance.runner import run_case
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.function import FunctionTarget
from refattn.conformance.targets.refattn import RefattnTarget

# How many times the bound a discrete fault must exceed, so that no rounding explains it.
ENOUGH = 10.0


class Catch(NamedTuple):
    """What became of a fault in one dtype: the case that caught it, "" for none, and error over bound there.

    The ratio is infinite for a wrong NaN, infinity, shape, dtype or side effect, and for what a check says.
    """

    fault: Fault
    dtype: str
    case: str
    ratio: float

    @property
    def caught(self) -> bool:
        """Whether a case fails by enough."""
        return bool(self.case) and self.ratio >= ENOUGH


class OutputAlone(RefattnTarget):
    """refattn without log-sum-exp and weights, whose bounds are narrower than the output's."""

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """The output, unless the problem is about something else."""
        answer = super().compute(problem, q, k, v, again)
        return answer if problem.asks else Answer(answer.output)


def target_of(fault: Fault, library: str) -> Any:
    """A fresh target with the fault; for one that is planted into refattn, refattn itself."""
    if not fault.patches:
        name, backward = f"refattn.conformance.faults:{fault.identifier}", fault.gradients() if fault.backward else None
        return FunctionTarget(name, library, fault.attention(), backward)
    return RefattnTarget(library) if fault.lse else OutputAlone(library)


def cases_of(label: str, dtype: str) -> list[Case]:
    """The cases of a clause in a dtype, those that are about it first of all in front."""
    found = [case for case in all_cases() if label in case.clauses and dtype in case.dtypes]
    return sorted(found, key=lambda case: case.clauses[0] != label)


def records_of(
    fault: Fault, library: str, cases: Iterable[Case], dtype: str, seed: int = DEFAULT_SEED
) -> Iterable[Record]:
    """The verdicts on a fault, one case after the other."""
    target = target_of(fault, library)
    with fault.planted():
        for case in cases:
            yield run_case(case, target, dtype, seed)


def catch(fault: Fault, library: str, dtype: str) -> Catch:
    """The first case of the fault's clause that it fails by enough, or else the one that it fails by most."""
    best = Catch(fault, dtype, "", 0.0)
    for record in records_of(fault, library, cases_of(fault.clause, dtype), dtype):
        if record.verdict == "fail" and (ratio := ratio_of(record)) > best.ratio:
            best = Catch(fault, dtype, record.case, ratio)
        if best.caught:
            break
    return best


def ratio_of(record: Record) -> float:
    """Error over bound; infinite where a failure is not one of a number, or of side effects beside right numbers."""
    ratio = record.error_over_bound
    return math.inf if ratio is None or ratio <= 1 else ratio
