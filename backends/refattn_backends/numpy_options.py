"""The options of a call on NumPy, for one piece of a tile, one batch entry and some heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arguments import Call
from refattn.arrays import Array, Shape
from refattn.frames import Frame
from refattn_backends.numpy_logits import Options
from refattn_backends.pieces import Piece


def options_of(call: Call, piece: Piece, entry: tuple[int, ...], heads: slice) -> Options:
    """Softcap, biases and visibility of a piece, for an entry and some key/value heads; a bias of -inf hides (M17)."""
    visible, summands = piece.visible, []
    heads = slice(heads.start * call.group, heads.stop * call.group)
    if visible is not None:
        visible = visible.reshape((1,) * (len(call.scores_shape) - visible.ndim) + visible.shape)
        for at in entry:
            visible = visible[min(at, len(visible) - 1)]
        visible = _by_row(visible if len(visible) == 1 else visible[heads], call.group)
    if call.bias is not None:
        frame = frame_of(call, piece, entry)
        for term in call.bias.part(entry, heads).terms():
            summand = _by_row(term.evaluate(frame, call.compute), call.group)
            hidden = np.isneginf(summand)
            if hidden.any():
                visible = ~hidden if visible is None else visible & ~hidden
            summands.append(summand)
    return Options(call.softcap, summands, visible)


def frame_of(call: Call, piece: Piece, entry: tuple[int, ...]) -> Frame:
    """The pairs of a piece, at the positions that an entry starts from."""
    q_start, k_start = (_start(start, call.scores_shape[:-3], entry) for start in (call.q_start, call.k_start))
    return Frame(call.library, call.device, tile=(piece.rows, piece.keys), q_start=q_start, k_start=k_start)


def _start(start: Any, batch: Shape, entry: tuple[int, ...]) -> int:
    return start if isinstance(start, int) else int(np.broadcast_to(start, batch)[entry])


def _by_row(x: Array, group: int) -> Array:
    """(h * G or 1, T or 1, K or 1), or less axes, as (h or 1, T or 1, G or 1, K or 1)."""
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    x = x[None] if len(x) == 1 else x.reshape(-1, group, *x.shape[1:])
    return x.swapaxes(1, 2)
