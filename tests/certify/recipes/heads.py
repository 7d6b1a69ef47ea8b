"""Chapter G: groups of heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from certify.call import Book, Call
from certify.draw import Draw

BOOK = Book("G")


@BOOK.recipe("G1")
def one_to_one(draw: Draw) -> Call:
    """As many key/value heads as query heads: each has its own."""
    return Call(**draw.qkv(3, 4, batch=(1,), heads=4, kv_heads=4))


@BOOK.recipe("G1")
def two_groups(draw: Draw) -> Call:
    """Four query heads, two key/value heads: heads 0 and 1 read the first, 2 and 3 the second."""
    return Call(**draw.qkv(3, 4, batch=(2,), heads=4, kv_heads=2, d_k=4))


@BOOK.recipe("G1")
def three_groups(draw: Draw) -> Call:
    """Six query heads in three groups: h // 2 and h % 3 differ for most."""
    return Call(**draw.qkv(3, 4, batch=(1,), heads=6, kv_heads=3))


@BOOK.recipe("G1")
def groups_of_three(draw: Draw) -> Call:
    """Six query heads in two groups of three."""
    return Call(**draw.qkv(3, 4, batch=(1,), heads=6, kv_heads=2), causal=True, q_start=1)


@BOOK.recipe("G1")
def one_for_all(draw: Draw) -> Call:
    """One key/value head for four query heads."""
    return Call(**draw.qkv(3, 4, batch=(2,), heads=4, kv_heads=1, d_k=4))


@BOOK.recipe("G1", "P3", "B1", flags=("sink", "alibi"))
def options_follow_the_query_head(draw: Draw) -> Call:
    """Sinks and slopes belong to query heads, of which two share a key/value head."""
    data = draw.qkv(3, 4, batch=(1,), heads=4, kv_heads=2)
    return Call(**data, sinks=draw.array(4), bias=({"kind": "alibi"},), q_start=1)


def _shared(draw: Draw) -> dict[str, Any]:
    return Draw("G2.sharing", draw.kind, draw.again).qkv(3, 4, batch=(2,), heads=4, kv_heads=2, d_k=4)


@BOOK.recipe("G2")
def shared(draw: Draw) -> Call:
    """Two key/value heads that four query heads share."""
    return Call(**_shared(draw))


@BOOK.recipe("G2")
def repeated(draw: Draw) -> Call:
    """The same, each key/value head repeated twice in a row: the same results."""
    data = _shared(draw)
    return Call(q=data["q"], k=np.repeat(data["k"], 2, axis=-3), v=np.repeat(data["v"], 2, axis=-3))
