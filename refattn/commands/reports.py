"""`refattn reports`: public reports of wrong attention, and the cases that would have caught them."""

import argparse
from collections.abc import Sequence

from refattn.commands.output import print_json, print_text
from refattn.conformance.public_reports import REPORTS, STANDINGS, PublicReport

DESCRIPTION = """\
Prints the public reports of wrong attention that the suite answers to: what was wrong, which clauses it is about,
and which cases fail on it. `refattn check TARGET --case NAME` runs such a case.
"""

EPILOG = """\
Examples:
  refattn reports                     every report
  refattn reports "NaN leak" overflow those of these kinds
  refattn reports --json              all of them for programs
  refattn reports --markdown          the whole list as the page docs/reports.md
"""

MARKDOWN_HEAD = """\
# Public reports

What went wrong in public, and the cases that would have caught it, printed by `refattn reports --markdown`. The tests
hold the published data and numbers, and a wrong implementation of each kind on which the cases fail.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn reports`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("kinds", nargs="*", metavar="KIND", type=_kind, help="kinds of reports; all if left out")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list")
    form.add_argument("--markdown", action="store_true", help="print a Markdown page")


def run(args: argparse.Namespace) -> int:
    """Prints the reports of the kinds that the command line names."""
    chosen = [report for report in REPORTS if not args.kinds or report.kind in args.kinds]
    if args.json:
        print_json([{**report._asdict(), "url": report.url} for report in chosen])
    elif args.markdown:
        print(markdown(chosen), end="")
    else:
        _print_plainly(chosen)
    return 0


def markdown(reports: Sequence[PublicReport] = REPORTS) -> str:
    """The reports as one Markdown page, a table for each kind."""
    parts = [MARKDOWN_HEAD]
    for kind, members in _by_kind(reports):
        parts.append(f"\n## {kind}\n\n| report | what was wrong | clauses | cases |\n|---|---|---|---|\n")
        for report in members:
            cases = ", ".join(f"`{name}`" for name in report.cases)
            link = f"[{report.repository} {report.number}]({report.url})"
            reason = f" *{report.standing}*: {report.reason}" if report.reason else ""
            parts.append(f"| {link} | {report.wrong}{reason} | {', '.join(report.clauses)} | {cases} |\n")
    parts.append("\n## How a report and its cases belong together\n\n")
    for standing, meaning in STANDINGS.items():
        count = sum(report.standing == standing for report in reports)
        parts.append(f"- *{standing}*, {count} of {len(reports)}: {meaning}.\n")
    return "".join(parts)


def _kind(text: str) -> str:
    """A kind of reports, in whatever capitals."""
    kinds = {report.kind.lower(): report.kind for report in REPORTS}
    if text.lower() not in kinds:
        raise argparse.ArgumentTypeError(f"no kind {text!r}; the kinds are {', '.join(kinds.values())}")
    return kinds[text.lower()]


def _print_plainly(reports: Sequence[PublicReport]) -> None:
    for kind, members in _by_kind(reports):
        print(kind)
        for report in members:
            print(f"\n  {report.repository} {report.number}  {report.standing}  {', '.join(report.clauses)}")
            print_text(report.wrong, indent="      ")
            if report.reason:
                print_text(report.reason, indent="      ")
            print_text(f"Cases: {', '.join(report.cases)}", indent="      ")
        print()


def _by_kind(reports: Sequence[PublicReport]) -> list[tuple[str, list[PublicReport]]]:
    kinds = dict.fromkeys(report.kind for report in reports)
    return [(kind, [report for report in reports if report.kind == kind]) for kind in kinds]
