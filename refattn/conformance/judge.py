"""The one place where a result is judged: golden value and derived bound, shape, dtype, library, side effects.

NaN equals nothing but a NaN that the specification asks for, and an infinity only itself. There is no absolute
tolerance: an element passes if its error is within the bound that `refattn.bounds` derives for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.bounds import ROUNDOFF, Model
from refattn.conformance.case import Problem
from refattn.dtypes import LOW
from refattn.goldens import Golden, golden_visible

# Bounds about as small as float32's smallest normal number are those of a result that is exactly 0.
NOTHING = 2.0**-125
# How places in gradients are called, before the name of the argument.
OF = "gradient of "


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a target made of a problem, on the host: floats as float64, with the dtype names that they had.

    lse and weights are None where the target does not offer them. `changed` names inputs that were written to;
    `beside` those beside which something was written, and `shared` those that the output shares memory with;
    `repeated` says whether a second call gave the same bits, None if there was none, and `undisturbed` whether another
    one after a call with other inputs did.
    """

    output: Array
    dtype: str
    library: bool = True
    # What came instead of an array of q's library, in words.
    foreign: str = ""
    # A clause and words, where a shape is none that the calling convention has.
    misshapen: tuple[str, str] | None = None
    lse: Array | None = None
    lse_dtype: str = ""
    weights: Array | None = None
    # The gradients that a problem asks for, by the names of the arguments, and the dtype names that they had.
    gradients: dict[str, Array] = field(default_factory=dict)
    gradient_dtypes: dict[str, str] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    repeated: bool | None = None
    undisturbed: bool = True


