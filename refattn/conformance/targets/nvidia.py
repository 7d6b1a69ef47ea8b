"""Implementations that run on NVIDIA devices alone, each called by the convention file of its name.

What their documentation says of layouts, alignment, windows and refusals is in those files. xformers, which takes masks
as objects, has a module of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from refattn.conformance.conventions import find_convention
from refattn.conformance.targets.base import TargetError
from refattn.conformance.targets.convention import ConventionTarget


class _Place(NamedTuple):
    """Where a function is, and what installs it."""

    module: str
    function: str
    distribution: str


PLACES = {
    "flash-attn": _Place("flash_attn", "flash_attn_func", "flash-attn"),
    "flash-attn-varlen": _Place("flash_attn", "flash_attn_varlen_func", "flash-attn"),
    "xformers": _Place("xformers.ops", "memory_efficient_attention_forward_requires_grad", "xformers"),
    "flashinfer": _Place("flashinfer", "single_prefill_with_kv_cache", "flashinfer-python"),
    "cudnn": _Place("jax.nn", "dot_product_attention", "jax[cuda12]"),
}


def nvidia_target(name: str, device: str | None = None) -> ConventionTarget:
    """The target of that name on a device of the backend, the first NVIDIA one by default. Raises TargetError."""
    place, convention = PLACES[name], find_convention(name)
    function = _function(name, place)
    chosen = _nvidia_device(name, convention.library) if device is None else device
    kind: type[ConventionTarget] = ConventionTarget
    if name == "xformers":
        from refattn.conformance.targets.xformers import XformersTarget

        kind = XformersTarget
    return kind(name, convention, function=function, device=chosen)


def _function(name: str, place: _Place) -> Callable[..., Any]:
    advice = f"pip install '{place.distribution}', on a machine with an NVIDIA GPU"
    root = place.module.partition(".")[0]
    try:
        module = importlib.import_module(place.module)
    except ModuleNotFoundError as fault:
        if (fault.name or "").partition(".")[0] != root:
            raise TargetError(f"{name} needs {fault.name}, which {root} lacks here: {advice}") from fault
        raise TargetError(f"{name} needs the library {root!r}, which is not installed: {advice}") from fault
    except (ImportError, OSError, RuntimeError) as fault:  # a compiled part without its driver
        raise TargetError(f"{name} cannot be imported here: {type(fault).__name__}: {fault}; {advice}") from fault
    if not hasattr(module, place.function):
        raise TargetError(f"{name} needs {place.module}.{place.function}, which this version of {root} lacks")
    return getattr(module, place.function)  # type: ignore[no-any-return]  # documented as functions


def _nvidia_device(name: str, library: str) -> str:
    """The first NVIDIA device that the array library finds."""
    from refattn.conformance.targets.base import library_backend

    devices = [one for one in library_backend(library).devices() if one.startswith(("cuda", "gpu"))]
    if not devices:
        raise TargetError(f"{name} needs an NVIDIA GPU, and {library} finds none here")
    return devices[0]
