"""Chapter M, first part: masks by position. Each problem carries the visible pairs twice, plainly and as a Mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import attention, biases, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.expect import expect, expect_error
from refattn.conformance.plain import Draw, indices, known_output, positions, published
from refattn.errors import CausalError, MaskArgumentError, MaskKindError, PositionError

CASES = Chapter("masks")


@CASES.problem("M1")
def true_means_visible(draw: Draw) -> Problem:
    """True means visible: an asymmetric mask, so that the opposite reading differs."""
    shown = np.asarray([[True, True, False, False]])
    return _published_mask(
        draw, shown, [[-0.4737, 0.583475, 0.003001, 0.967353], [0.872136, -0.395345, 0.119062, 0.785011]]
    )


@CASES.problem("M1")
def the_complement(draw: Draw) -> Problem:
    """The complement of that mask shows the other keys."""
    shown = np.asarray([[False, False, True, True]])
    return _published_mask(
        draw, shown, [[-0.721175, 0.700924, 1.334116, -0.291833], [-0.825401, 0.630731, 1.337234, -0.29335]]
    )


@CASES.problem("M1")
def lower_triangle(draw: Draw) -> Problem:
    """A boolean lower triangle shows the past: read the other way, row 0 is blind to itself and the last row empty."""
    return Problem(**draw.ramp(6, 6), shown=np.tril(np.ones((6, 6), dtype=bool)))


@CASES.problem("M1")
def mask_of_nothing_hidden(draw: Draw) -> Problem:
    """A mask that is True everywhere changes nothing."""
    return Problem(**draw.qkv(4, 6), shown=np.ones((4, 6), dtype=bool))


@CASES.check("M1", "E1")
def only_booleans_are_masks(api: Api) -> None:
    """Integers and floats are no masks: 0/1 integers are not added, summands go to bias."""
    x = api.array(np.ones((1, 4, 8)))
    for values in (np.ones((4, 4), dtype=np.int32), np.zeros((4, 4))):
        mask = api.array(values)
        expect_error(MaskKindError, "mask", attention, x, x, x, mask=mask)
        expect_error(MaskKindError, "dense", masks.dense, mask)
    expect_error(MaskKindError, "mask", attention, x, x, x, mask="causal")
    expect_error(MaskKindError, "padding", masks.padding, np.ones((1, 4)))


@CASES.problem("M2", "P1")
def hidden_before_softmax(draw: Draw) -> Problem:
    """Masking selects before softmax: with values of one the output is exactly one, whatever the hidden keys score."""
    data = draw.qkv(4, 6, d_v=2)
    data["v"] = np.ones_like(data["v"])
    data["k"] = data["k"] * np.where(np.arange(6) % 2 == 0, 1.0, 4.0)[:, None]
    shown = np.broadcast_to(np.arange(6) % 2 == 0, (4, 6))
    return Problem(**data, shown=shown, coherent=True)


@CASES.problem("M2")
def half_of_two_keys(draw: Draw) -> Problem:
    """Two equal keys with the values 2 and 4, the second hidden: 2, where masking after the softmax gives 1."""
    q, k, v = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 2, 1)), np.asarray([[[[2.0], [4.0]]]])
    known = {"output": (np.asarray([2.0]), 0.0)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=1.0, shown=np.asarray([[True, False]]), known=known)


@CASES.problem("M3", "M4")
def starts_per_batch_entry(draw: Draw) -> Problem:
    """q_start may differ per batch entry."""
    return Problem(**draw.ramp(4, 6), causal=True, q_start=np.asarray([0, 2]))


@CASES.problem("M3", "P2")
def negative_starts(draw: Draw) -> Problem:
    """Positions may be negative; queries before every key see nothing."""
    return Problem(**draw.ramp(6, 4), causal=True, q_start=-3)


@CASES.problem("M3")
def keys_that_start_later(draw: Draw) -> Problem:
    """k_start moves the keys, as in a shard of a longer sequence."""
    return Problem(**draw.ramp(4, 6), causal=True, q_start=7, k_start=5)


@CASES.problem("M4")
def causal(draw: Draw) -> Problem:
    """A query sees itself and what came before: each key outweighs its predecessor, so one more or less is plain."""
    return Problem(**draw.ramp(6, 6), causal=True)


@CASES.problem("M4")
def causal_from_the_first_key(draw: Draw) -> Problem:
    """Nothing before a query is hidden from it: here the first key weighs most."""
    return Problem(**draw.ramp(6, 6, step=-2.0), causal=True)


@CASES.problem("M4", "P1")
def causal_odd_length(draw: Draw) -> Problem:
    """Nine queries at the end of seventeen keys, one more than a common tile."""
    return Problem(**draw.ramp(9, 17, batch=(1,), d_k=32, step=1.0), causal=True, q_start=8)


@CASES.check("M4")
def causal_is_a_bool(api: Api) -> None:
    """causal is True or False, and no number or array."""
    x = api.array(np.ones((1, 4, 8)))
    for value in (1, None, "yes", api.array(np.asarray(True))):
        expect_error(CausalError, "causal", attention, x, x, x, causal=value)


@CASES.problem("M5")
def aligned_top_left(draw: Draw) -> Problem:
    """q_start = 0 with Lq < Lk: the first query sees the first key alone."""
    return Problem(**draw.ramp(4, 6), causal=True, q_start=0)


@CASES.problem("M5")
def aligned_bottom_right(draw: Draw) -> Problem:
    """q_start = Lk - Lq: the last query sees every key, as in a prefill after a cached prefix."""
    return Problem(**draw.ramp(4, 6), causal=True, q_start=2)


@CASES.problem("M5")
def decode_step(draw: Draw) -> Problem:
    """One new query at the last position sees every key."""
    return Problem(**draw.ramp(1, 6), causal=True, q_start=5)


@CASES.problem("M5", "P2")
def more_queries_than_keys(draw: Draw) -> Problem:
    """Bottom-right with Lq > Lk: the first queries see nothing, and their output is 0."""
    return Problem(**draw.ramp(6, 4), causal=True, q_start=-2)


@CASES.problem("M5")
def more_queries_than_keys_top_left(draw: Draw) -> Problem:
    """Top-left with Lq > Lk: the last queries see every key, and none sees nothing."""
    return Problem(**draw.ramp(6, 4), causal=True, q_start=0)


@CASES.problem("M5", "M10")
def aligned_per_length(draw: Draw) -> Problem:
    """Padded caches of length 3 and 5 of 5: each entry is aligned with its own length."""
    q, k, v = published(109, (2, 1, 2, 4), (2, 1, 5, 4), (2, 1, 5, 4))
    counts = np.asarray([3, 5])
    rows = [
        [[-0.550359, -0.582759, 0.346798, -0.003541], [-0.738413, -0.801432, 0.49273, -0.013282]],
        [[0.205357, -0.2943, 0.010273, -0.902979], [0.030056, -0.426461, -0.477855, -0.600599]],
    ]
    return Problem(
        **draw.given(q, k, v),
        causal=True,
        mask=lambda array: masks.lengths(array(counts)),
        shown=indices(2, 5)[1] < counts[:, None, None, None],
        counts=counts,
        q_start=counts - 2,
        known=known_output(draw, rows, (2, 1, 2, 4)),
    )


@CASES.check("M5", "E2")
def alignment_is_never_guessed(api: Api) -> None:
    """With Lq != Lk what reads positions needs q_start, and the error names both readings; nothing else needs it."""
    q, k = api.array(np.ones((2, 3, 8))), api.array(np.ones((2, 5, 8)))
    readers: list[dict[str, Any]] = [
        {"causal": True},
        {"mask": masks.window(1, None)},
        {"mask": masks.chunks(2)},
        {"mask": masks.prefix(1) | ~masks.causal()},
        {"bias": biases.alibi(2)},
        {"bias": biases.relative(api.array(np.zeros((2, 3))))},
    ]
    for options in readers:
        expect_error(PositionError, "q_start", attention, q, k, k, **options)
        expect_error(PositionError, "q_start", attention, k, k, k, k_start=1, **options)
    try:
        attention(q, k, k, causal=True)
    except PositionError as error:
        for word in ("top-left", "bottom-right", "Lk - Lq"):
            expect(word in str(error), f"the message must name {word!r}: {error}")
    indifferent = (masks.dense(np.ones((3, 5), dtype=bool)), masks.lengths(4), masks.padding(np.ones(5, dtype=bool)))
    for mask in (*indifferent, masks.documents([0, 0, 1], [0, 0, 0, 1, 1]), masks.prefix(2)):
        attention(q, k, k, mask=mask)


def _window(left: int | None, right: int | None, name: str, says: str, step: float) -> None:
    def build(draw: Draw) -> Problem:
        rows, keys = indices(6, 6)
        shown = (keys >= rows - 99 if left is None else keys >= rows - left) & (
            keys <= rows + 99 if right is None else keys <= rows + right
        )
        data, sides = draw.ramp(6, 6, step=step), (left, right)
        return Problem(**data, mask=lambda _: masks.window(left, right), shown=shown, window=sides)

    build.__name__, build.__doc__ = name, says
    CASES.problem("M6")(build)


_window(
    2, 0, "window_of_three_keys", "window(2, 0) shows the query's own key and two before: its far end, inclusive.", -2.0
)
_window(2, 0, "window_ends_at_the_query", "window(2, 0) shows nothing after the query.", 2.0)
_window(1, 2, "window_both_ways", "window(1, 2) shows one key before and two after: its near end, inclusive.", 2.0)
_window(
    1, 2, "window_both_ways_far_end", "window(1, 2) shows one key before and two after: its far end, inclusive.", -2.0
)
_window(0, 0, "window_of_itself", "window(0, 0) shows the query's own key alone.", 2.0)
_window(None, 1, "window_unbounded_left", "None is unbounded: window(None, 1) shows all up to one key ahead.", 2.0)
_window(1, None, "window_unbounded_right", "window(1, None) shows all from one key back, independent of causal.", -2.0)


@CASES.problem("M6", "M13")
def window_with_causal(draw: Draw) -> Problem:
    """A window of two tokens, self included, is window(1, 0): rows see 1, 2, 2, 2, 2 keys."""
    q, k, v = published(120, (1, 1, 5, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    output = [
        [-0.574835, -0.644339, 0.55911, -0.157325],
        [-0.186091, 0.506818, -0.024291, -0.439237],
        [0.440475, 1.064112, -0.52228, -0.926549],
        [0.621352, -0.73689, 0.508401, -1.852351],
        [-1.171821, 0.174018, 1.493475, -1.133335],
    ]
    rows, keys = indices(5, 5)
    return Problem(
        **draw.given(q, k, v),
        causal=True,
        mask=lambda _: masks.window(1, None),
        shown=keys >= rows - 1,
        window=(1, None),
        known=known_output(draw, output, (1, 1, 5, 4)),
    )


@CASES.problem("M6", "M3")
def window_over_a_cache(draw: Draw) -> Problem:
    """Three new queries over eight keys, a window of three tokens: the window moves with q_start."""
    q, k, v = published(110, (1, 1, 3, 4), (1, 1, 8, 4), (1, 1, 8, 4))
    output = [
        [1.104929, -0.006865, -0.732045, 1.141791],
        [-0.114509, -0.704122, -0.676793, -0.463217],
        [-0.104771, -0.878797, -0.393218, -0.73456],
    ]
    query, key = positions(3, 8, 5)
    return Problem(
        **draw.given(q, k, v),
        causal=True,
        mask=lambda _: masks.window(2, None),
        shown=key >= query - 2,
        window=(2, None),
        q_start=5,
        known=known_output(draw, output, (1, 1, 3, 4)),
    )


@CASES.problem("M6", "M3")
def window_per_batch_entry(draw: Draw) -> Problem:
    """Windows follow a q_start per batch entry."""
    starts = np.asarray([0, 2])
    query, key = positions(4, 6, starts)
    shown = (key >= query - 1) & (key <= query + 1)
    return Problem(**draw.ramp(4, 6), mask=lambda _: masks.window(1, 1), shown=shown, window=(1, 1), q_start=starts)


@CASES.check("M6")
def arguments_of_masks(api: Api) -> None:
    """Sides, sizes and counts are ints of their range, and nothing else."""
    for side in (-1, 1.0, True, "1"):
        expect_error(MaskArgumentError, "left", masks.window, side, 0)
        expect_error(MaskArgumentError, "right", masks.window, 0, side)
    for size in (0, -2, 1.5, None):
        expect_error(MaskArgumentError, "chunks", masks.chunks, size)
        expect_error(MaskArgumentError, "blocks", masks.blocks, np.ones((2, 2), dtype=bool), size)
    expect_error(MaskArgumentError, "prefix", masks.prefix, -1)
    expect_error(MaskArgumentError, "lengths", masks.lengths, [2, -1])
    expect_error(MaskArgumentError, "documents", masks.documents, api.array(np.ones(4)))


@CASES.problem("M7")
def chunks(draw: Draw) -> Problem:
    """chunks(4): the pairs whose positions have one floor(position / 4)."""
    query, key = positions(6, 6)
    return Problem(**draw.ramp(6, 6), mask=lambda _: masks.chunks(4), shown=query // 4 == key // 4)


@CASES.problem("M7", "M3")
def chunks_of_negative_positions(draw: Draw) -> Problem:
    """Positions below zero have their own chunks: floor, not truncation towards zero."""
    query, key = positions(6, 6, -3, -3)
    shown = np.floor(query / 4) == np.floor(key / 4)
    return Problem(**draw.ramp(6, 6), mask=lambda _: masks.chunks(4), shown=shown, q_start=-3, k_start=-3)


@CASES.problem("M8")
def prefix(draw: Draw) -> Problem:
    """prefix(2) shows the keys below position 2 and decides nothing else."""
    shown = np.broadcast_to(indices(4, 6)[1] < 2, (4, 6))
    return Problem(**draw.ramp(4, 6, step=1.0), mask=lambda _: masks.prefix(2), shown=shown)


@CASES.problem("M8", "M13")
def prefix_language_model(draw: Draw) -> Problem:
    """causal() | prefix(3): both ways inside the prefix, causal after it."""
    rows, keys = indices(6, 6)
    shown = (keys <= rows) | (keys < 3)
    return Problem(**draw.ramp(6, 6), mask=lambda _: masks.causal() | masks.prefix(3), shown=shown)


@CASES.problem("M8", "M3")
def prefix_by_position(draw: Draw) -> Problem:
    """A prefix is counted in positions, which k_start moves."""
    key = positions(6, 6, 0, -2)[1]
    shown = np.broadcast_to(key < 1, (6, 6))
    return Problem(**draw.ramp(6, 6), mask=lambda _: masks.prefix(1), shown=shown, q_start=0, k_start=-2)


def _published_mask(draw: Draw, shown: Array, rows: Any) -> Problem:
    q, k, v = published(111, (1, 1, 2, 4), (1, 1, 4, 4), (1, 1, 4, 4))
    shown = np.broadcast_to(shown, (2, 4))
    return Problem(**draw.given(q, k, v), shown=shown, known=known_output(draw, rows, (1, 1, 2, 4)))
