"""One failing case explained: the hypotheses that give the same answer, the simplest first, and where it is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.evidence import Evidence
from refattn.conformance.diagnosis.fitting import fitted
from refattn.conformance.diagnosis.hypotheses import Hypothesis, catalogue, of_fault, pairs
from refattn.conformance.diagnosis.readings import readings
from refattn.conformance.diagnosis.tiles import tilings
from refattn.conformance.diagnosis.where import where
from refattn.conformance.faults import Fault, named
from refattn.conformance.judge import Judgement, Result
from refattn.dtypes import LOW

LIMIT_S = 3.0
# Pairs of query and key beyond which predictions take too long for a report, and beyond which pairs of faults do.
LARGEST, LARGEST_OF_PAIRS = 4_000_000, 20_000
# Hypotheses that a report lists, and how much nearer than the right answer one is that is worth naming without fitting.
LISTED, WORTH_NAMING = 5, 10.0


class Match(NamedTuple):
    """A hypothesis, the clauses it breaks, how far the answer is from it in units of the bound, and what it means."""

    name: str
    clause: str
    ratio: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong, in one sentence that can be acted on, and what it rests on."""

    sentence: str
    hypotheses: tuple[Match, ...] = ()
    where: str = ""
    fitted: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The fault that the sentence names, or ""."""
        return self.hypotheses[0].name if self.hypotheses else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a ratio that is no number is a string."""
        return {
            "sentence": self.sentence,
            "hypotheses": [
                {**match._asdict(), "ratio": match.ratio if math.isfinite(match.ratio) else str(match.ratio)}
                for match in self.hypotheses
            ],
            "where": self.where,
            "fitted": self.fitted,
        }


def diagnose(problem: Problem, result: Result, judged: Judgement, *, limit_s: float = LIMIT_S) -> Diagnosis:
    """Explain one failure, of no case in particular, in about limit_s seconds of work.

    The catalogue comes first, then other readings, fitted numbers, and pairs of faults while there is time.
    """
    return explain(Evidence(problem, result, judged), limit_s=limit_s)


def explain(evidence: Evidence, *, limit_s: float = LIMIT_S) -> Diagnosis:
    """The same of evidence, the clauses of whose case decide between faults that fit alike."""
    deadline = time.thread_time() + limit_s
    place = where(evidence)
    found: list[Hypothesis] = []
    if evidence.size <= LARGEST:
        for allowed in (evidence, wide(evidence)) if evidence.problem.dtype in LOW else (evidence,):
            found = _fitting(allowed, deadline)
            if found:
                evidence = allowed
                break
    if found:
        return told(found, evidence, place)
    return unexplained(evidence, place, deadline)


def told(found: list[Hypothesis], evidence: Evidence, place: str | None = None) -> Diagnosis:
    """The diagnosis that names the first of these hypotheses, which fit the evidence."""
    first, matches = found[0], tuple(_match(one, evidence) for one in found[:LISTED])
    sentence = told_in_words(first, evidence)
    place = where(evidence) if place is None else place
    return Diagnosis(sentence=sentence, hypotheses=matches, where=place, fitted=first.fitted)


def told_in_words(one: Hypothesis, evidence: Evidence) -> str:
    """The sentence about a hypothesis that fits."""
    return f"matches {one.quoted}: {one.says(evidence.problem)}"


def unexplained(
    evidence: Evidence, place: str | None = None, deadline: float = 0.0, *, tried: bool = True
) -> Diagnosis:
    """What can be said where no hypothesis fits, or none was tried; the nearest one is looked for until a deadline."""
    judged, place = evidence.judged, where(evidence) if place is None else place
    worst = f": {place}" if place else f": {judged.message}"
    if judged.place is None and judged.message:
        sentence = judged.message
    elif evidence.size > LARGEST:
        sentence = f"no fault was tried on a call of this size{worst}"
    elif not tried:
        sentence = f"what explains other failures does not give this answer{worst}"
    else:
        sentence = f"no known fault gives this answer{worst}"
        near = [(_ratio(one, evidence), one) for one in _until(deadline, catalogue())]
        ratio, nearest = min(near, key=lambda item: item[0], default=(math.inf, None))
        if nearest is not None and ratio < max(evidence.right) / WORTH_NAMING:
            sentence = f"no known fault gives this answer, {nearest.quoted} is nearest{worst}"
    return Diagnosis(sentence=sentence, where=place)


def ratio_against(faults: str | Fault | Iterable[str | Fault], problem: Problem, result: Result) -> float:
    """How far a result is from what a fault, or several at once, would give, in units of the bound.

    Faults are of the catalogue, or their names. Infinite where shape, dtype or side effects differ, or the fault
    gives no answer. Raises KeyError for an unknown name, ValueError for faults that cannot be planted together.
    """
    chosen = [faults] if isinstance(faults, str | Fault) else [*faults]
    planted = [named(fault) if isinstance(fault, str) else fault for fault in chosen]
    hypothesis = of_fault(*(replace(fault, lse=True) for fault in planted))
    return _ratio(hypothesis, Evidence(problem, result, Judgement(verdict="fail")))


def wide(evidence: Evidence) -> Evidence:
    """The same evidence, scores and weights being stored in the dtype of q."""
    problem, result, judged = evidence.problem, evidence.result, evidence.judged
    return Evidence(problem, result, judged, case=evidence.case, clauses=evidence.clauses, wide=True)


def fits(hypothesis: Hypothesis, evidence: Evidence) -> bool:
    """Whether a hypothesis gives this answer, and not the right one."""
    predicted = hypothesis.predict(evidence.problem)
    return predicted is not None and evidence.fits(predicted)


def ranked(found: Iterable[Hypothesis], labels: Iterable[str]) -> list[Hypothesis]:
    """The simplest first: fewer faults, those of these clauses, and the order of the catalogue."""
    order, wanted = {one.name: place for place, one in enumerate(catalogue())}, [*labels]
    places = {label: place for place, label in reversed([*enumerate(wanted)])}

    def key(one: Hypothesis) -> tuple[Any, ...]:
        return len(one.names), min(places.get(label, len(wanted)) for label in one.clauses), order.get(one.name, 999)

    return sorted(found, key=key)


def _fitting(evidence: Evidence, deadline: float) -> list[Hypothesis]:
    stages: tuple[Callable[[], Iterable[Hypothesis]], ...] = (
        catalogue,
        readings,
        lambda: fitted(evidence),
        tilings,
        lambda: pairs(catalogue(), catalogue()) if evidence.size <= LARGEST_OF_PAIRS else (),
    )
    for stage in stages:
        found = [one for one in _until(deadline, stage()) if fits(one, evidence)]
        if found:
            return ranked(found, (evidence.about, *evidence.clauses))
    return []


def _until(deadline: float, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
    for one in hypotheses:
        if time.thread_time() > deadline:
            return
        yield one


def _match(one: Hypothesis, evidence: Evidence) -> Match:
    return Match(one.name, ", ".join(one.clauses), _ratio(one, evidence), one.says(evidence.problem))


def _ratio(one: Hypothesis, evidence: Evidence) -> float:
    predicted = one.predict(evidence.problem)
    if predicted is None or not evidence.comparable(predicted):
        return math.inf
    return max(evidence.ratios(predicted))
