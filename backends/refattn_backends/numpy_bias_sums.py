"""The gradients of biases that hold arrays, summed piece by piece on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arguments import Call
from refattn.arrays import Array, Shape
from refattn.biases import Bias, Plain, Relative
from refattn.gradients import summed_to
from refattn_backends.numpy_options import frame_of
from refattn_backends.pieces import Piece


def summable(call: Call) -> bool:
    """Whether every term is one whose sums take memory linear in the length, or no more than the term itself."""
    return all(not term.arrays() or isinstance(term, Relative) or _linear(call, term) for term in call.bias_terms())


def _linear(call: Call, term: Bias) -> bool:
    """Whether an array has one number for all rows or all keys, or else pairs of its own for each entry and head."""
    if not isinstance(term, Plain):
        return False
    shape = _padded(call, term)
    return 1 in shape[-2:] or shape == call.scores_shape


def _padded(call: Call, term: Plain) -> Shape:
    """The shape of an array with all the axes of the scores."""
    return (*(1,) * (len(call.scores_shape) - term.array.ndim), *term.array.shape)


class BiasSums:
    """The sums of some rows, for each entry and query head on its own, so that many can be added to at once."""

    def __init__(self, call: Call) -> None:
        self._call, self._sums = call, [_sum_for(call, term) for term in call.bias_terms()]

    def add(self, piece: Piece, entry: tuple[int, ...], heads: slice, logits: Array) -> None:
        """Adds gradients (K, T, G) of the logits of a piece, which are 0 where it is invisible."""
        call, logits = self._call, logits.transpose(2, 1, 0)  # (G, T, K)
        for term, whole in zip(call.bias_terms(), self._sums, strict=True):
            if whole is None:
                continue
            place = whole[entry][heads]
            if isinstance(term, Relative):
                columns = term.columns(frame_of(call, piece, entry)).ravel()
                for head, of_head in enumerate(logits):
                    place[head] += np.bincount(columns, of_head.ravel(), minlength=place.shape[-1])
                continue
            rows, keys = (
                slice(None) if length == 1 else slice(part.start, part.stop)
                for length, part in zip(place.shape[1:], (piece.rows, piece.keys), strict=True)
            )
            axes = tuple(axis for axis in (1, 2) if place.shape[axis] == 1)
            place[:, rows, keys] += np.sum(logits, axis=axes, keepdims=True)

    def __iadd__(self, other: BiasSums) -> BiasSums:
        for mine, its in zip(self._sums, other._sums, strict=True):
            if mine is not None and its is not None:
                mine += its
        return self

    def gradients(self) -> list[Array | None]:
        """One per term, in the shape of its array; None where it holds none."""
        found: list[Array | None] = []
        for term, whole in zip(self._call.bias_terms(), self._sums, strict=True):
            shapes = [tuple(x.shape) for x in term.arrays().values()]
            found.append(None if whole is None else summed_to(np, whole, shapes[0]))
        return found


def _sum_for(call: Call, term: Bias) -> Any:
    """Zeros for each entry and head: (batch..., H, rows or 1, keys or 1), or (batch..., H, 2R + 1) for a table."""
    lead = call.scores_shape[:-2]
    if isinstance(term, Relative):
        return np.zeros((*lead, term.table.shape[-1]), call.compute)
    return np.zeros((*lead, *_padded(call, term)[-2:]), call.compute) if isinstance(term, Plain) else None
