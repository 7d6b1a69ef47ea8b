"""The certified vectors as cases: what is expected is not the golden value but the proven result."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Case, Chapter, Problem
from refattn.conformance.plain import Draw, rounded
from refattn.conformance.records import CERTIFIED
from refattn.vectors import Vector, bias_of, load, mask_of

CASES = Chapter("vectors")

# Each vector in one dtype, and the first of each recipe in two: what all would add is time.
DTYPES = {
    "base-1": ("bfloat16", "float32"),
    "base-2": ("float16",),
    "float32": ("float32",),
    "float64": ("float64",),
}
# Equal terms, whose rounding errors need not average out.
COHERENT = frozenset({"uniform-weights", "constant-values"})


def problem_of(vector: Vector, dtype: str) -> Problem:
    """A vector's call in a dtype that holds its inputs; it must not be rotary, which no problem expresses."""
    data, terms = vector.mask_data, vector.bias_terms
    return Problem(
        dtype=dtype,
        q=vector.q,
        k=vector.k,
        v=vector.v,
        causal=vector.causal,
        mask=None if data is None else lambda array: mask_of(data, array),
        shown=vector.mask,
        bias=vector.bias,
        bias_of=(lambda array: bias_of(terms, vector.q, array)) if terms else None,
        scale=vector.scale,
        softcap=vector.softcap,
        sinks=vector.sinks,
        q_start=_start(vector.q_start),
        k_start=_start(vector.k_start),
        coherent=bool(COHERENT & set(vector.flags)),
        grad_output=vector.grad_output,
        certified={
            "output": vector.output,
            "lse": vector.lse,
            "weights": vector.weights,
            **{f"gradient of {name}": x for name, x in vector.gradients.items()},
        },
    )


def _start(start: Any) -> Any:
    return np.asarray(start) if isinstance(start, list) else start


def _dtypes(vector: Vector) -> tuple[str, ...]:
    """The dtypes in which a vector is a case: those of its kind that hold its bias and sinks as well."""
    if vector.rotary is not None:
        return ()
    summands = [x for x in (vector.bias, vector.sinks, vector.grad_output) if x is not None]
    exact = {dtype for dtype in vector.dtypes if all(_holds(dtype, x) for x in summands)}
    return tuple(dtype for dtype in DTYPES[vector.name.rpartition(".")[2]] if dtype in exact)


def _holds(dtype: str, x: Array) -> bool:
    return bool(np.array_equal(rounded(x, dtype), x, equal_nan=True))


def _case(vector: Vector, dtypes: tuple[str, ...]) -> Case:
    def build(draw: Draw) -> Problem:
        return problem_of(vector, draw.dtype)

    return Case(name=f"{CERTIFIED}{vector.name}", clauses=vector.clauses, says=vector.says, dtypes=dtypes, build=build)


CASES.cases.extend(_case(vector, dtypes) for vector in load() if (dtypes := _dtypes(vector)))
