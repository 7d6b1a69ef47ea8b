"""Chapter M, first part: who is visible. Each problem carries the visible pairs twice, plainly and as a Mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.conformance.case import Api, Chapter, Convert, Problem
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.plain import Draw, causal_pairs, indices, positions, published
from refattn.dtypes import COMPUTED

CASES = Chapter("masks")

Array = Any
# Batch entries of unequal length, most of the cases' (batch, Lk).
RIGHT_PADDED = np.asarray([[True] * 6, [True] * 3 + [False] * 3])
LEFT_PADDED = np.asarray([[True] * 6, [False] * 3 + [True] * 3])
WITH_HOLES = np.asarray([[True, False, True, False, True, True], [False, True, True, False, False, True]])


@CASES.problem("M1")
def true_means_visible(draw: Draw) -> Problem:
    """True means visible: an asymmetric mask, so that the opposite reading differs."""
    shown = np.asarray([[True, True, False, False]])
    return _published_mask(draw, shown, [[-0.4737, 0.583475, 0.003001, 0.967353], [0.872136, -0.395345, 0.119062, 0.785011]])


@CASES.problem("M1")
def the_complement(draw: Draw) -> Problem:
    """The complement of that mask shows the other keys."""
    shown = np.asarray([[False, False, True, True]])
    return _published_mask(draw, shown, [[-0.721175, 0.700924, 1.334116, -0.291833], [-0.825401, 0.630731, 1.337234, -0.29335]])


@CASES.problem("M1")
def mask_of_nothing_hidden(draw: Draw) -> Problem:
    """A mask that is True everywhere changes nothing."""
    return Problem(**draw.qkv(5, 6), shown=np.ones((5, 6), dtype=bool))


@CASES.check("M1", "E1", area="errors")
def only_booleans_are_masks(api: Api) -> None:
    """Integers and floats are no masks: 0/1 integers are not added, summands go to bias."""
    from refattn import attention, masks
    from refattn.errors import MaskKindError

    x = api.array(np.ones((1, 4, 8)))
    for values in (np.ones((4, 4), dtype=np.int32), np.zeros((4, 4))):
        mask = api.array(values)
        expect_error(MaskKindError, "mask", lambda mask=mask: attention(x, x, x, mask=mask))
        expect_error(MaskKindError, "dense", lambda mask=mask: masks.dense(mask))
    expect_error(MaskKindError, "mask", lambda: attention(x, x, x, mask="causal"))
    expect_error(MaskKindError, "padding", lambda: masks.padding(np.ones((1, 4))))


@CASES.problem("M2", "P1")
def hidden_before_softmax(draw: Draw) -> Problem:
    """Masking selects before softmax: with values of one the output is exactly one, whatever the hidden keys score."""
    data = draw.qkv(5, 6, d_v=2)
    data["v"] = np.ones_like(data["v"])
    data["k"] = data["k"] * np.where(np.arange(6) % 2 == 0, 1.0, 4.0)[:, None]
    shown = np.broadcast_to(np.arange(6) % 2 == 0, (5, 6))
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
    return Problem(**draw.ramp(3, 6), causal=True, q_start=np.asarray([1, 3]))


@CASES.problem("M3", "P2")
def negative_starts(draw: Draw) -> Problem:
    """Positions may be negative; queries before every key see nothing."""
    return Problem(**draw.ramp(5, 4), causal=True, q_start=-2)


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
    """Seventeen tokens, one more than a common tile."""
    return Problem(**draw.ramp(17, 17, batch=(1,), step=1.0), causal=True)


@CASES.check("M4", area="errors")
def causal_is_a_bool(api: Api) -> None:
    """causal is True or False, and no number or array."""
    from refattn import attention
    from refattn.errors import CausalError

    x = api.array(np.ones((1, 4, 8)))
    for value in (1, None, "yes", api.array(np.asarray(True))):
        expect_error(CausalError, "causal", lambda value=value: attention(x, x, x, causal=value))


@CASES.problem("M5")
def aligned_top_left(draw: Draw) -> Problem:
    """q_start = 0 with Lq < Lk: the first query sees the first key alone."""
    return Problem(**draw.ramp(4, 7), causal=True, q_start=0)


@CASES.problem("M5")
def aligned_bottom_right(draw: Draw) -> Problem:
    """q_start = Lk - Lq: the last query sees every key, as in a prefill after a cached prefix."""
    return Problem(**draw.ramp(4, 7), causal=True, q_start=3)


@CASES.problem("M5")
def decode_step(draw: Draw) -> Problem:
    """One new query at the last position sees every key."""
    return Problem(**draw.ramp(1, 7), causal=True, q_start=6)


@CASES.problem("M5", "P2")
def more_queries_than_keys(draw: Draw) -> Problem:
    """Bottom-right with Lq > Lk: the first queries see nothing, and their output is 0."""
    return Problem(**draw.ramp(5, 2), causal=True, q_start=-3)


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
        **_exact(draw, q, k, v),
        causal=True,
        mask=lambda array: _masks().lengths(array(counts)),
        shown=indices(2, 5)[1] < counts[:, None, None, None],
        q_start=counts - 2,
        known=_known(draw, rows, (2, 1, 2, 4)),
    )


@CASES.check("M5", "E2", area="errors")
def alignment_is_never_guessed(api: Api) -> None:
    """With Lq != Lk whatever reads positions needs q_start, and the error names both readings; what does not, does not."""
    from refattn import attention, biases, masks
    from refattn.errors import PositionError

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
        expect_error(PositionError, "q_start", lambda options=options: attention(q, k, k, **options))
        expect_error(PositionError, "q_start", lambda options=options: attention(k, k, k, k_start=1, **options))
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
        return Problem(**draw.ramp(6, 6, step=step), mask=lambda _: _masks().window(left, right), shown=shown)

    build.__name__, build.__doc__ = name, says
    CASES.problem("M6")(build)


_window(2, 0, "window_of_three_keys", "window(2, 0) shows the query's own key and two before: its far end, inclusive.", -2.0)
_window(2, 0, "window_ends_at_the_query", "window(2, 0) shows nothing after the query.", 2.0)
_window(1, 2, "window_both_ways", "window(1, 2) shows one key before and two after: its near end, inclusive.", 2.0)
_window(1, 2, "window_both_ways_far_end", "window(1, 2) shows one key before and two after: its far end, inclusive.", -2.0)
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
        **_exact(draw, q, k, v),
        causal=True,
        mask=lambda _: _masks().window(1, None),
        shown=keys >= rows - 1,
        known=_known(draw, output, (1, 1, 5, 4)),
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
        **_exact(draw, q, k, v),
        causal=True,
        mask=lambda _: _masks().window(2, None),
        shown=key >= query - 2,
        q_start=5,
        known=_known(draw, output, (1, 1, 3, 4)),
    )


@CASES.problem("M6", "M3")
def window_per_batch_entry(draw: Draw) -> Problem:
    """Windows follow a q_start per batch entry."""
    starts = np.asarray([1, 3])
    query, key = positions(3, 6, starts)
    shown = (key >= query - 1) & (key <= query + 1)
    return Problem(**draw.ramp(3, 6), mask=lambda _: _masks().window(1, 1), shown=shown, q_start=starts)


@CASES.check("M6", area="errors")
def arguments_of_masks(api: Api) -> None:
    """Sides, sizes and counts are ints of their range, and nothing else."""
    from refattn import masks
    from refattn.errors import MaskArgumentError

    for side in (-1, 1.0, True, "1"):
        expect_error(MaskArgumentError, "left", lambda side=side: masks.window(side, 0))
        expect_error(MaskArgumentError, "right", lambda side=side: masks.window(0, side))
    for size in (0, -2, 1.5, None):
        expect_error(MaskArgumentError, "chunks", lambda size=size: masks.chunks(size))
        expect_error(MaskArgumentError, "blocks", lambda size=size: masks.blocks(np.ones((2, 2), dtype=bool), size))
    expect_error(MaskArgumentError, "prefix", lambda: masks.prefix(-1))
    expect_error(MaskArgumentError, "lengths", lambda: masks.lengths([2, -1]))
    expect_error(MaskArgumentError, "documents", lambda: masks.documents(api.array(np.ones(4))))


@CASES.problem("M7")
def chunks(draw: Draw) -> Problem:
    """chunks(4): the pairs whose positions have one floor(position / 4)."""
    query, key = positions(6, 6)
    return Problem(**draw.ramp(6, 6), mask=lambda _: _masks().chunks(4), shown=query // 4 == key // 4)


@CASES.problem("M7", "M3")
def chunks_of_negative_positions(draw: Draw) -> Problem:
    """Positions below zero have their own chunks: floor, not truncation towards zero."""
    query, key = positions(6, 6, -3, -3)
    shown = np.floor(query / 4) == np.floor(key / 4)
    return Problem(**draw.ramp(6, 6), mask=lambda _: _masks().chunks(4), shown=shown, q_start=-3, k_start=-3)


@CASES.problem("M8")
def prefix(draw: Draw) -> Problem:
    """prefix(2) shows the keys below position 2 and decides nothing else."""
    shown = np.broadcast_to(indices(4, 6)[1] < 2, (4, 6))
    return Problem(**draw.ramp(4, 6, step=1.0), mask=lambda _: _masks().prefix(2), shown=shown)


@CASES.problem("M8", "M13")
def prefix_language_model(draw: Draw) -> Problem:
    """causal() | prefix(3): both ways inside the prefix, causal after it."""
    rows, keys = indices(6, 6)
    shown = (keys <= rows) | (keys < 3)
    return Problem(**draw.ramp(6, 6), mask=lambda _: _masks().causal() | _masks().prefix(3), shown=shown)


@CASES.problem("M8", "M3")
def prefix_by_position(draw: Draw) -> Problem:
    """A prefix is counted in positions, which k_start moves."""
    key = positions(6, 6, 0, -2)[1]
    shown = np.broadcast_to(key < 1, (6, 6))
    return Problem(**draw.ramp(6, 6), mask=lambda _: _masks().prefix(1), shown=shown, q_start=0, k_start=-2)


@CASES.problem("M9")
def documents(draw: Draw) -> Problem:
    """Packed documents see themselves alone, per batch entry; ids need not be in order."""
    ids = np.asarray([[0, 0, 1, 1, 1, 0], [5, 7, 7, 7, 5, 5]])
    shown = (ids[:, :, None] == ids[:, None, :])[:, None]
    return Problem(**draw.ramp(6, 6), mask=lambda array: _masks().documents(array(ids)), shown=shown, causal=True)


@CASES.problem("M9")
def documents_of_queries_and_keys(draw: Draw) -> Problem:
    """Queries and keys may have ids of their own; a query without a key of its id sees nothing."""
    q_ids, k_ids = np.asarray([1, 0, 3, 1]), np.asarray([0, 1, 1, 2, 0, 2])
    shown = q_ids[:, None] == k_ids[None, :]
    return Problem(**draw.ramp(4, 6), mask=lambda array: _masks().documents(array(q_ids), array(k_ids)), shown=shown)


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
    return Problem(**draw.ramp(6, 6), mask=lambda _: _masks().lengths(4), shown=shown)


@CASES.problem("M11")
def right_padding(draw: Draw) -> Problem:
    """A right-padded batch: keys where keep is False are hidden."""
    return _padded(draw, RIGHT_PADDED, causal=True)


@CASES.problem("M11", "M16")
def left_padding(draw: Draw) -> Problem:
    """A left-padded batch with causal visibility: rows of pad queries may be empty, positions are those of the slots."""
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
        **_exact(draw, q, k, v),
        mask=lambda array: _masks().padding(array(keep)),
        shown=keep[:, None, None, :],
        known=_known(draw, output, (1, 1, 2, 4)),
    )


@CASES.problem("M11", "M13", "P2")
def padding_and_causal(draw: Draw) -> Problem:
    """Padding and causal together: row 0 sees nothing, row 1 key 1 alone; the order of masks does not matter."""
    q, k, v = published(106, (1, 1, 7, 8), (1, 1, 7, 8), (1, 1, 7, 8))
    keep = np.asarray([[False, True, True, False, False, True, False]])
    rows = [[0.0] * 8, [0.948058, -1.527733, 1.458632, 0.814503, 0.786116, 1.247998, 0.618449, -1.461924]]
    return Problem(
        **_exact(draw, q, k, v),
        causal=True,
        mask=lambda array: _masks().padding(array(keep)),
        shown=keep[:, None, None, :],
        known=_known(draw, rows, (2, 8)),
    )


@CASES.problem("M12")
def dense_per_head(draw: Draw) -> Problem:
    """A mask may differ per head and batch entry."""
    shown = draw.rng.random((2, 2, 5, 6)) < 0.6
    return Problem(**draw.qkv(5, 6), mask=lambda array: _masks().dense(array(shown)), shown=shown)


@CASES.problem("M12", "A1")
def dense_random(draw: Draw) -> Problem:
    """Any boolean array hides what it hides: here about half of the pairs, on every row others."""
    return Problem(**draw.qkv(9, 17, batch=(1,), spread=1.5), shown=draw.rng.random((9, 17)) < 0.5)


@CASES.problem("M12")
def blocks(draw: Draw) -> Problem:
    """Blocks of 2 rows by 4 keys, the last ones partial."""
    kept = np.asarray([[True, False], [False, True], [True, True]])
    shown = np.repeat(np.repeat(kept, 2, axis=0), 4, axis=1)[:5, :7]
    return Problem(**draw.qkv(5, 7), mask=lambda array: _masks().blocks(array(kept), (2, 4)), shown=shown)


@CASES.problem("M13")
def mask_and_causal(draw: Draw) -> Problem:
    """mask and causal combine by AND: row 0 may see only key 0, which the mask hides."""
    q, k, v = published(102, (1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    output = [[0.0] * 4, [-0.242525, -2.022252, 0.876538, 1.909386], [0.394274, -1.196656, 0.771012, 0.992233]]
    shown = np.broadcast_to(np.asarray([[False, True, True]]), (3, 3))
    return Problem(**_exact(draw, q, k, v), causal=True, shown=shown, known=_known(draw, output, (1, 1, 3, 4)))


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
    mask = (lambda _: (_masks().window(2, 0) | _masks().prefix(1)) & _masks().causal())  # noqa: E731
    return Problem(**draw.ramp(6, 6, step=-1.0), mask=mask, shown=shown)


@CASES.problem("M13")
def complement_of_a_mask(draw: Draw) -> Problem:
    """~ shows what the mask hides: strictly future keys, and none for the last query."""
    rows, keys = indices(6, 6)
    return Problem(**draw.ramp(6, 6, step=-1.0), mask=lambda _: ~_masks().causal(), shown=keys > rows)


@CASES.problem("M15")
def rank_three_means_heads(draw: Draw) -> Problem:
    """A rank 3 mask is (H, Lq, Lk), also when batch and heads are equally many."""
    shown = np.stack([causal_pairs(5, 5), ~causal_pairs(5, 5, -1)])
    return Problem(**draw.ramp(5, 5, step=1.0), shown=shown)


@CASES.problem("M15")
def one_row_for_all(draw: Draw) -> Problem:
    """A mask (Lk,) or (1, Lk) holds for every query."""
    return Problem(**draw.ramp(5, 6), shown=np.asarray([True, True, False, True, False, False]))


@CASES.problem("M15")
def one_column_for_all(draw: Draw) -> Problem:
    """A mask (Lq, 1) shows a query all keys or none."""
    return Problem(**draw.ramp(5, 6), shown=np.asarray([[True], [False], [True], [True], [False]]))


@CASES.check("M15", "E2", area="errors")
def shapes_of_masks(api: Api) -> None:
    """A shape error on rank 2 or 3 names both readings: (B, Lk) as padding, (B, Lq, Lk) with a head axis."""
    from refattn import attention
    from refattn.errors import MaskShapeError

    x = api.array(np.ones((3, 2, 4, 8)))
    for shape, words in (((3, 4), ("(Lq, Lk)", "padding")), ((3, 4, 4), ("(H, Lq, Lk)", "(B, 1, Lq, Lk)"))):
        wrong, wide = api.array(np.ones(shape, dtype=bool)), api.array(np.ones(shape))
        expect_error(MaskShapeError, "mask", lambda wrong=wrong: attention(x, x, x, mask=wrong))
        expect_error(MaskShapeError, "bias", lambda wide=wide: attention(x, x, x, bias=wide))
        try:
            attention(x, x, x, mask=wrong)
        except MaskShapeError as error:
            for word in words:
                expect(word in str(error), f"the message for {shape} must name {word!r}: {error}")


@CASES.check("M16", area="masks", dtypes=COMPUTED)
def common_shift(api: Api) -> None:
    """A common shift of both starts changes nothing, not a bit: masks and biases see distances."""
    from refattn import attention, biases, masks

    data = api.draw.qkv(5, 5, batch=(1,))
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    for options in ({"causal": True}, {"mask": masks.window(2, 1)}, {"bias": biases.alibi(2)}):
        here = api.host(attention(q, k, v, **options))
        for shift in (-3, 1000):
            there = attention(q, k, v, q_start=shift, k_start=shift, **options)
            expect_equal(f"output shifted by {shift} with {options}", api.host(there), here)


@CASES.check("M16", area="masks", dtypes=COMPUTED)
def padded_like_unpadded(api: Api) -> None:
    """The real part of a left-padded entry equals the run without padding."""
    from refattn import attention, masks
    from refattn.conformance.judge import golden_of

    data = api.draw.ramp(6, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    padded = api.host(attention(q, k, v, causal=True, mask=masks.padding(api.array(LEFT_PADDED))))[1, :, 3:]
    parts = {name: data[name][1, :, 3:] for name in ("q", "k", "v")}
    golden = golden_of(Problem(dtype=api.dtype, causal=True, **parts))
    expect_within("padded output", padded, golden.output, golden.bound(api.dtype))
    alone = api.host(attention(*(api.array(x) for x in parts.values()), causal=True))
    expect_within("unpadded output", alone, golden.output, golden.bound(api.dtype))


def _masks() -> Any:
    from refattn import masks

    return masks


def _exact(draw: Draw, q: Array, k: Array, v: Array) -> dict[str, Any]:
    return {"dtype": draw.dtype, "q": draw.exact(q), "k": draw.exact(k), "v": draw.exact(v)}


def _known(draw: Draw, rows: Any, shape: tuple[int, ...]) -> dict[str, tuple[Array, float]]:
    """Published digits hold for the inputs as published, not as rounded to 16 bits."""
    full = draw.dtype in ("float32", "float64")
    return {"output": (np.asarray(rows).reshape(shape), 2e-6)} if full else {}


def _published_mask(draw: Draw, shown: Array, rows: Any) -> Problem:
    q, k, v = published(111, (1, 1, 2, 4), (1, 1, 4, 4), (1, 1, 4, 4))
    shown = np.broadcast_to(shown, (2, 4))
    return Problem(**_exact(draw, q, k, v), shown=shown, known=_known(draw, rows, (1, 1, 2, 4)))


def _lengths(draw: Draw, counts: Array, step: float) -> Problem:
    def mask(array: Convert) -> Any:
        return _masks().lengths(array(counts))

    return Problem(**draw.ramp(5, 6, step=step), mask=mask, shown=indices(5, 6)[1] < counts[:, None, None, None])


def _padded(draw: Draw, keep: Array, causal: bool) -> Problem:
    def mask(array: Convert) -> Any:
        return _masks().padding(array(keep))

    return Problem(**draw.ramp(6, 6), mask=mask, shown=keep[:, None, None, :], causal=causal)