class Place(NamedTuple):
    """Where a result is worst."""

    what: str
    at: tuple[int, ...]
    actual: float
    expected: float
    bound: float

    @property
    def ratio(self) -> float:
        """Error over bound; infinite for a wrong NaN or infinity, or an error where none is allowed."""
        return error_over_bound(self.actual, self.expected, self.bound)

    @property
    def rank(self) -> float:
        """To compare by: what cannot be judged is worse than any place that is right, and better than any wrong."""
        return 1.0 if math.isnan(self.ratio) else self.ratio

    def __str__(self) -> str:
        at = f"{self.what}[{', '.join(map(str, self.at))}] is {self.actual:.9g}, expected {self.expected:.9g}"
        error = abs(self.actual - self.expected)
        if not math.isfinite(error):
            return at
        if self.expected == 0 and self.bound <= NOTHING:
            why = {"weight": " (hidden key)", "output": " (only hidden keys hold anything else)"}.get(self.what, "")
            why = " (nothing visible depends on it)" if self.what.startswith(OF) else why
            return at.replace("expected 0", f"expected exactly 0{why}")
        if self.bound == 0:
            return f"{at} exactly"
        return f"{at}; the error {error:.3g} is {self.ratio:.3g} times the bound {self.bound:.3g}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """pass, fail or "not judgeable"; the worst error over bound, the rounding model met, and what is wrong.

    fault is the label of the clause that a failure of form is about, "" for one of numbers.
    """

    verdict: str
    error_over_bound: float | None = None
    model: str | None = None
    message: str = ""
    place: Place | None = None
    fault: str = ""


def widest_model(dtype: str) -> str:
    """The widest of the rounding models that need no declaration."""
    return "unfused" if dtype in LOW else "fused"


def judge(problem: Problem, result: Result, model: str | None = None) -> Judgement:
    """Judge one result of one problem: under a named model, or under the narrowest of "fused" and "unfused"."""
    judged = _judge_output(problem, result, model)
    if problem.grad_output is None or judged.verdict == "fail":
        return judged
    from refattn.conformance.gradients import judge_gradients

    return judge_gradients(problem, result, judged, model)


def _judge_output(problem: Problem, result: Result, model: str | None) -> Judgement:
    """The same, gradients apart."""
    golden = golden_of(problem, weights=result.weights is not None)
    if form := form_fault(golden, result, problem.dtype):
        label, message = form
        return Judgement(verdict="fail", message=message, fault=label)
    first = model or "fused"
    fused = worst_of(golden, result, problem.dtype, first, problem.coherent)
    notes = side_effects(result)
    if fused.ratio <= 1:
        judged = Judgement(verdict="pass", error_over_bound=fused.ratio, model=first, place=fused)
    elif problem.dtype in LOW and model is None:
        unfused = worst_of(golden, result, problem.dtype, "unfused", problem.coherent)
        judged = judge_unfused(fused, unfused, problem.dtype)
    elif math.isnan(fused.ratio):
        judged = not_judgeable(fused)
    else:
        message = str(fused) + hint_of_float32(golden, result, problem.dtype)
        judged = Judgement(verdict="fail", error_over_bound=fused.ratio, message=message, place=fused)
    if judged.verdict == "fail" and fused.what == "log-sum-exp" and _output_holds(problem, golden, result, model):
        judged = replace(judged, fault="P4")
    if notes and judged.verdict != "fail":
        ratio, fault = judged.error_over_bound, "A7" if result.changed or result.beside or result.shared else "N4"
        return Judgement(verdict="fail", error_over_bound=ratio, message="; ".join(notes), fault=fault)
    return judged


def golden_of(problem: Problem, weights: bool = False) -> Golden:
    """The golden value of a problem, from its plain arrays alone; where results are certified, with those in place."""
    golden = golden_visible(
        problem.q,
        problem.k,
        problem.v,
        problem.visible,
        bias=problem.bias,
        scale=problem.scale,
        softcap=problem.softcap,
        sinks=problem.sinks,
        weights=weights,
    )
    for name in problem.certified.keys() & {"output", "lse", *(("weights",) if weights else ())}:
        setattr(golden, name, problem.certified[name])
    return golden


def error_over_bound(actual: Any, expected: Any, bound: Any) -> float:
    """The largest error over its bound: 0 if all is equal, infinite for a wrong NaN or infinity, NaN if not judgeable.

    actual, expected and bound broadcast together; NaN is right where NaN is expected.
    """
    ratios = ratios_of(*np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (actual, expected, bound))))
    if not ratios.size:
        return 0.0
    return float(np.max(ratios[~np.isnan(ratios)])) if not np.all(np.isnan(ratios)) else math.nan


def worst_place(what: str, actual: Array, expected: Array, bound: Array, narrower: Array | None = None) -> Place | None:
    """Where the error is largest over its bound; None for no elements.

    Elements that cannot be judged come last. But if a narrower bound, that of the other model, is given, those within
    it are judged by it, and those beyond come right after those that are wrong, not to pass for the sake of the others.
    """
    actual, expected, bound = np.broadcast_arrays(actual, expected, bound)
    if not actual.size:
        return None
    open_rank = -1.0
    if narrower is not None:
        within, open_rank = ratios_of(actual, expected, narrower) <= 1, 1.0
        bound = np.where(within & np.isinf(bound), narrower, bound)
    ratios = ratios_of(actual, expected, bound)
    index = np.unravel_index(int(np.argmax(np.where(np.isnan(ratios), open_rank, ratios))), ratios.shape)
    at = tuple(int(i) for i in index)
    return Place(what, at, float(actual[at]), float(expected[at]), float(bound[at]))


def ratios_of(actual: Array, expected: Array, bound: Array) -> Array:
    """Each element's error over its bound, arrays of one shape; see `error_over_bound`."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        ratios = np.abs(actual - expected) / bound
    ratios = np.where(np.isfinite(actual) & np.isfinite(expected), ratios, np.inf)
    ratios = np.where(np.isinf(bound) & np.isfinite(actual), np.nan, ratios)
    return np.where(same, 0.0, ratios)


