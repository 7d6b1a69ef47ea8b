"""What `refattn.testing.assert_attention_close` says: nothing, or one sentence and some lines below it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array, describe, is_array
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.rows import Call, likeness
from refattn.conformance.diagnosis.single import diagnose
from refattn.conformance.diagnosis.where import any_along
from refattn.conformance.judge import (
    Judgement,
    Place,
    Result,
    error_over_bound,
    form_fault,
    hint_of_float32,
    not_judgeable,
    ratios_of,
    worst_of,
)
from refattn.conformance.targets.base import in_words
from refattn.dtypes import COMPUTED, dtype_name, is_float8
from refattn.errors import ModelError
from refattn.goldens import Golden, golden
from refattn.on_host import host, plain_options, wide
from refattn.rounding import MODELS, ROUNDOFF, Model, described, rounding_model

# Rows on which other readings of the arguments are tried, and numbers of rows and heads that a message lists.
TRIED, LISTED = 32, 8
# Elements times keys up to which a result is diagnosed as a whole, and for so many seconds.
LARGEST, LIMIT_S = 2_000_000, 3.0
# A log-sum-exp in base 2 has been rounded once more.
BASE_2 = 2.0


# The models that are tried where the claimed one does not hold: the wider ones would excuse ordinary faults.
USUAL = ("fused", "worst-case", "unfused", "prescaled", "truncating", "tf32")


class Claim(NamedTuple):
    """What a result is compared with: dtype, model, and whether rounding errors may all go the same way."""

    dtype: str
    model: str | Model
    coherent: bool

    def bound(self, exact: Golden) -> Array:
        """The bound of the output."""
        return exact.bound(*self)


def explained(
    actual: Any,
    q: Array,
    k: Array,
    v: Array,
    options: dict[str, Any],
    *,
    dtype: Any,
    model: str | Model,
    coherent: bool,
    lse: Any,
    rows: Sequence[int] | None,
    diagnosed: bool = True,
) -> str:
    """What is wrong with a result, "" if nothing is; arguments as in `assert_attention_close`.

    diagnosed asks for what the result looks like.
    """
    exact = golden(q, k, v, rows=rows, **options)
    values: dict[str, Array] = {}
    for what, array in (("output", actual), ("log-sum-exp", lse)):
        if array is None and what != "output":
            continue
        if is_array(array):
            values[what] = host(array, "actual" if what == "output" else "lse")
        if what not in values or values[what].dtype == object:
            pair = "; hand over output and log-sum-exp as actual and lse=" * isinstance(array, tuple)
            return f"the {what} is {in_words(array)}, expected an array{pair} [A7]"
    claim = Claim(claimed(dtype, actual), model, coherent)
    rounding_model("float32", model, coherent)  # raises what is wrong with a claim
    own = dtype_name(actual.dtype)
    if own not in COMPUTED:
        return f"the output has dtype {own}, expected {_wanted(q, claim, dtype)} [A4]"
    if lse is not None and dtype_name(lse.dtype) not in COMPUTED:
        return f"the log-sum-exp has dtype {dtype_name(lse.dtype)}, expected a floating one [P4]"
    picked = np.arange(q.shape[-2])[slice(None) if rows is None else np.asarray(rows, dtype=int)]
    output, whole = _of_rows(values["output"], picked, q.shape[-2], axis=-2)
    result = Result(output=wide(output), dtype=claim.dtype)
    if lse is not None:
        sums, _ = _of_rows(values["log-sum-exp"], picked, q.shape[-2], axis=-1)
        result = Result(output=result.output, dtype=claim.dtype, lse=wide(sums), lse_dtype=dtype_name(lse.dtype))
    if fault := _form(exact, result, claim, actual, q, dtype):
        return fault
    place = worst_of(exact, result, *claim)
    if place.ratio <= 1:
        return ""
    shown = _renumbered(place, picked) if whole else place
    numbers = picked if whole else np.arange(len(picked))
    if math.isnan(place.ratio):
        return not_judgeable(shown).message
    diagnosis = _diagnosis(Call(q, k, v, options), exact, result, claim, place, picked) if diagnosed else ""
    return "\n".join([f"{diagnosis}{shown}", *_details(exact, result, claim, place, numbers)])


def claimed(dtype: Any, actual: Array) -> str:
    """The name of the dtype that a result is judged in."""
    if dtype is None:
        return dtype_name(actual.dtype)
    name = ""
    with contextlib.suppress(Exception):  # a foreign object may refuse to be hashed or printed
        name = dtype if isinstance(dtype, str) else dtype_name(dtype)
    if name not in COMPUTED:
        raise ModelError("dtype", f"one of {', '.join(COMPUTED)}", describe(dtype))
    return name


def _wanted(q: Array, claim: Claim, asked: Any) -> str:
    """The dtype that the output should have: that of q unless another is asked for."""
    if asked is not None:
        return claim.dtype
    return "float32" if is_float8(q.dtype) else dtype_name(q.dtype)


def _form(exact: Golden, result: Result, claim: Claim, actual: Array, q: Array, asked: Any) -> str:
    """What is wrong with shapes and dtypes, or ""."""
    own, wanted = dtype_name(actual.dtype), _wanted(q, claim, asked)
    if fault := form_fault(exact, result, claim.dtype):
        turned = np.shape(np.swapaxes(result.output, -2, -3)) if result.output.ndim > 2 else ()
        swapped = "; it seems to be (..., tokens, heads, width)" * (fault[0] == "A1" and turned == exact.output.shape)
        return f"{fault[1]}{swapped}"
    if ROUNDOFF[own] > ROUNDOFF[wanted]:
        advice = f"; say dtype={own!r} if that is meant" if asked is None else ""
        return f"the output has dtype {own}, expected {'that of q, ' * (asked is None)}{wanted} [A4]{advice}"
    return ""


def _diagnosis(call: Call, exact: Golden, result: Result, claim: Claim, place: Place, picked: Array) -> str:
    """What the result looks like, with a semicolon or a colon, or "" """
    if (lost := np.isnan(result.output) & ~np.isnan(exact.output)).any():
        count = f"{np.count_nonzero(lost)} of {lost.size} elements"
        empty = np.isneginf(exact.lse[place.at[:-1]]) if place.what == "output" else False
        return f"the output is NaN in {count}, {'in rows that see no key, ' * bool(empty)}and should not be: "
    if place.what == "output":
        for other in other_models(claim):
            if worst_of(exact, Result(output=result.output, dtype=claim.dtype), *other).ratio <= 1:
                return f"the output is within the bound of model={other.model!r}, not of {named_model(claim.model)}: "
    if np.size(result.output) * exact.k_len <= LARGEST and len(picked) == call.q.shape[-2]:
        judged = Judgement(verdict="fail", error_over_bound=place.ratio, place=place)
        found = diagnose(problem_of_call(call, claim), result, judged, limit_s=LIMIT_S)
        return f"the {'output' if place.what == 'output' else 'log-sum-exp'} {found.sentence}; " if found.name else ""
    if result.lse is not None and place.what != "output":
        base_2 = ratios_of(result.lse * math.log(2), exact.lse, BASE_2 * exact.lse_bound(*claim))
        return "the log-sum-exp is in base 2: " if np.all(base_2 <= 1) else ""
    some = _some(len(picked), place.at[-2])
    few = result.output[..., some, :]

    def fits(reading: Golden) -> bool:
        if reading.output.shape != few.shape:
            return False
        unfused = Claim(claim.dtype, "unfused", True)
        return any(error_over_bound(few, reading.output, one.bound(reading)) <= 1 for one in (claim, unfused))

    words = likeness(call, picked[some], fits)
    return f"the output is that of {words}: " if words else ""


def problem_of_call(call: Call, claim: Claim) -> Problem:
    """A small call with its mask and its biases as plain arrays."""
    given = call.options
    arrays = {name: wide(host(getattr(call, name))) for name in ("q", "k", "v")}
    scale, softcap = (None if given.get(name) is None else float(host(given[name])) for name in ("scale", "softcap"))
    starts = [given.get("q_start"), given.get("k_start", 0)]
    q_start, k_start = (x if x is None or isinstance(x, int) else host(x) for x in starts)
    lengths = (call.q.shape[-2], call.k.shape[-2])
    shown, bias = plain_options(
        given.get("mask"), given.get("bias"), *lengths, 0 if q_start is None else q_start, k_start
    )
    return Problem(
        dtype=claim.dtype,
        causal=bool(given.get("causal")),
        shown=shown,
        bias=bias,
        sinks=None if given.get("sinks") is None else wide(host(given["sinks"])),
        q_start=q_start,
        k_start=k_start,
        coherent=claim.coherent,
        scale=scale,
        softcap=softcap,
        **arrays,
    )


def other_models(claim: Claim) -> Iterator[Claim]:
    """The models that kernels mean most often when they meet another than the one claimed."""
    names = [name for name in USUAL if MODELS[name] != claim.model and name != claim.model]
    yield from (claim._replace(model=name) for name in names)


def _details(exact: Golden, result: Result, claim: Claim, place: Place, numbers: Array) -> Iterator[str]:
    """How much is wrong, and where."""
    if place.what == "output":
        wrong = ratios_of(result.output, exact.output, claim.bound(exact)) > 1
        count = f"{np.count_nonzero(wrong)} of {wrong.size} elements"
        yield f"{count} are beyond the bound of model {named_model(claim.model)} in {claim.dtype}"
        yield from _where("query rows", wrong, wrong.ndim - 2, numbers)
        if wrong.ndim > 2:
            yield from _where("heads", wrong, wrong.ndim - 3, np.arange(wrong.shape[-3]))
        yield from _where("columns", wrong, wrong.ndim - 1, np.arange(wrong.shape[-1]))
        if hint := hint_of_float32(exact, result, claim.dtype):
            yield hint.removeprefix("; ")


def named_model(model: str | Model) -> str:
    """A model in words."""
    return repr(model) if isinstance(model, str) else described(model)


def _where(what: str, wrong: Array, axis: int, numbers: Array) -> Iterator[str]:
    """Which indices of an axis are wrong, unless all are."""
    found = any_along(wrong, axis)
    if not np.all(found):
        listed = [str(number) for number in numbers[found]]
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        yield f"{what}: {', '.join(listed[:LISTED])}{more}"


def _some(count: int, worst: int) -> Array:
    """At most TRIED of so many rows and the worst one."""
    return np.unique([*np.linspace(0, count - 1, min(count, TRIED)).astype(int), worst])


def _of_rows(x: Array, picked: Array, q_len: int, axis: int) -> tuple[Array, bool]:
    """The picked rows of an array that holds all of them or these alone; and whether it held all."""
    whole = x.ndim >= -axis and x.shape[axis] == q_len
    return (np.take(x, picked, axis=axis) if whole else x), whole


def _renumbered(place: Place, picked: Array) -> Place:
    """The place in the array that came, which holds all rows."""
    axis = -2 if place.what == "output" else -1
    at = list(place.at)
    at[axis] = int(picked[at[axis]])
    return place._replace(at=tuple(at))
