"""Cases by name, as a command line gives them: whole names, or patterns with * and ?."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from refattn.conformance.near import meant


class NoSuchCase(ValueError):
    """A name or pattern that no case has; the message says which come near, in one sentence."""


def picked(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that the text asks for, with commas or spaces, in the order of known. Raises NoSuchCase."""
    names = tuple(dict.fromkeys(known))
    patterns = text.replace(",", " ").split()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise NoSuchCase(f"no case {pattern!r}{_near(pattern, names)} refattn cases list shows all")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _near(pattern: str, names: tuple[str, ...]) -> str:
    """What may have been meant: a chapter's cases, those whose name contains it, or those spelt alike."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"; did you mean {pattern}.*?"
    near = [name for name in names if pattern in name][:3]
    return meant(pattern, near or names, most=3, cutoff=0.0 if near else 0.4) or ";"
