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
# Of numbers on both sides of zero, which has the middle colour, and of numbers on one side, for the eye to tell apart.
AROUND_ZERO = ("n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4")
ON_ONE_SIDE = ("w1", "w2", "w3", "w4", "w5", "w6", "w7")
NOT_FINITE = (Kind("bad", "NaN", "cross"), Kind("bad", "infinity", "plus"), Kind("bad", "-infinity", "minus"))
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


class Colours(NamedTuple):
    """Equal steps from low to high, and what lies beyond."""

    looks: tuple[str, ...]
    low: float
    high: float

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The steps, below, above, NaN and the infinities, in the order of the indices that `cells` gives."""
        below, above = ("n5", "p5") if self.looks is AROUND_ZERO else ("p2", "p4")
        beyond = (Kind(below, "below the scale"), Kind(above, "above the scale"))
        return (*(Kind(look, "") for look in self.looks), *beyond, *NOT_FINITE)

    @property
    def scale(self) -> Scale:
        """For the legend."""
        return Scale(tuple(range(len(self.looks))), f"{self.low:.3g}", f"{self.high:.3g}")

    def cells(self, values: Array) -> Array:
        """Indices into `kinds`."""
        last = len(self.looks) - 1
        with np.errstate(invalid="ignore", over="ignore"):
            steps = np.rint(last * ((values - self.low) / (self.high - self.low)))
        cells = np.clip(np.where(np.isnan(steps), 0.0, steps), 0, last).astype(int)
        cells[steps < 0], cells[steps > last] = last + 1, last + 2
        cells[np.isnan(values)], cells[np.isposinf(values)], cells[np.isneginf(values)] = last + 3, last + 4, last + 5
        return cells


def colours_for(values: Array, otherwise: Array) -> Colours:
    """Colours for a matrix, or for another one where its finite values are all alike zero or none."""
    for given in (values, otherwise):
        finite = given[np.isfinite(given)]
        if not np.any(finite):
            continue
        low, high = float(finite.min()), float(finite.max())
        if low < 0 < high or low == high:
            largest = max(abs(low), abs(high))
            return Colours(AROUND_ZERO, -largest, largest)
        return Colours(ON_ONE_SIDE, low, high)
    return Colours(AROUND_ZERO, -1.0, 1.0)


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
    worst = max(parts, key=lambda part: part.place.rank, default=None)
    leading = golden.lse.shape[:-1]
    head = (0,) * len(leading) if worst is None else worst.place.at[: len(leading)]
    where = _in_words(head, leading)
    row = None if worst is None else worst.place.at[len(leading)]
    drawn = _visibility(problem, golden, head, row, name)
    if worst is None:
        came = "The call gave no result" if result is None else "No result has the shape that it must have"
        return drawn, f"{came}{f'; drawn is {where}' if where and drawn else ''}."
    if worst.place.ratio <= 1:
        return [], "Every number is within its bound, so there is nothing to draw."
    count = int(np.sum(~(ratios_of(worst.actual, worst.expected, worst.bound) <= 1)))
    what = {"output": "elements of the output", "log-sum-exp": "log-sum-exps", "weight": "weights"}[worst.place.what]
    says = f"{count:,} of {worst.actual.size:,} {what} are beyond the bound"
    return drawn + _compared(worst, name), f"{says}{f'; drawn is the worst head, {where}' if where else ''}."


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
    down, across = part.axes
    cuts = ((down, first, rows, expected.shape[0]), (across, begin, columns, expected.shape[1]))
    left = [f"{axis} {start} to {start + count - 1} of {size}" for axis, start, count, size in cuts if count < size]
    note = f"cut to {', '.join(left)}" if left else ""
    cut = (slice(first, first + rows), slice(begin, begin + columns))
    expected, actual, bound = expected[cut], actual[cut], bound[cut]
    ratios = ratios_of(actual, expected, bound)
    colours = colours_for(expected, actual)

    def draw(what: str, cells: Array, kinds: tuple[Kind, ...], title: str, says: str, scale: Scale | None) -> Picture:
        svg = heatmap(
            cells,
            kinds,
            name=f"{name}-{what.split()[0].lower()}",
            title=f"{title} {part.place.what}",
            says=says,
            axes=(Axis(down, first), Axis(across, begin)),
            scale=scale,
            mark=(row - first, column - begin, 1, 1),
        )
        return Picture(what, svg, note)

    marked = f"the marked {down} {row}, {across} {column}"
    pictures = []
    for heading, values in (("Expected", expected), ("Actual", actual)):
        says = f"{_summary(values)}; at {marked} it is {values[row - first, column - begin]:.6g}"
        pictures.append(draw(heading, colours.cells(values), colours.kinds, heading.lower(), says, colours.scale))
    says = f"{int(np.sum(~(ratios <= 1))):,} of {ratios.size:,} elements beyond the bound, worst at {marked}"
    cells = _errors(ratios, np.isfinite(actual) & np.isfinite(expected))
    return [*pictures, draw("Error over bound", cells, ERRORS, "error over bound of the", says, None)]


def _window(place: int, size: int) -> tuple[int, int]:
    """The first index and the number of those drawn, around a place."""
    count = min(size, MOST)
    return max(0, min(place - count // 2, size - count)), count


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
