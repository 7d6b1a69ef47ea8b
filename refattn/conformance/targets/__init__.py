"""How implementations are called: one module per convention.

A target turns a problem into one call of an implementation and brings the result to the host. It never judges, and
never sees an expected value.
"""

from __future__ import annotations

from refattn.conformance.targets.base import Target, TargetError
from refattn.conformance.targets.find import find_target, is_own

__all__ = ["Target", "TargetError", "find_target", "is_own"]
