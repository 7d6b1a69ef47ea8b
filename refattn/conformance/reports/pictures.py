"""What a failing case looks like: who sees whom, what was expected, what came, and by how much it is off.

Of several heads the worst one is drawn. Larger matrices are cut to what lies around the worst element, except
visibility, where a cell then stands for a block of pairs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.judge import Place, golden_of, ratios_of, worst_place
from refattn.conformance.reports.heatmap import Axis, Kind, Scale, heatmap, shrunk

# Rows and columns that are drawn of a larger matrix.
MOST = 64
LOOKS = ("n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4")
MIDDLE = len(LOOKS) // 2
NUMBERS = (
    *(Kind(look, "") for look in LOOKS),
    Kind("n5", "below the scale"),
    Kind("p5", "above the scale"),
    Kind("bad", "NaN", "cross"),
    Kind("bad", "infinity", "plus"),
    Kind("bad", "-infinity", "minus"),
)
BELOW, ABOVE, NAN, UP, DOWN = range(len(LOOKS), len(NUMBERS))
ERRORS = (
    Kind("s0", "within the bound"),
    Kind("s1", "up to 10 times the bound"),
    Kind("s2", "up to 100 times the bound"),
    Kind("s3", "up to 1000 times the bound"),
    Kind("s4", "more than 1000 times the bound"),
    Kind("s4", "wrong where no error is allowed", "slash"),
    Kind("bad", "wrong NaN or infinity", "cross"),
    Kind("open", "not judgeable", "dot"),
)
INEXACT, WRONG, OPEN = 5, 6, 7
PAIRS = (Kind("z", "hidden"), Kind("w3", "some of the block visible"), Kind("w6", "visible"))


class Picture(NamedTuple):
    """A picture with its heading, and a note on what it leaves out."""

    heading: str
    svg: str
    note: str = ""


class Part(NamedTuple):
    """One of the results, with its worst place, the bounds on it, and what its last two axes count."""

    place: Place
    actual: Array
    expected: Array
    bound: Array
    axes: tuple[str, str]


def pictures_of(evidence: Any, name: str) -> tuple[list[Picture], str]:
    """Pictures of a failure and a sentence on what they show; name begins the ids in their SVG."""
    problem, result = evidence
    golden = golden_of(problem, weights=result is not None and result.weights is not None)
    parts = [] if result is None else _parts(problem, result, golden)
    worst = max(parts, key=lambda part: _rank(part.place.ratio), default=None)
    leading = golden.lse.shape[:-1]
    head = (0,) * len(leading) if worst is None else _head(worst, len(leading))
    where = _in_words(head, leading)
    row = None if worst is None else worst.place.at[len(leading)]
    drawn = _visibility(problem, golden, head, row, name)
    if worst is None:
        return drawn, f"No result of the expected shape came{where and drawn and f'; drawn is {where}' or ''}."
    if worst.place.ratio <= 1:
        return [], "Every number is within its bound, so there is nothing to draw."
    count = int(np.sum(~(ratios_of(worst.actual, worst.expected, worst.bound) <= 1)))
    what = {"output": "elements of the output", "log-sum-exp": "log-sum-exps", "weight": "weights"}[worst.place.what]
    says = f"{count:,} of {worst.actual.size:,} {what} are beyond the bound"
    return drawn + _compared(worst, name), f"{says}{where and f'; drawn is the worst head, {where}'}."


def _rank(ratio: float) -> float:
    return 1.0 if math.isnan(ratio) else ratio


def _parts(problem: Any, result: Any, golden: Any) -> list[Part]:
    """The results that have the expected shape, each with its worst place, under the fused model."""
    offered = [
        ("output", result.output, golden.output, golden.bound, ("query", "width")),
        ("log-sum-exp", result.lse, golden.lse, golden.lse_bound, ("head", "query")),
        ("weight", result.weights, golden.weights, golden.weights_bound, ("query", "key")),
    ]
    parts = []
    for what, actual, expected, bound_of, axes in offered:
        if actual is None or expected is None or np.shape(actual) != expected.shape or not expected.size:
            continue
        bound = np.broadcast_to(bound_of(problem.dtype, "fused", problem.coherent), expected.shape)
        place = worst_place(what, actual, expected, bound)
        if place is not None:
            parts.append(Part(place, actual, expected, bound, axes))
    return parts


def _head(worst: Part, leading: int) -> tuple[int, ...]:
    """The batch entry and head of the worst place; () for rank 2."""
    return worst.place.at[:leading]


def _in_words(head: tuple[int, ...], leading: tuple[int, ...]) -> str:
    """Batch entry and head, where there are several."""
    words = []
    if math.prod(leading[:-1]) > 1:
        words.append(f"batch entry {', '.join(map(str, head[:-1]))}")
    if leading and leading[-1] > 1:
        words.append(f"head {head[-1]}")
    return ", ".join(words)


def _visibility(problem: Any, golden: Any, head: tuple[int, ...], row: int | None, name: str) -> list[Picture]:
    """Which query sees which key, of one head; a bias of -inf hides too."""
    pairs = (*golden.lse.shape, golden.k_len)
    if 0 in pairs:
        return []
    visible = np.broadcast_to(problem.visible, pairs)[head]
    if problem.bias is not None:
        visible = visible & ~np.isneginf(np.broadcast_to(problem.bias, pairs)[head])
    return [visibility_picture(visible, f"{name}-visible", row)]


def visibility_picture(visible: Array, name: str, row: int | None = None, style: str = "") -> Picture:
    """Which query (row) sees which key (column), a boolean matrix that is not empty; row is marked."""
    shares, rows, columns = shrunk(visible, MOST)
    cells = np.where(shares == 1, 2, np.where(shares == 0, 0, 1))
    note = f"each cell stands for {rows} x {columns} pairs (queries x keys)" if rows * columns > 1 else ""
    seen = int(np.sum(visible))
    says = f"{seen:,} of {visible.size:,} pairs of query and key are visible"
    svg = heatmap(
        cells,
        PAIRS,
        name=name,
        title="visibility: which query sees which key",
        says="; ".join(part for part in (says, note) if part),
        axes=(Axis("query", step=rows), Axis("key", step=columns)),
        mark=None if row is None else (row // rows, 0, 1, cells.shape[1]),
        style=style,
    )
    return Picture("Visibility", svg, note)


def _compared(part: Part, name: str) -> list[Picture]:
    """Expected, actual and error over bound of the worst head, around the worst element."""
    at = part.place.at
    expected, actual, bound = (x[at[:-2]].reshape(-1, x.shape[-1]) for x in (part.expected, part.actual, part.bound))
    row, column = (at[-2] if len(at) > 1 else 0), at[-1]
    first, rows = _window(row, expected.shape[0])
    begin, columns = _window(column, expected.shape[1])
    whole = rows == expected.shape[0] and columns == expected.shape[1]
    down, across = part.axes
    note = "" if whole else (
        f"cut to {down} {first} to {first + rows - 1} of {expected.shape[0]}, "
        f"{across} {begin} to {begin + columns - 1} of {expected.shape[1]}"
    )
    cut = (slice(first, first + rows), slice(begin, begin + columns))
    expected, actual, bound = expected[cut], actual[cut], bound[cut]
    ratios = ratios_of(actual, expected, bound)
    largest = _largest(expected) or _largest(actual) or 1.0
    drawn = {"axes": (Axis(down, first), Axis(across, begin)), "mark": (row - first, column - begin, 1, 1)}
    ends = Scale(tuple(range(len(LOOKS))), f"{-largest:.3g}", f"{largest:.3g}")
    pictures = []
    for heading, values in (("Expected", expected), ("Actual", actual)):
        says = f"{_summary(values)}; at the marked {down} {row}, {across} {column} it is {values[row - first, column - begin]:.6g}"
        title = f"{heading.lower()} {part.place.what}"
        cells = _numbers(values, largest)
        svg = heatmap(cells, NUMBERS, name=f"{name}-{heading.lower()}", title=title, says=says, scale=ends, **drawn)
        pictures.append(Picture(heading, svg, note))
    beyond = int(np.sum(~(ratios <= 1)))
    says = f"{beyond:,} of {ratios.size:,} elements beyond the bound, worst at the marked {down} {row}, {across} {column}"
    title = f"error over bound of the {part.place.what}"
    svg = heatmap(_errors(ratios, np.isfinite(actual) & np.isfinite(expected)), ERRORS, name=f"{name}-error", title=title, says=says, **drawn)
    return [*pictures, Picture("Error over bound", svg, note)]


def _window(place: int, size: int) -> tuple[int, int]:
    """The first index and the number of those drawn, around a place."""
    count = min(size, MOST)
    return max(0, min(place - count // 2, size - count)), count


def _largest(values: Array) -> float:
    return float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))


def _numbers(values: Array, largest: float) -> Array:
    """Indices into NUMBERS, on a scale from -largest to largest; zero has the middle colour."""
    with np.errstate(invalid="ignore", over="ignore"):
        steps = np.rint(MIDDLE * values / largest)
    finite = np.where(np.isfinite(steps), steps, 0.0)
    cells = np.clip(finite, -MIDDLE, MIDDLE).astype(int) + MIDDLE
    cells[steps < -MIDDLE], cells[steps > MIDDLE] = BELOW, ABOVE
    cells[np.isnan(values)], cells[np.isposinf(values)], cells[np.isneginf(values)] = NAN, UP, DOWN
    return cells


def _errors(ratios: Array, finite: Array) -> Array:
    """Indices into ERRORS; finite says where neither number is a NaN or an infinity."""
    cells = np.searchsorted((1.0, 10.0, 100.0, 1000.0), np.where(np.isfinite(ratios), ratios, 0.0), side="left")
    return np.where(np.isnan(ratios), OPEN, np.where(np.isinf(ratios), np.where(finite, INEXACT, WRONG), cells))


def _summary(values: Array) -> str:
    """The range of a matrix in words, with what is not finite counted."""
    finite = values[np.isfinite(values)]
    words = [f"from {finite.min():.3g} to {finite.max():.3g}"] if finite.size else ["nothing finite"]
    words += [f"{count} NaN" for count in (int(np.sum(np.isnan(values))),) if count]
    words += [f"{count} infinite" for count in (int(np.sum(np.isinf(values))),) if count]
    return f"{values.shape[0]} x {values.shape[1]} values, {', '.join(words)}"
