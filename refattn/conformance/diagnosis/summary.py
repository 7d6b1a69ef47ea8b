"""All failures of a report explained together: one case fits several faults, but all cases seldom do.

Cases that passed speak too: a fault that they would have shown is not there. A fault is dropped as soon as more cases
speak against it than against the best one so far.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from refattn.conformance.diagnosis.evidence import Evidence
from refattn.conformance.diagnosis.fitting import fitted
from refattn.conformance.diagnosis.hypotheses import Hypothesis, Predict, catalogue, pairs
from refattn.conformance.diagnosis.readings import readings
from refattn.conformance.diagnosis.single import Diagnosis, explain, ranked, told, told_in_words, unexplained, wide
from refattn.conformance.diagnosis.tiles import tilings

LIMIT_S = 15.0
# The share of it for the best explanation; what is left is for the failures that this one leaves.
SEARCH = 2 / 3
# Failures on which hypotheses are tried first, those whose numbers are fitted, and those explained on their own.
PROBES, FITTED, ALONE = 16, 3, 4
# Cases that may speak against a hypothesis, and failures told in full.
FAILURES, PASSES, DETAILED = 150, 400, 60
# The share of failures that may stay unexplained before less plain hypotheses are tried.
RARE = 0.02
# Faults that pairs are built on, and the seconds for one case on its own.
BASES, ALONE_S = 12, 1.0
# Failures that the best fault does not explain, and a pair should.
HARD = 4
# Sentences of a report.
SENTENCES = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A hypothesis, and how many failures it explains and cases speak against it."""

    hypothesis: Hypothesis
    explained: int
    against: int
    words: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is most likely wrong, and a diagnosis for each failure, by its place in the evidence."""

    failures: int = 0
    findings: tuple[Finding, ...] = ()
    # Hypotheses that no case tells from the first.
    alike: tuple[str, ...] = ()
    diagnoses: dict[int, Diagnosis] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The fault, or the two, that is most likely; "" if none fits."""
        return self.findings[0].hypothesis.name if self.findings else ""

    @property
    def sentence(self) -> str:
        """The most likely fault in one sentence; "" if nothing failed."""
        if not self.failures:
            return ""
        if not self.findings:
            return "no known fault, and no two of them, explain these failures"
        return self._told(self.findings[0])

    @property
    def sentences(self) -> tuple[str, ...]:
        """The same, and what explains the rest."""
        return (self.sentence, *(self._told(one) for one in self.findings[1:])) if self.failures else ()

    def beside(self, failures: int, findings: Sequence[Finding]) -> Summary:
        """The same with failures of another kind, and what explains these; what explains most comes first."""
        if not findings and not self.failures:
            return self
        merged = sorted([*self.findings, *findings], key=lambda one: -one.explained)[:SENTENCES]
        return replace(self, failures=self.failures + failures, findings=tuple(merged))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sentence": self.sentence,
            "sentences": list(self.sentences),
            "failures": self.failures,
            "hypotheses": [
                {
                    "name": one.hypothesis.name,
                    "clause": ", ".join(one.hypothesis.clauses),
                    "explained": one.explained,
                    "against": one.against,
                    "words": one.words,
                    "fitted": one.hypothesis.fitted,
                }
                for one in self.findings
            ],
            "alike": list(self.alike),
        }

    def _told(self, one: Finding) -> str:
        extent = f"all {self.failures}" if one.explained == self.failures else f"{one.explained} of {self.failures}"
        extent = "the failure" if one.explained == self.failures == 1 else f"{extent} failures"
        return f"{one.hypothesis.quoted}: {one.words}; this explains {extent}"


def summarise(evidence: Sequence[Evidence]) -> Summary:
    """Explain all failures among the evidence, in the order of the calls, in about LIMIT_S seconds of work."""
    return _Search(evidence).summary()


