"""Text that a target, a file or a platform supplied, made safe to stand in XML and HTML."""

from __future__ import annotations

import re
from html import escape

# What XML 1.0 cannot hold, surrogates among it; control characters; and marks that turn the direction of reading.
_UNFIT = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""The text with what cannot be shown written as its escape, such as \x1b; escaping markup comes after this."""
    return _UNFIT.sub(lambda found: ascii(found[0])[1:-1], text)


def escaped(text: str) -> str:
    """The text as HTML and SVG show it."""
    return escape(printable(text))
