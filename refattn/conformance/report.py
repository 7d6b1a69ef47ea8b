"""Verdicts shown: a progress bar, a table by clause, the first failure explained, JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from refattn.clauses import CHAPTERS, clause
from refattn.conformance.runner import VERDICTS, Record, Report

WIDTH = 100
# Entries of a list that are shown before "and more".
SHOWN = 10


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[Record], None]]:
    """A function to call with each record; it draws a progress bar if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda record: bar.update(task, advance=1, description=f"{record.case} {record.dtype}")


def write_json(report: Report, where: str) -> None:
    """The report as JSON to a file, or to standard output for "-"."""
    text = json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


def print_report(report: Report) -> None:
    """Table by clause, what is unsupported, the first failure, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{report.target} ({versions}), seed {report.seed}, {report.seconds:.1f} s", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("clause")
    table.add_column("", overflow="ellipsis", no_wrap=True)
    for verdict in VERDICTS:
        table.add_column(verdict, justify="right")
    chapter = ""
    for label, records in _by_clause(report).items():
        rule = clause(label)
        if rule.chapter != chapter:
            chapter = rule.chapter
            table.add_row(f"[bold]{chapter}", f"[bold]{CHAPTERS[chapter]}")
        counts = [sum(record.verdict == verdict for record in records) for verdict in VERDICTS]
        style = "red" if counts[1] or counts[2] else "dim" if not counts[0] else None
        table.add_row(label, rule.title, *(str(count) if count else "" for count in counts), style=style)
    console.print(table)
    _print_unsupported(report, console.print)
    if report.broken:
        print()
        print(explain(report.broken[0]))
        others = [*dict.fromkeys(record.case for record in report.broken if record.case != report.broken[0].case)]
        if others:
            more = f" and {len(others) - SHOWN} more (--json has all)" if len(others) > SHOWN else ""
            print(_wrapped(f"Also: {', '.join(others[:SHOWN])}{more}", ""))
    print()
    print(verdict_line(report))


def explain(record: Record) -> str:
    """One failure in words: which case, what must hold, where it is worst, and the clauses' text."""
    what = "raised an error" if record.verdict == "crashed" else "failed"
    lines = [f"First failure: {record.case} in {record.dtype} {what}"]
    lines.append(_wrapped(record.says, "  must hold: "))
    lines.append(_wrapped(record.message, "  but: "))
    lines += [_wrapped(f"{clause(label).title}. {clause(label).text}", f"  {label}: ") for label in record.clauses]
    lines += [_wrapped(note, "  note: ") for note in record.notes]
    return "\n".join(lines)


def verdict_line(report: Report) -> str:
    """The verdict in one line."""
    counts = ", ".join(f"{report.counts[verdict]} {verdict}" for verdict in VERDICTS if report.counts.get(verdict))
    low = [dtype for dtype, model in report.models.items() if model == "unfused"]
    stored = f" Scores or weights are rounded to the storage type in {', '.join(low)}." if low else ""
    if not report.complete:
        return f"{report.target}: interrupted, no verdict ({counts})."
    if report.conforms:
        return f"{report.target} conforms ({counts}).{stored}"
    if not report.broken:
        return f"{report.target}: nothing could be judged, so it does not conform ({counts or 'no case was chosen'})."
    return f"{report.target} does not conform ({counts})."


def _by_clause(report: Report) -> dict[str, list[Record]]:
    """Records by label, in the order of the chapters; a case of several clauses stands with each."""
    found: dict[str, list[Record]] = {}
    for record in report.records:
        for label in record.clauses:
            found.setdefault(label, []).append(record)
    order = {letter: place for place, letter in enumerate(CHAPTERS)}
    return dict(sorted(found.items(), key=lambda item: (order[item[0][0]], int(item[0][1:]))))


def _print_unsupported(report: Report, show: Callable[..., None]) -> None:
    """The reasons for which cases could not be run, each with their number."""
    reasons: dict[str, int] = {}
    for record in report.records:
        if record.verdict == "unsupported":
            reasons[record.message] = reasons.get(record.message, 0) + 1
    if reasons:
        show("\nUnsupported, so not judged:")
    ranked = sorted(reasons.items(), key=lambda item: -item[1])
    for reason, count in ranked[:SHOWN]:
        show(f"  {count:4d}  {reason}", markup=False)
    if len(ranked) > SHOWN:
        show(f"  {sum(count for _, count in ranked[SHOWN:]):4d}  of {len(ranked) - SHOWN} other kinds (--json has all)")


def _wrapped(text: str, head: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
