"""Whether a target's answers may be refattn's own: then they are no second opinion, and the report says so.

Seen are imports of refattn by other code, its functions and modules among their globals, its code running during the
first calls, and stored vectors being read. Who wants to hide it can; that is not what this is for.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from refattn import registry

ROOTS = ("refattn", "refattn_backends")
# What a target of any library needs to be called at all: it makes arrays, and reads them.
NEEDED = (
    *("refattn.arrays", "refattn.backend", "refattn.dtypes", "refattn.errors", "refattn.registry"),
    *("refattn.conformance.targets", "refattn.conformance.isolation", "refattn.conformance.case"),
    *("refattn.conformance.plain", "refattn.conformance.recording", "refattn.conformance.records"),
    "refattn.conformance.conventions",
)
VECTORS = os.path.join("refattn", "conformance", "vectors", "")  # noqa: PTH118  # part of what an audit event names
# Calls that are looked into, since that takes time.
CALLS = 3


class Provenance:
    """`found` says in words what was seen first; it is empty while nothing was."""

    def __init__(self) -> None:
        self.found = ""
        self._calls = 0
        self._known: set[str] = set()
        self._backends = {f"refattn_backends.{name}" for name in registry.names()}

    def watch(self) -> None:
        """Looks at every import and every file that is opened from now on."""
        self._known = set(sys.modules)
        plain_import, plain_module = builtins.__import__, importlib.import_module

        def looking_import(name: str, *rest: Any, **more: Any) -> Any:
            importer = rest[0] if rest else more.get("globals")
            self._imported(name, (importer or {}).get("__name__"))
            return plain_import(name, *rest, **more)

        def looking_module(name: str, package: str | None = None) -> ModuleType:
            self._imported(name, sys._getframe(1).f_globals.get("__name__"))
            return plain_module(name, package)

        builtins.__import__, importlib.import_module = looking_import, looking_module
        sys.addaudithook(self._opened)

    def look_at_modules(self) -> None:
        """Looks for refattn among the globals of modules that came with the target."""
        for name in set(sys.modules) - self._known:
            module = sys.modules[name]
            if _root(name) in _OTHERS or not isinstance(module, ModuleType):
                continue
            for value in [*vars(module).values()]:
                # By type, because other objects may warn, or worse, when they are asked what they are.
                if type(value) in (ModuleType, FunctionType, type):
                    own = value.__name__ if type(value) is ModuleType else value.__module__
                    self._noted(_is_own(own), f"{name} holds {own}")

    @contextlib.contextmanager
    def during_a_call(self) -> Iterator[None]:
        """Looks at the Python functions that run inside, in the first calls."""
        self._calls += 1
        if self._calls > CALLS or self.found:
            yield
            return
        sys.setprofile(self._entered)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _imported(self, name: str, importer: Any) -> None:
        if not self.found and _root(name) in ROOTS and isinstance(importer, str):
            self._noted(_root(importer) not in (*ROOTS, "importlib"), f"{importer} imports {name}")

    def _opened(self, event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and not self.found and isinstance(details[0], str):
            self._noted(VECTORS in details[0] and details[0].endswith(".json"), "it reads the stored vectors")

    def _entered(self, frame: Any, event: str, detail: Any) -> None:
        if event == "call" and not self.found:
            name = frame.f_globals.get("__name__")
            # The backends make arrays; what they compute with lies in modules of other names.
            own = _is_own(name) and name not in self._backends
            self._noted(own, f"it runs {name}.{frame.f_code.co_name}")

    def _noted(self, seen: bool, words: str) -> None:
        if seen and not self.found:
            self.found = words


# Modules that come with Python, refattn's own, and the worker's main one under its two names.
_OTHERS = frozenset({*sys.stdlib_module_names, *ROOTS, "__main__", "__mp_main__"})


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_own(name: Any) -> bool:
    """Whether a module is refattn's, and not one that targets of others need."""
    return isinstance(name, str) and _root(name) in ROOTS and not name.startswith(NEEDED)
