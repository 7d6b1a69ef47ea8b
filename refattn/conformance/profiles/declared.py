"""Whether the departures that a profile declares explain a result that the judge fails."""

from __future__ import annotations

import contextlib
import itertools

from refattn.conformance.case import Problem
from refattn.conformance.judge import Result, golden_of
from refattn.conformance.profiles.profile import Profile
from refattn.conformance.profiles.reproduce import Imitation


class Declared:
    """The departures of one profile, asked about one failing result after the other."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self._imitations = profile, []
        # Single ones, pairs, and all at once.
        for count in sorted({1, 2, len(profile.faults)} - {0}):
            for some in itertools.combinations(profile.faults, count):
                with contextlib.suppress(ValueError):  # some cannot be planted together
                    self._imitations.append(Imitation(some))

    def explains(self, problem: Problem, result: Result) -> tuple[str, ...]:
        """The names of the fewest declared departures that reproduce the result as far as rounding may
        reach; none if none do.

        A call that wrote to its inputs, or gave other bits the second time, is no matter of declared numbers.
        """
        if result.changed or result.repeated is False or not result.library:
            return ()
        golden = golden_of(problem)
        fitting = (one.names for one in self._imitations if one.gives(problem, result, golden))
        return next(fitting, ())
