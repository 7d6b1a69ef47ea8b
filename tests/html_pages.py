"""What a page holds, read with the parser of the standard library, and records with text that tries to break out."""

from __future__ import annotations

from html.parser import HTMLParser

from refattn.conformance.records import VERDICTS, Record, Report

VOID = {"meta", "link", "br", "img"}
HOSTILE = "<script>alert(1)</script> & \"'> ]]> --> \x00 \x1b[31m \ud800 \u202e \ufffe é 漢"


class Page(HTMLParser):
    """The elements of a page: their attributes, and that they close in the order in which they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of each element of that name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self) -> list[str]:
        """All ids, in order."""
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]


def hostile_report() -> Report:
    """A report whose every text that may come from a target, a file or a platform is HOSTILE."""
    about = {"clauses": ("M4", "P2"), "dtype": "float32", "message": HOSTILE, "notes": (HOSTILE,), "called": HOSTILE}
    records = tuple(
        Record(case=f"inputs.{HOSTILE}{verdict}", says=HOSTILE, verdict=verdict, place=HOSTILE, trace=HOSTILE, **about)  # type: ignore[arg-type]  # each field has its own type
        for verdict in VERDICTS
    )
    versions = {"refattn": "0", HOSTILE: HOSTILE}
    return Report(target=HOSTILE, versions=versions, seed=0, records=records, notes=(HOSTILE,))
