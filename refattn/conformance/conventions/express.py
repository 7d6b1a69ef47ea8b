"""From a problem to the arguments of a call in some convention, all of it on the host and before any library is asked.

What the convention has a parameter for is said by that parameter; the rest is written into the mask, if it has one.
What is left makes the problem unsupported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.conventions.convention import DEFAULT, NONE, Bias, Convention, Mask
from refattn.conformance.plain import numbers_of


class Lacking(Unsupported):
    """Something that a convention has no words for; `missing` is what."""

    def __init__(self, convention: str, missing: str, why: str = "") -> None:
        super().__init__(f"the convention {convention} cannot express {missing}{why}", (missing,))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a problem asks beside q, k and v, with exactly one batch axis: B entries, H heads, Lq queries, Lk keys."""

    problem: Problem
    batch: tuple[int, ...]
    entries: int
    # Position of the first query minus that of the first key, (B,); None where the problem leaves it open.
    offset: Array | None
    # (B, H, Lq, Lk): what the mask shows, what the mask and the causal rule show, and the summands.
    shown: Array | None
    visible: Array
    bias: Array | None
    counts: Array | None
    # Which number of the problem's own bias stands at each pair, (B, H, Lq, Lk).
    numbers: Array | None

    @classmethod
    def of(cls, problem: Problem) -> Parts:
        """The parts of a problem."""
        batch, (q_len, k_len) = problem.batch, problem.scores_shape[-2:]
        entries = math.prod(batch)

        def pairs(x: Array | None) -> Array | None:
            if x is None:
                return None
            whole = np.broadcast_to(x, (*batch, problem.heads, q_len, k_len))
            return whole.reshape(entries, problem.heads, q_len, k_len)

        def each(x: Any) -> Array:
            return np.broadcast_to(np.asarray(x), batch).reshape(entries)

        open_start = problem.q_start is None and (q_len != k_len or "k_start" in problem.needs)
        start = 0 if problem.q_start is None else problem.q_start
        visible = pairs(problem.visible)
        assert visible is not None
        return cls(
            problem=problem,
            batch=batch,
            entries=entries,
            offset=None if open_start else each(start) - each(problem.k_start),
            shown=pairs(problem.shown),
            visible=visible,
            bias=pairs(problem.bias),
            counts=None if problem.counts is None else each(problem.counts),
            numbers=None if problem.bias is None else pairs(numbers_of(problem.bias)),
        )

    def entry(self, b: int) -> Parts:
        """One batch entry alone."""
        chosen: dict[str, Any] = {
            name: None if (x := getattr(self, name)) is None else x[b : b + 1]
            for name in ("offset", "shown", "visible", "bias", "counts", "numbers")
        }
        return replace(self, batch=(1,), entries=1, **chosen)

    @property
    def q_len(self) -> int:
        """Lq."""
        return int(self.problem.q.shape[-2])

    @property
    def k_len(self) -> int:
        """Lk."""
        return int(self.problem.k.shape[-2])


def features_of(convention: Convention) -> frozenset[str]:
    """What a convention can express of `Problem.needs`, sometimes at least; `express` knows what when."""
    found = {name for name in ("scale", "softcap", "sinks") if getattr(convention.names, name)}
    found |= {"q_start", "k_start"}
    found |= {"causal"} if convention.causal or convention.mask else set()
    found |= {"mask"} if convention.mask or convention.window or convention.lengths or convention.packed else set()
    found |= {"bias"} if convention.bias or convention.alibi else set()
    found |= {"gqa"} if convention.grouped else set()
    found |= {"lse"} if convention.lse else set()
    return frozenset(found)


