"""What a backward function of the user's takes and returns, whatever convention it speaks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from refattn.arrays import Array
from refattn.conformance.targets.answer import in_words

# What the function itself returned, for backward functions that have parameters of these names.
FORWARD = ("output", "lse")


def asked_of_forward(backward: Callable[..., Any]) -> tuple[str, ...]:
    """Those of FORWARD that a backward function has parameters for."""
    try:
        parameters = inspect.signature(backward).parameters
    except (TypeError, ValueError):  # compiled functions may hide their signature
        return ()
    return tuple(name for name in FORWARD if name in parameters)


def in_order(found: Any, names: list[str], name: str) -> dict[str, Array]:
    """What a backward function returned, by name; None stands for what it leaves out."""
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if not isinstance(found, Mapping):
        if not isinstance(found, (tuple, list)):
            raise TypeError(f"the backward function of {name} returned {in_words(found)}, expected a tuple or a dict")
        found = dict(zip(names, found))
    return {name: x for name, x in found.items() if x is not None}


def refused_option(fault: TypeError, options: Mapping[str, Any]) -> str:
    """The option for which a function has no parameter, if that is what the error of its call says; else ""."""
    refused = re.search(r"unexpected keyword argument '(\w+)'", str(fault))
    return refused[1] if refused is not None and refused[1] in options else ""
