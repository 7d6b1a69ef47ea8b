"""Where reports are written: looked at before a run, so that no work is lost, and replaced as a whole after it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from refattn.conformance.records import Report
from refattn.conformance.reports.junit import junit_text
from refattn.conformance.reports.page import page_text
from refattn.whole_files import check_writable, write_whole

STANDARD_OUTPUT = "-"


class ReportError(Exception):
    """A report that cannot be written; the message says which and why, in one sentence."""


def json_text(report: Report) -> str:
    """The report as JSON, of the form that report.schema.json describes; it has ASCII characters alone."""
    return json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n"


# Option -> what makes the text out of a report and the command line that repeats the run.
FORMS: dict[str, Callable[[Report, str], str]] = {
    "--json": lambda report, _: json_text(report),
    "--junit": lambda report, _: junit_text(report),
    "--html": page_text,
}


def check_places(places: dict[str, str]) -> None:
    """Raises ReportError for a place, by its option, that could not be written now, or that two options name."""
    found: dict[Path | str, str] = {}
    for option, where in places.items():
        if not where:
            raise ReportError(f"{option}: expected the name of a file, or -; got nothing")
        if where == STANDARD_OUTPUT and sys.__stdout__ is None:
            raise ReportError(f"{option}: standard output is closed")
        place: Path | str = where if where == STANDARD_OUTPUT else Path(where).resolve()
        if place in found:
            raise ReportError(f"{found[place]} and {option} name one place, {where}; give each its own")
        found[place] = option
        if isinstance(place, Path):
            with faults_of(option, where):
                check_writable(place)


def write_all(report: Report, places: dict[str, str], command: str) -> None:
    """Writes each form to its place, - being standard output. Raises ReportError after all that can be written are."""
    faults = []
    for option, where in places.items():
        text = FORMS[option](report, command)
        try:
            write_text(option, where, text)
        except ReportError as fault:
            faults.append(str(fault))
    if faults:
        raise ReportError("; ".join(faults))


def write_text(option: str, where: str, text: str) -> None:
    """Writes text to a place, - being standard output. Raises ReportError."""
    with faults_of(option, where):
        if where == STANDARD_OUTPUT:
            sys.stdout.write(text)
        else:
            write_whole(Path(where), text.encode(), synced=True)


@contextlib.contextmanager
def faults_of(option: str, where: str) -> Iterator[None]:
    """Makes a ReportError of what hinders the writing at a place that an option names."""
    try:
        yield
    except BrokenPipeError:  # the reader went away: the command line knows what that means
        raise
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        place = "standard output" if where == STANDARD_OUTPUT else where
        raise ReportError(f"{option}: {place} cannot be written: {reason}") from fault
