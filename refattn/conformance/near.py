"""What may have been meant by a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """The end of a sentence, "; did you mean a or b?", with the known names spelt most alike; "" if there is none."""
    near = difflib.get_close_matches(name, tuple(known), n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""
