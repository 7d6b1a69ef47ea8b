"""From the name that a user types to a target."""

from __future__ import annotations

import importlib
from pathlib import Path

from refattn.conformance.near import meant
from refattn.conformance.targets.base import ArrayTarget, TargetError
from refattn.conformance.targets.names import NAMES

PREFIX = "refattn-"
TILED = "-tiled"
# Implementations that run on NVIDIA devices alone, see `refattn.conformance.targets.nvidia`.
ON_NVIDIA = ("flash-attn", "flash-attn-varlen", "xformers", "flashinfer", "cudnn")
# Implementations of others that go by a plain name.
FOREIGN = (*NAMES, *ON_NVIDIA)


def is_own(name: str) -> bool:
    """Whether the name is one of refattn's own, through one of its backends; no library is imported for it."""
    from refattn import registry

    backend = name.removeprefix(PREFIX).removesuffix(TILED)
    return ":" not in name and name not in FOREIGN and backend in registry.names()


def find_target(
    name: str, library: str | None = None, convention: str | None = None, gradients: str | None = None
) -> ArrayTarget:
    """The target of that name; `library` is the array library that a function of the user's own is called with.

    gradients asks for derivatives: "" for the library's own, else the name of a backward function.
    convention is the name or the file of the calling convention that such a function speaks, refattn's by default.

    Names are those of public implementations (`refattn.conformance.targets.names`), refattn-LIBRARY or LIBRARY for
    refattn itself, with -tiled for its fast path, and module:object or path.py:object for a function of refattn's own
    convention. Raises TargetError.
    """
    target = _find(name, library, convention)
    if gradients is not None:
        target.differentiate(gradients)
    return target


def _find(name: str, library: str | None, convention: str | None) -> ArrayTarget:
    """The same, not asked for derivatives."""
    if convention is not None:
        from refattn.conformance.targets.convention import by_convention

        return by_convention(name, convention, library)
    if ":" in name:
        from refattn.conformance.targets.function import FunctionTarget

        return FunctionTarget(name, library or "numpy")
    if name in ON_NVIDIA:
        from refattn.conformance.targets.nvidia import nvidia_target

        return nvidia_target(name)
    if name in NAMES:
        return _public(name)
    from refattn import registry

    installed = registry.names()
    backend, path = name.removeprefix(PREFIX), "dense"
    if backend.endswith(TILED):
        backend, path = backend.removesuffix(TILED), "tiled"
    if backend not in installed:
        raise TargetError(_unknown(name, installed))
    from refattn.conformance.targets.refattn import RefattnTarget

    return RefattnTarget(backend, path)


def _public(name: str) -> ArrayTarget:
    """The target of a public implementation whose libraries are installed."""
    known = NAMES[name]
    if missing := known.missing:
        several = "libraries" if len(missing) > 1 else "library"
        names, which = ", ".join(missing), "are" if len(missing) > 1 else "is"
        raise TargetError(
            f"{name} needs the {several} {names}, which {which} not installed: pip install {known.quoted}"
        )
    module = importlib.import_module(f"refattn.conformance.targets.{known.module}")
    target: ArrayTarget = getattr(module, known.cls)(name, **known.keywords)
    return target


def _unknown(name: str, backends: tuple[str, ...] | list[str]) -> str:
    """What there is instead: close matches first, all names if there are none."""
    if name.endswith(".py") or Path(f"{name}.py").is_file():
        return f"no target {name!r}; name a function of your module too, {name}:FUNCTION"
    choices = [*NAMES, *ON_NVIDIA, *(PREFIX + one for one in backends)]
    if guess := meant(name, dict.fromkeys([*choices, *backends]), most=4):  # numpy alone is a name too
        return f"no target {name!r}{guess} refattn check --list shows all"
    return f"no target {name!r}; there are {', '.join(choices)}, and module:function or file.py:function"
