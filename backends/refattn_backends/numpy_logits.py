"""The logits of one piece of a tile on NumPy: all of them into scratch, or those of some rows once more."""

from __future__ import annotations

import threading
from math import prod
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn_backends.numpy_products import by_columns, by_rows


class _Scratch(threading.local):
    """Buffers of one thread, by name and dtype."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, Any], Array] = {}


_scratch = _Scratch()


class Options(NamedTuple):
    """What makes logits of scaled scores, for some heads and one tile; (h, T, G, K) is what all broadcast to.

    T is the number of rows of q, G of query heads that share keys.
    """

    softcap: float | None
    summands: list[Array]
    visible: Array | None  # None: all

    @property
    def seen(self) -> Array | None:
        """Which rows see any of the keys, broadcastable to (h, T, G); None: all."""
        return None if self.visible is None else self.visible.any(axis=-1)

    def apply(self, x: Array) -> None:
        """Turns scaled scores (h, T, G, K) into logits in place."""
        if self.softcap is not None:
            x /= self.softcap
            np.tanh(x, out=x)
            x *= self.softcap
        for summand in self.summands:
            x += summand
        if self.visible is not None:
            limit = np.subtract(self.visible, 0.5, dtype=x.dtype) * np.inf
            np.fmin(x, limit, out=x)  # -inf for hidden pairs, NaN too; selecting takes several times as long

    def of(self, head: int, rows: Array, shape: tuple[int, ...]) -> Options:
        """The options of some rows of one head, for x (1, n, 1, K); shape is (h, T, G, K)."""

        def pick(x: Array) -> Array:
            x = np.broadcast_to(x, (*shape[:3], x.shape[-1]))
            return x[head].reshape(-1, x.shape[-1])[rows][None, :, None]

        return Options(
            self.softcap, list(map(pick, self.summands)), None if self.visible is None else pick(self.visible)
        )


class Logits:
    """Scaled q (h, T * G, d_k) against keys as columns (h, d_k, K), the G heads of a row next to each other.

    few says that there are few rows, whose keys nobody has looked at for what is not finite.
    """

    def __init__(self, q: Array, columns: Array, group: int, options: Options, *, few: bool) -> None:
        self._q, self._columns, self._options, self._few = q, columns, options, few
        self._shape = (q.shape[0], q.shape[1] // group, group, columns.shape[-1])
        self._broken: Array | None = None

    @property
    def seen(self) -> Any:
        """Which rows see any of the keys, (h, T * G); True: all."""
        seen = self._options.seen
        return True if seen is None else np.broadcast_to(seen, self._shape[:3]).reshape(self._q.shape[:2])

    def visible(self, index: Array) -> Array:
        """Which rows see the keys of those indices, (h, T * G, n)."""
        visible = True if self._options.visible is None else self._options.visible
        picked = np.broadcast_to(visible, self._shape)[..., index]
        return picked.reshape(*self._q.shape[:2], len(index))

    def all(self) -> Array:
        """The logits (h, T * G, K), in scratch, -inf for hidden pairs."""
        x = take("logits", (*self._q.shape[:2], self._shape[-1]), self._q.dtype)
        (by_columns if self._few else by_rows)(self._q, self._columns, x)
        if self._few and not np.isfinite(x).all():
            self._broken = ~np.isfinite(self._columns).all(axis=-2, keepdims=True)
            np.copyto(x, np.nan, where=self._broken)  # M20
        self._options.apply(x.reshape(self._shape))
        return x

    def some(self, head: int, rows: Array) -> Array:
        """The logits (len(rows), K) of some rows of a head."""
        x = self._q[head, rows] @ self._columns[head]
        if self._broken is not None:
            np.copyto(x, np.nan, where=self._broken[head])
        self._options.of(head, rows, self._shape).apply(x[None, :, None])
        return x


def take(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Scratch of this thread, reused from tile to tile and call to call."""
    size = prod(shape)
    buffer = _scratch.buffers.get((name, dtype))
    if buffer is None or buffer.size < size:
        buffer = _scratch.buffers[name, dtype] = np.empty(size, dtype)
    taken: Array = buffer[:size].reshape(shape)
    return taken
