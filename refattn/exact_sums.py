"""Sums of blocks as exact as one sum over all of them."""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array


class ExactSum:
    """A sum of blocks that keeps what each addition rounds off (Knuth, 1969): many blocks are as exact as one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        import numpy as np

        self._high, self._low = np.zeros(shape), np.zeros(shape)

    def add(self, at: Any, shift: Array, x: Array) -> None:
        """Add x to the rows at an index, after what is there is multiplied by shift."""
        old = self._high[at] * shift
        new = old + x
        taken = new - old
        self._high[at], self._low[at] = new, self._low[at] * shift + ((old - (new - taken)) + (x - taken))

    @property
    def value(self) -> Array:
        """The sum."""
        import numpy as np

        return np.where(np.isfinite(self._high), self._high + self._low, self._high)
