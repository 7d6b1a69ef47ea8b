"""What a function takes, as far as its signature or the error of a call says so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function, or of a module's forward; None where the signature is hidden."""
    forward = getattr(function, "forward", None)
    if callable(forward) and not inspect.isroutine(function):  # a module: its own __call__ takes anything
        function = forward
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled functions may have none
        return None


def refused_option(fault: TypeError, options: Mapping[str, Any]) -> str:
    """The option for which a function has no parameter, if that is what the error of its call says; else ""."""
    refused = re.search(r"unexpected keyword argument '(\w+)'", str(fault))
    return refused[1] if refused is not None and refused[1] in options else ""
