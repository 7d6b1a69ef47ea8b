"""The calls, one module per chapter; and the clauses that no call's values can show."""

from __future__ import annotations

from certify.call import Book
from certify.recipes import scores

BOOKS: tuple[Book, ...] = (scores.BOOK,)

NOT_SHOWN: dict[str, str] = {}
