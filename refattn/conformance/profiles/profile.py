"""Reading profiles: a card in JSON, by name from this folder, or from a file of the user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from refattn.conformance.faults.fault import Fault
from refattn.conformance.near import meant
from refattn.conformance.probe.card import Card, CardError, Finding
from refattn.conformance.profiles.meaning import faults_of

FOLDER = Path(__file__).parent
# What a probe asks about by the options of these names alone. `refattn check` says it in other ways where a calling
# convention differs, so that none of these departures explains a result of an implementation that it calls by name.
LITERAL = ("mask", "mask of rank 3", "causal alignment", "mask with causal", "window")
# A card is a few ten thousand bytes.
LARGEST_FILE = 1 << 20


class ProfileError(ValueError):
    """A profile that cannot be read; the message says which and why, in one sentence."""


@dataclass(frozen=True)
class Profile:
    """A card under a name."""

    name: str
    card: Card

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The wrong implementations that its departures describe, each once, in the order of the card."""
        found = {fault.name: fault for finding in self._shown for fault in faults_of(finding)}
        return tuple(found.values())

    @property
    def _shown(self) -> tuple[Finding, ...]:
        """The departures that a case can show: where q_start is honoured, none depends on an alignment of one's own."""
        honoured = any(one.name == "q_start" and one.found == "honoured" for one in self.card.findings)
        by_name = ":" not in self.card.target
        hidden = LITERAL if by_name else ("causal alignment",) if honoured else ()
        return tuple(one for one in self.card.departures if one.name not in hidden)


def names() -> tuple[str, ...]:
    """The profiles that are shipped."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load(name: str) -> Profile:
    """The profile of that name, or in that file if it ends in .json. Raises ProfileError."""
    if not name.endswith(".json") and name not in names():
        guess = meant(name, names(), cutoff=0.4)
        raise ProfileError(
            f"no profile {name!r}{guess or ';'} there are {', '.join(names())}, and files that end in .json"
        )
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
    except OSError as fault:
        raise ProfileError(f"{path.name}: {fault.strerror or fault}") from fault
    if len(text) > LARGEST_FILE:
        raise ProfileError(f"{path.name}: expected a card of at most {LARGEST_FILE} bytes")
    try:
        card = Card.from_dict(json.loads(text))
    except CardError as fault:
        raise ProfileError(f"{path.name}: {fault}") from fault
    except (ValueError, RecursionError) as fault:  # numbers and nesting beyond Python's limits included
        raise ProfileError(f"{path.name} is no JSON: {fault}") from fault
    return Profile(path.stem, card)
