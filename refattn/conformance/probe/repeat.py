"""Probes of repeatability (N4): the same call again, alone and in a batch, alone and among rows; side effects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.judge import judge
from refattn.conformance.plain import Draw, causal_pairs
from refattn.conformance.probe.caller import WIDTH, Caller, NotOffered, Seen, Unclear
from refattn.conformance.probe.probes import Probes

PROBES = Probes()
LENGTH = 33
SAME = {
    "same bits": "the bits are the same",
    "other bits": "the last bits differ, within the error bound",
    "other values": "the values differ by more than the error bound allows",
}
# The specification asks for the same bits of the same shape alone.
EITHER = ("same bits", "other bits")


def _problem(call: Caller, seed: int = 3, batch: int = 1) -> Problem:
    draw = Draw(call.dtype, np.random.default_rng(seed))
    return Problem(**draw.qkv(LENGTH, LENGTH, batch=(batch,), d_k=WIDTH))


def _compared(call: Caller, problem: Problem, whole: Array, part: Array) -> str:
    """Whether two outputs of one problem have the same bits, or are both within its bound, or are not."""
    if np.array_equal(whole, part, equal_nan=True):
        return "same bits"
    result = call.result(problem)
    both = [judge(problem, replace(result, output=output)).verdict == "pass" for output in (whole, part)]
    # A target that is wrong in another way may still give nearly the same.
    return "other bits" if all(both) or (not any(both) and call.close(whole, part)) else "other values"


@PROBES.add(
    "two calls",
    "N4",
    {
        "same bits": "the same call gives the same bits",
        "other bits": "the same call gives other bits the second time",
        "remembers": "answers depend on earlier calls, or change with later ones",
    },
)
def two_calls(call: Caller) -> str:
    """33 normal queries and keys: the call twice; another with other data; the first again, and once more with other
    calls before and after it."""
    first, second = _problem(call), _problem(call, seed=4)
    result = call.result(first)
    if np.all(result.output == result.output.flat[0]) or np.all(np.isnan(result.output)):
        raise Unclear("the output is the same everywhere")
    if np.array_equal(call.output(second), result.output, equal_nan=True):
        return "remembers"
    if not np.array_equal(call.output(replace(first, among_others=True)), result.output, equal_nan=True):
        return "other bits" if call.close(call.output(first), result.output) else "remembers"
    same = result.repeated is not False and np.array_equal(call.output(first), result.output, equal_nan=True)
    return "same bits" if same and not call.irreproducible else "other bits"


@PROBES.add("alone and in a batch", "N4", SAME, specified=EITHER)
def in_a_batch(call: Caller) -> str:
    """Three batch entries of 33 normal queries and keys, together and each alone: the outputs."""
    problem = _problem(call, batch=3)
    whole = call.output(problem)
    parts = [call.output(replace(problem, **{n: getattr(problem, n)[b : b + 1] for n in "qkv"})) for b in range(3)]
    return _compared(call, problem, whole, np.concatenate(parts))


@PROBES.add("a row alone", "N4", SAME, specified=EITHER)
def a_row_alone(call: Caller) -> str:
    """33 normal queries and keys, and every fourth query alone: the rows of the output."""
    problem = _problem(call)
    whole = call.output(problem)
    parts = whole.copy()
    for row in range(0, LENGTH, 4):
        parts[..., row : row + 1, :] = call.output(replace(problem, q=problem.q[..., row : row + 1, :]))
    return _compared(call, problem, whole, parts)


@PROBES.add("chunked prefill", "N4", SAME, specified=EITHER)
def chunked_prefill(call: Caller) -> str:
    """33 normal queries and keys, causal, at once, and in chunks of 16, 16 and 1 queries over the keys up to each
    chunk's end, by q_start if that is offered and by a mask otherwise: the outputs."""
    if reason := call.lacks("causal"):
        raise NotOffered(reason)
    by_start = not call.lacks("q_start")
    if not by_start and (reason := call.lacks("mask")):
        raise NotOffered(reason)
    problem = replace(_problem(call), causal=True)
    whole, parts = call.output(problem), []
    for start, stop in ((0, 16), (16, 32), (32, LENGTH)):
        options = (
            {"q_start": start} if by_start else {"causal": False, "shown": causal_pairs(stop - start, stop, start)}
        )
        chunk = {"q": problem.q[..., start:stop, :], "k": problem.k[..., :stop, :], "v": problem.v[..., :stop, :]}
        parts.append(call.output(replace(problem, **chunk, **options)))
    return _compared(call, problem, whole, np.concatenate(parts, axis=-2))


@PROBES.add(
    "writes to inputs",
    "A7",
    {"none": "no call of any probe wrote to its inputs", "writes": "calls write to their inputs"},
)
def writes(call: Caller) -> Seen | str:
    """q, k and v, looked at after every call of all probes."""
    return Seen("writes", f"calls write to {', '.join(sorted(call.changed))}") if call.changed else "none"
