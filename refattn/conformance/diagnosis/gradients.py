"""Which fault of the catalogue gives the same gradients as a target, and what is told of wrong gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.evidence import FITS, worst
from refattn.conformance.diagnosis.gradient_where import where
from refattn.conformance.diagnosis.hypotheses import of_fault
from refattn.conformance.diagnosis.single import Diagnosis, Match
from refattn.conformance.diagnosis.summary import Finding
from refattn.conformance.faults import FAULTS, Fault, named
from refattn.conformance.gradients import golden_gradients_of, is_of_gradient
from refattn.conformance.judge import Judgement, Result
from refattn.conformance.records import Record
from refattn.conformance.targets.base import TargetError
from refattn.conformance.targets.function import FunctionTarget

# Pairs of query and key beyond which faults take too long for a report.
LARGEST = 20_000
# What such a fault means for the one who wrote the backward pass.
WORDS = "the gradients are those of a backward pass with this fault"


def told(problem: Problem, result: Result, judged: Judgement) -> tuple[Judgement, dict[str, Any] | None]:
    """A judgement, with the fault that it looks like, and its diagnosis for a record; None if it is of no gradient."""
    if judged.verdict != "fail" or problem.grad_output is None or not is_of_gradient(judged):
        return judged, None
    match = _match(problem, result)
    judged = replace(judged, message=judged.message + _in_words(match))
    found = Diagnosis(
        sentence=judged.message,
        hypotheses=() if match is None else (match,),
        where=where(problem, result) if judged.place is not None else "",
    )
    return judged, found.as_dict()


def likeness(problem: Problem, result: Result) -> str:
    """The fault whose gradients these are, in words that continue a sentence; "" if there is none."""
    return _in_words(_match(problem, result))


def findings(records: Iterable[Record]) -> tuple[int, tuple[Finding, ...]]:
    """How many records fail for their gradients, and the faults that these were explained by, the commonest first.

    So far no failure of an output has a diagnosis.
    """
    wrong = [one.diagnosis for one in records if one.verdict == "fail" and one.diagnosis]
    matches = Counter(match["name"] for one in wrong for match in one["hypotheses"])
    return len(wrong), tuple(
        Finding(hypothesis=of_fault(named(name)), explained=count, against=0, words=WORDS)
        for name, count in matches.most_common()
    )


def _in_words(match: Match | None) -> str:
    return "" if match is None else f'; the gradients match "{match.name}" [{match.clause}]'


def _match(problem: Problem, result: Result) -> Match | None:
    """The fault that fits: all gradients are near what it gives, and what it changes is far from right."""
    if problem.grad_output is None or problem.q.shape[-2] * problem.k.shape[-2] > LARGEST or not result.gradients:
        return None
    exact = golden_gradients_of(problem)
    bounds = exact.bounds(problem.dtype, "fused", problem.coherent)
    for fault in FAULTS:
        found = _gradients(fault, problem) if fault.backward and problem.dtype in fault.dtypes else {}
        if not result.gradients.keys() <= found.keys():
            continue
        if any(np.shape(x) != np.shape(found[name]) for name, x in result.gradients.items()):
            continue
        moved = max(worst(found[name], exact.values[name], bounds[name]) for name in result.gradients)
        apart = max(
            worst(x, found[name], _room(bounds[name], found[name], problem)) for name, x in result.gradients.items()
        )
        if moved > FITS and apart <= FITS:
            return Match(fault.name, fault.clause, apart, WORDS)
    return None


def _room(bound: Array, predicted: Array, problem: Problem) -> Array:
    """The bound, widened by the rounding of what is larger than it should be."""
    return bound + 2 * ROUNDOFF[problem.dtype] * np.abs(np.where(np.isfinite(predicted), predicted, 0.0))


def _gradients(fault: Fault, problem: Problem) -> dict[str, Array]:
    """What a fault makes of a problem, on NumPy; nothing where it raises."""
    try:
        target = FunctionTarget(fault.name, "numpy", fault.attention(), fault.gradients())
        if target.unsupported(problem.needs, problem.dtype):
            return {}
        with np.errstate(all="ignore"):
            return target.call(problem).gradients
    except (TargetError, ValueError, TypeError, IndexError):
        return {}
