"""What a backward function of the user's takes and returns, whatever convention it speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from refattn.arrays import Array
from refattn.conformance.targets.answer import in_words
from refattn.conformance.targets.signatures import parameters_of

# What the function itself returned, for backward functions that have parameters of these names.
FORWARD = ("output", "lse")


def asked_of_forward(backward: Callable[..., Any]) -> tuple[str, ...]:
    """Those of FORWARD that a backward function has parameters for."""
    known = {parameter.name for parameter in parameters_of(backward) or ()}
    return tuple(name for name in FORWARD if name in known)


def in_order(found: Any, names: list[str], name: str) -> dict[str, Array]:
    """What a backward function returned, by name; None stands for what it leaves out."""
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if not isinstance(found, Mapping):
        if not isinstance(found, (tuple, list)):
            raise TypeError(f"the backward function of {name} returned {in_words(found)}, expected a tuple or a dict")
        found = dict(zip(names, found))
    return {name: x for name, x in found.items() if x is not None}
