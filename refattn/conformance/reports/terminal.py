"""On a terminal: a progress bar, the verdict, a table by clause, and the most telling failure explained."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from refattn.clauses import clause
from refattn.conformance.alignment import note_on
from refattn.conformance.headline import explains_much, is_plainest, most_telling
from refattn.conformance.records import BROKEN, CAPTURED, OWN_FUNCTIONS, VERDICTS, Record, Report
from refattn.conformance.table import print_table
from refattn.dtypes import COMPUTED

# Of a pipe, and the most of a terminal.
WIDTH = 100
# Entries of a list that are shown before "and more".
SHOWN = 8
# Cases of what a function of a user's own may leave out without being called partial.
SELDOM_OFFERED = {"weights", OWN_FUNCTIONS}


@contextlib.contextmanager
def progress(
    total: int | None, words: Callable[[Any], str] = lambda record: f"{record.case} {record.dtype}"
) -> Iterator[Callable[[Any], None]]:
    """A function to call with each record; it draws a progress bar if standard error is a terminal.

    total is None where nobody knows how many there will be; words say which one a record is.
    """
    if not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda record: bar.update(task, advance=1, description=words(record))


def print_report(report: Report, labels: frozenset[str] | None = None, command: str = "") -> None:
    """The verdict, a table of those clauses, what is unsupported, the most telling failure, and the verdict again.

    command is how the target is called, for a hint at how to see more.
    """
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print(_wrapped(verdict_line(report)))
    print(_wrapped(f"{report.target} ({versions}), seed {report.seed}, {report.seconds:.1f} s"))
    for note in report.notes:
        print(_wrapped(note))
    print_table(report, labels, width())
    _print_dumps(report)
    _print_declared(report)
    _print_missing(report)
    _print_unsupported(report)
    if report.alignment:
        print("\n" + _wrapped(note_on(report.alignment)))
    if report.broken:
        first = most_telling(report)
        print(f"\n{explain(first)}")
        _print_others(report, first)
        _print_crashes(report)
        if report.diagnosis:
            likely = "\nmost likely: " if explains_much(report.diagnosis) else "\nin part: "
            for number, sentence in enumerate(report.diagnosis["sentences"]):
                print(_wrapped(sentence, "then: " if number else likely))
        print(f"\ndetails: {command or f'refattn check {report.target}'} --case {first.case}")
    print("\n" + _wrapped(verdict_line(report)))


def print_cases(report: Report) -> None:
    """Every record in full, with the target's own traceback, and the verdict; what comes in several dtypes once."""
    told: dict[tuple[str, str, str], str] = {}
    for record in report.records:
        failure = "Failure" if record.verdict in BROKEN else "No verdict"
        first = told.setdefault((record.case, record.verdict, record.message), record.dtype)
        if record.verdict != "pass" and first != record.dtype:
            print(_wrapped(f"{failure}: {record.case} in {record.dtype}, the same as in {first}") + "\n")
            continue
        print(_passed(record) if record.verdict == "pass" else f"{explain(record, failure)}\n")
        if record.trace:
            print(f"{record.trace}\n")
    print(_wrapped(verdict_line(report)))


def explain(record: Record, head: str = "First failure") -> str:
    """One failure in words: which case, what must hold, where it is worst, the call, and the clauses' text."""
    what = {"fail": "failed", "crashed": "raised an error", "out of memory": "ran out of memory", "pass": "passed"}.get(
        record.verdict, record.verdict
    )
    lines = [_wrapped(f"{head}: {record.case} in {record.dtype} {what}")]
    if record.verdict == "crashed" and is_plainest(record):
        lines = [_wrapped(f"{head}: the plainest call raised an error, {record.case} in {record.dtype}")]
    labels = (record.fault,) if record.fault else record.clauses
    if not record.fault or record.error_over_bound is not None:
        lines.append(_wrapped(record.says, "  must hold: "))
    lines.append(_wrapped(record.message, "  but: "))
    if record.diagnosis and record.diagnosis["sentence"] not in record.message:
        lines.append(_wrapped(record.diagnosis["sentence"], "  diagnosis: "))
    if record.diagnosis and (place := record.diagnosis["where"]) and place not in record.diagnosis["sentence"]:
        lines.append(_wrapped(place, "  where: "))
    if record.place:
        lines.append(f"  at: {record.place}")
    if record.called:
        lines.append(_wrapped(record.called, "  called with "))
    lines += [_wrapped(f"{clause(label).title}. {clause(label).text}", f"  {label}: ") for label in labels]
    lines += [_wrapped(note, "  note: ") for note in record.notes]
    return "\n".join(lines)


def verdict_line(report: Report) -> str:
    """The verdict in one line."""
    counts = ", ".join(f"{report.counts[verdict]} {verdict}" for verdict in VERDICTS if report.counts[verdict])
    low = [dtype for dtype, model in report.models.items() if model == "unfused"]
    stored = f" Scores or weights are rounded to the storage type in {', '.join(low)}." if low else ""
    if not report.complete:
        judged = f", no verdict ({counts})" if counts else " before any case was judged, no verdict"
        return f"{report.target}: interrupted{judged}."
    if report.conforms:
        return f"{report.target} conforms{_profile(report)}{_extent(report)} ({counts}).{stored}"
    if not report.broken and report.counts["missing"]:
        return f"{report.target}: results are missing, so it does not conform ({counts})."
    if not report.broken:
        reasons = unsupported_lines(report)
        why = f": {reasons[0].rpartition(': ')[0]}" if len(reasons) == 1 else ""
        counts = counts or "no case was chosen"
        return f"{report.target}: nothing could be judged, so it does not conform ({counts}{why})."
    return f"{report.target} does not conform{_profile(report)} ({counts})."


