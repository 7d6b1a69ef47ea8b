"""Whether the departures that a profile declares explain a result that the judge fails."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from refattn.conformance.diagnosis import Evidence
from refattn.conformance.diagnosis.hypotheses import Hypothesis, of_fault
from refattn.conformance.diagnosis.single import fits, wide
from refattn.conformance.judge import LOW, side_effects
from refattn.conformance.profiles.profile import Profile


class Declared:
    """The departures of one profile, asked about one failing result after the other."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._hypotheses: list[Hypothesis] = []
        faults = [replace(fault, lse=True) for fault in profile.faults if not fault.patches]
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
        return next((one.names for one in self._hypotheses if any(fits(one, some) for some in allowed)), ())
