"""The convention card: what was found, as data. Reading one checks every key, type and word; nothing is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

FORMAT = 1
AS_SPECIFIED, DEPARTS, NOT_OFFERED, NOT_DETERMINED = VERDICTS = (
    "as specified",
    "departs",
    "not offered",
    "not determined",
)
# What any probe may find, beside its own values.
RAISES, CRASHES, OTHER = "raises", "crashes", "other"
ALWAYS = (RAISES, CRASHES, OTHER, NOT_OFFERED, NOT_DETERMINED)


class CardError(ValueError):
    """Data that is no card; the message says where, what was expected and what came."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of a card.

    `found` is one of the probe's values or of ALWAYS; `words` says it in full; `clause` is the label that it is about;
    `verdict` is one of VERDICTS; `evidence` describes the constructed call, so that it can be repeated.
    """

    name: str
    clause: str
    found: str
    words: str
    verdict: str
    evidence: str

    @property
    def departs(self) -> bool:
        """Whether it is something else than the specification says."""
        return self.verdict == DEPARTS


@dataclass(frozen=True, kw_only=True)
class Card:
    """All findings on one target, in the order of the probes; `dtype` is the one of all calls that name no other."""

    target: str
    versions: dict[str, str]
    dtype: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """The number of findings of each verdict."""
        return Counter(finding.verdict for finding in self.findings)

    @property
    def departures(self) -> tuple[Finding, ...]:
        """The findings that are something else than the specification says."""
        return tuple(finding for finding in self.findings if finding.departs)

    def finding(self, name: str) -> Finding:
        """The finding of that name. Raises KeyError."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"no finding {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON, as schema.json describes it."""
        return {
            "format": FORMAT,
            "target": self.target,
            "versions": dict(self.versions),
            "dtype": self.dtype,
            "notes": list(self.notes),
            "findings": [asdict(finding) for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Card:
        """The card of such data. Raises CardError for a missing or unknown key, a wrong type, and an unknown word."""
        from refattn.conformance.probe.run import vocabulary

        keys = ("format", "target", "versions", "dtype", "notes", "findings")
        _keys("the card", data, keys)
        if data["format"] != FORMAT or isinstance(data["format"], bool):
            raise CardError(f"format: expected {FORMAT}; got {data['format']!r}")
        for name in ("target", "dtype"):
            _text(name, data[name])
        if not isinstance(data["versions"], dict):
            raise CardError(f"versions: expected an object; got {type(data['versions']).__name__}")
        for library, version in data["versions"].items():
            _text(f"versions.{library}", version)
        for name in ("notes", "findings"):
            if not isinstance(data[name], list):
                raise CardError(f"{name}: expected a list; got {type(data[name]).__name__}")
        for note in data["notes"]:
            _text("notes", note)
        findings = tuple(_finding(number, one, vocabulary()) for number, one in enumerate(data["findings"]))
        if repeated := [name for name, count in Counter(one.name for one in findings).items() if count > 1]:
            raise CardError(f"findings: expected each name once; got {repeated[0]!r} again")
        return cls(
            target=data["target"],
            versions=dict(data["versions"]),
            dtype=data["dtype"],
            findings=findings,
            notes=tuple(data["notes"]),
        )


class Difference(NamedTuple):
    """A finding that two cards do not share; "" stands for a card that lacks it."""

    name: str
    clause: str
    first: str
    second: str


def differences(card: Card, other: Card) -> tuple[Difference, ...]:
    """The findings in which two cards differ, by what was found alone: not by words, evidence or versions."""
    first = {finding.name: finding for finding in card.findings}
    second = {finding.name: finding for finding in other.findings}
    found = []
    for name in (*first, *(name for name in second if name not in first)):
        one, two = first.get(name), second.get(name)
        values = (one.found if one else "", two.found if two else "")
        if values[0] != values[1]:
            found.append(Difference(name, (one or two).clause, *values))  # type: ignore[union-attr]  # one is there
    return tuple(found)


def _finding(number: int, data: Any, vocabulary: Mapping[str, tuple[str, tuple[str, ...]]]) -> Finding:
    where = f"findings[{number}]"
    names = tuple(field.name for field in fields(Finding))
    _keys(where, data, names)
    for name in names:
        _text(f"{where}.{name}", data[name])
    if data["name"] not in vocabulary:
        raise CardError(f"{where}.name: expected the name of a probe; got {data['name']!r}")
    clause, values = vocabulary[data["name"]]
    for name, choices in (("clause", (clause,)), ("found", values), ("verdict", VERDICTS)):
        if data[name] not in choices:
            raise CardError(f"{where}.{name}: expected {' or '.join(map(repr, choices))}; got {data[name]!r}")
    return Finding(**data)


def _keys(where: str, data: Any, expected: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        raise CardError(f"{where}: expected an object; got {type(data).__name__}")
    for what, names in (
        ("unknown", [name for name in data if name not in expected]),
        ("missing", [name for name in expected if name not in data]),
    ):
        if names:
            raise CardError(f"{where}: expected the keys {', '.join(expected)}; {names[0]!r} is {what}")


def _text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise CardError(f"{where}: expected a string; got {type(value).__name__}")