def form_fault(golden: Golden, result: Result, dtype: str) -> tuple[str, str] | None:
    """What is wrong with library, shape or dtype, before any number is looked at: a label and words."""
    if not result.library:
        return "A7", f"{result.foreign or 'the output is not an array of the library of q'} [A7]"
    if result.misshapen:
        return result.misshapen
    shape, got = golden.output.shape, np.shape(result.output)
    if got != shape:
        return "A1", f"the output has shape {got}, expected {shape}"
    if result.dtype != dtype:
        return "A4", f"the output has dtype {result.dtype}, expected that of q, {dtype} [A4]"
    if result.lse is not None:
        least = "float64" if dtype == "float64" else "float32"
        if (got := np.shape(result.lse)) != golden.lse.shape:
            like = "; it looks like the weights, which are not asked for" * (got == (*golden.lse.shape, golden.k_len))
            return "P4", f"the log-sum-exp, the second of the pair, has shape {got}, expected {golden.lse.shape}{like}"
        if ROUNDOFF.get(result.lse_dtype, 1.0) > ROUNDOFF[least]:
            return "P4", f"the log-sum-exp has dtype {result.lse_dtype}, expected at least {least}"
    if result.weights is not None and golden.weights is not None and np.shape(result.weights) != golden.weights.shape:
        return "P1", f"the weights have shape {np.shape(result.weights)}, expected {golden.weights.shape}"
    return None


def worst_of(golden: Golden, result: Result, dtype: str, model: str | Model, coherent: bool = False) -> Place:
    """The worst place of output, log-sum-exp and weights under one model."""
    parts = [("output", result.output, golden.output, golden.bound)]
    if result.lse is not None:
        parts.append(("log-sum-exp", result.lse, golden.lse, golden.lse_bound))
    if result.weights is not None and golden.weights is not None:
        parts.append(("weight", result.weights, golden.weights, golden.weights_bound))
    places = []
    for what, actual, expected, bound in parts:
        fused = bound(dtype, "fused", coherent)
        bounds = (fused,) if model == "fused" else (bound(dtype, model, coherent), fused)
        places.append(worst_place(what, actual, expected, *bounds))
    return worst_among(places, "output")


def worst_among(places: Iterable[Place | None], what: str) -> Place:
    """The worst of some places, None standing for no elements; a right one of that name where there is none."""
    return max(
        (place for place in places if place), key=lambda place: place.rank, default=Place(what, (), 0.0, 0.0, 0.0)
    )


def judge_unfused(fused: Place, unfused: Place, dtype: str) -> Judgement:
    """Beyond the fused model: right if scores and weights were stored in the low dtype, and then that is said."""
    if math.isnan(unfused.ratio):
        return not_judgeable(unfused)
    if unfused.ratio <= 1:
        note = f"beyond the fused bound ({fused.ratio:.3g} times), within that for scores and weights in {dtype}"
        return Judgement(verdict="pass", error_over_bound=unfused.ratio, model="unfused", message=note, place=unfused)
    message = str(fused)
    if math.isfinite(unfused.ratio):
        message += (
            f"; even if scores and weights may be rounded to {dtype} on the way it is "
            f"{unfused.ratio:.3g} times what rounding explains"
        )
    return Judgement(verdict="fail", error_over_bound=fused.ratio, message=message, place=fused)


def _output_holds(problem: Problem, golden: Golden, result: Result, model: str | None) -> bool:
    """Whether the output alone is within its bound."""
    model = model or widest_model(problem.dtype)
    return error_over_bound(result.output, golden.output, golden.bound(problem.dtype, model, problem.coherent)) <= 1


def hint_of_float32(golden: Golden, result: Result, dtype: str) -> str:
    """A float64 result that is right to float32's precision was most likely computed in float32 (N1)."""
    if dtype != "float64":
        return ""
    bound = golden.bound("float32", coherent=True)
    right = error_over_bound(result.output, golden.output, bound) <= 1
    return "; it is right to float32's precision, so float64 seems to be computed in float32 [N1]" if right else ""


def not_judgeable(place: Place) -> Judgement:
    """Where rounding alone may change a result beyond recognition."""
    return Judgement(
        verdict="not judgeable",
        message=f"nothing follows: rounding alone may move a logit by 1 or more at {place.what}{list(place.at)}",
        place=place,
    )


def side_effects(result: Result) -> tuple[str, ...]:
    """What a call did beside its answer, in words: writes, shared memory, other bits the second time."""
    found = [f"the call wrote to {name}" for name in result.changed]
    found += [f"the call wrote outside of {name}, before its first or after its last element" for name in result.beside]
    found += [f"the output shares memory with {name}" for name in result.shared]
    if result.repeated is False:
        found.append("a second call with the same inputs gave other bits")
    elif not result.undisturbed:
        found.append("after a call with other inputs the same inputs gave other bits")
    return tuple(found)
