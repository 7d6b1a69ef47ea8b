"""Softmax over the keys, with empty rows and sinks (chapter P)."""

from __future__ import annotations

from typing import Any

from .arrays import Array


def softmax(
    xp: Any, logits: Array, visible: Array | None, sinks: Array | None, empty: Array | None
) -> tuple[Array, Array]:
    """Weights and log-sum-exp of each row.

    logits (..., H, Lq, Lk) with -inf at invisible pairs, Lk > 0; visible boolean, broadcastable to them, None if all
    are; sinks (H, 1, 1) or None; empty (..., H, Lq, 1), the rows that see no key, where derivatives may be taken.
    Returns weights (..., H, Lq, Lk) and lse (..., H, Lq).
    """
    peak = xp.max(logits, axis=-1, keepdims=True)  # (..., H, Lq, 1)  P1: over keys, each row on its own
    if sinks is not None:
        peak = xp.maximum(peak, sinks)  # P3: a sink counts in the maximum and in the denominator
    nothing = None
    if visible is not None:
        # P2: empty rows, (..., 1, Lq, 1)
        nothing = ~xp.any(visible, axis=-1, keepdims=True) if empty is None else empty
        if sinks is not None:
            nothing = nothing & (sinks == -float("inf"))
        peak = xp.where(nothing, 0.0, peak)  # -inf - (-inf) would be NaN
    # P5, P6: only differences count. P7: a visible -inf gives 0, +inf or nothing but -inf gives NaN.
    weights = xp.exp(logits - peak)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - peak)
    if nothing is None:
        return weights / total, (xp.log(total) + peak)[..., 0]
    total = xp.where(nothing, 1.0, total)
    lse = xp.where(nothing, -float("inf"), xp.log(total) + peak)  # P4
    return weights / total, lse[..., 0]
