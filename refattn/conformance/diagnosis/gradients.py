"""Which fault of the catalogue gives the same gradients as a target, and what is told of wrong gradients."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.evidence import FITS, worst
from refattn.conformance.diagnosis.gradient_where import comparable, where
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
LARGEST = 100_000
# What such a fault means for the one who wrote the backward pass.
WORDS = "the gradients are those of a backward pass with this fault"


class Likeness(NamedTuple):
    """A fault, and the wrong gradients that it explains; none are named where it explains all that came."""

    match: Match
    names: tuple[str, ...] = ()


def explain_gradients(problem: Problem, result: Result, judged: Judgement) -> tuple[Judgement, dict[str, Any] | None]:
    """A judgement, with the fault that it looks like, and its diagnosis for a record; None if it is of no gradient."""
    if judged.verdict != "fail" or problem.grad_output is None or not is_of_gradient(judged):
        return judged, None
    found = likenesses(problem, result)
    words = _in_words(found, problem, result)
    judged = replace(judged, message="; ".join([judged.message, *([words] if words else [])]))
    diagnosis = Diagnosis(
        sentence=judged.message,
        hypotheses=tuple(one.match for one in found),
        where=where(problem, result) if judged.place is not None else "",
    )
    return judged, diagnosis.as_dict()


def likeness(problem: Problem, result: Result) -> str:
    """What wrong gradients are instead of the right ones; "" if nothing fits."""
    return _in_words(likenesses(problem, result), problem, result)


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


def _in_words(found: list[Likeness], problem: Problem, result: Result) -> str:
    """The faults and what they explain, then what is a multiple, as a clause of a sentence; ""."""
    if found and not found[0].names:
        return f"the gradients match {_cited(found[0].match)}"
    parts = [f"the gradient of {' and '.join(names)} matches {_cited(match)}" for match, names in found]
    explained = {name for one in found for name in one.names}
    return ", ".join([*parts, *_multiples(problem, result, explained)])


def _cited(match: Match) -> str:
    return f'"{match.name}" [{match.clause}]'


def likenesses(problem: Problem, result: Result) -> list[Likeness]:
    """The fault whose gradients all that came are; or that of the wrong ones; or one for each wrong gradient."""
    if problem.q.shape[-2] * problem.k.shape[-2] > LARGEST:
        return []
    came = comparable(problem, result)
    wrong = [name for name, beyond in came.items() if beyond.any()]
    if len(came) < len(result.gradients) or not wrong:
        return []
    exact = golden_gradients_of(problem)
    bounds = exact.bounds(problem.dtype, "fused", problem.coherent)
    some: Likeness | None = None
    single: dict[str, Likeness] = {}
    for fault in FAULTS:
        near = {}
        for name, predicted in _predicted(fault, problem).items():
            x = result.gradients.get(name)
            if x is None or np.shape(x) != np.shape(predicted):
                continue
            apart = worst(x, predicted, _room(bounds[name], predicted, problem))
            if apart <= FITS and (name not in wrong or worst(predicted, exact.values[name], bounds[name]) > FITS):
                near[name] = apart  # what is wrong is not explained by a fault that does not move it
        for name in set(wrong) & near.keys():
            single.setdefault(name, Likeness(_match(fault, near[name]), (name,)))
        if set(wrong) <= near.keys():
            match = _match(fault, max(near[name] for name in wrong))
            if near.keys() == came.keys():
                return [Likeness(match)]
            some = some or Likeness(match, tuple(wrong))
    return [some] if some else [single[name] for name in wrong if name in single]


def _match(fault: Fault, ratio: float) -> Match:
    return Match(fault.name, fault.clause, ratio, WORDS)


def _multiples(problem: Problem, result: Result, explained: set[str]) -> Iterator[str]:
    """The wrong gradients, but for those that are explained, that are a number times the right ones."""
    exact = golden_gradients_of(problem)
    bounds = exact.bounds(problem.dtype, "fused", problem.coherent)
    for name, beyond in comparable(problem, result).items():
        x, right = result.gradients[name], exact.values[name]
        if name in explained or not beyond.any() or np.count_nonzero(right) < 2 or not np.isfinite(x).all():
            continue
        factor = float(np.sum(x * right) / np.sum(right * right))
        if factor and worst(x, factor * right, _room(abs(factor) * bounds[name], x, problem)) <= FITS:
            yield f"the gradient of {name} is {factor:.4g} times the right one"


def _room(bound: Array, predicted: Array, problem: Problem) -> Array:
    """The bound, widened by the rounding of what is larger than it should be."""
    return bound + 2 * ROUNDOFF[problem.dtype] * np.abs(np.where(np.isfinite(predicted), predicted, 0.0))


def _predicted(fault: Fault, problem: Problem) -> dict[str, Array]:
    """What a backward fault makes of a problem, on NumPy; nothing of others, or where it raises."""
    if not fault.backward or problem.dtype not in fault.dtypes:
        return {}
    target = _target(fault.name)
    if target.unsupported(problem.needs, problem.dtype):
        return {}
    try:
        with np.errstate(all="ignore"):
            return target.call(problem).gradients
    except (TargetError, ValueError, TypeError, IndexError):
        return {}


@functools.cache
def _target(name: str) -> FunctionTarget:
    fault = named(name)
    return FunctionTarget(name, "numpy", fault.attention(), fault.gradients())
