"""The logits of one piece of a tile on NumPy: all of them into scratch, or those of some rows once more."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn_backends.numpy_products import by_columns, by_rows


class _Scratch(threading.local):
    """Buffers of one thread, by name and dtype."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, Any], Array] = {}


_scratch = _Scratch()


class Logits:
    """Scaled q (h, n, d_k) against keys as columns (h, d_k, K); the n rows are those of G heads, next to each other.

    visible is (h or 1, n / G or 1, G or 1, K or 1), or None for all. few says that there are few rows, whose keys
    nobody has looked at for what is not finite.
    """

    def __init__(
        self, q: Array, columns: Array, visible: Array | None, softcap: float | None, *, group: int, few: bool
    ) -> None:
        self._q, self._columns, self._visible, self._softcap = q, columns, visible, softcap
        self._group, self._few = group, few
        self._broken: Array | None = None

    @property
    def seen(self) -> Any:
        """Which rows see any of the keys, (h or 1, n); True: all."""
        if self._visible is None:
            return True
        some = self._visible.any(axis=-1)
        return np.broadcast_to(some, (len(some), self._q.shape[1] // self._group, self._group)).reshape(len(some), -1)

    def all(self) -> Array:
        """The logits (h, n, K), in scratch, -inf for hidden pairs."""
        (heads, count, _), width = self._q.shape, self._columns.shape[-1]
        x = take("logits", (heads, count, width), self._q.dtype)
        (by_columns if self._few else by_rows)(self._q, self._columns, x)
        if self._few and not np.isfinite(x).all():
            self._broken = ~np.isfinite(self._columns).all(axis=-2, keepdims=True)
            np.copyto(x, np.nan, where=self._broken)  # M20
        return self._finished(x, self._visible, self._group)

    def some(self, head: int, rows: Array) -> Array:
        """The logits (len(rows), K) of some rows of a head."""
        x = self._q[head, rows] @ self._columns[head]
        if self._broken is not None:
            np.copyto(x, np.nan, where=self._broken[head])
        visible = self._visible
        if visible is not None:
            heads, tile, group = visible.shape[:3]
            visible = visible[head % heads, rows // self._group % tile, rows % group][None, :, None]
        return self._finished(x[None], visible, 1)[0]

    def _finished(self, x: Array, visible: Array | None, group: int) -> Array:
        if self._softcap is not None:
            x /= self._softcap
            np.tanh(x, out=x)
            x *= self._softcap
        if visible is not None:
            limit = np.subtract(visible, 0.5, dtype=x.dtype) * np.inf
            tiles = x.reshape(len(x), -1, group, x.shape[-1])
            np.fmin(tiles, limit, out=tiles)  # -inf for hidden pairs, NaN too; selecting takes several times as long
        return x


def take(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Scratch of this thread, reused from tile to tile and call to call."""
    size = int(np.prod(shape))
    buffer = _scratch.buffers.get((name, dtype))
    if buffer is None or buffer.size < size:
        buffer = _scratch.buffers[name, dtype] = np.empty(size, dtype)
    taken: Array = buffer[:size].reshape(shape)
    return taken
