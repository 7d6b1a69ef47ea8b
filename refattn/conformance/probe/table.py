"""A card shown: a table, and one line that sums it up."""

from __future__ import annotations

from refattn.clauses import CHAPTERS
from refattn.conformance.probe.card import DEPARTS, NOT_DETERMINED, NOT_OFFERED, VERDICTS, Card, Finding

STYLES = {DEPARTS: "red", NOT_DETERMINED: "yellow", NOT_OFFERED: "dim"}
# Of a pipe.
WIDTH = 120


def print_card(card: Card) -> None:
    """The table by chapter, the notes, and the line that sums it up."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=WIDTH)
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    console.print(f"{card.target} ({versions}), probed in {card.dtype}")
    for note in card.notes:
        console.print(note)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, share in (("clause", None), ("finding", 1), ("verdict", None), ("what was found", 3)):
        table.add_column(column, ratio=share, overflow="fold", no_wrap=share is None)
    for letter, title in CHAPTERS.items():
        members = [finding for finding in card.findings if finding.clause[0] == letter]
        if members:
            table.add_row(letter, title, "", "", style="bold")
        for one in members:
            table.add_row(one.clause, one.name, one.verdict, in_words(one), style=STYLES.get(one.verdict, ""))
    console.print(table)
    console.print(f"\n{summary(card)}")


def in_words(finding: Finding) -> str:
    """What was found, with the words that say more."""
    if finding.verdict == NOT_OFFERED or finding.words.startswith(finding.found):
        return finding.words
    return f"{finding.found}: {finding.words}"


def summary(card: Card) -> str:
    """The numbers of findings, and the names of those that depart."""
    counts = ", ".join(f"{card.counts[verdict]} {verdict}" for verdict in VERDICTS if card.counts[verdict])
    departing = ", ".join(finding.name for finding in card.departures)
    return f"{card.target}: {counts}{f'; it departs in {departing}' if departing else ''}."
