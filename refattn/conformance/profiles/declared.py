"""Whether the departures that a profile declares explain a result that the judge fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from refattn.conformance.case import Problem
from refattn.conformance.faults.fault import Fault
from refattn.conformance.judge import Result
from refattn.conformance.profiles.profile import Profile
from refattn.conformance.profiles.reproduce import ratio_against

# A bound is that of the right answer, and holds for what a departure makes of it up to a factor.
FITS = 2.0


class Declared:
    """The departures of one profile, asked about one failing result after the other."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.faults = profile, profile.faults

    def explains(self, problem: Problem, result: Result) -> tuple[str, ...]:
        """The names of the fewest declared departures that reproduce the result within the bound; none if none do.

        A call that wrote to its inputs, or gave other bits the second time, is no matter of declared numbers.
        """
        if result.changed or result.repeated is False or not result.library:
            return ()
        for some in self._choices():
            if ratio_against(some, problem, result) <= FITS:
                return tuple(fault.name for fault in some)
        return ()

    def _choices(self) -> Iterator[tuple[Fault, ...]]:
        """Single ones, pairs, and all at once."""
        yield from itertools.combinations(self.faults, 1)
        yield from itertools.combinations(self.faults, 2)
        if len(self.faults) > 2:
            yield self.faults
