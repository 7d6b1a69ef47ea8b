"""From the name that a user types to a target."""

from __future__ import annotations

from refattn.conformance.targets.base import ArrayTarget, TargetError

PREFIX = "refattn-"
TILED = "-tiled"
# Implementations that run on NVIDIA devices alone, see `refattn.conformance.targets.nvidia`.
ON_NVIDIA = ("flash-attn", "flash-attn-varlen", "xformers", "flashinfer", "cudnn")
# Implementations of others that go by a plain name.
FOREIGN = ("torch", *ON_NVIDIA)


def is_own(name: str) -> bool:
    """Whether the name is one of refattn's own, through one of its backends; no library is imported for it."""
    from refattn import registry

    backend = name.removeprefix(PREFIX).removesuffix(TILED)
    return ":" not in name and name not in FOREIGN and backend in registry.names()


def find_target(name: str, library: str | None = None, convention: str | None = None) -> ArrayTarget:
    """The target of that name; `library` is the array library that a function of the user's own is called with.

    convention is the name or the file of the calling convention that such a function speaks, refattn's by default.

    Names are torch, refattn-LIBRARY or LIBRARY for refattn itself, with -tiled for its fast path,
    and module:object or path.py:object for a function
    of refattn's own convention. Raises TargetError.
    """
    if convention is not None:
        from refattn.conformance.targets.convention import by_convention

        return by_convention(name, convention, library)
    if ":" in name:
        from refattn.conformance.targets.function import FunctionTarget

        return FunctionTarget(name, library or "numpy")
    if name in ON_NVIDIA:
        from refattn.conformance.targets.nvidia import nvidia_target

        return nvidia_target(name)
    if name == "torch":
        from refattn.conformance.targets.torch import TorchTarget

        return TorchTarget()
    from refattn import registry

    installed = registry.names()
    backend, path = name.removeprefix(PREFIX), "dense"
    if backend.endswith(TILED):
        backend, path = backend.removesuffix(TILED), "tiled"
    if backend not in installed:
        choices = ["torch", *ON_NVIDIA, *(PREFIX + one for one in installed)]
        raise TargetError(
            f"no target {name!r}; there are {', '.join(choices)}, and module:function or file.py:function"
        )
    from refattn.conformance.targets.refattn import RefattnTarget

    return RefattnTarget(backend, path)
