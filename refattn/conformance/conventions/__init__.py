"""Calling conventions other than refattn's, described as data: how a function wants its tensors and its options.

Each TOML file here is one, named after its file. `read` reads them and a user's own, `express` turns a problem into
the arguments of a call, and `refattn.conformance.targets.convention` makes the call.
"""

from __future__ import annotations

from refattn.conformance.conventions.convention import Convention
from refattn.conformance.conventions.read import ConventionError, convention_names, find_convention, read_convention

__all__ = ["Convention", "ConventionError", "convention_names", "find_convention", "read_convention"]
