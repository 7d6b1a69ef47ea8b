"""Chapter M, first part: what positions decide."""

from __future__ import annotations

import numpy as np

from certify.call import BASE, Book, Call, dense
from certify.draw import Draw

BOOK = Book("M")


@BOOK.recipe("M1")
def true_means_visible(draw: Draw) -> Call:
    """True means visible: an asymmetric mask, so that the opposite reading differs."""
    return Call(**draw.ramp(4, 6), mask=dense(np.tile(np.arange(6) < 4, (4, 1))))


@BOOK.recipe("M1")
def nothing_hidden(draw: Draw) -> Call:
    """A mask that is True everywhere changes nothing."""
    return Call(**draw.qkv(4, 6), mask=dense(np.ones((4, 6))))


@BOOK.recipe("M2", flags=("constant-values",))
def hidden_before_softmax(draw: Draw) -> Call:
    """Masking selects before softmax: with values of one the output is exactly one, whatever hidden keys score."""
    data = draw.ramp(4, 6)
    return Call(**data | {"v": np.ones_like(data["v"])}, mask=dense(draw.shown(4, 6) | (np.arange(6) == 0)))


@BOOK.recipe("M2", flags=("uniform-weights",), kinds=BASE)
def half_of_two_keys(draw: Draw) -> Call:
    """Two equal keys, the second hidden: the first value, where masking after the softmax gives half of it."""
    data = draw.qkv(1, 2)
    data["k"][..., 1, :] = data["k"][..., 0, :]
    return Call(**data, mask=dense(np.asarray([[True, False]])))


@BOOK.recipe("M3", flags=("ragged", "positions"))
def starts_per_entry(draw: Draw) -> Call:
    """q_start differs per batch entry."""
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), causal=True, q_start=[0, 2])


@BOOK.recipe("M3", "P2", flags=("positions",))
def negative_starts(draw: Draw) -> Call:
    """Positions may be negative; queries before every key see nothing."""
    return Call(**draw.ramp(6, 4), causal=True, q_start=-3)


@BOOK.recipe("M3", flags=("positions",))
def keys_that_start_later(draw: Draw) -> Call:
    """k_start moves the keys, as in a shard of a longer sequence."""
    return Call(**draw.ramp(4, 6), causal=True, q_start=7, k_start=5)


@BOOK.recipe("M3", flags=("ragged", "positions"))
def both_starts_per_entry(draw: Draw) -> Call:
    """Both starts differ per entry; only their difference counts."""
    return Call(**draw.ramp(4, 6, batch=(2,), heads=2), causal=True, q_start=[3, 9], k_start=[1, 8])


@BOOK.recipe("M4")
def causal(draw: Draw) -> Call:
    """A query sees itself and what came before; each key outweighs its predecessor, so one more or less is plain."""
    return Call(**draw.ramp(5, 5), causal=True)


@BOOK.recipe("M4")
def causal_from_the_first_key(draw: Draw) -> Call:
    """Nothing before a query is hidden from it: here the first key weighs most."""
    return Call(**draw.ramp(5, 5, up=False), causal=True)


@BOOK.recipe("M5")
def top_left(draw: Draw) -> Call:
    """q_start = 0 with Lq < Lk: the first query sees the first key alone."""
    return Call(**draw.ramp(4, 6), causal=True, q_start=0)


@BOOK.recipe("M5")
def bottom_right(draw: Draw) -> Call:
    """q_start = Lk - Lq: the last query sees every key, as in a prefill after a cached prefix."""
    return Call(**draw.ramp(4, 6), causal=True, q_start=2)


@BOOK.recipe("M5", flags=("decode-step",))
def last_query(draw: Draw) -> Call:
    """One query at the last position sees every key."""
    return Call(**draw.ramp(1, 6), causal=True, q_start=5)


@BOOK.recipe("M5", "P2", flags=("positions",))
def bottom_right_with_more_queries(draw: Draw) -> Call:
    """Bottom-right with Lq > Lk: the first queries see nothing."""
    return Call(**draw.ramp(6, 4), causal=True, q_start=-2)


@BOOK.recipe("M6", flags=("window",))
def window_to_the_left(draw: Draw) -> Call:
    """window(1, 0) shows a query itself and the key before."""
    return Call(**draw.ramp(5, 5, up=False), mask={"kind": "window", "left": 1, "right": 0})


@BOOK.recipe("M6", flags=("window",))
def window_to_the_right(draw: Draw) -> Call:
    """window(0, 2) shows a query itself and two keys after it, independent of causal."""
    return Call(**draw.ramp(5, 5), mask={"kind": "window", "left": 0, "right": 2})


@BOOK.recipe("M6", flags=("window",))
def window_to_both_sides(draw: Draw) -> Call:
    """window(2, 1), both ends included."""
    return Call(**draw.ramp(5, 5), mask={"kind": "window", "left": 2, "right": 1})


@BOOK.recipe("M6", "M13", flags=("window",))
def window_without_an_end(draw: Draw) -> Call:
    """window(1, None) is open to the right, and causal closes it."""
    return Call(**draw.ramp(5, 5, up=False), causal=True, mask={"kind": "window", "left": 1, "right": None})


@BOOK.recipe("M6", "M3", flags=("window", "positions"))
def window_over_a_cache(draw: Draw) -> Call:
    """Three new queries over seven keys: the window moves with q_start."""
    return Call(**draw.ramp(3, 7, up=False, d_k=4), mask={"kind": "window", "left": 2, "right": 0}, q_start=4)


@BOOK.recipe("M6", "M3", flags=("window", "positions", "ragged"))
def window_per_entry(draw: Draw) -> Call:
    """Windows follow a q_start per entry."""
    data = draw.ramp(4, 6, batch=(2,), heads=2)
    return Call(**data, mask={"kind": "window", "left": 1, "right": 1}, q_start=[0, 2])


@BOOK.recipe("M7")
def chunks(draw: Draw) -> Call:
    """chunks(2): the pairs whose positions have one floor(position / 2)."""
    return Call(**draw.ramp(5, 5), mask={"kind": "chunks", "size": 2})


@BOOK.recipe("M7", "M3", flags=("positions",))
def chunks_of_negative_positions(draw: Draw) -> Call:
    """Positions below zero have their own chunks: floor, not truncation towards zero."""
    return Call(**draw.ramp(5, 5), mask={"kind": "chunks", "size": 3}, q_start=-2, k_start=-2)


@BOOK.recipe("M8")
def prefix(draw: Draw) -> Call:
    """prefix(2) shows the keys below position 2 and decides nothing else."""
    return Call(**draw.ramp(4, 6), mask={"kind": "prefix", "n": 2})


@BOOK.recipe("M8", "M13")
def prefix_language_model(draw: Draw) -> Call:
    """causal() | prefix(3): both ways inside the prefix, causal after it."""
    return Call(**draw.ramp(5, 5), mask={"kind": "or", "of": [{"kind": "causal"}, {"kind": "prefix", "n": 3}]})


@BOOK.recipe("M8", "M3", flags=("positions",))
def prefix_by_position(draw: Draw) -> Call:
    """A prefix is counted in positions, which k_start moves."""
    return Call(**draw.ramp(4, 6), mask={"kind": "prefix", "n": 1}, q_start=0, k_start=-2)