def express(convention: Convention, parts: Parts) -> dict[str, Any]:
    """Parameter -> value, for all but q, k, v and the output; host arrays, those of float64 in the problem's dtype.

    Raises Lacking.
    """
    problem, options, bias = parts.problem, dict(convention.fixed), parts.bias
    if problem.slopes is not None and convention.alibi and _aligned(convention, parts, parts.k_len):
        options |= {convention.alibi.name: problem.slopes.astype(np.float32), **_starts(convention, parts)}
        bias = None
    elif bias is not None and convention.bias is None:
        raise Lacking(convention.name, "bias")
    options |= _visibility(convention, parts, bias)
    for name in ("scale", "softcap"):
        if (value := getattr(problem, name)) is not None:
            options[getattr(convention.names, name)] = value
    if problem.sinks is not None and convention.names.sinks:
        options[convention.names.sinks] = np.broadcast_to(problem.sinks, (problem.heads,))
    for what, need in (("grouped", "gqa"), ("lse", "lse")):
        if need in problem.needs:
            options |= convention.ask.get(what, {})
    for argument, value in convention.off.items():
        if argument == "scale" and value == DEFAULT:
            d_k = problem.q.shape[-1]
            value = d_k**-0.5 if d_k else 1.0
        options |= {name: value for name in convention.parameters(argument) if name not in options}
    return options


def _visibility(convention: Convention, parts: Parts, bias: Array | None) -> dict[str, Any]:
    """Causal, window, lengths, mask and bias."""
    mask, summands = convention.mask, convention.bias
    shared = bias is not None and mask is not None and summands is not None and mask.name == summands.name
    if (said := _by_parameters(convention, parts, beside_a_mask=shared)) is not None:
        return said | (_biased(convention, summands, bias) if bias is not None and summands else {})
    if mask is None:
        raise Lacking(convention.name, *_what_lacks(convention, parts))
    said, pairs = {}, parts.visible
    if parts.problem.causal and parts.shown is not None and convention.causal and convention.causal.with_mask:
        causal = _causal(convention, parts, parts.k_len)
        said, pairs = ({}, parts.visible) if causal is None else (causal, parts.shown)
    if shared and summands is not None and bias is not None:
        return said | _biased(convention, summands, np.where(pairs, bias, -np.inf))
    if bias is not None and summands is not None:
        said |= _biased(convention, summands, bias)
    return said | _masked(convention, mask, pairs)


def _by_parameters(convention: Convention, parts: Parts, beside_a_mask: bool) -> dict[str, Any] | None:
    """Everything that is visible, without a mask; None if that cannot be said."""
    problem = parts.problem
    if parts.shown is not None and problem.window is None and parts.counts is None:
        return None
    said: dict[str, Any] = {}
    ends: Any = parts.k_len
    if parts.counts is not None:
        ends = parts.counts
        if convention.lengths is not None:
            said[convention.lengths.name] = parts.counts
        if convention.packed is None and (
            convention.lengths is None or (beside_a_mask and not convention.lengths.with_mask)
        ):
            return None
    if problem.causal:
        causal = _causal(convention, parts, ends)
        if causal is None or (beside_a_mask and convention.causal and not convention.causal.with_mask):
            return None
        said |= causal
    if problem.window is not None:
        window = _window(convention, parts, ends)
        if window is None or (beside_a_mask and convention.window and not convention.window.with_mask):
            return None
        said |= window
    return said


def _aligned(convention: Convention, parts: Parts, ends: Any) -> bool:
    """Whether the positions are those that the convention means; `ends` counts the keys, also per entry."""
    if parts.offset is None:
        return True  # the problem asks how the implementation reads it
    if convention.aligns == "q_start":
        return bool(np.all(parts.offset == parts.offset[:1]))
    expected = 0 if convention.aligns == "top-left" else ends - parts.q_len
    return bool(np.all(parts.offset == expected))


def _starts(convention: Convention, parts: Parts) -> dict[str, Any]:
    """q_start and k_start, where the convention takes them; their difference, where it takes the former alone."""
    names, offset = convention.names, parts.offset
    if convention.aligns != "q_start" or offset is None or not offset.size:
        return {}
    k_start = int(np.asarray(parts.problem.k_start).reshape(-1)[0]) if names.k_start else 0
    starts = {names.q_start: int(offset[0]) + k_start} if names.q_start else {}
    return starts | ({names.k_start: k_start} if names.k_start else {})


