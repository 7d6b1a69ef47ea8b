"""Chapter T: parts of the keys, each with its own results, and the whole."""

from __future__ import annotations

import numpy as np

from certify.call import Book, Call, dense, plain
from certify.draw import Draw

BOOK = Book("T")


@BOOK.recipe("T1", flags=("long-row",))
def longer_than_a_tile(draw: Draw) -> Call:
    """67 keys: more than two tiles of 32, the last of three keys."""
    return Call(**draw.qkv(2, 67, batch=(1,), heads=1, d_k=4))


@BOOK.recipe("T1", flags=("long-row", "wide-logits"))
def growing_maximum(draw: Draw) -> Call:
    """Each key outweighs the one before, so that every tile raises the maximum."""
    return Call(**draw.ramp(1, 65, batch=(1,), heads=1, d_k=4))


@BOOK.recipe("T1", flags=("long-row", "wide-logits"))
def falling_maximum(draw: Draw) -> Call:
    """The first tile holds the maximum, and what comes later underflows."""
    return Call(**draw.ramp(1, 65, batch=(1,), heads=1, d_k=4, up=False))


@BOOK.recipe("T1", "P2", flags=("long-row",))
def first_tiles_hidden(draw: Draw) -> Call:
    """The first 40 keys are hidden, and from one query all: a maximum of -inf must not become NaN."""
    shown = np.tile(np.arange(67) >= 40, (2, 1))
    shown[1] = False
    return Call(**draw.qkv(2, 67, batch=(1,), heads=1, d_k=4), mask=dense(shown))


@BOOK.recipe("T1", "M4", flags=("long-row",))
def diagonal_within_a_tile(draw: Draw) -> Call:
    """The causal diagonal crosses the second tile."""
    return Call(**draw.ramp(3, 40, batch=(1,), heads=1, d_k=4, up=False), causal=True, q_start=33)


@BOOK.recipe("T2", flags=("split-keys",))
def two_parts(draw: Draw) -> Call:
    """Two halves of the keys merge to the whole."""
    return Call(**draw.qkv(3, 6), parts=((0, 3), (3, 6)))


@BOOK.recipe("T2", flags=("split-keys",))
def uneven_parts(draw: Draw) -> Call:
    """Parts of 1, 4, 0 and 2 keys, in any order, merge to the whole."""
    return Call(**draw.qkv(2, 7, d_k=4), parts=((5, 7), (0, 1), (3, 3), (1, 5)))


@BOOK.recipe("T2", "P2", flags=("split-keys",))
def parts_that_see_nothing(draw: Draw) -> Call:
    """A part whose keys are hidden is (0, -inf), the identity, and two of them merge to it."""
    return Call(**draw.ramp(4, 6, d_k=4), causal=True, q_start=-1, parts=((0, 2), (2, 4), (4, 6)))


@BOOK.recipe("T2", flags=("split-keys", "wide-logits"))
def parts_far_apart(draw: Draw) -> Call:
    """Parts whose log-sum-exps differ by hundreds: the smaller one vanishes and leaves no NaN."""
    bias = np.where(np.arange(6) < 3, -320.0, 320.0)[None, :]
    return Call(**draw.qkv(3, 6), bias=plain(bias), parts=((0, 3), (3, 6)))


@BOOK.recipe("T3", "P3", flags=("split-keys", "sink"))
def parts_and_sinks(draw: Draw) -> Call:
    """Parts never include the sinks, which merging applies once."""
    data = draw.qkv(3, 6)
    return Call(**data, sinks=draw.array(data["q"].shape[-3]), parts=((0, 2), (2, 6)))


@BOOK.recipe("T3", "S3", flags=("split-keys", "softcap"))
def parts_with_every_option(draw: Draw) -> Call:
    """Scale, cap, bias, mask and causal hold in parts as in the whole."""
    return Call(
        **draw.qkv(3, 6),
        scale=0.5,
        softcap=2.0,
        bias=plain(draw.array(3, 6)),
        mask=dense(draw.shown(3, 6)),
        causal=True,
        q_start=3,
        parts=((0, 4), (4, 6)),
    )
