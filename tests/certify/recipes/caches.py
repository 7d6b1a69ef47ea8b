"""Chapter K: what attention over a cache must give, as attention over the keys appended so far."""

from __future__ import annotations

import math
from typing import Any

from certify.call import Book, Call
from certify.draw import Draw

BOOK = Book("K")


def _cached(draw: Draw, lengths: list[int], slots: int, new: int, cache: dict[str, Any], **options: Any) -> Call:
    """The newest queries over buffers whose slots beyond each length hold NaN and infinities."""
    data = draw.ramp(new, slots, batch=(len(lengths),), heads=2, up=False, d_k=4)
    for entry, length in enumerate(lengths):
        data["k"][entry, :, length:], data["v"][entry, :, length:] = math.nan, math.inf
    starts = [length - new for length in lengths]
    uniform = len(set(lengths)) == 1
    mask = {"kind": "lengths", "n": lengths[0] if uniform else lengths}
    q_start = starts[0] if uniform else starts
    return Call(**data, causal=True, mask=mask, q_start=q_start, cache=cache, **options)


@BOOK.recipe("K1", "K7", flags=("decode-step", "positions"))
def decode_after_prefill(draw: Draw) -> Call:
    """One new query over five cached keys and its own: the last row of one full pass."""
    cache = {"kind": "contiguous", "appends": [5, 1], "capacity": 6}
    data = draw.ramp(1, 6, batch=(2,), heads=2, up=False)
    return Call(**data, causal=True, q_start=5, cache=cache)


@BOOK.recipe("K1", "K7", flags=("positions",))
def prefill_in_pieces(draw: Draw) -> Call:
    """Three new queries over three cached keys and their own: the last rows of one full pass."""
    cache = {"kind": "contiguous", "appends": [2, 1, 3], "capacity": 6}
    return Call(**draw.ramp(3, 6, batch=(2,), heads=2), causal=True, q_start=3, cache=cache)


@BOOK.recipe("K2", "B5", flags=("decode-step", "rotary", "positions"))
def no_drift(draw: Draw) -> Call:
    """Rotary keys in a cache keep the positions at which they came: a drift of one shows."""
    rotary = {"style": "half", "base": 10000.0, "width": None, "q_positions": [5], "k_positions": list(range(6))}
    return Call(**draw.qkv(1, 6, batch=(2,), heads=2), causal=True, q_start=5, rotary=rotary)


@BOOK.recipe("K2", "B1", flags=("decode-step", "alibi", "positions"))
def no_drift_of_distances(draw: Draw) -> Call:
    """Distances to cached keys are those of absolute positions; a sink shows a common drift."""
    cache = {"kind": "contiguous", "appends": [4, 2], "capacity": 8}
    data = draw.qkv(2, 6, batch=(2,), heads=2)
    return Call(**data, causal=True, q_start=4, bias=({"kind": "alibi"},), sinks=draw.array(2), cache=cache)


@BOOK.recipe("K3", "K4", flags=("unused-slots", "hidden-poison", "ragged", "positions"))
def ragged_lengths(draw: Draw) -> Call:
    """Entries of 5 and 3 tokens in buffers of 7 slots, appended in pieces of different sizes."""
    cache = {"kind": "contiguous", "appends": [[3, 2], [2, 1]], "capacity": 7}
    return _cached(draw, [5, 3], 7, 2, cache)


@BOOK.recipe("K3", "K7", flags=("unused-slots", "hidden-poison", "decode-step", "ragged", "positions"))
def ragged_decode_step(draw: Draw) -> Call:
    """One new query per entry, each at the end of its own length."""
    cache = {"kind": "contiguous", "appends": [[5, 2], [1, 1]], "capacity": 8}
    return _cached(draw, [6, 3], 8, 1, cache)


@BOOK.recipe("K4", flags=("unused-slots", "hidden-poison", "positions"))
def unused_slots(draw: Draw) -> Call:
    """Slots beyond the length hold NaN and infinities, and do not matter."""
    return _cached(draw, [4, 4], 7, 2, {"kind": "contiguous", "appends": [4], "capacity": 7})


@BOOK.recipe("K4", "M6", flags=("unused-slots", "hidden-poison", "ragged", "window", "positions"))
def unused_slots_and_a_window(draw: Draw) -> Call:
    """A window of three tokens over ragged lengths."""
    call = _cached(draw, [5, 4], 7, 2, {"kind": "contiguous", "appends": [[5, 4]], "capacity": 7})
    window = {"kind": "window", "left": 2, "right": 0}
    return Call(**{**vars(call), "mask": {"kind": "and", "of": [call.mask, window]}, "cache": None})


@BOOK.recipe("K7", "P2", flags=("unused-slots", "hidden-poison", "ragged", "positions"))
def more_queries_than_tokens(draw: Draw) -> Call:
    """Queries before the first token of a short entry see nothing."""
    return _cached(draw, [4, 2], 5, 3, {"kind": "contiguous", "appends": [[4, 2]], "capacity": 5})


@BOOK.recipe("K8", flags=("unused-slots", "hidden-poison", "ragged", "positions"))
def pages(draw: Draw) -> Call:
    """Pages of 2 positions: entries of 5 and 3 tokens end within a page."""
    cache = {"kind": "paged", "appends": [[3, 1], [2, 2]], "page_size": 2, "pages": 5}
    return _cached(draw, [5, 3], 6, 2, cache)


@BOOK.recipe("K8", flags=("decode-step", "positions"))
def full_pages(draw: Draw) -> Call:
    """A length that is a multiple of the page size, and one page more than a power of two."""
    cache = {"kind": "paged", "appends": [5, 3, 1], "page_size": 3, "pages": 6}
    return _cached(draw, [9, 9], 9, 1, cache)


@BOOK.recipe("K9", "M6", flags=("window", "decode-step", "positions"))
def rolling_decode_step(draw: Draw) -> Call:
    """A rolling cache of window 3 gives the newest query what window(2, 0) over all keys gives."""
    cache = {"kind": "rolling", "appends": [4, 1, 1, 1], "window": 3}
    data = draw.ramp(1, 7, batch=(2,), heads=2, up=False)
    return Call(**data, causal=True, mask={"kind": "window", "left": 2, "right": 0}, q_start=6, cache=cache)


@BOOK.recipe("K9", "M6", flags=("window", "positions"))
def rolling_several_at_once(draw: Draw) -> Call:
    """Three tokens appended at once see the three keys that end with each, two of them older than the append."""
    cache = {"kind": "rolling", "appends": [2, 2, 3], "window": 3}
    data = draw.ramp(3, 7, batch=(2,), heads=2, up=False, d_k=4)
    return Call(**data, causal=True, mask={"kind": "window", "left": 2, "right": 0}, q_start=4, cache=cache)
