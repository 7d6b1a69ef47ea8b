"""What public implementations are known to do otherwise, and what must still hold of their results then.

A departure excuses no more than it says: a result that fails is judged again without what the departure changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.judge import Result, form_fault, golden_of, side_effects, widest_model, worst_of
from refattn.conformance.plain import rounded
from refattn.dtypes import LOW
from refattn.rounding import Model

# What a problem and its result may stand for without a departure: several where more than one is right.
Readings = list[tuple[Problem, Result]]


@dataclass(frozen=True, kw_only=True)
class Departure:
    """What an implementation is known to get wrong: it is no false alarm to be told so."""

    targets: tuple[str, ...]
    says: str
    concerns: Callable[[Problem], bool]
    # Nothing must hold of the result where there is no such function.
    without: Callable[[Problem, Result], Readings] | None = None
    # How the rest may be rounded, in 16 bits.
    model: Model | None = None


def excused(target: str, problem: Problem, result: Result | None) -> tuple[str, ...]:
    """The known departures of a target that explain a failure, None being a crash; empty if they do not."""
    known = [one for one in DEPARTURES if target in one.targets and one.concerns(problem)]
    if any(one.without is None for one in known):
        return tuple(one.says for one in known if one.without is None)
    if result is None or not known:
        return ()
    readings: Readings = [(problem, result)]
    models: Iterable[Model | None] = [None, *(one.model for one in known if one.model)]
    for one in known:
        readings = [found for reading in readings for found in (one.without(*reading) if one.without else [])]
    holds = any(_holds(*reading, model) for reading, model in product(readings, models))
    return tuple(one.says for one in known) if holds else ()


def _holds(problem: Problem, result: Result, model: Model | None) -> bool:
    """Whether a result is right under a model, "unfused" in 16 bits by default, or nothing follows from it."""
    golden = golden_of(problem, weights=result.weights is not None)
    if form_fault(golden, result, problem.dtype) or side_effects(result):
        return False
    ratio = worst_of(golden, result, problem.dtype, model or widest_model(problem.dtype), problem.coherent).ratio
    return ratio <= 1 or math.isnan(ratio)


def _empty_rows(problem: Problem) -> Array:
    """Which rows see no key, broadcast to (..., H, Lq)."""
    bias = np.zeros((1, 1)) if problem.bias is None else problem.bias
    visible = problem.visible & ~np.isneginf(bias)
    lead = np.broadcast_shapes(visible.shape[:-1], problem.q.shape[:-1])
    return ~np.any(np.broadcast_to(visible, (*lead, problem.k.shape[-2])), axis=-1)


def _has_empty_rows(problem: Problem) -> bool:
    return bool(np.any(_empty_rows(problem)))


def _filled(problem: Problem, result: Result) -> Readings:
    """The rows that see no key as they are specified; the others as they came."""
    golden = golden_of(problem)
    if np.shape(result.output) != golden.output.shape:
        return [(problem, result)]
    empty = np.broadcast_to(_empty_rows(problem), golden.output.shape[:-1])
    output = np.where(empty[..., None], golden.output, result.output)
    lse = None if result.lse is None else np.where(empty, golden.lse, result.lse)
    return [(problem, replace(result, output=output, lse=lse, weights=None))]


def _without_lse(problem: Problem, result: Result) -> Readings:
    return [(problem, replace(result, lse=None))]


def in_float32(problem: Problem, result: Result) -> Readings:
    """Held to the bound of float32, the inputs as they are or rounded to it."""
    narrow = {name: rounded(getattr(problem, name), "float32") for name in ("q", "k", "v")}
    options = {name: getattr(problem, name) for name in ("bias", "sinks")}
    narrow |= {name: rounded(x, "float32") for name, x in options.items() if x is not None}
    read = replace(result, dtype="float32", lse_dtype="float32" if result.lse is not None else "")
    return [(replace(one, dtype="float32"), read) for one in (problem, replace(problem, **narrow))]


def _as_it_is(problem: Problem, result: Result) -> Readings:
    return [(problem, result)]


def _stored_as(*dtypes: str) -> Callable[[Problem], bool]:
    return lambda problem: problem.dtype in dtypes


def _scale_is_not_positive(problem: Problem) -> bool:
    return problem.scale is not None and problem.scale <= 0


DEPARTURES = (
    Departure(
        targets=("jax", "keras-jax", "keras-torch", "mlx", "transformers-eager", "transformers-gemma2"),
        says="a row that sees no key is the mean of the values",
        concerns=_has_empty_rows,
        without=_filled,
    ),
    Departure(
        targets=("torch-mha-weights", "onnxruntime-mha", "onnxruntime-gqa", "mlx", "tinygrad"),
        says="a row that sees no key, by a floating mask in MLX, is NaN",
        concerns=_has_empty_rows,
        without=_filled,
    ),
    Departure(
        targets=("torch-flash",),
        says="the log-sum-exp of torch's tiled kernel is 0 for a row that sees no key",
        concerns=_has_empty_rows,
        without=_without_lse,
    ),
    Departure(
        targets=("torch-flash",),
        says="the log-sum-exp of torch's tiled kernel is inexact in 16 bits",
        concerns=_stored_as(*LOW),
        without=_without_lse,
    ),
    *(
        Departure(
            targets=("onnx-reference",),
            says=f"ONNX's reference evaluator computes everything in {dtype}",
            concerns=_stored_as(dtype),
            without=_as_it_is,
            model=Model(stored=True, prescaled=True, sums=dtype, tile=1),
        )
        for dtype in LOW
    ),
    Departure(
        targets=("jax", "mlx", "transformers-eager", "transformers-gemma2", "keras-jax", "keras-torch"),
        says="float64 is computed, or given back, in float32",
        concerns=_stored_as("float64"),
        without=in_float32,
    ),
    Departure(
        targets=("onnx-reference",),
        says="ONNX's reference evaluator has its scale in float32",
        concerns=_stored_as("float64"),
        without=in_float32,
    ),
    Departure(
        targets=("transformers-sdpa", "keras-torch", "onnx-reference", "onnxruntime", "onnxruntime-mha"),
        says="a scale that is not positive gives NaN, or is refused",
        concerns=_scale_is_not_positive,
    ),
    Departure(
        targets=("torch", "torch-math", "torch-flash"),
        says="torch's CPU kernels give NaN for hidden keys where the scale is negative",
        concerns=_scale_is_not_positive,
    ),
)
