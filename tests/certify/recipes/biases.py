"""Chapter B: ALiBi, relative tables, sums, rotary positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from certify.call import BASE, Book, Call, plain
from certify.draw import Draw

BOOK = Book("B")
ALIBI: tuple[dict[str, Any], ...] = ({"kind": "alibi"},)


@BOOK.recipe("B1", "B2", flags=("alibi",))
def alibi(draw: Draw) -> Call:
    """slope_h times minus the distance is added, on both sides of the query."""
    return Call(**draw.qkv(4, 4, batch=(1,), heads=4), bias=ALIBI)


@BOOK.recipe("B1", "M3", flags=("alibi", "positions"))
def alibi_over_a_cache(draw: Draw) -> Call:
    """Distances are of positions: two queries at the end of six keys."""
    return Call(**draw.qkv(2, 6, batch=(1,), heads=4), causal=True, q_start=4, bias=ALIBI)


@BOOK.recipe("B1", "M3", flags=("alibi", "positions", "ragged"))
def alibi_per_entry(draw: Draw) -> Call:
    """Distances follow the starts of each entry."""
    data = draw.qkv(3, 4, batch=(2,), heads=2)
    return Call(**data, q_start=[0, 7], k_start=[2, 3], bias=ALIBI)


@BOOK.recipe("B1", "P3", flags=("alibi", "sink"))
def alibi_with_sinks(draw: Draw) -> Call:
    """A query's distance to itself is 0: an offset that cancels elsewhere shows beside a sink."""
    data = draw.qkv(4, 4, batch=(1,), heads=2)
    return Call(**data, causal=True, sinks=draw.array(2), bias=ALIBI)


@BOOK.recipe("B2", flags=("alibi",))
def slope_of_one_head(draw: Draw) -> Call:
    """One head has the slope 2^-8."""
    return Call(**draw.qkv(3, 6, batch=(2,), heads=1), bias=ALIBI, q_start=3)


@BOOK.recipe("B2", flags=("alibi",))
def slopes_of_three_heads(draw: Draw) -> Call:
    """3 heads have the slopes of 2, then the first of 4."""
    return Call(**draw.qkv(3, 6, batch=(1,), heads=3, d_k=4), bias=ALIBI, q_start=3)


@BOOK.recipe("B2", flags=("alibi",))
def slopes_of_six_heads(draw: Draw) -> Call:
    """6 heads have the slopes of 4, then every second one of 8."""
    return Call(**draw.qkv(2, 6, batch=(1,), heads=6, kv_heads=2, d_k=4), bias=ALIBI, q_start=4)


@BOOK.recipe("B2", flags=("alibi",))
def slopes_of_eight_heads(draw: Draw) -> Call:
    """8 heads have the slopes 1/2 to 1/256."""
    return Call(**draw.qkv(2, 6, batch=(1,), heads=8, kv_heads=2, d_k=4), bias=ALIBI, q_start=4)


@BOOK.recipe("B2", flags=("alibi",))
def slopes_of_twelve_heads(draw: Draw) -> Call:
    """12 heads have the slopes of 8, then every second one of 16, irrational powers of two."""
    return Call(**draw.qkv(2, 4, batch=(1,), heads=12, kv_heads=3, d_k=2), bias=ALIBI, q_start=2)


@BOOK.recipe("B3", flags=("relative-bias",))
def relative(draw: Draw) -> Call:
    """A table by clipped distance, key minus query: R = 2, so that distances beyond are clipped on both sides."""
    data = draw.qkv(5, 5)
    return Call(**data, bias=({"kind": "relative", "table": draw.array(data["q"].shape[-3], 5)},))


@BOOK.recipe("B3", "M3", flags=("relative-bias", "positions"))
def relative_over_a_cache(draw: Draw) -> Call:
    """Distances are of positions."""
    data = draw.qkv(3, 6)
    return Call(**data, q_start=2, bias=({"kind": "relative", "table": draw.array(data["q"].shape[-3], 5)},))


@BOOK.recipe("B3", flags=("relative-bias",))
def relative_to_nothing(draw: Draw) -> Call:
    """With R = 0 the one entry per head is a shift."""
    data = draw.qkv(4, 4)
    return Call(**data, bias=({"kind": "relative", "table": draw.array(data["q"].shape[-3], 1)},))


@BOOK.recipe("B4")
def bias_array(draw: Draw) -> Call:
    """A bias (Lq, Lk) holds for all heads and entries."""
    return Call(**draw.qkv(4, 6), bias=plain(draw.array(4, 6)))


