"""`refattn clauses`: the specification, clause by clause."""

import argparse
from collections.abc import Sequence

from refattn import clauses as specification
from refattn.clauses import CHAPTERS, CLAUSES, Clause
from refattn.commands.output import print_json, print_text

DESCRIPTION = """\
Prints the clauses of the specification. Each has a label such as M3, which error messages, tests, reports and
the documentation use too. MUST binds every implementation; SHOULD and MAY say so themselves. Clauses that are named
one by one are followed by the code that realises them, and by their errors, cases, vectors, faults and reports.
"""

EPILOG = """\
Examples:
  refattn clauses              every clause
  refattn clauses M3 P2        these two, and where each leads; m3,p2 says the same
  refattn clauses M            chapter M, visibility
  refattn clauses --json S     chapter S for programs
  refattn clauses --markdown   the whole list as the page docs/clauses.md
"""

MARKDOWN_HEAD = """\
# All clauses

Every rule of the specification on one page, printed by `refattn clauses --markdown`. The label of a clause
appears in the documentation, at the code that realises it, on the cases that test it, and in the error that
enforces it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn clauses`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "names", nargs="*", type=labels_in, metavar="LABEL", help="labels (M3) or chapters (M); all if left out"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list")
    form.add_argument("--markdown", action="store_true", help="print a Markdown page")


def run(args: argparse.Namespace) -> int:
    """Prints the clauses that the command line names."""
    wanted = frozenset(label for labels in args.names for label in labels)
    chosen = [clause for clause in CLAUSES if not wanted or clause.label in wanted]
    if args.json:
        print_json([{**clause._asdict(), "chapter": clause.chapter, **_leads(clause, wanted)} for clause in chosen])
    elif args.markdown:
        print(markdown(chosen), end="")
    else:
        _print_plainly(chosen, wanted)
    return 0


def markdown(clauses: Sequence[Clause] = CLAUSES) -> str:
    """The clauses as one Markdown page."""
    parts = [MARKDOWN_HEAD]
    for letter, members in _by_chapter(clauses):
        parts.append(f"\n## {letter} — {CHAPTERS[letter]}\n")
        for clause in members:
            # A heading of its own makes each clause a place that a link can name.
            parts.append(f"\n### {clause.label} · {_escaped(clause.title)}\n")
            parts.append(f"\n**{clause.level}.** {_escaped(clause.text)}\n")
            if clause.note:
                parts.append(f"\n> {_escaped(clause.note)}\n")
    return "".join(parts)


def labels_in(text: str) -> frozenset[str]:
    """`refattn.clauses.labels_in`, with the error that argparse shows."""
    try:
        return specification.labels_in(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def _leads(clause: Clause, wanted: frozenset[str]) -> dict[str, list[str]]:
    """Where a clause leads, if not its whole chapter is wanted."""
    if not wanted or wanted.issuperset(one.label for one in CLAUSES if one.chapter == clause.chapter):
        return {}
    from refattn.conformance.trace import trace  # builds every case and reads every vector

    found = trace(clause.label)
    code = [f"{place} (refattn/{place.module}.py:{place.line})" for place in found.code]
    return {**{name: list(names) for name, names in found._asdict().items()}, "code": code}


def _print_plainly(clauses: Sequence[Clause], wanted: frozenset[str]) -> None:
    for letter, members in _by_chapter(clauses):
        print(f"{letter}  {CHAPTERS[letter]}")
        for clause in members:
            print(f"\n  {clause.label}  {clause.level}  {clause.title}")
            print_text(clause.text, indent="      ")
            if clause.note:
                print_text(f"Note: {clause.note}", indent="      ")
            for name, found in _leads(clause, wanted).items():
                if found:
                    print_text(f"{name}: {', '.join(found)}", indent="      ")
        print()


def _by_chapter(clauses: Sequence[Clause]) -> list[tuple[str, list[Clause]]]:
    chapters = [(letter, [clause for clause in clauses if clause.chapter == letter]) for letter in CHAPTERS]
    return [(letter, members) for letter, members in chapters if members]


def _escaped(text: str) -> str:
    """Text in which Markdown finds no emphasis, HTML or links."""
    for mark in "\\`*_<[":
        text = text.replace(mark, f"\\{mark}")
    return text
