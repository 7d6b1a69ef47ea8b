"""What `refattn.testing.assert_gradients_close` says: nothing, or one sentence and a line for each gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from refattn.arrays import Array, describe, is_array
from refattn.conformance.case import Problem
from refattn.conformance.closeness import Claim, claimed, named_model, other_models, problem_of_call
from refattn.conformance.diagnosis.gradient_where import where
from refattn.conformance.diagnosis.gradients import likeness
from refattn.conformance.diagnosis.rows import Call
from refattn.conformance.gradients import golden_gradients_of, worst_gradient
from refattn.conformance.judge import Result, not_judgeable
from refattn.conformance.targets.base import in_words
from refattn.dtypes import COMPUTED, dtype_name, is_float, is_float8
from refattn.errors import GradientError, InputsError
from refattn.goldens import golden
from refattn.on_host import host, wide
from refattn.rounding import ROUNDOFF, Model, rounding_model


def explained(
    gradients: Any,
    q: Array,
    k: Array,
    v: Array,
    grad_output: Array,
    options: dict[str, Any],
    *,
    dtype: Any,
    model: str | Model,
    coherent: bool,
) -> str:
    """What is wrong with gradients, "" if nothing is; arguments as in `assert_gradients_close`."""
    golden(q, k, v, rows=[], **options)  # raises what attention raises, and computes no row
    rounding_model("float32", model, coherent)  # and what is wrong with a claim
    given = {"q": q, "k": k, "v": v} | {name: x for name in ("bias", "sinks") if (x := options.get(name)) is not None}
    named = _named(gradients, given)
    problem = _problem(Call(q, k, v, options), grad_output, Claim("float64", model, coherent), given)
    for name, x in named.items():
        if fault := _form(name, x, given[name], dtype):
            return fault
    # Each in its own dtype, which is mostly one.
    lines = []
    for stored in dict.fromkeys(claimed(dtype, x) for x in named.values()):
        some = {name: wide(host(x)) for name, x in named.items() if claimed(dtype, x) == stored}
        lines += _wrong(replace(problem, dtype=stored), some, model)
    return "\n".join(lines)


def _wrong(problem: Problem, gradients: dict[str, Array], model: str | Model) -> list[str]:
    """What is wrong with gradients that are stored in the problem's dtype; no lines if nothing is."""
    dtypes = dict.fromkeys(gradients, problem.dtype)
    result = Result(output=np.zeros(0), dtype=problem.dtype, gradients=gradients, gradient_dtypes=dtypes)
    place = worst_gradient(problem, result, golden_gradients_of(problem), model)
    if place.ratio <= 1:
        return []
    if math.isnan(place.ratio):
        return [not_judgeable(place).message]
    alike = _within_another(problem, result, model) or likeness(problem, result)
    return [f"{alike}: {place}" if alike else str(place), *where(problem, result, model).split("; ")]


def _within_another(problem: Problem, result: Result, model: str | Model) -> str:
    """The model of rounding that the gradients meet, where it is not the claimed one; ""."""
    exact = golden_gradients_of(problem)
    for other in other_models(Claim(problem.dtype, model, problem.coherent)):
        if worst_gradient(problem, result, exact, other.model).ratio <= 1:
            return f"the gradients are within the bound of model={other.model!r}, not of {named_model(model)}"
    return ""


def _named(gradients: Any, given: dict[str, Any]) -> dict[str, Array]:
    """The gradients by the names of the arguments. Raises InputsError."""
    if hasattr(gradients, "_asdict"):
        gradients = gradients._asdict()
    if isinstance(gradients, (tuple, list)):
        gradients = dict(zip(given, gradients))
    if not isinstance(gradients, Mapping):
        expected = "a tuple of the gradients of q, k, v [, bias] [, sinks], or a dict of them by these names"
        raise InputsError("gradients", expected, in_words(gradients))
    named = {name: x for name, x in gradients.items() if x is not None}
    if unknown := [name for name in named if name not in given]:
        raise InputsError("gradients", f"names out of {', '.join(given)}, which the call has", repr(unknown[0]))
    if not named:
        raise InputsError("gradients", "the gradient of one argument at least", "none")
    return named


def _problem(call: Call, grad_output: Array, claim: Claim, given: dict[str, Any]) -> Problem:
    """The call with its mask and bias as plain arrays. Raises GradientError (D1), and InputsError for other biases."""
    problem = problem_of_call(call, claim)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (call.q, call.k, call.v)))
    shape = (*batch, *call.q.shape[-3:-1], call.v.shape[-1])
    if not is_array(grad_output) or tuple(grad_output.shape) != shape or not is_float(grad_output.dtype):
        raise GradientError("grad_output", f"a floating array of the output's shape {shape}", describe(grad_output))
    bias = given.get("bias")
    if bias is not None:
        if not is_array(bias):
            raise InputsError("bias", "an array, where gradients are judged", in_words(bias))
        problem = replace(problem, bias=wide(host(bias)))
    return replace(problem, grad_output=wide(host(grad_output)))


def _form(name: str, x: Any, argument: Array, asked: Any) -> str:
    """What is wrong with the type, shape or dtype of one gradient, or ""."""
    if not is_array(x):
        return f"the gradient of {name} is {in_words(x)}, expected an array [D1]"
    if tuple(x.shape) != tuple(argument.shape):
        return (
            f"the gradient of {name} has shape {tuple(x.shape)}, expected that of {name}, {tuple(argument.shape)} [D1]"
        )
    own = dtype_name(x.dtype)
    wanted = "float32" if is_float8(argument.dtype) else dtype_name(argument.dtype)
    if own not in COMPUTED or (asked is None and ROUNDOFF[own] > ROUNDOFF[wanted]):
        advice = f"; say dtype={own!r} if that is meant" if own in COMPUTED else ""
        return f"the gradient of {name} has dtype {own}, expected that of {name}, {wanted} [D1]{advice}"
    return ""
