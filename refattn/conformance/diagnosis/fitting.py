"""Numbers fitted to an answer: effective scale, soft cap, factors, offsets, bases, positions and mappings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.evidence import Evidence
from refattn.conformance.diagnosis.hypotheses import Hypothesis
from refattn.conformance.diagnosis.readings import but, few_keys, moved_causal, reading, right_answer, windows
from refattn.conformance.diagnosis.words import facts
from refattn.conformance.judge import Result, ratios_of

# First guesses of a factor, and steps of Gauss and Newton's method from the best.
GUESSES = tuple(sign * 2.0 ** (power / 2) for sign in (1, -1) for power in range(-8, 9))
CAPS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
STEPS = 12
# Calls beyond so many pairs of query and key are not fitted; keys dropped, keys moved and heads that are tried.
LARGEST, REACH, MOST = 50_000, 8, 64


def fitted(evidence: Evidence) -> Iterator[Hypothesis]:
    """Hypotheses whose numbers are taken from one answer; whether they fit it is left to the caller."""
    problem, result = evidence.problem, evidence.result
    if np.shape(result.output) != evidence.golden.output.shape or evidence.size > LARGEST:
        return
    if evidence.right.output <= 1:
        yield from _log_sum_exps(evidence)
        return
    if problem.causal:
        yield from (moved_causal(by) for step in range(2, REACH + 1) for by in (step, -step))
    yield from windows()
    yield from _heads(evidence)
    yield from _rearranged(evidence)
    yield from _factors(evidence)
    for count in range(1, min(REACH, problem.k.shape[-2] - 1) + 1):
        yield from (few_keys(0, count), few_keys(count, 0))
    yield from _scales(evidence)


def _scales(evidence: Evidence) -> Iterator[Hypothesis]:
    """The scale, the soft cap, the bias or the sinks, times a factor."""
    problem = evidence.problem
    yield from _best(evidence, lambda factor: _another_scale(problem, factor), GUESSES)
    if problem.softcap is None:
        yield from _best(evidence, _cap_unasked, CAPS)
    else:
        positive = [guess for guess in GUESSES if guess > 0]
        yield from _best(evidence, lambda factor: _another_cap(problem, factor), positive)
    if problem.bias is not None:
        yield from _best(evidence, lambda factor: _times("bias", "B4", "the bias acts", factor), GUESSES)
    if problem.sinks is not None:
        yield from _best(evidence, lambda factor: _times("sinks", "P3", "sinks act", factor), GUESSES)


def _another_scale(asked: Problem, factor: float) -> Hypothesis:
    def words(p: Problem) -> str:
        right = facts(p)["scale"]
        return f"the effective scale is {factor * right:.6g}, {factor:.5g} times the expected {right:.6g}"

    def change(p: Problem) -> Problem:
        return but(p, scale=factor * facts(p)["scale"])

    expected = facts(asked)["scale"] or 1.0
    return reading("another scale", "S1" if asked.scale is None else "S2", words, change, scale=factor * expected)


def _another_cap(asked: Problem, factor: float) -> Hypothesis:
    def words(p: Problem) -> str:
        return f"the soft cap acts as {factor * facts(p)['softcap']:.6g} instead of {facts(p)['softcap']:.6g}"

    def change(p: Problem) -> Problem:
        return but(p, softcap=None if p.softcap is None else factor * p.softcap)

    return reading("another soft cap", "S3", words, change, softcap=factor * facts(asked)["softcap"])


def _cap_unasked(value: float) -> Hypothesis:
    words = f"scores are capped at {value:.6g}, which was not asked for"
    return reading("soft cap unasked", "S3", words, lambda p: but(p, softcap=value), softcap=value)


def _times(name: str, clause: str, acts: str, factor: float) -> Hypothesis:
    def change(p: Problem) -> Problem:
        values = getattr(p, name)
        return p if values is None else but(p, **{name: np.where(np.isfinite(values), values * factor, values)})

    return reading(f"{name} times a factor", clause, f"{acts} times {factor:.5g}", change, **{name: factor})


def _best(evidence: Evidence, make: Callable[[float], Hypothesis], guesses: Any) -> Iterator[Hypothesis]:
    """The hypothesis whose number fits best: the best guess, improved by steps along its derivative."""
    actual = evidence.result.output
    usable = np.isfinite(actual) & np.isfinite(evidence.golden.output)
    if not usable.any():
        return

    def miss(value: float) -> Array | None:
        predicted = make(value).predict(evidence.problem)
        if predicted is None or predicted.output.shape != actual.shape:
            return None
        return np.where(np.isfinite(predicted.output), predicted.output, 0.0)[usable] - actual[usable]

    def size(x: Array | None) -> float:
        return math.inf if x is None else float(np.sum(x * x))

    value = min(guesses, key=lambda guess: size(miss(guess)))
    error = miss(value)
    if error is None:
        return
    for _ in range(STEPS):
        step = 1e-4 * abs(value)
        moved = miss(value + step)
        if moved is None or not (slope := (moved - error) / step).any():
            break
        nearer = value - float(np.sum(slope * error) / np.sum(slope * slope))
        if size(found := miss(nearer)) >= size(error):
            break
        value, error = nearer, found
        assert error is not None
    yield make(value)


def _factors(evidence: Evidence) -> Iterator[Hypothesis]:
    """The right output times a factor, or plus a constant."""
    actual, right = evidence.result.output, evidence.golden.output
    usable = np.isfinite(actual) & np.isfinite(right)
    power = float(np.sum(right[usable] ** 2))
    if power:
        factor = float(np.sum(actual[usable] * right[usable])) / power
        yield _of_output(
            "output times a factor",
            f"the output is {factor:.5g} times what it should be",
            lambda x: x * factor,
            output_times=factor,
        )
    if usable.any():
        constant = float(np.mean(actual[usable] - right[usable]))
        yield _of_output(
            "output plus a constant",
            f"the output is {constant:.5g} too large everywhere",
            lambda x: x + constant,
            output_plus=constant,
        )


def _rearranged(evidence: Evidence) -> Iterator[Hypothesis]:
    """Batch entries, heads, rows or columns of the right output in another order."""
    actual, right = evidence.result.output, evidence.golden.output
    names = {-1: "columns", -2: "rows", -3: "heads", -4: "batch entries"}
    for axis, what in names.items():
        if actual.ndim < -axis or not 1 < actual.shape[axis] <= MOST:
            continue
        order = []
        for index in range(actual.shape[axis]):
            one = np.take(actual, [index], axis=axis)
            ratios = ratios_of(*np.broadcast_arrays(one, right, evidence.bound))
            axes = tuple(other for other in range(ratios.ndim) if other != ratios.ndim + axis)
            worst = np.max(np.where(np.isnan(ratios), 0.0, ratios), axis=axes)
            order.append(index if worst[index] <= 1 else int(np.argmin(worst)))
        if order == sorted(set(order)):
            continue

        def take(x: Array, order: list[int] = order, axis: int = axis) -> Array | None:
            return np.take(x, order, axis=axis) if x.ndim >= -axis and x.shape[axis] == len(order) else None

        words = f"the output's {what} are those of {what} {_listed(order)} in this order"
        yield _of_output(f"{what} in another order", words, take, order=order)


def _heads(evidence: Evidence) -> Iterator[Hypothesis]:
    """Another mapping of query heads to key/value heads."""
    problem = evidence.problem
    if problem.k.ndim < 3 or not 1 < problem.k.shape[-3] <= MOST:
        return
    heads, kv_heads = problem.heads, problem.k.shape[-3]
    worst = np.zeros((kv_heads, heads))
    for kv_head in range(kv_heads):
        one = {name: getattr(problem, name)[..., kv_head : kv_head + 1, :, :] for name in "kv"}
        predicted = right_answer(but(problem, **one), problem.dtype).output
        if predicted.shape != evidence.result.output.shape:
            return
        ratios = ratios_of(evidence.result.output, predicted, evidence.bound)
        axes = tuple(axis for axis in range(ratios.ndim) if axis != ratios.ndim - 3)
        worst[kv_head] = np.max(np.where(np.isnan(ratios), 0.0, ratios), axis=axes)
    expected = [head // (heads // kv_heads) for head in range(heads)]
    mapping = [one if worst[one, head] <= 1 else int(np.argmin(worst[:, head])) for head, one in enumerate(expected)]
    if mapping == expected:
        return

    def change(p: Problem) -> Problem | None:
        if (p.heads, p.k.shape[-3] if p.k.ndim > 2 else 1) != (heads, kv_heads):
            return None
        return but(p, k=p.k[..., mapping, :, :], v=p.v[..., mapping, :, :])

    words = f"query heads 0, 1, ... read key/value heads {_listed(mapping)} instead of {_listed(expected)}"
    yield reading("another mapping of heads", "G1", words, change, heads=mapping)


def _log_sum_exps(evidence: Evidence) -> Iterator[Hypothesis]:
    """The log-sum-exp times a factor, which is a base, or plus a constant."""
    lse = evidence.result.lse
    if lse is None or np.shape(lse) != evidence.golden.lse.shape:
        return
    usable = np.isfinite(lse) & np.isfinite(evidence.golden.lse)
    if not usable.any():
        return
    actual, right = lse[usable], evidence.golden.lse[usable]
    if power := float(np.sum(right**2)):
        factor = float(np.sum(actual * right)) / power
        base = math.exp(1 / factor) if factor > 0.02 else math.nan
        words = f"the log-sum-exp is {factor:.6g} times the natural one, as one in base {base:.4g} is"
        yield _of_lse("log-sum-exp in another base", words, lambda x: x * factor, lse_times=factor, lse_base=base)
    constant = float(np.mean(actual - right))
    words = f"the log-sum-exp is {constant:.6g} too large everywhere"
    yield _of_lse("log-sum-exp plus a constant", words, lambda x: x + constant, lse_plus=constant)


def _of_output(name: str, says: str, change: Callable[[Array], Array | None], **fitted: Any) -> Hypothesis:
    def predict(problem: Problem) -> Result | None:
        right = right_answer(problem, problem.dtype)
        with np.errstate(all="ignore"):  # infinities times a factor of 0
            changed = change(right.output)
        return None if changed is None else Result(output=changed, dtype=problem.dtype)

    return Hypothesis(names=(name,), clauses=("N6",), predict=predict, says=lambda _: says, fitted=fitted)


def _of_lse(name: str, says: str, change: Callable[[Array], Array], **fitted: Any) -> Hypothesis:
    def predict(problem: Problem) -> Result | None:
        right = right_answer(problem, problem.dtype)
        return Result(output=right.output, dtype=problem.dtype, lse=change(right.lse), lse_dtype="float64")

    return Hypothesis(names=(name,), clauses=("P4",), predict=predict, says=lambda _: says, fitted=fitted)


def _listed(values: list[int]) -> str:
    return f"{', '.join(map(str, values[:REACH]))}{', ...' * (len(values) > REACH)}"
