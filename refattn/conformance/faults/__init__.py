"""The catalogue of faults: wrong implementations on purpose, which show that the suite can tell wrong from right.

Each is judged by name like any other function: `refattn check refattn.conformance.faults:causal_shows_the_next`.
"""

from __future__ import annotations

from typing import Any

from refattn.conformance.faults import (
    caches,
    controls,
    flash_backward,
    gradients,
    groups,
    masks,
    numbers,
    paths,
    positions,
    scores,
    softmax,
    tiles,
    visibility,
    whole_models,
)
from refattn.conformance.faults.fault import Fault

# In the order of the chapters, functions before what is planted into refattn.
MODULES = (
    *(scores, visibility, softmax, numbers, tiles, masks, positions),
    *(groups, paths, caches, whole_models, gradients, flash_backward),
)
FAULTS: tuple[Fault, ...] = tuple(fault for module in MODULES for fault in module.FAULTS)
# Right implementations, some of which look wrong.
CONTROLS: tuple[Fault, ...] = controls.CONTROLS

__all__ = ["CONTROLS", "FAULTS", "Fault", "named"]


def named(name: str) -> Fault:
    """The fault or control of that name, or of that identifier. Raises KeyError."""
    for fault in (*FAULTS, *CONTROLS):
        if name in (fault.name, fault.identifier):
            return fault
    raise KeyError(f"no fault {name!r}")


def __getattr__(name: str) -> Any:
    """A fresh function with the fault of that identifier."""
    try:
        fault = named(name)
    except KeyError:
        raise AttributeError(name) from None
    return fault.attention()