class _Search:
    """The hypotheses against all cases."""

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        stored_low = {one.problem.dtype for one in evidence if one.judged.model == "unfused"}
        # Where scores or weights are stored low, a wider bound is a second chance.
        self.low = {id(one): wide(one) for one in evidence if one.problem.dtype in stored_low}
        self.evidence = list(evidence)
        self.end = time.thread_time() + LIMIT_S
        self.deadline = self.end - (1 - SEARCH) * LIMIT_S
        self.failing = _spread([one for one in self.evidence if one.failed])
        self.passing = _spread([one for one in self.evidence if one.judged.verdict == "pass"])
        self.probes = self._probes()
        # Hypotheses of earlier stages, with the number of cases against each.
        self.tried: dict[Hypothesis, int] = {}
        self.labels = [label for label, _ in Counter(one.about for one in self.failing).most_common()]

    def summary(self) -> Summary:
        """The best hypotheses, and what they say of each failure."""
        if not self.failing:
            return Summary()
        scores = self._scores(catalogue(), math.inf)
        # What is less plain must explain twice as well.
        for stage in (self._remembering, readings, tilings, self._near_pairs, self._fitted, self._far_pairs):
            best = min(scores.values(), default=math.inf)
            if best > RARE * min(FAILURES, len(self.failing)):
                self.tried = dict(scores)
                scores |= self._scores(stage(), best / 2)
        self.deadline = self.end
        findings, alike = self._findings(scores)
        return Summary(
            failures=len(self.failing),
            findings=findings,
            alike=alike,
            diagnoses=self._diagnoses([one.hypothesis for one in findings]),
        )

    def _scores(self, hypotheses: Iterable[Hypothesis], most: float) -> dict[Hypothesis, int]:
        """The number of cases against each hypothesis, if no more than that and than the best of them have."""
        matched: list[tuple[int, Hypothesis]] = []
        for one in self._in_time(hypotheses):
            count = sum(self._fits(one, probe) for probe in self.probes)
            if count:
                matched.append((count, one))
        matched.sort(key=lambda item: -item[0])
        best, scores = most, dict[Hypothesis, int]()
        for one in self._in_time(one for _, one in matched):
            against = self._against(one, best)
            if against <= best:
                best, scores[one] = against, int(against)
        return scores

    def _against(self, one: Hypothesis, most: float) -> float:
        """How many cases speak against a hypothesis; infinite once there are more than so many."""
        against = 0
        for case in self.failing[:FAILURES]:
            against += not self._fits(one, case)
            if against > most:
                return math.inf
        related = sorted(self.passing, key=lambda case: not set(one.clauses) & set(case.clauses))
        for case in related[:PASSES]:
            if time.thread_time() > self.deadline:
                break
            predicted = one.predict(case.problem)
            against += predicted is not None and self.low.get(id(case), case).contradicts(predicted)
            if against > most:
                return math.inf
        return against

    def _fits(self, one: Hypothesis, case: Evidence) -> bool:
        predicted = one.predict(case.problem)
        if predicted is None:
            return False
        return case.fits(predicted) or (id(case) in self.low and self.low[id(case)].fits(predicted))

    def _remembering(self) -> Iterator[Hypothesis]:
        """Faults whose answers come from other calls, asked in the order of the calls."""
        for one in catalogue() if self._repeats() else ():
            if one.begin is not None and "N4" in one.clauses:
                yield replace(one, predict=self._in_order(one.begin()))

    def _in_order(self, ask: Predict) -> Predict:
        """Answers to all problems, asked for in the order of the calls."""
        answers = {id(case.problem): ask(case.problem) for case in self.evidence}
        return lambda problem: answers[id(problem)]

    def _repeats(self) -> bool:
        """Whether an answer that is wrong came before, to another problem."""
        if not any(case.problem.among_others for case in self.failing):
            return False
        met: set[bytes] = set()
        for case in self.evidence:
            output = case.result.output
            if not output.size or np.ptp(output) == 0 or np.isnan(output).any():
                continue
            if case.failed and output.tobytes() in met:
                return True
            met.add(output.tobytes())
        return False

    def _fitted(self) -> Iterator[Hypothesis]:
        for probe in self.probes[:FITTED]:
            yield from (one for one in self._in_time(fitted(probe)) if self._fits(one, probe))

    def _near_pairs(self) -> Iterator[Hypothesis]:
        """Pairs of faults that each explain a part."""
        bases = self._bases()
        return self._promising(pairs(bases, bases))

    def _far_pairs(self) -> Iterator[Hypothesis]:
        """Pairs with one fault that explains a part, or of all faults if none does."""
        return self._promising(pairs(self._bases() or catalogue(), catalogue()))

    def _bases(self) -> list[Hypothesis]:
        counts = {one: sum(self._fits(one, probe) for probe in self.probes) for one in catalogue()}
        kept = [one for one in counts if counts[one] or one in self.tried]
        return sorted(kept, key=lambda one: -counts[one])[:BASES]

    def _promising(self, candidates: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        """Those that fit where the best fault alone does not: there shows what a pair adds."""
        best = min(self.tried, key=lambda one: self.tried[one], default=None)
        hard = [case for case in self.failing[:FAILURES] if best is None or not self._fits(best, case)][:HARD]
        for one in self._in_time(candidates):
            if hard and (self._fits(one, hard[0]) or sum(self._fits(one, case) for case in hard) > len(hard) / 2):
                yield one

    def _findings(self, scores: dict[Hypothesis, int]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        """The best hypothesis, those like it, and what explains the rest."""
        if not scores:
            return (), ()
        least = min(scores.values())
        best, *others = ranked((one for one, against in scores.items() if against == least), self.labels)
        findings: list[Finding] = []
        rest, alike = self.failing, tuple(one.name for one in others)
        chosen: Hypothesis | None = best
        while chosen is not None and len(findings) < SENTENCES:
            explained = [case for case in self.failing if self._fits(chosen, case)]
            if not explained:
                break
            labels = chosen.clauses
            plainest = min(explained, key=lambda case: (case.about not in labels, case.problem.plainness))
            against = scores.get(chosen, len(self.failing) - len(explained))
            findings.append(
                Finding(
                    hypothesis=chosen, explained=len(explained), against=against, words=chosen.says(plainest.problem)
                )
            )
            rest = [case for case in rest if case not in explained]
            chosen = self._next(rest)
        # Those of a report are told in this order, and a failure that several explain is told the first.
        return tuple(sorted(findings, key=lambda one: -one.explained)), alike

    def _next(self, rest: list[Evidence]) -> Hypothesis | None:
        """The fault that explains most of what is left, if it explains two of them, or all."""
        some = rest[:PROBES]
        known = itertools.chain(catalogue(), readings(), tilings(), *(fitted(case) for case in some[:1]))
        counts = {one: sum(self._fits(one, case) for case in some) for one in self._in_time(known)} if some else {}
        most = max(counts.values(), default=0)
        if most < min(2, len(some)) or not most:
            return None
        return ranked((one for one, count in counts.items() if count == most), self.labels)[0]

    def _diagnoses(self, best: list[Hypothesis]) -> dict[int, Diagnosis]:
        found: dict[int, Diagnosis] = {}
        alone = 0
        for place, case in enumerate(self.evidence):
            if not case.failed:
                continue
            matching = [one for one in best if self._fits(one, case)]
            if matching and len(found) >= DETAILED:
                found[place] = Diagnosis(sentence=told_in_words(matching[0], case))
            elif matching:
                found[place] = told(matching, case)
            elif alone < ALONE and time.thread_time() < self.deadline:
                alone += 1
                found[place] = explain(case, limit_s=min(ALONE_S, self.deadline - time.thread_time()))
            else:
                found[place] = unexplained(case, tried=False)
        return found

    def _probes(self) -> list[Evidence]:
        """Failures of many kinds, small ones first, and one of several calls, which alone shows what is remembered."""
        probes = self.failing[:PROBES]
        remembering = [case for case in self.failing[PROBES:] if case.problem.among_others]
        return probes + remembering[:1]

    def _in_time(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        for one in hypotheses:
            if time.thread_time() > self.deadline:
                return
            yield one


def _spread(cases: list[Evidence]) -> list[Evidence]:
    """One of each clause and dtype by turns, small ones first."""
    groups: dict[tuple[str, str], list[Evidence]] = {}
    for case in sorted(cases, key=lambda case: case.size):
        groups.setdefault((case.about, case.problem.dtype), []).append(case)
    turns = [(turn, case) for group in groups.values() for turn, case in enumerate(group)]
    return [case for _, case in sorted(turns, key=lambda item: item[0])]
