"""Which gradients are wrong, and where: heads, queries, keys, columns."""

from __future__ import annotations

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.where import any_along, indices_in_words
from refattn.conformance.gradients import golden_gradients_of
from refattn.conformance.judge import Result, ratios_of, widest_model
from refattn.rounding import Model

# What the axes of each gradient are, the last one first.
AXES = {
    "q": ("columns", "rows", "heads"),
    "k": ("columns", "keys", "key/value heads"),
    "v": ("columns", "keys", "key/value heads"),
    "bias": ("keys", "rows", "heads"),
    "sinks": ("heads",),
}
BATCH = "batch entries"


def where(problem: Problem, result: Result, model: str | Model | None = None) -> str:
    """The gradients that are wrong, each with its places, and those that are right; "" where none can be compared.

    model is the rounding that is allowed, by default the widest of those that need no declaration.
    """
    if problem.grad_output is None:
        return ""
    exact = golden_gradients_of(problem)
    wrong, right = [], []
    for name, beyond in comparable(problem, result, model).items():
        if beyond.any():
            lost = np.isnan(result.gradients[name]) & ~np.isnan(exact.values[name])
            wrong.append(f"gradient of {name}: {_places(name, beyond, int(np.count_nonzero(lost)))}")
        else:
            right.append(name)
    if not wrong:
        return ""
    listed = " and ".join([", ".join(right[:-1]), right[-1]] if len(right) > 1 else right)
    some = f"the gradient{'s' * (len(right) > 1)} of {listed} {'are' if len(right) > 1 else 'is'} right"
    return "; ".join([*wrong, *([some] if right else [])])


def comparable(problem: Problem, result: Result, model: str | Model | None = None) -> dict[str, Array]:
    """The gradients that have the right shape, and which of their elements are wrong."""
    exact = golden_gradients_of(problem)
    bounds = exact.bounds(problem.dtype, model or widest_model(problem.dtype), problem.coherent)
    return {
        name: ratios_of(x, exact.values[name], bounds[name]) > 1
        for name, x in result.gradients.items()
        if np.shape(x) == exact.values[name].shape
    }


def _places(name: str, wrong: Array, lost: int) -> str:
    parts = [f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong"]
    if lost:
        parts.append(f"{lost} of them NaN")
    for axis in range(wrong.ndim):
        from_end = wrong.ndim - 1 - axis
        called = AXES[name][from_end] if from_end < len(AXES[name]) else BATCH
        found = any_along(wrong, axis)
        if not found.all():
            parts.append(f"{called} {indices_in_words(np.flatnonzero(found), found.size)}")
    return ", ".join(parts)
