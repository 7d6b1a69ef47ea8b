"""The results as a page of Markdown, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from refattn_backends.bench.report import row
from refattn_backends.bench.rows import COLUMNS, Row, cells, quantity

HEAD = """# Benchmark

Medians of interleaved bursts on one quiet machine, the middle ones of three processes (`nox -s bench` measures anew).
Ratios are ours over the peer's in the same run; a floor is what the work needs at the rates that this machine reached
in the same run, part by part.

![Time and memory against the length](bench.svg)
"""


def page(result: Mapping[str, Any]) -> str:
    """The page of what `report.gathered` gives last."""
    rows = [row(entry) for entry in result["rows"]]
    lines = [HEAD, *_about(result), "", *_table(rows), "", "## What bounds each row", "", *_bounds(rows)]
    lines += ["", "## Growth over the last doubling of the length", "", *_growth(result["curves"])]
    lines += [f"- not measured: {failure}" for failure in result["failures"]]
    return "\n".join(lines) + "\n"


def _about(result: Mapping[str, Any]) -> Iterator[str]:
    for name in ("machine", "versions"):
        yield f"- {name}: " + ", ".join(f"{key} {value}" for key, value in result[name].items())
    yield "- rates, all cores together: " + ", ".join(
        f"{value / 1e9:.3g} G {key.replace('_', ' ')}/s" for key, value in result["rates"].items()
    )


def _table(rows: list[Row]) -> Iterator[str]:
    yield _line(COLUMNS)
    yield _line(["---"] * len(COLUMNS))
    yield from (_line(cells(one)) for one in rows)


def _line(values: Any) -> str:
    return "| " + " | ".join(values) + " |"


def _bounds(rows: list[Row]) -> Iterator[str]:
    for one in rows:
        if one.floor and one.least and one.ours:
            parts = ", ".join(f"{name} {quantity(value, one.unit)}" for name, value in one.floor.items())
            least = quantity(one.least, one.unit)
            yield f"- {one.work}: {one.ours / one.least:.1f} times its floor of {least} ({parts})."


def _growth(curves: Mapping[str, Any]) -> Iterator[str]:
    for plot in ("prefill", "window", "decode"):
        for name, points in curves.get(plot, {}).items():
            before, last = list(points.values())[-2:] if len(points) > 1 else (0.0, 0.0)
            if before:
                yield f"- {name}, {plot}: {last / before:.1f} times as long."
