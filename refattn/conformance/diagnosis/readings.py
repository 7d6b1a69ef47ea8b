"""Other readings of a call, beyond the catalogue: the specification's answer to a call that was not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.hypotheses import Hypothesis
from refattn.conformance.diagnosis.words import facts
from refattn.conformance.judge import Result, golden_of
from refattn.conformance.plain import positions

# Another call instead of this one; None where there is none.
Change = Callable[[Problem], Problem | None]
NUMBERS = {1: "one", 2: "two", 3: "three"}


def reading(name: str, clause: str, words: str | Callable[[Problem], str], change: Change, **fitted: Any) -> Hypothesis:
    """The hypothesis that a kernel answers another call than the one that was made."""

    def predict(problem: Problem) -> Result | None:
        other = change(problem)
        return None if other is None else right_answer(other, problem.dtype)

    def says(problem: Problem) -> str:
        return words.format(**facts(problem)) if isinstance(words, str) else words(problem)

    return Hypothesis(names=(name,), clauses=(clause,), predict=predict, says=says, fitted=fitted)


def right_answer(problem: Problem, dtype: str) -> Result:
    """The specification's answer to a problem."""
    golden = golden_of(problem)
    return Result(output=golden.output, dtype=dtype, lse=golden.lse, lse_dtype="float64")


def but(problem: Problem, **changes: Any) -> Problem:
    """The same problem with other arguments; what is certified or known of it no longer holds."""
    return replace(problem, **{"mask": None, "bias_of": None, "certified": {}, "known": {}, **changes})


@cache
def readings() -> tuple[Hypothesis, ...]:
    """Readings without numbers to fit."""
    return (
        reading("mask is ignored", "M1", "the mask is ignored; False hides its pair", lambda p: but(p, shown=None)),
        reading("scale of 1", "S2", "the scale is 1 instead of {scale:.6g}", lambda p: but(p, scale=1.0)),
        reading(
            "causal from the top left, unasked",
            "M4",
            "a causal rule, aligned top-left, that was not asked for",
            lambda p: None if p.causal else but(p, causal=True, q_start=0, k_start=0),
        ),
        reading(
            "causal from the bottom right, unasked",
            "M4",
            "a causal rule, aligned bottom-right, that was not asked for",
            lambda p: None if p.causal else but(p, causal=True, q_start=p.k.shape[-2] - p.q.shape[-2], k_start=0),
        ),
        reading("keys in reverse", "S1", "k is read with its tokens in reverse", _changed("k", np.flip, axis=-2)),
        reading("values in reverse", "S1", "v is read with its tokens in reverse", _changed("v", np.flip, axis=-2)),
        *(
            reading(
                f"{what} {words}",
                "S1",
                f"token j of {name} is read as token j {'-+'[by < 0]} 1",
                _changed(name, np.roll, shift=by, axis=-2),
            )
            for name, what in (("k", "keys"), ("v", "values"))
            for by, words in ((1, "one token late"), (-1, "one token early"))
        ),
        *(
            reading(
                f"tokens and heads of {name} swapped",
                "A2",
                f"{name} is read as if its memory were (tokens, heads, width); here it is (heads, tokens, width)",
                _changed(name, _tokens_first),
            )
            for name in ("q", "k", "v")
        ),
        reading(
            "tokens and heads of q, k and v swapped",
            "A2",
            "q, k and v are read as if their memory were (tokens, heads, width); here it is (heads, tokens, width)",
            lambda p: but(p, **{name: _tokens_first(getattr(p, name)) for name in "qkv"}),
        ),
        *(
            reading(
                f"{name} is transposed in memory",
                "A2",
                f"{name} is read with tokens and width exchanged in memory",
                _changed(name, lambda x: np.swapaxes(x, -1, -2).reshape(x.shape)),
            )
            for name in ("q", "v")
        ),
        _axes_exchanged(),
        reading("queries and keys exchanged", "S1", "q and k are exchanged", _exchanged("q", "k")),
        reading("keys and values exchanged", "S1", "k and v are exchanged", _exchanged("k", "v")),
    )


def _axes_exchanged() -> Hypothesis:
    """The axes of heads and tokens taken for each other, where sizes allow it and no mask or bias speaks against it."""

    def predict(problem: Problem) -> Result | None:
        q_len, k_len = problem.q.shape[-2], problem.k.shape[-2]
        square = problem.shown is None and problem.bias is None and problem.sinks is None
        if not square or min(problem.q.ndim, problem.k.ndim) < 3 or not k_len or (q_len > k_len and q_len % k_len):
            return None
        # Of more "key heads" than query heads, head h reads key head h.
        turned = {name: np.swapaxes(getattr(problem, name), -2, -3)[..., : max(q_len, 1), :, :] for name in "qkv"}
        found = right_answer(but(problem, **turned), problem.dtype)
        assert found.lse is not None
        return replace(found, output=np.swapaxes(found.output, -2, -3), lse=np.swapaxes(found.lse, -1, -2))

    words = (
        "heads are taken for tokens and tokens for heads: arrays are (..., heads, tokens, width); swap these axes, or "
        "let --convention name the layout, such as flash-attn's"
    )
    return Hypothesis(
        names=("axes of heads and tokens exchanged",), clauses=("A1",), predict=predict, says=lambda _: words
    )


