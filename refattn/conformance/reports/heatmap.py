"""A matrix as inline SVG: cells of a few kinds, two axes with indices, one marked place, a legend, alternative text.

Kinds are CSS classes, whose colours page.css holds for light and dark. A kind that must not be told by its colour alone
has a sign, drawn over its cells. Cells of one kind that lie side by side are one rectangle, which keeps the text short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.reports.text import escaped

# Pixels: of a cell, of the room that a picture aims at, of a line of text and a character of it, and around the cells.
LEAST, MOST, ROOM = 3, 26, 208
# Cells from this size on are told apart by lines.
LINED = 8
LINE, CHARACTER = 16, 6.2
LEFT, TOP = 44, 34
# Strokes over one cell at (x, y), in units of cells.
SIGNS = {
    "": "",
    "cross": "M{x}.2 {y}.2l.6 .6m0-.6l-.6 .6",
    "plus": "M{x}.2 {y}.5h.6m-.3-.3v.6",
    "minus": "M{x}.2 {y}.5h.6",
    "dot": "M{x}.45 {y}.5h.1",
    "slash": "M{x} {y}m0 1l1-1",
}


class Kind(NamedTuple):
    """What a class of cells looks like and means."""

    look: str
    words: str
    sign: str = ""


class Axis(NamedTuple):
    """What an axis counts, the index of its first cell, and how many indices each cell stands for."""

    name: str
    first: int = 0
    step: int = 1


class Scale(NamedTuple):
    """Kinds that lie side by side in the legend, with words at both ends."""

    kinds: tuple[int, ...]
    low: str
    high: str


def heatmap(
    cells: Array,
    kinds: Sequence[Kind],
    *,
    name: str,
    title: str,
    says: str,
    axes: tuple[Axis, Axis],
    scale: Scale | None = None,
    mark: tuple[int, int, int, int] | None = None,
    style: str = "",
    footer: Sequence[str] = (),
) -> str:
    """SVG text of a matrix of indices into kinds, not empty.

    name begins the ids and is theirs alone in a page; title and says are the alternative text; mark is the row, the
    column, the number of rows and of columns of a rectangle; style is CSS for a picture that stands alone, which
    footer, lines of text, can end.
    """
    rows, columns = cells.shape
    high, wide = (max(LEAST, min(MOST, ROOM // count)) for count in (rows, columns))
    legend, legend_width, legend_height = _legend(cells, kinds, scale)
    for line in footer:
        legend.append(f'<text y="{legend_height + 10}">{escaped(line)}</text>')
        legend_width, legend_height = max(legend_width, len(line) * CHARACTER + 16), legend_height + LINE
    width = max(LEFT + columns * wide + 12, legend_width)
    height = TOP + rows * high + 14 + legend_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" role="img" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" aria-labelledby="{name}-t {name}-d">',
        f'<title id="{name}-t">{escaped(title)}</title><desc id="{name}-d">{escaped(says)}</desc>',
    ]
    if style:
        parts.append(f'<style>{style}</style><rect class="paper" width="100%" height="100%"/>')
    parts += _axes(axes, rows, columns, high, wide)
    parts.append(f'<g transform="translate({LEFT} {TOP}) scale({wide} {high})">')
    for index, kind in enumerate(kinds):
        chosen = cells == index
        if np.any(chosen):
            parts.append(f'<path class="{kind.look}" d="{_rectangles(chosen)}"/>')
            if kind.sign:
                parts.append(f'<path class="sign" d="{_signs(chosen, kind.sign)}"/>')
    if min(high, wide) >= LINED:
        lines = [f"M0 {y}h{columns}" for y in range(1, rows)] + [f"M{x} 0v{rows}" for x in range(1, columns)]
        parts.append(f'<path class="grid" d="{"".join(lines)}"/>')
    if mark:
        row, column, deep, broad = mark
        around = 0 if min(high, wide) >= LINED else 1  # so that the frame does not cover what it marks
        size = f'width="{broad + 2 * around}" height="{deep + 2 * around}"'
        frame = f'x="{column - around}" y="{row - around}" {size}'
        parts.append(f'<rect class="halo" {frame}/><rect class="mark" {frame}/>')
    parts += ["</g>", f'<g transform="translate(8 {TOP + rows * high + 18})">', *legend, "</g></svg>"]
    return "\n".join(parts)


def _rectangles(chosen: Array) -> str:
    """One rectangle for each run of chosen cells in a row."""
    padded = np.pad(chosen.astype(np.int8), ((0, 0), (1, 1)))
    steps = np.diff(padded, axis=1)
    starts, ends = np.argwhere(steps == 1), np.argwhere(steps == -1)
    runs = zip(starts.tolist(), ends.tolist())
    return "".join(f"M{x} {y}h{end - x}v1h{x - end}z" for (y, x), (_, end) in runs)


def _signs(chosen: Array, sign: str) -> str:
    # "{x}.2" reads as a number, x being whole.
    return "".join(SIGNS[sign].format(x=x, y=y) for y, x in np.argwhere(chosen).tolist())


def _axes(axes: tuple[Axis, Axis], rows: int, columns: int, high: int, wide: int) -> list[str]:
    """The name of each axis, and the indices of some cells."""
    down, across = axes
    parts = [
        f'<text x="{LEFT}" y="11">{escaped(across.name)} →</text>',
        f'<text transform="translate(11 {TOP}) rotate(90)">{escaped(down.name)} →</text>',
    ]
    longest = len(str(across.first + (columns - 1) * across.step))
    for cell in _ticks(columns, max(1, -(-int(longest * CHARACTER + 8) // wide))):
        x = LEFT + (cell + 0.5) * wide
        parts.append(f'<text class="tick" x="{x:g}" y="{TOP - 5}">{across.first + cell * across.step}</text>')
    for cell in _ticks(rows, max(1, -(-LINE // high))):
        y = TOP + (cell + 0.5) * high + 4
        parts.append(f'<text class="tick-down" x="{LEFT - 5}" y="{y:g}">{down.first + cell * down.step}</text>')
    return parts


def _ticks(count: int, apart: int) -> list[int]:
    """Cells to label: the first, and others at a round distance of at least that many cells."""
    step = next(size for size in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, count + 1) if size >= apart)
    return list(range(0, count, step))


def _legend(cells: Array, kinds: Sequence[Kind], scale: Scale | None) -> tuple[list[str], float, int]:
    """The legend's parts, one line for the scale and one for each other kind that occurs; its width and height."""
    parts: list[str] = []
    side, width, y = 12, 0.0, 0
    if scale:
        x = len(scale.low) * CHARACTER + 6
        parts.append(f'<text x="0" y="10">{escaped(scale.low)}</text>')
        for index in scale.kinds:
            parts.append(f'<rect class="{kinds[index].look} edge" x="{x:g}" y="0" width="{side}" height="{side}"/>')
            x += side
        parts.append(f'<text x="{x + 6:g}" y="10">{escaped(scale.high)}</text>')
        width, y = x + 6 + len(scale.high) * CHARACTER, LINE + 2
    for index, kind in enumerate(kinds):
        if (scale and index in scale.kinds) or not np.any(cells == index):
            continue
        parts.append(f'<rect class="{kind.look} edge" x="0" y="{y}" width="{side}" height="{side}"/>')
        if kind.sign:
            sign = SIGNS[kind.sign].format(x=0, y=0)
            parts.append(f'<path class="sign" transform="translate(0 {y}) scale({side})" d="{sign}"/>')
        parts.append(f'<text x="{side + 6}" y="{y + 10}">{escaped(kind.words)}</text>')
        width, y = max(width, side + 6 + len(kind.words) * CHARACTER), y + LINE + 2
    return parts, width + 16, y + 4


def shrunk(visible: Any, most: int) -> tuple[Array, int, int]:
    """The share of True in blocks of a boolean matrix, so that at most that many stand in a row or column.

    Also how many rows and columns a block has; the last ones may have fewer.
    """
    rows, columns = (max(1, -(-size // most)) for size in visible.shape)
    sums = np.add.reduceat(
        np.add.reduceat(visible.astype(np.float64), np.arange(0, visible.shape[0], rows), axis=0),
        np.arange(0, visible.shape[1], columns),
        axis=1,
    )
    deep = np.add.reduceat(np.ones(visible.shape[0]), np.arange(0, visible.shape[0], rows))
    broad = np.add.reduceat(np.ones(visible.shape[1]), np.arange(0, visible.shape[1], columns))
    return sums / np.outer(deep, broad), rows, columns
