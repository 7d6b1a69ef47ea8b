"""Inputs and results that were dumped together, by any program on any machine: verdict and diagnosis.

A file holds q, k, v and output, and optionally lse, weights and options, or several problems as NAME.q, NAME.k, ...
With grad_output it holds grad_q, grad_k and grad_v too, and grad_bias and grad_sinks if these are to be judged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from refattn.bounds import ROUNDOFF
from refattn.conformance.captured import (
    CLAUSES_OF_ANY_INPUT,
    CLAUSES_OF_GRADIENTS,
    REQUIRED,
    Group,
    check_group,
    problem_of,
    read_groups,
)
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.gradients import explain_gradients
from refattn.conformance.exchange.bits import Tensor, tensor_of
from refattn.conformance.exchange.files import LARGEST
from refattn.conformance.exchange.words import in_words
from refattn.conformance.gradients import FILED
from refattn.conformance.judge import Judgement, Result, judge
from refattn.conformance.recording import gathered, problem_in_words, record_of
from refattn.conformance.records import DEFAULT_SEED, Record, Report
from refattn.dtypes import COMPUTED, is_float8

# A log-sum-exp in base 2 has been rounded once more.
BASE_2 = 2.0
SAYS = "The result that was dumped is that of the specification within the bound."


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a dump is to be read: options and dtype that it does not hold itself, its layout, and the rounding model."""

    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    layout: str = "BHSD"
    lse_layout: str = "BHS"
    lse_base: str = "e"
    model: str | None = None
    largest: int = LARGEST


def compare_dump(path: Path, reading: Reading, advance: Callable[[Record], None] = lambda record: None) -> Report:
    """One record for each problem in the file. Raises TensorFileError."""
    started = time.monotonic()
    given = {name: tensor_of(np.asarray(value)) for name, value in reading.options.items()}
    groups = [_turned(group, reading) for group in read_groups(path, reading.dtype, given, reading.largest)]
    for group in groups:
        check_group(group)
        if "output" not in group.parts:
            raise group.refused(f"lacks {group.called('output')}, the result to be judged")
        _check_gradients(group)
    records, diagnosis = gathered((_judged(group, reading) for group in groups), advance)
    return Report(
        target=str(path),
        versions={},
        seed=DEFAULT_SEED,
        records=records,
        seconds=time.monotonic() - started,
        diagnosis=diagnosis,
    )


def result_of(problem: Problem, parts: Mapping[str, Tensor]) -> Result:
    """Output, lse, weights and gradients as a result; all but lse and weights in the dtype of q, if it holds them."""
    output = parts["output"].read_as(problem.dtype)
    others: dict[str, Any] = {name: parts[name].values() for name in ("lse", "weights") if name in parts}
    if "lse" in parts:
        others["lse_dtype"] = parts["lse"].dtype
    gradients = {
        name: parts[filed].read_as(problem.dtype)
        for name, filed in FILED.items()
        if filed in parts and name in problem.differentiable
    }
    others["gradients"] = {name: tensor.values() for name, tensor in gradients.items()}
    others["gradient_dtypes"] = {name: tensor.dtype for name, tensor in gradients.items()}
    return Result(output=output.values(), dtype=output.dtype, **others)


def _judged(group: Group, reading: Reading) -> Record:
    problem = problem_of(group)
    notes: tuple[str, ...] = ()
    if is_float8(group.parts["q"].dtype) and group.parts["output"].dtype in COMPUTED:
        # Any of them holds the inputs exactly, and kernels of 8 bits return one or another.
        problem = replace(problem, dtype=group.parts["output"].dtype)
        notes = (f"the inputs are {group.parts['q'].dtype}; judged in the dtype of the output",)
    result = result_of(problem, group.parts)
    if reading.lse_base == "2" and result.lse is not None:
        result = replace(result, lse=result.lse * math.log(2))
    judged, of_gradient = explain_gradients(problem, result, judge(problem, result, reading.model))
    if judged.verdict == "fail" and of_gradient is None and _looks_causal(problem, result):
        notes += ("the first query sees the first key alone, as under a causal rule; if that was meant, add --causal",)
    if reading.lse_base == "2":
        judged = _tolerating_base_2(problem, result, judged, reading.model)
    about = {
        "case": group.name or group.path.stem,
        "clauses": CLAUSES_OF_ANY_INPUT if of_gradient is None else CLAUSES_OF_GRADIENTS,
        "says": SAYS,
        "dtype": problem.dtype,
        "message": in_words(problem, result, judged, reading.model),
        "notes": notes,
        "called": problem_in_words(problem, None),
        "needs": problem.needs,
    }
    return record_of(about, problem, result, judged, of_gradient)


def _check_gradients(group: Group) -> None:
    """Whether gradients and that of the output came together. Raises TensorFileError."""
    came = [name for name in FILED.values() if name in group.parts]
    if came and "grad_output" not in group.parts:
        raise group.refused(f"holds {group.called(came[0])}, but no {group.called('grad_output')}")
    if "grad_output" not in group.parts:
        return
    for name in REQUIRED:
        if FILED[name] not in group.parts:
            raise group.refused(f"lacks {group.called(FILED[name])}, which goes with grad_output")
    for name in ("bias", "sinks"):
        if FILED[name] in group.parts and name not in group.parts:
            raise group.refused(f"holds {group.called(FILED[name])}, but no {group.called(name)}")


def _looks_causal(problem: Problem, result: Result) -> bool:
    """Whether the first row of a call that names no causal rule is the first of several values."""
    q, v = problem.q, problem.v
    if problem.causal or problem.shown is not None or 0 in (*q.shape, *v.shape) or v.shape[-2] == 1:
        return False
    if np.shape(result.output) != (*q.shape[:-1], v.shape[-1]):
        return False
    values = v if v.ndim < 3 else np.repeat(v, problem.heads // v.shape[-3], axis=-3)
    first, near = result.output[..., 0, :], 4 * ROUNDOFF[problem.dtype]
    return bool(np.allclose(first, values[..., 0, :], rtol=near, atol=0.0))


def _tolerating_base_2(problem: Problem, result: Result, judged: Judgement, model: str | None) -> Judgement:
    """The verdict with a wider bound for the log-sum-exp, and for nothing beside it."""
    place = judged.place
    if judged.verdict != "fail" or place is None or place.what != "log-sum-exp" or not place.ratio <= BASE_2:
        return judged
    if judge(problem, replace(result, lse=None), model).verdict == "fail":
        return judged
    return Judgement(verdict="pass", error_over_bound=place.ratio / BASE_2, model=model or "fused", place=place)


def _turned(group: Group, reading: Reading) -> Group:
    """In the specification's layout: heads before tokens."""
    parts = dict(group.parts)
    if reading.layout == "BSHD":
        for name in (*REQUIRED, "output", "grad_output", *(FILED[name] for name in REQUIRED)):
            if name in parts:
                parts[name] = _swapped(group, name, parts[name], -2, -3)
    if reading.lse_layout == "BSH" and "lse" in parts:
        parts["lse"] = _swapped(group, "lse", parts["lse"], -1, -2)
    return group._replace(parts=parts)


def _swapped(group: Group, name: str, tensor: Tensor, first: int, second: int) -> Tensor:
    if tensor.stored.ndim < -second:
        raise group.refused(f"{group.called(name)} {tensor.shape} lacks the axes of tokens and heads that were named")
    return tensor._replace(stored=np.swapaxes(tensor.stored, first, second))