def unsupported_lines(report: Report) -> list[str]:
    """What the target lacks, each with the number of cases; dtypes and other reasons on lines of their own."""
    missing = report.lacking
    dtypes = {one: count for one, count in missing.items() if one in COMPUTED}
    options = {one: count for one, count in missing.items() if one not in {*COMPUTED, "lse", OWN_FUNCTIONS}}
    lines = []
    if options:
        (first, count), *others = options.items()
        lines.append(", ".join([f"cannot express {first}: {_cases(count)}", *(f"{name}: {n}" for name, n in others)]))
    if missing["lse"]:
        lines.append(f"returns no log-sum-exp: {_cases(missing['lse'])}")
    if missing[OWN_FUNCTIONS]:
        lines.append(f"lacks {OWN_FUNCTIONS} (errors, layers, caches, ...): {_cases(missing[OWN_FUNCTIONS])}")
    unsupported = [record for record in report.records if record.verdict == "unsupported"]
    for dtype, count in dtypes.items():
        reason = next(record.message for record in unsupported if record.missing == (dtype,))
        lines.append(f"{reason}: {_cases(count)}")
    others = Counter(record.message for record in unsupported if not record.missing).most_common()
    lines += [f"{reason}: {_cases(count)}" for reason, count in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"{len(others) - SHOWN} other reasons: {_cases(sum(n for _, n in others[SHOWN:]))} (--json FILE)")
    return lines


def width() -> int:
    """Columns to write in: those of a terminal, at most WIDTH, and WIDTH in a pipe."""
    return max(40, min(WIDTH, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else WIDTH


def _print_crashes(report: Report) -> None:
    """Where the target's own code raised, and how often, unless that is one place."""
    kinds: dict[str, list[Record]] = {}
    for record in report.broken:
        if record.verdict == "crashed" and record.place:
            kind = f"{record.message.partition(':')[0]} at {Path(record.place).name}"
            kinds.setdefault(kind, []).append(record)
    most = sorted(kinds.items(), key=lambda item: -len(item[1]))[:SHOWN]
    if len(kinds) > 1:
        told = [f"{kind}: {_cases(len(found))}, such as {found[0].case}" for kind, found in most]
        print("\n" + _wrapped("; ".join(told), "crashed: "))


def _profile(report: Report) -> str:
    """The profile that the report is about, and how many of its departures were met."""
    if not report.profile:
        return ""
    met = len(report.declared)
    return f" to profile {report.profile} ({met} declared departure{'s' * (met != 1)})"


def _print_declared(report: Report) -> None:
    """What was met of what the profile declares, each with the number of results."""
    if report.declared:
        listed = ", ".join(f"{name} ({count})" for name, count in report.declared.most_common())
        print("\n" + _wrapped(f"Declared by profile {report.profile}, so no fault: {listed}"))


def _extent(report: Report) -> str:
    """What a target that lacks options was judged on."""
    lacking = [need for need in report.lacking if need not in {*COMPUTED, *SELDOM_OFFERED}]
    # A refusal in the call says nothing that could be counted, only that there was one.
    if any(record.verdict == "unsupported" and record.called and not record.missing for record in report.records):
        lacking.append("what it refuses")
    if not lacking:
        return ""
    used = Counter(need for record in report.records if record.verdict == "pass" for need in record.needs)
    expressed = ", ".join(need for need in used if need not in ("gqa", "lse", "weights")) or "q, k and v alone"
    return f" in what it can express: {expressed}; not judged: {', '.join(lacking)}"


def _print_dumps(report: Report) -> None:
    dumps = [record for record in report.records if record.case.startswith(CAPTURED)]
    for number, record in enumerate(dumps):
        reason = f": {record.message}" if record.verdict not in ("pass", "fail") else ""
        print(_wrapped(f"{record.case}: {record.verdict} ({record.dtype}){reason}", "" if number else "\n"))


def _print_missing(report: Report) -> None:
    """Results that did not come back, each with what would have been judged."""
    missing = [
        f"{record.message} ({record.case} {record.dtype})" for record in report.records if record.verdict == "missing"
    ]
    if missing:
        more = f" and {len(missing) - SHOWN} more (--json FILE)" if len(missing) > SHOWN else ""
        print(_wrapped(f"Missing, so not judged: {', '.join(missing[:SHOWN])}{more}", "\n"))


def _print_unsupported(report: Report) -> None:
    lines = unsupported_lines(report)
    if lines:
        print("\nUnsupported, so not judged:")
    for line in lines:
        print(_wrapped(line, "  "))


def _cases(count: int) -> str:
    return f"{count} case{'s' * (count != 1)}"


def _print_others(report: Report, first: Record) -> None:
    others = [*dict.fromkeys(record.case for record in report.broken if record.case != first.case)]
    if others:
        more = f" and {len(others) - SHOWN} more (--json FILE)" if len(others) > SHOWN else ""
        print(_wrapped(f"Also: {', '.join(others[:SHOWN])}{more}"))


def _passed(record: Record) -> str:
    ratio = record.error_over_bound
    error = "" if ratio is None else f", error {ratio:.3g} of the bound"
    notes = "".join(f"\n{_wrapped(note, '  note: ')}" for note in record.notes)
    return f"{record.case} in {record.dtype} passed{error}\n{_wrapped(record.called, '  called with ')}{notes}\n"


def _wrapped(text: str, head: str = "") -> str:
    """Text that fits, its lines after the first indented as far as the first one's words."""
    indent = " " * len(head.lstrip("\n"))
    return textwrap.fill(
        " ".join(text.split()),
        width(),
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
