"""A function of refattn's own convention: f(q, k, v, **options), with just the options that a case uses.

q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k) and v (..., Hkv, Lk, d_v) are NumPy arrays, or those of --library. Options
are causal=True, mask (boolean, True = visible, broadcasts to (..., H, Lq, Lk)), bias (floating, likewise), scale,
softcap, sinks (H,), q_start and k_start. It returns the output, or (output, log-sum-exp). A parameter that the
signature lacks makes a case unsupported, as does raising NotImplementedError. Modules are called as such, and what
they can express is read off their forward.

Where gradients are asked for they come from the library's own differentiation, or from a function of the user's,
backward(q, k, v, grad_output, **options), which returns those of q, k, v [, bias] [, sinks] in this order, or by name.
It may have parameters output and lse too, for what the function returned.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import GRADIENTS, Problem, Unsupported
from refattn.conformance.near import meant
from refattn.conformance.targets.backward import asked_of_forward, in_order
from refattn.conformance.targets.base import Answer, ArrayTarget, TargetError, in_words, library_backend
from refattn.conformance.targets.signatures import parameters_of, refused_option

OPTIONS = frozenset({"causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "k_start"})
ALWAYS = frozenset({"gqa", "lse"})  # heads in groups and the log-sum-exp show only in a call
# What others call the options.
OTHER_NAMES = {
    "is_causal": "causal",
    "attn_mask": "mask",
    "attention_mask": "mask",
    "attn_bias": "bias",
    "alibi_bias": "bias",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "scaling": "scale",
    "soft_cap": "softcap",
    "logit_cap": "softcap",
    "logits_soft_cap": "softcap",
    "s_aux": "sinks",
    "sink": "sinks",
    "query_start": "q_start",
    "q_offset": "q_start",
    "k_offset": "k_start",
}


class FunctionTarget(ArrayTarget):
    """The function that "module:object" or "path.py:object" names, or is given, on arrays of one library."""

    def __init__(
        self,
        name: str,
        library: str = "numpy",
        function: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(library_backend(library))
        self.name = name
        self._function = load_function(name) if function is None else function
        self._backward = backward
        self._asked = () if backward is None else asked_of_forward(backward)
        self.gradients = frozenset(() if backward is None else GRADIENTS)
        parameters = _parameters(self._function, name)
        self.features = _features(parameters)
        self.notes = _unused(parameters)

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call with the options that the problem uses."""
        output, lse = self._answered(problem, q, k, v, self._options(problem))
        return Answer(output, lse)

    def differentiate(self, backward: str = "") -> None:
        """Gradients of every argument, by the library's own differentiation or a function of the user's."""
        if backward:
            self._backward = load_function(backward)
            self._asked = asked_of_forward(self._backward)
        else:
            super().differentiate()
        self.gradients = frozenset(GRADIENTS)

    def with_gradients(self, problem: Problem, q: Array, k: Array, v: Array) -> Answer:
        """One call and its gradients; those that a function leaves out are not judged, unless they are the point."""
        options, arrays = self._options(problem), {"q": q, "k": k, "v": v}
        gradient = self.array(np.asarray(problem.grad_output), problem.dtype)
        if self._backward is not None:
            output, lse = self._answered(problem, q, k, v, options)
            before = {name: x for name, x in (("output", output), ("lse", lse)) if name in self._asked}
            if before.get("lse", output) is None:
                raise Unsupported(f"{self.name} returns no log-sum-exp, which its backward function takes", ("lse",))
            found = self._called(self._backward, (q, k, v, gradient), options | before)
            named = in_order(found, [*problem.differentiable], self.name)
            gradients = {name: named[name] for name in problem.differentiable if name in named}
            for name in ("bias", "sinks"):
                if f"{name} gradient" in problem.asks and name not in gradients:
                    raise Unsupported(f"{self.name} returns no gradient of {name}", (f"{name} gradient",))
            return Answer(output, lse, gradients=gradients)
        arrays |= {name: options[name] for name in ("bias", "sinks") if name in options}

        def output_of(arrays: dict[str, Array]) -> Array:
            given = {name: arrays.get(name, x) for name, x in options.items()}
            return self._answered(problem, arrays["q"], arrays["k"], arrays["v"], given)[0]

        output, gradients = self.differentiated(output_of, arrays, gradient)
        return Answer(output, gradients=gradients)

    def _options(self, problem: Problem) -> dict[str, Any]:
        """The options that the problem uses."""
        options: dict[str, Any] = {}
        if problem.literal and problem.window is not None:
            raise Unsupported(f"{self.name} is given windows as boolean masks")
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
        return options

    def _called(self, function: Callable[..., Any], arrays: tuple[Array, ...], options: dict[str, Any]) -> Any:
        """What a function returns. Raises Unsupported where it refuses an option."""
        try:
            return function(*arrays, **options)
        except NotImplementedError as refusal:
            raise Unsupported(f"{self.name} does not do this: {refusal}") from refusal
        except TypeError as refusal:
            if not (refused := refused_option(refusal, options)):
                raise
            raise Unsupported(f"{self.name} cannot express {refused}", (refused,)) from refusal

    def _answered(self, problem: Problem, q: Array, k: Array, v: Array, options: dict[str, Any]) -> tuple[Any, Any]:
        """Output and log-sum-exp, None for the latter where there is none."""
        result = self._called(self._function, (q, k, v), options)
        output, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if lse is None and "lse" in problem.asks:
            raise Unsupported(f"{self.name} returns no log-sum-exp", ("lse",))
        return output, lse

    def hint(self, fault: BaseException) -> str:
        """What to try where the function was given arrays of a library that it does not take."""
        library, text = self.backend.name, str(fault)
        wants_tensors = re.search(r"(must be|expected|as) .*Tensor|'numpy\.ndarray' object has no attribute", text)
        if library == "numpy" and ("not numpy.ndarray" in text or wants_tensors):
            return "; it was given NumPy arrays and seems to want tensors: try --library torch"
        if library == "torch" and "'Tensor' object has no attribute" in text:
            return "; it was given tensors and seems to want NumPy arrays: leave out --library torch"
        return ""


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
        searched = ""
        if isinstance(fault, ModuleNotFoundError) and fault.name == where.partition(".")[0]:
            searched = f"; searched {Path.cwd()} and the installed packages"
        raise TargetError(f"importing {where} failed: {type(fault).__name__}: {fault}{searched}") from fault
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [one for one, x in vars(found).items() if callable(x) and not one.startswith("_")]
            raise TargetError(f"{where} has no {attribute!r}{meant(part, own, most=3, cutoff=0.3)}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{name} is {in_words(found)}, not a function")
    if isinstance(found, type):
        raise TargetError(f"{name} is a class; name an instance of it, or a function")
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


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter] | None:
    """The parameters after q, k and v; None where the signature is hidden or takes whatever it is given."""
    parameters = parameters_of(function)
    if parameters is None:  # try everything
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TargetError(f"{name} must take q, k and v as its first three arguments")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p for p in parameters if p not in positional[:3] and p.kind is not p.VAR_POSITIONAL]


def _features(parameters: list[inspect.Parameter] | None) -> frozenset[str]:
    """The options that the signature takes."""
    if parameters is None:
        return OPTIONS | ALWAYS
    return (OPTIONS & {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}) | ALWAYS


def _unused(parameters: list[inspect.Parameter] | None) -> tuple[str, ...]:
    """A note that names the parameters that no case uses, and what they may have been meant to be called."""
    names = [p.name for p in parameters or () if p.name not in OPTIONS]
    if not names:
        return ()
    meant = [OTHER_NAMES[name] for name in names if name in OTHER_NAMES]
    guess = f" (did you mean {', '.join(meant)}?)" if meant else ""
    return (f"parameters never used: {', '.join(names)}{guess}",)
