"""A function of refattn's own convention: f(q, k, v, **options), with just the options that a case uses.

q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k) and v (..., Hkv, Lk, d_v) are NumPy arrays, or those of --library. Options
are causal=True, mask (boolean, True = visible, broadcasts to (..., H, Lq, Lk)), bias (floating, likewise), scale,
softcap, sinks (H,), q_start and k_start. It returns the output, or (output, log-sum-exp). A parameter that the
signature lacks makes a case unsupported, as does raising NotImplementedError.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import Answer, ArrayTarget, TargetError, library_backend

OPTIONS = frozenset({"causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "k_start"})


class FunctionTarget(ArrayTarget):
    """The function that "module:object" or "path.py:object" names, on arrays of one library."""

    def __init__(self, name: str, library: str = "numpy") -> None:
        super().__init__(library_backend(library))
        self.name = name
        self._function = load_function(name)
        self.features = _features(self._function, name)

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call with the options that the problem uses."""
        options: dict[str, Any] = {}
        if problem.causal:
            options["causal"] = True
        if problem.shown is not None:
            options["mask"] = self.plain(problem.shown)
        for name in ("bias", "sinks"):
            if (values := getattr(problem, name)) is not None:
                options[name] = self.array(values, problem.dtype)
        for name in ("scale", "softcap", "q_start"):
            if getattr(problem, name) is not None:
                options[name] = getattr(problem, name)
        if "k_start" in problem.needs:
            options["k_start"] = problem.k_start
        try:
            result = self._function(q, k, v, **options)
        except NotImplementedError as refusal:
            raise Unsupported(f"{self.name} does not do this: {refusal}") from refusal
        if isinstance(result, tuple) and len(result) == 2:
            return Answer(result[0], result[1])
        if "lse" in problem.asks:
            raise Unsupported(f"{self.name} returns no log-sum-exp")
        return Answer(result)


def load_function(name: str) -> Callable[..., Any]:
    """The callable that "module:object" or "path.py:object" names. Raises TargetError, in one sentence."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise TargetError(f"{name!r} must read module:function or path.py:function")
    try:
        found: Any = _from_path(Path(where)) if where.endswith(".py") else _from_module(where)
    except TargetError:
        raise
    except (Exception, SystemExit) as fault:  # whatever foreign code raises while it is imported, exit included
        raise TargetError(f"importing {where} failed: {type(fault).__name__}: {fault}") from fault
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{where} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{name} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # callable, as just checked


def _from_path(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(Path.cwd()))


def _features(function: Callable[..., Any], name: str) -> frozenset[str]:
    """The options that the signature takes; heads in groups and the log-sum-exp show only in a call."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled functions may hide their signature: try everything
        return OPTIONS | {"gqa", "lse"}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return OPTIONS | {"gqa", "lse"}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if len(positional) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in positional):
        raise TargetError(f"{name} must take q, k and v as its first three arguments")
    taken = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return (OPTIONS & taken) | {"gqa", "lse"}
