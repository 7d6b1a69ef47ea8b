"""Where reports are written: looked at before a run, so that no work is lost, and replaced as a whole after it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from refattn.conformance.records import Report
from refattn.conformance.reports.junit import junit_text
from refattn.conformance.reports.page import page_text

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
        place: Path | str = where if where == STANDARD_OUTPUT else Path(where).resolve()
        if place in found:
            raise ReportError(f"{found[place]} and {option} name one place, {where}; give each its own")
        found[place] = option
        if isinstance(place, Path):
            with _faults_of(option, where):
                _check(place)


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
    with _faults_of(option, where):
        if where == STANDARD_OUTPUT:
            sys.stdout.write(text)
        else:
            _write_whole(Path(where).resolve(), text)


def _write_whole(path: Path, text: str) -> None:
    """Writes a file beside, then puts it in the place of path, so that no reader ever sees half of it.

    What is no ordinary file, such as a pipe, is written to directly. Raises OSError, and then leaves path as it was.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = _beside(path)
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _check(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError("it is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError("it may not be written to")
    if path.exists() and not path.is_file():
        return
    beside = _beside(path)
    try:
        beside.touch()
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{os.getpid()}.part")


@contextlib.contextmanager
def _faults_of(option: str, where: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader went away: the command line knows what that means
        raise
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise ReportError(f"{option}: {where} cannot be written: {reason}") from fault
