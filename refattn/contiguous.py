"""The contiguous cache (K3)."""

from __future__ import annotations

from typing import Any, Self

from .arrays import Array
from .cache import Cache, Seen, allocate_buffers, greatest, known, tidy
from .errors import CapacityError
from .masks import lengths


class KVCache(Cache):
    """Keys and values of up to `capacity` positions per batch entry; slot j of an entry holds its position j (K1, K2).

    k (batch, Hkv, capacity, d_k) and v (batch, Hkv, capacity, d_v) are the buffers; `length` is how many slots are
    used: an int, or (batch,) ints if the entries differ. What unused slots hold never matters (K4).

    `append` consumes the object it is called on, because buffers are written in place where the library allows it (K5).

    >>> import numpy as np, refattn
    >>> new = np.zeros((2, 1, 3, 4))  # (batch, Hkv, n, d_k)
    >>> cache = refattn.KVCache.allocate(new, batch=2, kv_heads=1, capacity=8, d_k=4)
    >>> cache = cache.append(new, new).append(new, new, counts=[1, 3])
    >>> cache.length
    array([4, 6])
    """

    _layout = "(batch, Hkv, capacity, width)"

    def __init__(self, k: Array, v: Array, length: Any = 0) -> None:
        super().__init__(k, v)
        self._length = self._counts(length, "length", self.capacity, CapacityError)

    @classmethod
    def allocate(
        cls, like: Array, batch: int, kv_heads: int, capacity: int, d_k: int, d_v: int | None = None
    ) -> KVCache:
        """An empty cache in the library, device and dtype of `like`; d_v is d_k by default. Raises CacheError (K3)."""
        sizes = {"batch": batch, "kv_heads": kv_heads, "capacity": capacity}
        return cls(*allocate_buffers(like, sizes, ("batch", "kv_heads", "capacity"), d_k, d_v))

    @property
    def capacity(self) -> int:
        """Slots per batch entry."""
        return int(self._k.shape[2])

    def seen_by(self, q_len: int, first: Any = None) -> Seen:
        """All used slots; where the entries differ, or may, those up to the greatest length, the others hidden."""
        length, most = self.length, self.after(0)
        used = None if isinstance(length, int) else lengths(length)  # K4
        return Seen(self._k[:, :, :most, :], self._v[:, :, :most, :], 0, used)

    def after(self, new: int, counts: Any = None) -> int:
        """The greatest length then; the capacity where lengths may not be looked at."""
        length, added = self.length, self._added(new, counts)
        return greatest(length + added) if known(length, added) else self.capacity

    def _appended(self, k: Array, v: Array, added: Any) -> Self:
        at = self._length
        if known(at, added):
            length = at + added
            if greatest(length) > self.capacity:
                expected = f"at most {self.capacity} positions per entry, the capacity"
                raise CapacityError("k, v", expected, f"{greatest(length)}")
            keys, values = self._write(self._k, k, at, added), self._write(self._v, v, at, added)
        else:
            length, fits = self._traced_length(added, int(k.shape[2]))
            keys, values = self._select(self._k, k, at, added, fits), self._select(self._v, v, at, added, fits)
        return type(self)(keys, values, tidy(length))

    def _traced_length(self, added: Any, most: int) -> tuple[Array, Array]:
        """The new length, (batch,), and which entries fit, (batch, 1) or (1, 1); the others stay as they are."""
        length, more = self._column(self._length), self._column(added)
        fits = (length + more <= self.capacity) & (more >= 0) & (more <= most)  # K6
        return self._row(self._library.xp.where(fits, length + more, length)), fits

    def _forked(self) -> Self:
        return type(self)(*self._copies(), self._length)

    def _state(self) -> tuple[Any, ...]:
        return self._k, self._v, self._length
