"""The table of verdicts by clause, as wide as what it is printed on."""

from __future__ import annotations

import sys

from refattn.clauses import CHAPTERS, clause
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


def print_table(report: Report, labels: frozenset[str] | None, width: int) -> None:
    """One row for each of the clauses, all that have cases if labels is None; no column or row without a number."""
    rows = {label: records for label, records in by_clause(report).items() if labels is None or label in labels}
    if not rows:
        return
    chosen = [record for records in rows.values() for record in records]
    used = {record.verdict for record in chosen}
    verdicts = [verdict for verdict in VERDICTS if verdict in ("pass", "fail") or verdict in used]
    columns = [max(map(len, HEADERS[verdict])) for verdict in verdicts]
    title = max(8, min(TITLE, width - LABEL - sum(columns) - 2 * len(columns)))

    def line(label: str, words: str, cells: list[str], style: str = "") -> None:
        words = words if len(words) <= title or not cells else f"{words[: title - 1]}…"
        filled = "".join(f"  {cell:>{size}}" for cell, size in zip(cells, columns))
        _show(f"{label:<{LABEL}}{words:<{title}}{filled}", style)

    print()
    if any(HEADERS[verdict][0] for verdict in verdicts):
        line("", "", [HEADERS[verdict][0] for verdict in verdicts])
    line("clause", "", [HEADERS[verdict][1] for verdict in verdicts])
    for letter, words in CHAPTERS.items():
        members = {label: records for label, records in rows.items() if clause(label).chapter == letter}
        of_chapter = {(record.case, record.dtype) for records in members.values() for record in records}
        if not members:
            continue
        if all(record.verdict == "unsupported" for records in members.values() for record in records):
            line(letter, f"{words}: all {len(of_chapter)} unsupported", [], "dim")
            continue
        line(letter, words, [], "bold")
        for label, records in members.items():
            counts = [sum(record.verdict == verdict for record in records) for verdict in verdicts]
            broken = any(record.verdict in BROKEN for record in records)
            style = "red" if broken else "" if counts[0] else "dim"
            line(label, clause(label).title, [str(count) if count else "" for count in counts], style)
    if len(chosen) > len({(record.case, record.dtype) for record in chosen}):
        print("A case of several clauses is counted with each.")


def by_clause(report: Report) -> dict[str, list[Record]]:
    """Records by label, in the order of the chapters; a case of several clauses stands with each."""
    found: dict[str, list[Record]] = {}
    for record in report.records:
        for label in record.clauses:
            found.setdefault(label, []).append(record)
    order = {letter: place for place, letter in enumerate(CHAPTERS)}
    return dict(sorted(found.items(), key=lambda item: (order[item[0][0]], int(item[0][1:]))))


def _show(text: str, style: str) -> None:
    """One line without trailing blanks, coloured on a terminal."""
    text = text.rstrip()
    if not (style and sys.stdout.isatty()):
        print(text)
        return
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(text, style=style, no_wrap=True, crop=False)