def moved_causal(by: int) -> Hypothesis:
    """The causal rule with its diagonal moved by so many keys."""

    def change(problem: Problem) -> Problem | None:
        start = 0 if problem.q_start is None else problem.q_start
        return but(problem, q_start=start + by) if problem.causal else None

    def words(problem: Problem) -> str:
        start = facts(problem)["q_start"]
        keys = f"{NUMBERS.get(abs(by), abs(by))} key{'s' * (abs(by) > 1)} too {'many' if by > 0 else 'few'}"
        moved = f"q_start={start + by} instead of {start}, " if isinstance(start, int) else ""
        return f"the causal rule shows {keys}, {moved}Lq={problem.q.shape[-2]}, Lk={problem.k.shape[-2]}"

    return reading(f"causal moved by {by}", "M4", words, change, causal_moved_by=by)


def other_window(left: int, right: int) -> Hypothesis:
    """A sliding window that reaches so many keys further to the left and to the right."""

    def change(problem: Problem) -> Problem | None:
        band = window_of(problem)
        if band is None:
            return None
        offsets, reach = _offsets(problem), [band[0], band[1]]
        shown = np.ones(offsets.shape, dtype=bool)
        if reach[0] is not None:
            shown &= offsets >= -(reach[0] + left)
        if reach[1] is not None:
            shown &= offsets <= reach[1] + right
        return but(problem, shown=shown)

    def words(problem: Problem) -> str:
        parts = []
        for by, side, reach in zip((left, right), ("left", "right"), window_of(problem) or (None, None)):
            if by and reach is not None:
                keys = f"{NUMBERS.get(abs(by), abs(by))} key{'s' * (abs(by) > 1)} too {'wide' if by > 0 else 'narrow'}"
                see = f"rows see keys up to {reach + by} to the {side} where the window has {side}={reach}"
                parts.append(f"your window is {keys}: {see}")
        return ", and ".join(parts)

    name = ", ".join(f"{side} {by:+d}" for side, by in (("left", left), ("right", right)) if by)
    return reading(f"window of another width ({name})", "M6", words, change, window_left_by=left, window_right_by=right)


def window_of(problem: Problem) -> tuple[int | None, int | None] | None:
    """(left, right) of a mask that is a sliding window, None for a side without end; None for another mask."""
    if problem.shown is None or not problem.shown.any() or problem.shown.all():
        return None
    if any(size > 1 for size in problem.shown.shape[:-2]) or not (
        isinstance(problem.k_start, int) and isinstance(problem.q_start, int | None)
    ):
        return None
    offsets = _offsets(problem)
    shown = np.broadcast_to(problem.shown, (*problem.shown.shape[:-2], *offsets.shape)).reshape(offsets.shape)
    least, most = int(offsets[shown].min()), int(offsets[shown].max())
    if not np.array_equal(shown, (offsets >= least) & (offsets <= most)):
        return None
    left = None if least == offsets.min() else -least
    right = None if most == offsets.max() else most
    return (left, right)


def few_keys(first: int, last: int) -> Hypothesis:
    """So many of the first and of the last keys are not read."""

    def change(problem: Problem) -> Problem | None:
        k_len = problem.k.shape[-2]
        if first + last >= k_len:
            return None
        kept = np.arange(k_len)
        kept = (kept >= first) & (kept < k_len - last)
        return but(problem, shown=kept[None, :] if problem.shown is None else problem.shown & kept)

    count, end = (first, "first") if first else (last, "last")
    what = f"the {end} key is" if count == 1 else f"the {end} {count} keys are"
    return reading(f"{what} not read", "P1", f"{what} not read", change, keys_dropped=count)


def windows() -> Iterator[Hypothesis]:
    """Windows a few keys wider or narrower, one side alone first."""
    steps = (1, -1, 2, -2)
    yield from (other_window(by, 0) for by in steps)
    yield from (other_window(0, by) for by in steps)
    yield from (other_window(left, right) for left in steps for right in steps)


def _offsets(problem: Problem) -> Array:
    """Key position minus query position, (Lq, Lk)."""
    start = 0 if problem.q_start is None else problem.q_start
    query, key = positions(problem.q.shape[-2], problem.k.shape[-2], start, problem.k_start)
    return key - query


def _changed(name: str, function: Callable[..., Array], **options: Any) -> Change:
    return lambda problem: but(problem, **{name: np.ascontiguousarray(function(getattr(problem, name), **options))})


def _tokens_first(x: Array) -> Array:
    """The memory of (heads, tokens) read as (tokens, heads)."""
    if x.ndim < 3:
        return x
    heads, tokens, width = x.shape[-3:]
    return np.swapaxes(x.reshape(*x.shape[:-3], tokens, heads, width), -2, -3)


def _exchanged(first: str, second: str) -> Change:
    def change(problem: Problem) -> Problem | None:
        x, y = getattr(problem, first), getattr(problem, second)
        return but(problem, **{first: y, second: x}) if x.shape == y.shape else None

    return change
