"""Profiles: the cards of known implementations as data, and what `refattn check --profile NAME` makes of them.

A profile declares what its card says departs from the specification. A result that the declared departures reproduce
is a choice, listed as "declared"; all else stays a fault.
"""

from __future__ import annotations

from refattn.conformance.profiles.declared import Declared
from refattn.conformance.profiles.profile import Profile, ProfileError, load, names

__all__ = ["Declared", "Profile", "ProfileError", "load", "names"]
