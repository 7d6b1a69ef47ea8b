"""What crosses between judge and worker: the inputs of a problem there, what was observed back.

Results that are known or proven stay with the judge, and so do masks and biases as refattn's own objects.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.clauses import clause
from refattn.conformance.case import LAYOUTS, Problem
from refattn.conformance.isolation.channel import MalformedError, Message, text_of
from refattn.conformance.judge import OF
from refattn.conformance.targets.base import Observed, Seen

# The fields of a problem that cross, and those that never do.
INPUTS = (
    *("dtype", "q", "k", "v", "causal", "shown", "bias", "scale", "softcap", "sinks"),
    *("q_start", "k_start", "window", "counts", "slopes", "layout", "among_others", "literal", "asks", "grad_output"),
)
KEPT = ("mask", "bias_of", "coherent", "known", "certified")
NAMES = ("q", "k", "v")
PARTS = ("output", "lse", "weights", "second", "third")
ARGUMENTS = ("q", "k", "v", "bias", "sinks")
# Elements beyond those of the problem that an answer may have before only its shape crosses.
SPARE = 1 << 16


def inputs_of(problem: Problem) -> tuple[dict[str, Any], dict[str, Array]]:
    """The inputs of a problem as a header's entries and arrays."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name in INPUTS:
        value = getattr(problem, name)
        if isinstance(value, (np.ndarray, np.generic)):
            arrays[name] = np.asarray(value)
        elif value is not None:
            plain[name] = list(value) if isinstance(value, tuple) else value
    return {"problem": plain}, arrays


def problem_of(message: Message) -> Problem:
    """The same as a problem again, in the worker."""
    plain: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in message.header["problem"].items()
    }
    # Numbers of no axes were numbers of NumPy; targets expect arrays that they may write to.
    arrays = {name: x.copy() if x.ndim else x[()] for name, x in message.arrays.items()}
    if plain["layout"] not in LAYOUTS:
        raise MalformedError("a layout that there is none of")
    return Problem(**plain, **arrays)


def most_elements(problem: Problem) -> int:
    """The size of the largest array that an answer to a problem may have: output, weights or a gradient."""
    given = (problem.q, problem.k, problem.v, problem.shown, problem.bias)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in given if x is not None))
    rows = math.prod(batch) * problem.heads * problem.q.shape[-2]
    gradient = 0 if problem.grad_output is None else max(x.size for x in problem.differentiable.values())
    return max(int(rows * max(problem.v.shape[-1], problem.k.shape[-2], 1)), int(gradient)) + SPARE


def most_bytes(problem: Problem) -> int:
    """What all arrays of an answer may have: three outputs, log-sum-exp and weights, and the inputs once more."""
    parts = len(PARTS) + (0 if problem.grad_output is None else len(ARGUMENTS))
    return 8 * (int(problem.q.size + problem.k.size + problem.v.size) + parts * most_elements(problem))


def observed_entries(observed: Observed, problem: Problem) -> tuple[dict[str, Any], dict[str, Array]]:
    """What was observed as a header's entries and arrays; of arrays that are far too large the shape alone."""
    entries: dict[str, Any] = {
        "foreign": observed.foreign,
        "misshapen": list(observed.misshapen or ()),
        "beside": list(observed.beside),
        "shared": list(observed.shared),
        "parts": {},
    }
    arrays = {f"after {name}": x for name, x in observed.inputs.items()}
    room = most_elements(problem)
    seen: Seen | None
    for name, seen in [
        *((name, getattr(observed, name)) for name in PARTS),
        *((OF + name, one) for name, one in observed.gradients.items()),
    ]:
        if seen is not None:
            entries["parts"][name] = [seen.dtype, list(seen.values.shape)]
            if seen.values.size <= room:
                arrays[name] = seen.values
    return entries, arrays


def observed_of(message: Message, problem: Problem) -> Observed:
    """What was observed, as the worker says. Raises MalformedError for all that an answer cannot be."""
    header, arrays = message
    try:
        parts: dict[str, Seen | None] = {name: _seen(name, part, arrays) for name, part in header["parts"].items()}
        foreign = text_of(header["foreign"], 500)
        misshapen = _misshapen(header["misshapen"])
        beside, shared = (tuple(name for name in NAMES if name in header[key]) for key in ("beside", "shared"))
        inputs = {} if foreign or misshapen else {name: _floats(arrays[f"after {name}"]) for name in NAMES}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        raise MalformedError("an answer that lacks a part, or has one of another form") from fault
    if misshapen:
        return Observed(misshapen=misshapen, inputs={})
    gradients = {name: parts.pop(OF + name) for name in ARGUMENTS if OF + name in parts}
    if gradients and problem.grad_output is None:
        raise MalformedError("gradients that nobody asked for")
    if not parts.keys() <= set(PARTS) or not (foreign or {"output", "second"} <= parts.keys()):
        raise MalformedError("an answer without an output, or with parts that nobody asked for")
    if any(x.shape != getattr(problem, name).shape for name, x in inputs.items()):
        raise MalformedError("inputs of other shapes than those that were sent")
    if not foreign and "output" not in arrays:  # too large to cross: its shape is the verdict
        parts |= {"second": parts["output"], "third": None}
    named = {name: seen for name, seen in gradients.items() if seen is not None}
    return Observed(foreign=foreign, inputs=inputs, beside=beside, shared=shared, gradients=named, **parts)


def _seen(name: str, part: Any, arrays: dict[str, Array]) -> Seen:
    dtype, shape = part
    if name in arrays:
        values = _floats(arrays[name])
        if list(values.shape) != shape:
            raise ValueError
    else:  # too large to cross
        values = np.broadcast_to(np.float64(np.nan), shape)
    return Seen(values, text_of(dtype, 100))


def _misshapen(words: list[Any]) -> tuple[str, str] | None:
    if not words:
        return None
    label, text = words
    return clause(label).label, text_of(text, 500)


def _floats(x: Array) -> Array:
    if x.dtype != np.float64:
        raise ValueError
    return x