@BOOK.recipe("B4", flags=("head-mask",))
def bias_per_head(draw: Draw) -> Call:
    """A bias (H, Lq, Lk) differs per head."""
    return Call(**draw.qkv(4, 6, heads=2, kv_heads=2), bias=plain(draw.array(2, 4, 6)))


@BOOK.recipe("B4")
def bias_per_key_and_entry(draw: Draw) -> Call:
    """A bias (batch, 1, 1, Lk) holds for all queries and heads."""
    return Call(**draw.qkv(4, 6, batch=(2,), heads=2), bias=plain(draw.array(2, 1, 1, 6)))


@BOOK.recipe("B4", "M17", flags=("relative-bias", "infinite-bias"), kinds=BASE)
def biases_add(draw: Draw) -> Call:
    """A table and two arrays add; -inf in one of them hides."""
    data = draw.qkv(5, 5)
    table = {"kind": "relative", "table": np.round(draw.array(data["q"].shape[-3], 3))}
    hiding = np.where(np.eye(5) > 0, -math.inf, 0.5)
    return Call(**data, bias=(table, *plain(np.round(draw.array(5, 5)), hiding)))


@BOOK.recipe("B4", "B1", flags=("alibi",), kinds=BASE)
def alibi_and_an_array(draw: Draw) -> Call:
    """ALiBi and an array add."""
    data = draw.qkv(4, 4, batch=(1,), heads=2)
    return Call(**data, bias=(*ALIBI, *plain(np.round(draw.array(4, 4)))))


def _rotary(
    q: Any, k: Any = None, style: str = "half", base: float = 10000.0, width: int | None = None
) -> dict[str, Any]:
    return {
        "style": style,
        "base": base,
        "width": width,
        "q_positions": list(q),
        "k_positions": list(q if k is None else k),
    }


@BOOK.recipe("B5", flags=("rotary",))
def rotary_halves(draw: Draw) -> Call:
    """Style "half" pairs component i with i + width/2."""
    return Call(**draw.qkv(4, 4), causal=True, rotary=_rotary(range(4)))


@BOOK.recipe("B5", flags=("rotary",))
def rotary_interleaved(draw: Draw) -> Call:
    """Style "interleaved" pairs component 2i with 2i + 1."""
    return Call(**draw.qkv(4, 4), causal=True, rotary=_rotary(range(4), style="interleaved"))


@BOOK.recipe("B5", flags=("rotary",))
def rotary_width(draw: Draw) -> Call:
    """A rotary width of 4 turns the first 4 components and leaves the others."""
    return Call(**draw.qkv(4, 4, d_k=8), rotary=_rotary(range(4), width=4))


@BOOK.recipe("B5", flags=("rotary",))
def rotary_base(draw: Draw) -> Call:
    """The base sets how fast later pairs turn."""
    return Call(**draw.qkv(4, 4, d_k=8), rotary=_rotary(range(4), style="interleaved", base=100.0))


@BOOK.recipe("B5", "G1", flags=("rotary",))
def rotary_with_shared_heads(draw: Draw) -> Call:
    """Heads that share keys turn alike."""
    return Call(**draw.qkv(3, 4, batch=(1,), heads=4, kv_heads=1), rotary=_rotary(range(1, 4), range(4)))


def _for_both(draw: Draw) -> dict[str, Any]:
    return Draw("B6.both", draw.kind, draw.again).qkv(4, 5)


@BOOK.recipe("B6", flags=("rotary",))
def rotary_from_zero(draw: Draw) -> Call:
    """Positions from 0."""
    return Call(**_for_both(draw), rotary=_rotary(range(1, 5), range(5)))


@BOOK.recipe("B6", flags=("rotary", "positions"))
def rotary_from_a_thousand(draw: Draw) -> Call:
    """The same inputs a thousand positions later: the same results."""
    return Call(**_for_both(draw), rotary=_rotary(range(1001, 1005), range(1000, 1005)))


@BOOK.recipe("B7", flags=("rotary", "ragged", "left-padding"))
def rotary_under_left_padding(draw: Draw) -> Call:
    """Under left padding positions count the kept keys from 0, per entry."""
    keep = np.asarray([[False, False, True, True, True], [True, True, True, True, True]])
    places = [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    data = draw.qkv(5, 5, batch=(2,), heads=2, d_k=4)
    return Call(**data, causal=True, mask={"kind": "padding", "keep": keep}, rotary=_rotary(places))


@BOOK.recipe("B7", flags=("rotary", "decode-step"))
def rotary_decode_step(draw: Draw) -> Call:
    """A new query is turned by its own position, not by its index."""
    return Call(**draw.qkv(1, 6), causal=True, q_start=5, rotary=_rotary([5], range(6)))
