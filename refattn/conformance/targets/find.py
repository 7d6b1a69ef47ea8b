"""From the name that a user types to a target."""

from __future__ import annotations

from refattn.conformance.targets.base import ArrayTarget, TargetError

PREFIX = "refattn-"
TILED = "-tiled"


def find_target(name: str, library: str = "numpy") -> ArrayTarget:
    """The target of that name; `library` is the array library that a function of the user's own is called with.

    Names are torch, refattn-LIBRARY or LIBRARY for refattn itself, with -tiled for its fast path,
    and module:object or path.py:object for a function
    of refattn's own convention. Raises TargetError.
    """
    if ":" in name:
        from refattn.conformance.targets.function import FunctionTarget

        return FunctionTarget(name, library)
    if name == "torch":
        from refattn.conformance.targets.torch import TorchTarget

        return TorchTarget()
    from refattn import registry

    installed = registry.names()
    backend, path = name.removeprefix(PREFIX), "dense"
    if backend.endswith(TILED):
        backend, path = backend.removesuffix(TILED), "tiled"
    if backend not in installed:
        choices = ["torch", *(PREFIX + one for one in installed)]
        raise TargetError(
            f"no target {name!r}; there are {', '.join(choices)}, and module:function or file.py:function"
        )
    from refattn.conformance.targets.refattn import RefattnTarget

    return RefattnTarget(backend, path)
