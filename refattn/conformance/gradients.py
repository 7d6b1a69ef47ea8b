"""Gradients are judged like outputs: golden values, derived bounds, shapes and dtypes (chapter D)."""

from __future__ import annotations

import math

import numpy as np

from refattn.conformance.case import Problem
from refattn.conformance.judge import (
    OF,
    Judgement,
    Place,
    Result,
    golden_of,
    judge_unfused,
    not_judgeable,
    worst_among,
    worst_place,
)
from refattn.dtypes import LOW
from refattn.golden_gradients import GoldenGradients
from refattn.rounding import Model

# What files call the gradients of the arguments.
FILED = {"q": "grad_q", "k": "grad_k", "v": "grad_v", "bias": "grad_bias", "sinks": "grad_sinks"}


def golden_gradients_of(problem: Problem) -> GoldenGradients:
    """The golden gradients of a problem with a `grad_output`; where they are certified, with those in place."""
    shapes = {name: x.shape for name, x in problem.differentiable.items()}
    exact = GoldenGradients(golden_of(problem), np.asarray(problem.grad_output), shapes)
    for name in shapes:
        if (proven := problem.certified.get(OF + name)) is not None:
            exact.values[name] = proven
    return exact


def judge_gradients(problem: Problem, result: Result, judged: Judgement, model: str | None = None) -> Judgement:
    """The judgement on the output, which is no failure, and on the gradients that came with it."""
    if fault := _form_fault(problem, result):
        return Judgement(verdict="fail", message=fault, fault="D1")
    exact = golden_gradients_of(problem)
    first = model or "fused"
    place = worst_gradient(problem, result, exact, first)
    if math.isnan(place.ratio):
        found = not_judgeable(place)
    elif place.ratio <= 1:
        found = Judgement(verdict="pass", error_over_bound=place.ratio, model=first, place=place)
    elif problem.dtype in LOW and model is None:
        found = judge_unfused(place, worst_gradient(problem, result, exact, "unfused"), problem.dtype)
    else:
        found = Judgement(verdict="fail", error_over_bound=place.ratio, message=str(place), place=place)
    if found.verdict != "pass" or judged.verdict != "pass":
        return found if found.verdict != "pass" else judged
    # The wider model is what the implementation meets, and then the larger ratio is what there is to tell.
    return max(judged, found, key=lambda one: (one.model == "unfused", one.error_over_bound or 0.0))


def worst_gradient(problem: Problem, result: Result, exact: GoldenGradients, model: str | Model) -> Place:
    """The worst place of all gradients under one model."""
    fused = exact.bounds(problem.dtype, "fused", problem.coherent)
    bounds = fused if model == "fused" else exact.bounds(problem.dtype, model, problem.coherent)
    places = []
    for name, actual in result.gradients.items():
        narrower = None if model == "fused" else fused[name]
        places.append(worst_place(OF + name, actual, exact.values[name], bounds[name], narrower))
    return worst_among(places, f"{OF}q")


def is_of_gradient(judged: Judgement) -> bool:
    """Whether a judgement is about a gradient."""
    return judged.fault == "D1" or (judged.place is not None and judged.place.what.startswith(OF))


def _form_fault(problem: Problem, result: Result) -> str:
    """What is wrong with shapes and dtypes, in words; ""."""
    for name, x in problem.differentiable.items():
        got = result.gradients.get(name)
        if got is None and (name in "qkv" or f"{name} gradient" in problem.asks):
            return f"there is no gradient of {name}"
        if got is None:
            continue
        if np.shape(got) != x.shape:
            return f"the gradient of {name} has shape {np.shape(got)}, expected that of {name}, {x.shape}"
        if result.gradient_dtypes[name] != problem.dtype:
            dtype = result.gradient_dtypes[name]
            return f"the gradient of {name} has dtype {dtype}, expected that of {name}, {problem.dtype}"
    return ""
