"""The convention cards as a page: question by implementation, how each line was looked at by hand, departures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from refattn.clauses import CHAPTERS
from refattn.conformance.probe import PROBES, Card, Finding
from refattn.conformance.probe.card import NOT_DETERMINED, NOT_OFFERED
from refattn.conformance.targets.names import NAMES


class Looked(Protocol):
    """How the lines were looked at by hand."""

    @property
    def lines(self) -> Mapping[str, str]:
        """A sentence for each line."""

    @property
    def cards(self) -> Mapping[str, Mapping[str, Any]]:
        """Date, versions and what else there is to say of each implementation."""


def page_of(cards: Mapping[str, Card], looked: Looked) -> str:
    """The page in Markdown."""
    software = sorted({item for card in cards.values() for item in card.versions.items()})
    lines = [
        "# What public implementations do",
        "",
        f"The convention cards of {len(cards)} implementations on a CPU, found out by `refattn probe NAME`:",
        f"{', '.join(f'{library} {version}' for library, version in software)}.",
        "Written by `nox -s cards`; NAME.json beside this page is a card in full, and where a profile is shipped,",
        "`refattn check NAME --profile NAME` accepts what it declares.",
        "",
        "**Bold** departs from this specification, which decides where implementations disagree; an empty cell means",
        "that there is no such option or result. Each line of each card was compared once with what plain calls of the",
        "library give that share nothing with refattn and whose answers are worked out by hand:",
        "[below](#how-each-line-was-looked-at).",
        "",
        *_table(cards),
        "",
        "## How each line was looked at",
        "",
        *(f"- **{probe.name}** ({probe.clause}): {looked.lines.get(probe.name, 'not yet')}" for probe in PROBES),
        "",
        *(line for name, card in cards.items() for line in _one(name, card, looked.cards.get(name, {}))),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(cards: Mapping[str, Card]) -> Iterable[str]:
    yield f"| clause | question | {' | '.join(f'[{name}](#{name})' for name in cards)} |"
    yield f"| --- | --- |{' --- |' * len(cards)}"
    for letter, title in CHAPTERS.items():
        asked = [probe for probe in PROBES if probe.clause[0] == letter]
        if asked:
            yield f"| **{letter}** | **{title}** |{' |' * len(cards)}"
        for probe in asked:
            cells = (_cell(card, probe.name) for card in cards.values())
            yield f"| {probe.clause} | {probe.name} | {' | '.join(cells)} |"


def _cell(card: Card, name: str) -> str:
    """What was found, empty where nothing is offered."""
    finding = next((one for one in card.findings if one.name == name), None)
    if finding is None or finding.found == NOT_OFFERED:
        return ""
    if finding.found == NOT_DETERMINED:
        return "?"
    return f"**{finding.found}**" if finding.departs else finding.found


def _one(name: str, card: Card, looked: Mapping[str, Any]) -> Iterable[str]:
    """The section of one implementation."""
    yield from [f"## {name}", "", NAMES[name].says, ""]
    versions = ", ".join(f"{library} {version}" for library, version in card.versions.items())
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in card.notes)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in card.counts.items())
    yield f"{versions}: {counts}.{notes}"
    if looked:
        yield f"Looked at by hand on {looked['date']}, {looked['how']}"
    yield ""
    yield from (f"- {one.clause} {one.name}: {_in_words(one)}." for one in card.departures)
    yield from (f"- By hand: {words}" for words in looked.get("rest", ()))
    yield ""


def _in_words(finding: Finding) -> str:
    """The words of a finding on one line, without what Markdown would read as markup."""
    return " ".join(finding.words.split()).replace("|", "\\|").rstrip(".")
