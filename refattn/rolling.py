"""The rolling cache: the newest positions, as far as a window reaches (K9; Beltagy et al., 2020)."""

from __future__ import annotations

from typing import Any, Self

from .arrays import Array
from .cache import Cache, Seen, allocate_buffers, greatest, known, size_of, tidy
from .errors import CacheError
from .masks import Mask, dense, lengths, window


class RollingKVCache(Cache):
    """Keys and values for queries that see `window` positions, themselves and the window - 1 before them.

    `attend` gives what the mask window(W - 1, 0) over all keys ever appended gives the newest queries (K9). All that
    the last append brought can be asked; older ones as long as their keys are still held, then it is an error. Where
    the entries differ, or lengths may not be looked at (N3), a row whose keys are gone sees nothing.

    k (batch, Hkv, slots, d_k) and v (batch, Hkv, slots, d_v) are the buffers; slot j of an entry holds its position
    start + j, up to `length`, which counts all positions ever appended. There are 2 W slots: when they are full the
    newest W - 1 positions move to the front, so that an append costs O(1) per token. After an append of n > W + 1
    positions there are W - 1 + n slots, until the next append.

    >>> import numpy as np, refattn
    >>> new = np.zeros((1, 1, 1, 4))  # (batch, Hkv, n, d_k)
    >>> cache = refattn.RollingKVCache.allocate(new, batch=1, kv_heads=1, window=2, d_k=4)
    >>> for _ in range(5):
    ...     cache = cache.append(new, new)
    >>> cache.length, cache.start, cache.slots
    (5, 3, 4)
    """

    def __init__(self, k: Array, v: Array, window: int, length: Any = 0, start: Any = 0) -> None:
        super().__init__(k, v)
        self._window = size_of(window, "window", 1)
        self._length = self._counts(length, "length", 2**29, CacheError)
        self._start = self._counts(start, "start", 2**29, CacheError)
        if known(self._length, self._start):
            for last, first in zip(self._each(self._length), self._each(self._start), strict=True):
                if not first <= last <= first + self.slots:
                    raise CacheError("length", f"from start = {first} to start + slots = {first + self.slots}", last)

    @classmethod
    def allocate(
        cls, like: Array, batch: int, kv_heads: int, window: int, d_k: int, d_v: int | None = None
    ) -> RollingKVCache:
        """An empty cache in the library, device and dtype of `like`; d_v is d_k by default. Raises CacheError (K9)."""
        window = size_of(window, "window", 1)
        sizes = {"batch": batch, "kv_heads": kv_heads, "window": window, "slots": 2 * window}
        return cls(*allocate_buffers(like, sizes, ("batch", "kv_heads", "slots"), d_k, d_v), window)

    @property
    def window(self) -> int:
        """W, how many positions a query sees, its own included."""
        return self._window

    @property
    def slots(self) -> int:
        """Slots per batch entry."""
        return int(self._k.shape[2])

    @property
    def start(self) -> Any:
        """The position in slot 0, an int, or (batch,) ints."""
        return self._live()._start

    def seen_by(self, q_len: int, first: Any = None) -> Seen:
        """The queries' positions and W - 1 before; where the entries differ, or may, all slots in use, masked."""
        length, start, before = self.length, self._start, self._window - 1
        mask = window(before, 0)
        first = length - q_len if first is None else first
        if isinstance(length, int) and isinstance(start, int) and isinstance(first, int):
            oldest = max(first - before, 0)
            if oldest < start:
                expected = f"at most the {length - start - before} newest positions, whose keys the cache still holds"
                raise CacheError("q", expected, f"{q_len} positions")
            used = slice(oldest - start, length - start)
            return Seen(self._k[:, :, used, :], self._v[:, :, used, :], oldest, mask)
        used = self._used()
        most = greatest(used) if known(used) else self.slots
        mask = mask & lengths(used) & self._held(q_len, first)  # K4
        return Seen(self._k[:, :, :most, :], self._v[:, :, :most, :], start, mask)

    def after(self, new: int, counts: Any = None) -> int:
        """The new positions and W - 1 before; where the entries differ, or may, all slots then in use."""
        first, start, added = self.length, self._start, self._added(new, counts)
        if not known(first, start, added):
            return self._slots_for(new)
        length = tidy(first + added)
        start = self._start_after(length, new)
        if isinstance(length, int) and isinstance(start, int) and isinstance(first, int):
            start = max(first - (self._window - 1), 0)
        return greatest(length - start)

    def _slots_for(self, new: int) -> int:
        """Slots after an append of n: 2 W, or as many as the new queries can see."""
        return max(2 * self._window, self._window - 1 + new)

    def _start_after(self, length: Any, new: int) -> Any:
        """The position in slot 0 after an append of n up to a known length: it goes on when the slots are full."""
        slots = self._slots_for(new)
        if slots == self.slots and greatest(length - self._start) <= slots:
            return self._start
        return tidy(_at_least(self._start, length - (self._window - 1 + new)))

    def _used(self) -> Any:
        """How many slots are in use."""
        if known(self._length, self._start):
            return self._length - self._start
        return self._row(self._column(self._length) - self._column(self._start))

    def _held(self, q_len: int, first: Any) -> Mask:
        """Which of q_len rows from position `first` on have all of their window among the slots."""
        start = self._column(self._start)
        rows = self._column(first) + self._library.xp.arange(q_len, device=self._device)[None, :]
        whole = (rows >= start + (self._window - 1)) | (start == 0)  # (batch, Lq)
        return dense(self._library.xp.reshape(whole, (whole.shape[0], 1, q_len, 1)))

    def _appended(self, k: Array, v: Array, added: Any) -> Self:
        new, start = int(k.shape[2]), self._start
        kept = self._window - 1 + new  # as many positions as the new queries can see
        slots = self._slots_for(new)
        if known(self._length, start, added):
            length, used = tidy(self._length + added), self._length - start
            start = self._start_after(length, new)
            if slots == self.slots and start is self._start:
                keys, values = self._write(self._k, k, used, added), self._write(self._v, v, used, added)
            else:
                keys, values = (self._moved(x, y, start, added, slots) for x, y in ((self._k, k), (self._v, v)))
        else:
            xp, old, more = self._library.xp, self._column(self._length), self._column(added)
            more = xp.where((more >= 0) & (more <= new), more, 0)  # K6
            first, column = self._column(start), old + more
            if slots == self.slots:
                start = self._row(xp.where(column - first > slots, xp.maximum(first, column - kept), first))
            else:
                start = self._row(xp.maximum(first, column - kept))
            length, more = self._row(column), self._row(more)
            keys, values = (self._moved(x, y, start, more, slots) for x, y in ((self._k, k), (self._v, v)))
        return type(self)(keys, values, self._window, tidy(length), tidy(start))

    def _moved(self, buffer: Array, new: Array, start: Any, added: Any, slots: int) -> Array:
        """A new buffer of that many slots from position start on: the old positions that are left, then the new."""
        xp = self._library.xp
        if all(isinstance(x, int) for x in (self._length, self._start, start, added)):
            first, last = start - self._start, self._length - self._start  # start <= length, see `kept`
            parts = buffer[:, :, first:last, :], new[:, :, :added, :]
            batch, heads, _, width = buffer.shape
            free = slots - (last - first) - added
            zeros = xp.zeros((batch, heads, free, width), dtype=buffer.dtype, device=self._device)
            return xp.concat((*parts, zeros), axis=2)
        shift = self._column(start) - self._column(self._start)
        used = self._column(self._length) - self._column(self._start)
        index = xp.arange(slots, device=self._device)[None, :] + shift  # (batch or 1, slots): the old slot, if used
        index = xp.where(index < used, index, self.slots + index - used)
        return self._gather(xp.concat((buffer, new), axis=2), index)

    def _forked(self) -> Self:
        return type(self)(*self._copies(), self._window, self._length, self._start)

    def _state(self) -> tuple[Any, ...]:
        return self._k, self._v, self._window, self._length, self._start


def _at_least(start: Any, least: Any) -> Any:
    """The greater of two known counts, entry by entry."""
    if isinstance(start, int) and isinstance(least, int):
        return max(start, least)
    return start + (least - start).clip(min=0)
