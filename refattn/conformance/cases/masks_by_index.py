"""Chapter M, second part: masks by index, their combination and their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import attention, biases, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Convert, Problem
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw, causal_pairs, indices, known_output, published
from refattn.dtypes import COMPUTED
from refattn.errors import BiasError, MaskShapeError

CASES = Chapter("masks_by_index")

# Batch entries of unequal length, most of the cases' (batch, Lk).
RIGHT_PADDED = np.asarray([[True] * 6, [True] * 3 + [False] * 3])
LEFT_PADDED = np.asarray([[True] * 6, [False] * 3 + [True] * 3])
WITH_HOLES = np.asarray([[True, False, True, False, True, True], [False, True, True, False, False, True]])


@CASES.problem("M9")
def documents(draw: Draw) -> Problem:
    """Packed documents see themselves alone, per batch entry; ids need not be in order."""
    ids = np.asarray([[0, 0, 1, 1, 1, 0], [5, 7, 7, 7, 5, 5]])
    shown = (ids[:, :, None] == ids[:, None, :])[:, None]
    return Problem(**draw.ramp(6, 6), mask=lambda array: masks.documents(array(ids)), shown=shown, causal=True)


@CASES.problem("M9")
def documents_of_queries_and_keys(draw: Draw) -> Problem:
    """Queries and keys may have ids of their own; a query without a key of its id sees nothing."""
    q_ids, k_ids = np.asarray([1, 0, 3, 1]), np.asarray([0, 1, 1, 2, 0, 2])
    shown = q_ids[:, None] == k_ids[None, :]
    return Problem(**draw.ramp(4, 6), mask=lambda array: masks.documents(array(q_ids), array(k_ids)), shown=shown)


@CASES.problem("M10")
def lengths(draw: Draw) -> Problem:
    """Counts per batch entry hide the keys from index n on, and no query."""
    return _lengths(draw, np.asarray([6, 4]), step=2.0)


@CASES.problem("M10")
def lengths_from_the_first_key(draw: Draw) -> Problem:
    """Counts show every key below n."""
    return _lengths(draw, np.asarray([2, 5]), step=-2.0)


@CASES.problem("M10", "P2")
def length_of_zero(draw: Draw) -> Problem:
    """A batch entry of length 0 has output 0 and leaves the others alone."""
    return _lengths(draw, np.asarray([0, 4]), step=2.0)


@CASES.problem("M10")
def one_length_for_all(draw: Draw) -> Problem:
    """A single count holds for every batch entry."""
    shown = np.broadcast_to(indices(6, 6)[1] < 4, (6, 6))
    return Problem(**draw.ramp(6, 6), mask=lambda _: masks.lengths(4), shown=shown, counts=np.asarray(4))


@CASES.problem("M11")
def right_padding(draw: Draw) -> Problem:
    """A right-padded batch: keys where keep is False are hidden."""
    return _padded(draw, RIGHT_PADDED, causal=True)


@CASES.problem("M11", "M16")
def left_padding(draw: Draw) -> Problem:
    """A left-padded batch, causal: rows of pad queries may be empty, positions are those of the slots."""
    return _padded(draw, LEFT_PADDED, causal=True)


@CASES.problem("M11")
def padding_with_holes(draw: Draw) -> Problem:
    """Hidden keys need not be at an end: a count of kept keys is not enough."""
    return _padded(draw, WITH_HOLES, causal=False)


@CASES.problem("M11")
def padding_with_holes_published(draw: Draw) -> Problem:
    """Kept keys 0, 2 and 4 of five, as published."""
    q, k, v = published(123, (1, 1, 2, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    keep = np.asarray([[True, False, True, False, True]])
    output = [[-0.111065, -0.103926, -0.023005, -0.661785], [0.301254, 0.748641, 0.469428, -0.451118]]
    return Problem(
        **draw.given(q, k, v),
        mask=lambda array: masks.padding(array(keep)),
        shown=keep[:, None, None, :],
        known=known_output(draw, output, (1, 1, 2, 4)),
    )


@CASES.problem("M11", "M13", "P2")
def padding_and_causal(draw: Draw) -> Problem:
    """Padding and causal together: row 0 sees nothing, row 1 key 1 alone; the order of masks does not matter."""
    q, k, v = published(106, (1, 1, 7, 8), (1, 1, 7, 8), (1, 1, 7, 8))
    keep = np.asarray([[False, True, True, False, False, True, False]])
    rows = [[0.0] * 8, [0.948058, -1.527733, 1.458632, 0.814503, 0.786116, 1.247998, 0.618449, -1.461924]]
    return Problem(
        **draw.given(q, k, v),
        causal=True,
        mask=lambda array: masks.padding(array(keep)),
        shown=keep[:, None, None, :],
        known=known_output(draw, rows, (2, 8)),
    )


@CASES.problem("M12")
def dense_per_head(draw: Draw) -> Problem:
    """A mask may differ per head and batch entry."""
    shown = draw.rng.random((2, 2, 4, 6)) < 0.6
    return Problem(**draw.qkv(4, 6), mask=lambda array: masks.dense(array(shown)), shown=shown)


@CASES.problem("M12", "A1")
def dense_random(draw: Draw) -> Problem:
    """Any boolean array hides what it hides: here about half of the pairs, on every row others."""
    return Problem(**draw.qkv(9, 17, batch=(1,), d_k=32, spread=1.5), shown=draw.rng.random((9, 17)) < 0.5)


@CASES.problem("M12")
def blocks(draw: Draw) -> Problem:
    """Blocks of 5 rows by 4 keys, the last ones partial."""
    kept = np.asarray([[True, False], [False, True]])
    shown = np.repeat(np.repeat(kept, 5, axis=0), 4, axis=1)[:6, :6]
    return Problem(**draw.qkv(6, 6), mask=lambda array: masks.blocks(array(kept), (5, 4)), shown=shown)


@CASES.problem("M12", "A3")
def block_beyond_the_input(draw: Draw) -> Problem:
    """A block of 128 by 128 over 4 rows and 6 keys, for each of three batch entries: only the second sees nothing."""
    kept = np.asarray([True, False, True])[:, None, None, None]

    def mask(array: Convert) -> Any:
        return masks.blocks(array(kept), (128, 128))

    return Problem(**draw.ramp(4, 6, batch=(3,)), causal=True, q_start=2, mask=mask, shown=kept)


@CASES.problem("M13")
def mask_and_causal(draw: Draw) -> Problem:
    """mask and causal combine by AND: row 0 may see only key 0, which the mask hides."""
    q, k, v = published(102, (1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    output = [[0.0] * 4, [-0.242525, -2.022252, 0.876538, 1.909386], [0.394274, -1.196656, 0.771012, 0.992233]]
    shown = np.broadcast_to(np.asarray([[False, True, True]]), (3, 3))
    return Problem(**draw.given(q, k, v), causal=True, shown=shown, known=known_output(draw, output, (1, 1, 3, 4)))


@CASES.problem("M13")
def mask_does_not_override_causal(draw: Draw) -> Problem:
    """A mask that shows the future does not lift causal visibility, and causal does not lift the mask."""
    rows, keys = indices(6, 6)
    return Problem(**draw.ramp(6, 6), causal=True, shown=(keys != 2) & (rows + keys != 4))


@CASES.problem("M13")
def sink_tokens(draw: Draw) -> Problem:
    """(window(2, 0) | prefix(1)) & causal(): the first key stays visible when the window has left it."""
    rows, keys = indices(6, 6)
    shown = ((keys >= rows - 2) | (keys < 1)) & (keys <= rows)
    return Problem(
        **draw.ramp(6, 6, step=-1.0),
        mask=lambda _: (masks.window(2, 0) | masks.prefix(1)) & masks.causal(),
        shown=shown,
    )


@CASES.problem("M13")
def complement_of_a_mask(draw: Draw) -> Problem:
    """~ shows what the mask hides: strictly future keys, and none for the last query."""
    rows, keys = indices(6, 6)
    return Problem(**draw.ramp(6, 6, step=-1.0), mask=lambda _: ~masks.causal(), shown=keys > rows)


@CASES.problem("M15")
def rank_three_means_heads(draw: Draw) -> Problem:
    """A rank 3 mask is (H, Lq, Lk), also when batch and heads are equally many."""
    shown = np.stack([causal_pairs(6, 6), ~causal_pairs(6, 6, -1)])
    return Problem(**draw.ramp(6, 6, step=1.0), shown=shown)


@CASES.problem("M15", "M5")
def rank_three_over_a_past(draw: Draw) -> Problem:
    """A rank 3 mask over two new tokens after two cached ones differs per head, and causal goes on beside it."""
    shown = np.asarray(
        [[[True, False, True, True], [False, True, True, True]], [[True] * 4, [True, True, False, True]]]
    )
    return Problem(**draw.ramp(2, 4, step=1.0), causal=True, q_start=2, shown=shown)


@CASES.problem("M15")
def one_row_for_all(draw: Draw) -> Problem:
    """A mask (Lk,) or (1, Lk) holds for every query."""
    return Problem(**draw.ramp(4, 6), shown=np.asarray([True, True, False, True, False, False]))


@CASES.problem("M15")
def one_column_for_all(draw: Draw) -> Problem:
    """A mask (Lq, 1) shows a query all keys or none."""
    return Problem(**draw.ramp(4, 6), shown=np.asarray([[True], [False], [True], [False]]))


@CASES.check("M15", "E2")
def shapes_of_masks(api: Api) -> None:
    """A shape error on rank 2 or 3 names both readings: (B, Lk) as padding, (B, Lq, Lk) with a head axis."""
    x = api.array(np.ones((3, 2, 4, 8)))
    for shape, words in (((3, 4), ("(Lq, Lk)", "padding")), ((3, 4, 4), ("(H, Lq, Lk)", "(B, 1, Lq, Lk)"))):
        wrong, wide = api.array(np.ones(shape, dtype=bool)), api.array(np.ones(shape))
        expect_error(MaskShapeError, "mask", attention, x, x, x, mask=wrong)
        expect_error(BiasError, "bias", attention, x, x, x, bias=wide)
        try:
            attention(x, x, x, mask=wrong)
        except MaskShapeError as error:
            for word in words:
                expect(word in str(error), f"the message for {shape} must name {word!r}: {error}")


@CASES.check("M16", dtypes=COMPUTED)
def common_shift(api: Api) -> None:
    """A common shift of both starts changes nothing, not a bit: masks and biases see distances."""
    data = api.draw.qkv(6, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    for options in ({"causal": True}, {"mask": masks.window(2, 1)}, {"bias": biases.alibi(2)}):
        here = api.host(attention(q, k, v, **options))
        for shift in (-3, 1000):
            there = attention(q, k, v, q_start=shift, k_start=shift, **options)
            expect_equal(f"output shifted by {shift} with {options}", api.host(there), here)


@CASES.check("M16", dtypes=COMPUTED)
def padded_like_unpadded(api: Api) -> None:
    """The real part of a left-padded entry equals the run without padding."""
    data = api.draw.ramp(6, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    padded = api.host(attention(q, k, v, causal=True, mask=masks.padding(api.array(LEFT_PADDED))))[1, :, 3:]
    parts = {name: data[name][1, :, 3:] for name in ("q", "k", "v")}
    golden = golden_of(Problem(dtype=api.dtype, causal=True, **parts))
    expect_within("padded output", padded, golden.output, golden.bound(api.dtype))
    alone = api.host(attention(*(api.array(x) for x in parts.values()), causal=True))
    expect_within("unpadded output", alone, golden.output, golden.bound(api.dtype))


def _lengths(draw: Draw, counts: Array, step: float) -> Problem:
    def mask(array: Convert) -> Any:
        return masks.lengths(array(counts))

    shown = indices(4, 6)[1] < counts[:, None, None, None]
    return Problem(**draw.ramp(4, 6, step=step), mask=mask, shown=shown, counts=counts)


def _padded(draw: Draw, keep: Array, causal: bool) -> Problem:
    def mask(array: Convert) -> Any:
        return masks.padding(array(keep))

    return Problem(**draw.ramp(6, 6), mask=mask, shown=keep[:, None, None, :], causal=causal)
