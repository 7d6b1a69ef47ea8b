"""`python -m refattn.conformance.cards`: the convention cards of public implementations, the profiles and the page.

Each is probed in a process of its own, as `refattn probe` does. A card whose departures have a meaning becomes a
profile too. What the page draws beside the cards is verified.toml: how each line was looked at by hand, and when.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refattn.conformance.cards_page import page_of
from refattn.conformance.isolation.target import IsolatedTarget
from refattn.conformance.probe import Card, probe
from refattn.conformance.probe.schema import as_text
from refattn.conformance.profiles import Profile
from refattn.conformance.targets.names import NAMES, chosen_names

VERIFIED = "verified.toml"
# For the calls of a question: tinygrad's device of plain Python takes minutes for some.
SECONDS = 1500.0


@dataclass(frozen=True)
class Verified:
    """How the lines were looked at by hand: a sentence for each, and each implementation's date, versions and rest."""

    lines: dict[str, str]
    cards: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Verified:
        """What verified.toml in a folder says. Raises OSError, tomllib.TOMLDecodeError, KeyError."""
        data = tomllib.loads((folder / VERIFIED).read_text(encoding="utf-8"))
        return cls(dict(data["lines"]), dict(data["cards"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Probes, writes cards, profiles and page."""
    parser = argparse.ArgumentParser(prog="python -m refattn.conformance.cards", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="as `refattn check --list` shows them (all installed)")
    parser.add_argument("--folder", type=Path, default=Path("docs/cards"), help="for cards and page (%(default)s)")
    parser.add_argument(
        "--profiles", type=Path, default=Path("refattn/conformance/profiles"), help="for profiles (%(default)s)"
    )
    parser.add_argument("--draw", action="store_true", help="probe nothing: draw the page of the cards that are there")
    chosen = parser.parse_args(arguments)
    names = chosen_names(chosen.names, parser)
    for name in () if chosen.draw else names:
        started = time.monotonic()
        card = probed(name)
        text = as_text(card.as_dict())
        (chosen.folder / f"{name}.json").write_text(text, encoding="utf-8")
        shown, profile = bool(Profile(name, card).faults), chosen.profiles / f"{name}.json"
        if shown:
            profile.write_text(text, encoding="utf-8")
        else:
            profile.unlink(missing_ok=True)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in card.counts.items())
        seconds = time.monotonic() - started
        print(f"{name}: {counts}{', and a profile' * shown}, in {seconds:.0f} s", flush=True)
    page = page_of(cards_in(chosen.folder), Verified.read(chosen.folder))
    (chosen.folder / "README.md").write_text(page, encoding="utf-8")
    return 0


def probed(name: str) -> Card:
    """The card of one implementation."""
    target = IsolatedTarget(name, seconds=SECONDS)
    try:
        return probe(target)
    finally:
        target.close()


def cards_in(folder: Path) -> dict[str, Card]:
    """The cards of a folder by name, in the order of `NAMES`. Raises CardError."""
    paths = {name: folder / f"{name}.json" for name in NAMES}
    return {
        name: Card.from_dict(json.loads(path.read_text(encoding="utf-8")))
        for name, path in paths.items()
        if path.exists()
    }


if __name__ == "__main__":
    raise SystemExit(main())
