"""Whether the departures that a profile declares explain a result that the judge fails."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from refattn.conformance.departures import in_float32
from refattn.conformance.diagnosis import Evidence
from refattn.conformance.diagnosis.hypotheses import Hypothesis, of_fault
from refattn.conformance.diagnosis.single import fits, wide
from refattn.conformance.judge import judge, side_effects
from refattn.conformance.profiles.profile import Profile
from refattn.dtypes import LOW

# Declared, they hold results in float64 to the bound of float32: each with the dtype that such a result has.
NARROW = {"float64 in float32": "float64", "float64 becomes float32": "float32"}


class Declared:
    """The departures of one profile, asked about one failing result after the other."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._hypotheses: list[Hypothesis] = []
        faults = [replace(fault, lse=True) for fault in profile.faults if not fault.patches]
        self._narrow = {fault.name: NARROW[fault.name] for fault in faults if fault.name in NARROW}
        # Single ones, pairs, and all at once.
        for count in sorted({1, 2, len(faults)} - {0}):
            for some in itertools.combinations(faults, count):
                with contextlib.suppress(ValueError):  # some cannot be planted together
                    self._hypotheses.append(of_fault(*some))

    def explains(self, evidence: Evidence) -> tuple[str, ...]:
        """The names of the fewest declared departures that reproduce the result as far as rounding may reach, or none.

        A call with side effects, or that gave other bits the second time, is no matter of declared numbers.
        """
        result = evidence.result
        if side_effects(result) or not result.library:
            return ()
        allowed = (evidence, wide(evidence)) if evidence.problem.dtype in LOW else (evidence,)
        return self._reproduced(*allowed) or self._in_float32(evidence)

    def _reproduced(self, *allowed: Evidence) -> tuple[str, ...]:
        return next((one.names for one in self._hypotheses if any(fits(one, some) for some in allowed)), ())

    def _in_float32(self, evidence: Evidence) -> tuple[str, ...]:
        """The same of a result in float64 that was computed in float32, if that is declared: by float32's bound."""
        problem, result = evidence.problem, evidence.result
        names = [name for name, dtype in self._narrow.items() if dtype == result.dtype and problem.dtype == "float64"]
        if not names:
            return ()
        for asked, came in in_float32(problem, result):
            judged = judge(asked, came)
            if judged.verdict != "fail":
                return tuple(names)
            if others := self._reproduced(Evidence(asked, came, judged)):
                return (*others, *names)
        return ()
