"""The scoreboard as a page: clause by implementation, then each implementation's departures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from refattn.clauses import CHAPTERS, CLAUSES
from refattn.conformance.reproductions import Reproduction
from refattn.conformance.table import in_order
from refattn.conformance.targets.names import NAMES


def page_of(board: dict[str, Any], found: list[Reproduction]) -> str:
    """The page in Markdown."""
    software = dict(item for figures in board.values() for item in sorted(figures["versions"].items()))
    lines = [
        "# Public implementations, clause by clause",
        "",
        f"{len(board)} implementations on a CPU, judged by `refattn check NAME` in all their dtypes:",
        f"{', '.join(f'{library} {version}' for library, version in sorted(software.items()))}.",
        "Written by `nox -s scoreboard`; [scoreboard.json](scoreboard.json) has every failing case.",
        "",
        "A cell counts cases, one for each dtype: `12` passed all that it can express, **3**/12 failed 3 of 12, and an",
        "empty one could not be asked. To depart from this specification is not always a fault: it decides where",
        "implementations disagree, and asks that what is hidden influence nothing, not even as NaN.",
        "",
        *_table(board),
        "",
        *(line for name, figures in board.items() for line in _departures(name, figures, found)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(board: dict[str, Any]) -> Iterable[str]:
    yield f"| clause | {' | '.join(f'[{name}](#{name})' for name in board)} |"
    yield f"| --- |{' ---: |' * len(board)}"
    for letter, title in CHAPTERS.items():
        labels = [one for one in CLAUSES if one.label[0] == letter]
        asked = [one for one in labels if any(_cell(figures, one.label) for figures in board.values())]
        if asked:
            yield f"| **{letter}** {title} |{' |' * len(board)}"
        for one in asked:
            cells = [_cell(figures, one.label) for figures in board.values()]
            yield f"| {one.label} {one.title} | {' | '.join(cells)} |"


def _cell(figures: dict[str, Any], label: str) -> str:
    """What is judged of a clause; empty where nothing is."""
    counts = figures["clauses"].get(label, {})
    failed = counts.get("fail", 0)
    judged = failed + counts.get("pass", 0)
    return f"**{failed}**/{judged}" if failed else str(judged or "")


def _departures(name: str, figures: dict[str, Any], found: list[Reproduction]) -> Iterable[str]:
    yield from [f"## {name}", "", NAMES[name].says, ""]
    counts, versions = figures["counts"], ", ".join(f"{one} {two}" for one, two in figures["versions"].items())
    words = {"crashed": "crash", "timed out": "take too long"}
    verdicts = ", ".join(f"{count} {words.get(verdict, verdict)}" for verdict, count in counts.items())
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in figures["notes"])
    yield f"{versions}: {verdicts}.{notes}"
    if low := [dtype for dtype, model in figures["models"].items() if model == "unfused"]:
        yield f"Scores or weights are rounded to the storage type in {', '.join(low)}."
    yield ""
    for one in found:
        cases = [row for row in figures["failing"] if one.shows(name, row["clause"])]
        if not cases:
            continue
        labels = in_order({row["clause"] for row in cases})
        link = f"[{one.function}](reproductions/{one.path.name})"
        count = f"{len(cases)} case{'s' * (len(cases) > 1)}"
        yield f"- {one.says} {link}: {', '.join(labels)}, {count}, first `{cases[0]['case']}`"
    if not figures["failing"]:
        yield "No departure in what it can express."
    yield ""
