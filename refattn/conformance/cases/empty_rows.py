"""Chapter P: rows that see no key, whatever hides the keys and whatever stands around the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import AttentionWeights, masks, multi_head_attention
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Convert, Problem
from refattn.conformance.expect import expect, expect_equal
from refattn.conformance.plain import Draw, indices, positions
from refattn.dtypes import COMPUTED

CASES = Chapter("empty_rows")

IDS = np.asarray([[0, 7, 1, 7], [7, 2, 1, 7]])
KEY_IDS = np.asarray([[0, 0, 0, 1, 1, 1], [2, 2, 1, 1, 1, 1]])
KEEP = np.asarray([[True, True, False, True, True, True], [False] * 6])
KEPT = np.asarray([[True, False, True], [False, False, False]])
# Where 4 queries start over 6 keys, so that the last ones see nothing, or under causal visibility the first.
STARTS = {"causal": -2, "window": 6, "chunks": 6}
KINDS = ("causal", "window", "chunks", "prefix", "documents", "padding", "dense", "blocks")


def _rule(kind: str) -> tuple[Array, Callable[[Convert], Any]]:
    """Visible pairs of 4 queries and 6 keys, plainly and as a Mask; some rows see nothing."""
    query, key = positions(4, 6, STARTS.get(kind, 0))
    odd = np.broadcast_to(query % 2 == 1, (4, 6))
    rules: dict[str, tuple[Array, Callable[[Convert], Any]]] = {
        "causal": (key <= query, lambda _: masks.causal()),
        "window": (key >= query - 2, lambda _: masks.window(2, None)),
        "chunks": (key // 4 == query // 4, lambda _: masks.chunks(4)),
        "prefix": (np.zeros((4, 6), dtype=bool), lambda _: masks.prefix(0)),
        "documents": (
            (IDS[:, :, None] == KEY_IDS[:, None, :])[:, None],
            lambda array: masks.documents(array(IDS), array(KEY_IDS)),
        ),
        "padding": (KEEP[:, None, None, :], lambda array: masks.padding(array(KEEP))),
        "dense": (odd, lambda array: masks.dense(array(odd))),
        "blocks": (np.kron(KEPT, np.ones((2, 2))) > 0, lambda array: masks.blocks(array(KEPT), (2, 2))),
    }
    return rules[kind]


def _away_from_zero(draw: Draw, **data: Any) -> dict[str, Any]:
    """The same with values around 4, so that a mean of values is not taken for 0."""
    return {**data, "v": draw.exact(data["v"] + 4.0)}


def _empty_by(kind: str) -> None:
    def build(draw: Draw) -> Problem:
        shown, mask = _rule(kind)
        return Problem(**_away_from_zero(draw, **draw.qkv(4, 6)), shown=shown, mask=mask, q_start=STARTS.get(kind))

    build.__name__ = f"by_{kind}"
    build.__doc__ = (
        f"Rows that {kind} leaves without a key have output 0, not NaN and not a mean; the others are as ever."
    )
    CASES.problem("P2")(build)


for _kind in KINDS:
    _empty_by(_kind)


@CASES.problem("P2", "S5")
def under_every_option(draw: Draw) -> Problem:
    """An empty row stays 0 under a negative scale, a soft cap, a bias and in groups of heads."""
    shown = np.ones((4, 6), dtype=bool)
    shown[1] = False
    data = _away_from_zero(draw, **draw.qkv(4, 6, heads=4, kv_heads=2))
    return Problem(**data, shown=shown, scale=-0.5, softcap=2.0, bias=draw.normal(4, 4, 6))


@CASES.problem("P2", "T1")
def of_many_keys(draw: Draw) -> Problem:
    """Over 150 keys one row sees nothing, one the last key alone, one the first: no tile decides for the row."""
    shown = np.zeros((4, 150), dtype=bool)
    shown[1, -1], shown[2, 0], shown[3] = True, True, True
    return Problem(**_away_from_zero(draw, **draw.qkv(4, 150, batch=(1,))), shown=shown)


@CASES.problem("P2", "M5")
def many_queries_and_one_key(draw: Draw) -> Problem:
    """Five queries, aligned bottom-right with one key: the last sees it and gives the value, the others give 0."""
    return Problem(**_away_from_zero(draw, **draw.qkv(5, 1)), causal=True, q_start=-4)


@CASES.problem("P2", "M9")
def packed_queries_over_one_key_each(draw: Draw) -> Problem:
    """Two packed documents of three queries and one key each: only the last query of each sees its document's key."""
    q_ids, k_ids, last = np.asarray([0, 0, 0, 1, 1, 1]), np.asarray([0, 1]), indices(6, 2)[0] % 3 == 2
    return Problem(
        **_away_from_zero(draw, **draw.qkv(6, 2)),
        mask=lambda array: masks.documents(array(q_ids), array(k_ids)) & masks.dense(array(last)),
        shown=(q_ids[:, None] == k_ids) & last,
    )


@CASES.problem("P2", "P1")
def weights_of_one_head(draw: Draw) -> Problem:
    """Where one head of three sees nothing its weights are 0, and those of the others sum to one."""
    shown = np.ones((3, 5, 5), dtype=bool)
    shown[2] = False
    return Problem(**draw.qkv(5, 5, batch=(1,), heads=3, d_k=1), shown=shown, asks=("weights",))


@CASES.problem("P2", "M13")
def weights_under_mask_and_causal(draw: Draw) -> Problem:
    """A row that only mask and causal together leave empty has weights 0 too."""
    shown = np.broadcast_to(np.asarray([[False, True, True]]), (3, 3))
    return Problem(**draw.qkv(3, 3), causal=True, shown=shown, asks=("weights",))


@CASES.check("L5", "P2", dtypes=COMPUTED)
def layer_with_one_head_masked(api: Api) -> None:
    """A layer whose third head sees nothing gives the same bits with and without weights, zeros for that head alone."""
    x, shown = api.array(api.draw.normal(1, 5, 6)), np.ones((3, 5, 5), dtype=bool)
    shown[2] = False
    weights = AttentionWeights(*(api.array(api.draw.normal(6, 6, spread=0.5)) for _ in range(3)))
    plain = multi_head_attention(x, weights, heads=3, mask=api.array(shown))
    layer = multi_head_attention(x, weights, heads=3, mask=api.array(shown), return_weights=True)
    output, returned = api.host(layer.output), api.host(layer.weights)
    expect_equal("output with and without weights", output, api.host(plain.output))
    expect_equal("output of the masked head", output[..., 4:], np.zeros((1, 5, 2)))
    expect_equal("weights of the masked head", returned[:, 2], np.zeros((1, 5, 5)))
    expect(bool(np.all(output[..., :4] != 0)), "the other heads must not be 0")
    expect(bool(np.all(returned[:, :2] > 0)), "the weights of the other heads must be positive")
