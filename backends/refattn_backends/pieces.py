"""What a mask shows of each tile, found once for all the jobs that look at the tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refattn.arguments import Call
from refattn.arrays import Array
from refattn_backends.tiles import cut

KEPT = 4  # tiles of rows whose pieces are remembered


class Piece(NamedTuple):
    """Rows and keys of a tile that are computed together."""

    rows: range
    keys: range
    visible: Array | None  # (..., H, rows, keys) or what broadcasts to it; None: all are


class Shown:
    """The pieces of a call's tiles: nothing of what no row sees, strips of `edge` rows along the edges of the rest."""

    def __init__(self, call: Call, edge: int) -> None:
        self._call, self._edge = call, edge
        self._memory: dict[int, dict[int, list[Piece]]] = {}

    def pieces(self, rows: range, keys: range) -> list[Piece]:
        """The parts of a tile that some entry, head and row sees something of."""
        if self._call.mask is None:
            return [Piece(rows, keys, None)]
        known = self._memory.get(rows.start)
        if known is None:
            known = self._memory[rows.start] = {}
            for start in list(self._memory)[:-KEPT]:
                self._memory.pop(start, None)
        found = known.get(keys.start)
        if found is None:  # two threads may both look: they find the same
            answer = self._call.answer(rows, keys)
            found = [] if answer == "none" else [Piece(rows, keys, None)] if answer == "all" else self._cut(rows, keys)
            known[keys.start] = found
        return found

    def _cut(self, rows: range, keys: range) -> list[Piece]:
        assert self._call.mask is not None
        visible = self._call.mask.evaluate(cut(self._call, rows, keys, masked=True).frame())
        leads = tuple(range(visible.ndim - 2))
        some, every = (np.broadcast_to(f(visible, axis=leads), (len(rows), len(keys))) for f in (np.any, np.all))
        pieces: list[Piece] = []
        for start in range(0, len(rows), self._edge):
            stop = min(start + self._edge, len(rows))
            seen = np.flatnonzero(some[start:stop].any(axis=0))
            if not seen.size:
                continue
            first, last = int(seen[0]), int(seen[-1]) + 1
            full = bool(every[start:stop, first:last].all())
            strip = rows[start:stop], keys[first:last], full
            if pieces and _continues(pieces[-1], *strip):
                strip = range(pieces.pop().rows.start, strip[0].stop), *strip[1:]
            part = None if full else _part(visible, rows, keys, *strip[:2])
            pieces.append(Piece(*strip[:2], part))
        return pieces


def _continues(before: Piece, rows: range, keys: range, full: bool) -> bool:
    return before.rows.stop == rows.start and before.keys == keys and (before.visible is None) == full


def _part(visible: Array, rows: range, keys: range, of_rows: range, of_keys: range) -> Array:
    """The strip's part of what is visible on the tile, axes of size 1 as they are."""
    if visible.shape[-2] > 1:
        visible = visible[..., of_rows.start - rows.start : of_rows.stop - rows.start, :]
    if visible.shape[-1] > 1:
        visible = visible[..., of_keys.start - keys.start : of_keys.stop - keys.start]
    return visible
