"""What a black box does, found out by constructed inputs: `refattn probe TARGET` prints it as a convention card.

No convention is presumed. With q = k = 0 and v = identity the output is the weights, so that what is visible can be
read off; scores are planted by q = identity and k = their transpose. Each probe is a small function in the module of
its subject.
"""

from __future__ import annotations

from refattn.conformance.probe.card import Card, CardError, Finding, differences
from refattn.conformance.probe.run import PROBES, probe, vocabulary

__all__ = ["PROBES", "Card", "CardError", "Finding", "differences", "probe", "vocabulary"]
