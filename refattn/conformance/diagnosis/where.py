"""Where an answer is wrong: batch entries, heads, rows, columns, keys, and whether they repeat as tiles do."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.diagnosis.evidence import Evidence
from refattn.conformance.judge import ratios_of

LISTED = 8
# A weight that a hidden key has, or by which a visible one is off, to be named.
WEIGHT = 1e-2


def where(evidence: Evidence) -> str:
    """Which elements are wrong, in words; "" where the answer has not even the right shape."""
    golden, result = evidence.golden, evidence.result
    if np.shape(result.output) != golden.output.shape:
        return ""
    wrong = ratios_of(result.output, golden.output, evidence.bound) > 1
    if not wrong.any():
        if result.lse is None or np.shape(result.lse) != golden.lse.shape:
            return ""
        wrong = ratios_of(result.lse, golden.lse, evidence.lse_bound) > 1
        return _words("log-sum-exps", wrong, evidence, lead=1) if wrong.any() else ""
    lost = np.isnan(result.output) & ~np.isnan(golden.output)
    nan = f", {np.count_nonzero(lost)} of them NaN" if lost.any() else ""
    keys = _keys(evidence, np.any(wrong, axis=-1))
    return f"{_words('elements', wrong, evidence, lead=2)}{nan}{'; ' * bool(keys)}{keys}"


def _words(what: str, wrong: Array, evidence: Evidence, lead: int) -> str:
    parts = [f"{np.count_nonzero(wrong)} of {wrong.size} {what} are wrong"]
    row = wrong.ndim - lead
    empty = np.isneginf(evidence.golden.lse)
    rows = wrong.any(axis=-1) if lead == 2 else wrong
    if empty.any() and not rows[~empty].any():
        parts.append("all in rows that see no key")
    axes = [("rows", row)]
    if row > 0 and evidence.problem.q.ndim > 2:
        axes.append(("heads", row - 1))
        axes += [("batch entries", axis) for axis in range(row - 1)]
    if lead == 2:
        axes.append(("columns", wrong.ndim - 1))
    for name, axis in axes:
        found = any_along(wrong, axis)
        if not found.all():
            parts.append(f"{name} {indices_in_words(np.flatnonzero(found), found.size)}")
    return ", ".join(parts)


def any_along(wrong: Array, axis: int) -> Array:
    """Whether each index of an axis has a wrong element."""
    return np.any(wrong, axis=tuple(other for other in range(wrong.ndim) if other != axis))


def indices_in_words(found: Array, size: int) -> str:
    """Indices as a range, a period, or a list: "64 to 127", "3, 7, 11, ... (every 4th)", "0, 5 and 9"."""
    values = [int(one) for one in found]
    steps = set(np.diff(values).tolist())
    if len(values) > 2 and steps == {1}:
        tile = next((n for n in (128, 64, 32, 16) if values[0] % n == 0 and (values[-1] + 1) % n == 0), 0)
        end = "the last" if values[-1] == size - 1 and values[0] else str(values[-1])
        tiles = f" (tiles of {tile} from tile {values[0] // tile} on)" if tile and values[0] else ""
        return f"{values[0]} to {end}{tiles}"
    if len(values) > 2 and len(steps) == 1:
        return f"{values[0]}, {values[1]}, ... (every {steps.pop()} from {values[0]})"
    more = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    return f"{', '.join(map(str, values[:LISTED]))}{more}"


def _keys(evidence: Evidence, rows: Array) -> str:
    """Which keys have the wrong weight in the first wrong row, where the values are independent enough to tell."""
    problem, output = evidence.problem, evidence.result.output
    at = tuple(int(i) for i in np.argwhere(rows)[0])
    group = problem.heads // problem.k.shape[-3] if problem.k.ndim > 2 and problem.k.shape[-3] else 1
    entry: Any = (*at[:-2], at[-2] // group) if problem.v.ndim > 2 else ()
    try:
        values = np.broadcast_to(problem.v, (*output.shape[:-3], *problem.v.shape[-3:]))[entry]
    except ValueError:
        return ""
    if not np.isfinite(values).all() or not np.isfinite(output[at]).all() or not 0 < len(values) <= values.shape[-1]:
        return ""
    if np.linalg.cond(values) > 100:
        return ""
    weights = np.linalg.lstsq(values.T, output[at], rcond=None)[0]
    visible = np.broadcast_to(problem.visible, (*output.shape[:-1], len(values)))[at]
    if problem.bias is not None:
        visible = visible & ~np.isneginf(np.broadcast_to(problem.bias, (*output.shape[:-1], len(values)))[at])
    row = f"row {at[-1]}{f' of head {at[-2]}' if len(at) > 1 and problem.heads > 1 else ''}"
    seen = np.flatnonzero((np.abs(weights) > WEIGHT) & ~visible)
    unseen = np.flatnonzero((np.abs(weights) < 1e-9) & visible)
    parts = [f"sees key {indices_in_words(seen, len(values))}, hidden from it"] if seen.size else []
    parts += [f"does not see key {indices_in_words(unseen, len(values))}, visible to it"] if unseen.size else []
    return f"{row} {' and '.join(parts)}" if parts else ""
