"""Faults of visibility in an attention function (chapter M): alignment, masks, poison behind them."""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import INF, Plain, diagonal_moved

SENTINEL = -1e4


def _integers_added(run: Any, seen: Array) -> Array:
    """The mask as 0 and 1, added to the logits."""
    x = Plain.logits(run, seen)
    return x if run.mask is None else x + run.xp.astype(run.mask, run.wide)


def _masked_afterwards(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
    weights, lse = Plain.softmax(run, x, run.xp.ones_like(seen), sink)
    return run.xp.where(seen, weights, 0.0), lse


def _weights_zeroed(run: Any, x: Array, seen: Array) -> Array:
    return x


def _without_causal(run: Any) -> Array:
    if run.mask is not None:
        return run.xp.ones((1, 1), dtype=run.xp.bool, device=run.device)
    return Plain.causal_pairs(run)


def _rank_three_as_batch(run: Any) -> Array:
    return run.mask[:, None, :, :] if run.mask.ndim == 3 else run.mask


def _without_last_row(run: Any) -> Array:
    last = run.integers(range(run.q_len))[:, None] == run.q_len - 1
    return Plain.causal_pairs(run) | last


def _first_start(run: Any, start: Any) -> Any:
    return start if isinstance(start, int) else int(start.reshape(-1)[0])


def _from_top_left(run: Any) -> Array:
    return run.integers(range(run.q_len))[:, None]


def _from_bottom_right(run: Any) -> Array:
    return run.integers(range(run.q_len))[:, None] + (run.k_len - run.q_len)


def _peak_of_hidden(run: Any, x: Array, seen: Array) -> Array:
    """Remembers the largest score, hidden ones included, before hiding."""
    run.largest = run.xp.max(x, axis=-1, keepdims=True) if run.k_len else None
    return Plain.hidden(run, x, seen)


def _largest_of_all(run: Any, x: Array, sink: Array | None) -> Array:
    return Plain.peak(run, x, sink) if run.largest is None else run.largest


def _one_largest(run: Any, x: Array, sink: Array | None) -> Array:
    """One maximum for all rows of a head, so that one NaN row spoils them all."""
    peak = run.xp.max(x, axis=(-2, -1), keepdims=True) if run.q_len else Plain.peak(run, x, sink)
    return peak if sink is None else run.xp.maximum(peak, sink)


def _threshold(run: Any) -> Array:
    """A large negative bias is taken for a mask."""
    return run.bias > -50.0


def _zeros_are_padding(run: Any) -> Array:
    """Keys of zeros are taken for padding."""
    return Plain.visible(run) & run.xp.any(run.k != 0.0, axis=-1)[..., None, :]


def _bias_added_everywhere(run: Any, x: Array, seen: Array) -> Array:
    return x + run.summand()


def _hidden_by_addition(run: Any, x: Array, seen: Array) -> Array:
    return x + run.xp.where(seen, 0.0, run.full((1, 1), -INF))


def _group_shares_mask(run: Any) -> Array:
    """The mask of a group's first head counts for the whole group."""
    if run.mask.ndim < 3 or run.mask.shape[-3] == 1 or run.heads == run.kv_heads:
        return run.mask
    group = run.heads // run.kv_heads
    return run.xp.take(run.mask, run.integers([h // group * group for h in range(run.heads)]), axis=-3)


def _first_entry(run: Any) -> Array:
    return run.mask[:1, ...] if run.mask.ndim == 4 else run.mask


FAULTS = (
    Fault(
        name="mask polarity",
        clause="M1",
        kind="mask polarity",
        steps={"masked_pairs": lambda run: ~run.mask},
    ),
    Fault(
        name="mask is added as 0 and 1",
        clause="M1",
        kind="mask polarity",
        steps={"logits": _integers_added, "masked_pairs": lambda run: run.xp.ones_like(run.mask)},
    ),
    Fault(
        name="mask after softmax",
        clause="M2",
        kind="mask-after-softmax",
        steps={"hidden": _weights_zeroed, "softmax": _masked_afterwards},
    ),
    Fault(
        name="k_start is ignored",
        clause="M3",
        kind="mask alignment",
        steps={"key_positions": lambda run: run.integers(range(run.k_len))[None, :]},
    ),
    Fault(name="first start for all entries", clause="M3", kind="mask alignment", steps={"start": _first_start}),
    Fault(name="causal hides itself", clause="M4", kind="mask alignment", steps={"causal_pairs": diagonal_moved(-1)}),
    Fault(name="causal shows the next", clause="M4", kind="test oracle", steps={"causal_pairs": diagonal_moved(1)}),
    Fault(
        name="causal looks ahead",
        clause="M4",
        kind="mask polarity",
        steps={"causal_pairs": lambda run: run.key_positions() >= run.query_positions()},
    ),
    Fault(
        name="causal is ignored",
        clause="M4",
        kind="test oracle",
        steps={"causal_pairs": lambda run: run.xp.ones((1, 1), dtype=run.xp.bool, device=run.device)},
    ),
    Fault(
        name="last row sees all keys",
        clause="M4",
        kind="mask alignment",
        steps={"causal_pairs": _without_last_row},
    ),
    Fault(
        name="causal from the top left",
        clause="M5",
        kind="mask alignment",
        steps={"query_positions": _from_top_left},
    ),
    Fault(
        name="causal from the bottom right",
        clause="M5",
        kind="mask alignment",
        steps={"query_positions": _from_bottom_right},
    ),
    Fault(name="mask drops causal", clause="M13", kind="all-masked row", steps={"causal_pairs": _without_causal}),
    Fault(
        name="causal drops mask",
        clause="M13",
        kind="overflow",
        steps={"masked_pairs": lambda run: run.xp.ones_like(run.mask) if run.causal else run.mask},
    ),
    Fault(
        name="mask of rank 3 as batch",
        clause="M15",
        kind="mask alignment",
        steps={"masked_pairs": _rank_three_as_batch},
    ),
    Fault(
        name="mask of the first entry for all",
        clause="M11",
        kind="padding",
        steps={"masked_pairs": _first_entry},
    ),
    Fault(
        name="bias of -inf is a large number",
        clause="M17",
        kind="all-masked row",
        steps={
            "biased_pairs": lambda run: run.xp.ones_like(run.bias, dtype=run.xp.bool),
            "summand": lambda run: run.xp.where(run.bias == -INF, SENTINEL, Plain.summand(run)),
        },
    ),
    Fault(name="large negative bias is a mask", clause="M18", kind="overflow", steps={"biased_pairs": _threshold}),
    Fault(
        name="poison leaks from k",
        clause="M19",
        kind="NaN leak",
        steps={
            "scores": lambda run: run.products(run.q, run.k),
            "hidden": _hidden_by_addition,
        },
    ),
    Fault(
        name="poison leaks from v",
        clause="M19",
        kind="NaN leak",
        steps={
            "weighted": lambda run, weights, v: run.xp.matmul(weights, run.v),
            "restored": lambda run, output, seen: output,
        },
    ),
    Fault(
        name="poison leaks from the bias",
        clause="M19",
        kind="NaN leak",
        steps={
            "biased": _bias_added_everywhere,
            "hidden": _hidden_by_addition,
        },
    ),
    Fault(
        name="maximum over hidden keys",
        clause="M19",
        kind="overflow",
        steps={"hidden": _peak_of_hidden, "peak": _largest_of_all},
    ),
    Fault(
        name="visible NaN keys count as zero",
        clause="M20",
        kind="NaN leak",
        steps={"scores": lambda run: run.products(run.q, run.finite(run.k))},
    ),
    Fault(
        name="visible infinite values count as zero",
        clause="M20",
        kind="NaN leak",
        steps={"restored": lambda run, output, seen: output},
    ),
    Fault(name="one maximum for all rows", clause="M21", kind="NaN leak", steps={"peak": _one_largest}),
    Fault(name="keys of zeros are padding", clause="P5", kind="padding", steps={"visible": _zeros_are_padding}),
    Fault(
        name="mask of one head for its group",
        clause="G2",
        kind="GQA mapping",
        steps={"masked_pairs": _group_shares_mask},
    ),
)
