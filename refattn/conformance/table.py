"""The table of verdicts by clause: its rows, and how a terminal shows them, as wide as it is."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from refattn.clauses import CHAPTERS, CLAUSES, clause
from refattn.conformance.records import BROKEN, VERDICTS, Record, Report

# Two lines of each header, so that all columns fit a narrow terminal.
HEADERS = {
    "pass": ("", "pass"),
    "declared": ("decl-", "ared"),
    "fail": ("", "fail"),
    "crashed": ("", "crash"),
    "timed out": ("timed", "out"),
    "out of memory": ("out of", "memory"),
    "missing": ("", "miss"),
    "not judgeable": ("not judge-", "able"),
    "unsupported": ("unsup-", "ported"),
}
LABEL, TITLE = 6, 24
# Where every clause stands in the specification.
PLACES = {one.label: place for place, one in enumerate(CLAUSES)}


class Row(NamedTuple):
    """One clause: how many records have each verdict, and whether one speaks against the target."""

    label: str
    title: str
    counts: dict[str, int]
    broken: bool


class Section(NamedTuple):
    """One chapter: rows of the clauses with a verdict, labels of those that were not judged, the number of records."""

    letter: str
    title: str
    rows: list[Row]
    unsupported: list[str]
    size: int


def sections(report: Report, labels: frozenset[str] | None = None) -> Iterator[Section]:
    """The chapters that have records, of these clauses or of all; a record of several clauses counts with each."""
    records = by_clause(report)
    for letter, title in CHAPTERS.items():
        members = {
            label: found
            for label, found in records.items()
            if label[0] == letter and (labels is None or label in labels)
        }
        judged = {
            label: found for label, found in members.items() if any(record.verdict != "unsupported" for record in found)
        }
        if members:
            rows = [_row(label, found) for label, found in judged.items()]
            lacking = [label for label in members if label not in judged]
            size = len({(record.case, record.dtype) for found in members.values() for record in found})
            yield Section(letter, title, rows, lacking, size)


def _row(label: str, records: list[Record]) -> Row:
    counts = {verdict: sum(record.verdict == verdict for record in records) for verdict in VERDICTS}
    return Row(label, clause(label).title, counts, any(record.verdict in BROKEN for record in records))


def shown_verdicts(found: Iterable[Section]) -> list[str]:
    """The verdicts that have a column: passes and failures, and what some row has."""
    rows = [row for section in found for row in section.rows]
    return [one for one in VERDICTS if one in ("pass", "fail") or any(row.counts[one] for row in rows)]


def print_table(report: Report, labels: frozenset[str] | None, width: int) -> None:
    """A row for each clause that was judged, of these or of all; no column or row without a number."""
    found = [*sections(report, labels)]
    if not found:
        return
    verdicts = shown_verdicts(found)
    columns = [max(map(len, HEADERS[verdict])) for verdict in verdicts]
    title = max(8, min(TITLE, width - LABEL - sum(columns) - 2 * len(columns)))

    def line(label: str, words: str, cells: Iterable[str], style: str = "") -> None:
        words = words if len(words) <= title else f"{words[: title - 1]}…"
        filled = "".join(f"  {cell:>{size}}" for cell, size in zip(cells, columns))
        _show(f"{label:<{LABEL}}{words:<{title}}{filled}", style)

    print()
    if any(HEADERS[verdict][0] for verdict in verdicts):
        line("", "", (HEADERS[verdict][0] for verdict in verdicts))
    line("clause", "", (HEADERS[verdict][1] for verdict in verdicts))
    for section in found:
        if not section.rows:
            _show(f"{section.letter:<{LABEL}}{section.title}: all {section.size} unsupported", "dim")
            continue
        _show(f"{section.letter:<{LABEL}}{section.title}", "bold")
        for row in section.rows:
            style = "red" if row.broken else "" if row.counts["pass"] else "dim"
            line(row.label, row.title, (str(row.counts[verdict] or "") for verdict in verdicts), style)
        if section.unsupported:
            words = f"unsupported: {', '.join(section.unsupported)}"
            indent = " " * LABEL
            for part in textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=indent):
                _show(part, "dim")
    listed = {label for section in found for label in (*(row.label for row in section.rows), *section.unsupported)}
    if any(len(listed.intersection(record.clauses)) > 1 for record in report.records):
        print("A case of several clauses is counted with each.")


def by_clause(report: Report) -> dict[str, list[Record]]:
    """Records by label, in the order of the specification; a case of several clauses stands with each."""
    found: dict[str, list[Record]] = {}
    for record in report.records:
        for label in record.clauses:
            found.setdefault(label, []).append(record)
    return {label: found[label] for label in in_order(found)}


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels of clauses in the order of the specification."""
    return sorted(labels, key=PLACES.__getitem__)


def _show(text: str, style: str) -> None:
    """One line without trailing blanks, coloured on a terminal."""
    text = text.rstrip()
    if not (style and sys.stdout.isatty()):
        print(text)
        return
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(text, style=style, no_wrap=True, crop=False)