def _causal(convention: Convention, parts: Parts, ends: Any) -> dict[str, Any] | None:
    if convention.causal is None or not _aligned(convention, parts, ends):
        return None
    said = {convention.causal.name: convention.causal.value, **convention.ask.get("causal", {})}
    return said | _starts(convention, parts)


def _window(convention: Convention, parts: Parts, ends: Any) -> dict[str, Any] | None:
    """The window's parameters; those of causal too, where it stands for the side after the query."""
    table, sides = convention.window, parts.problem.window
    if table is None or sides is None or not _aligned(convention, parts, ends):
        return None
    left, right = sides
    right = 0 if parts.problem.causal else right
    one_sided = table.pair is None and table.right is None
    if right != 0 and not table.ahead and not (right is None and table.left and not table.right):
        return None
    if one_sided and right != 0 and not (table.left and right is None):
        return None
    needs_causal = right == 0 and (one_sided or table.needs_causal)
    causal = _causal(convention, parts, ends) if needs_causal else {}
    open_side = None if table.unbounded == NONE else table.unbounded
    if causal is None or (table.unbounded is None and (left is None or (right is None and not one_sided))):
        return None
    behind, ahead = (open_side if side is None else side for side in (left, right))
    said = {**causal, **convention.ask.get("window", {}), **_starts(convention, parts)}
    if table.pair:
        return said | {table.pair: (behind, ahead)}
    if table.left:
        return said | {table.left: behind} | ({table.right: ahead} if table.right else {})
    assert table.size is not None
    return said | {table.size: open_side if left is None else left + table.counts_self}


def _what_lacks(convention: Convention, parts: Parts) -> tuple[str, str]:
    """Which option it is that cannot be expressed, and why, for want of a mask."""
    problem = parts.problem
    if parts.shown is not None and problem.window is None and parts.counts is None:
        return "mask", ""
    if parts.counts is not None and not (convention.lengths or convention.packed):
        return "lengths", ""
    if problem.window is not None and convention.window is None:
        return "window", ""
    ends: Any = parts.k_len if parts.counts is None else parts.counts
    if _aligned(convention, parts, ends):
        return ("window", f" {problem.window}") if problem.window is not None else ("causal", "")
    return "q_start", f"={np.asarray(problem.q_start).tolist()}, its positions being aligned {convention.aligns}"


def _masked(convention: Convention, mask: Mask, pairs: Array) -> dict[str, Any]:
    if mask.means == "added":
        pairs = np.where(pairs, 0.0, -np.inf)
    elif mask.means == "hidden":
        pairs = ~pairs
    return {mask.name: _shaped(convention, pairs, mask.axes, mask.broadcasts, "mask")}


def _biased(convention: Convention, table: Bias, bias: Array) -> dict[str, Any]:
    return {table.name: _shaped(convention, bias, table.axes, table.broadcasts, "bias")}


def _shaped(convention: Convention, pairs: Array, axes: str, broadcasts: bool, what: str) -> Array:
    """(B, H, Lq, Lk) with the axes of the convention; the others must make no difference."""
    for axis, letter in enumerate("BHQK"):
        first = pairs[tuple(slice(0, 1) if one == axis else slice(None) for one in range(4))]
        alike = bool(np.array_equal(pairs, np.broadcast_to(first, pairs.shape), equal_nan=pairs.dtype.kind == "f"))
        if letter not in axes and not alike:
            raise Lacking(convention.name, what, f" that differs along {letter}, its axes being {axes}")
        if letter not in axes or (letter in "BH" and broadcasts and alike):
            pairs = first
    dropped = tuple(axis for axis, letter in enumerate("BHQK") if letter not in axes)
    return np.array(pairs[tuple(0 if axis in dropped else slice(None) for axis in range(4))])
