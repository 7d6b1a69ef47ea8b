"""The contiguous key/value cache and attention over it (chapter K)."""

from __future__ import annotations

import contextlib
from typing import Any

from . import masks
from .arrays import (
    Array,
    as_int,
    describe,
    device_of,
    from_list,
    into_library,
    is_host,
    library_of,
    same_device,
    same_library,
)
from .dtypes import COMPUTED, dtype_name, is_float, is_float8, is_integer
from .errors import CacheError, CapacityError, ConsumedCacheError
from .frames import check_start
from .pipeline import attention

_IN_PLACE = ("numpy", "torch", "cupy", "array_api_strict")


class KVCache:
    """Keys and values of up to `capacity` positions per batch entry; slot j of an entry holds its position j (K1, K2).

    k (batch, Hkv, capacity, d_k) and v (batch, Hkv, capacity, d_v) are the buffers; `length` is how many slots are
    used: an int, or (batch,) ints if the entries differ. What unused slots hold never matters (K4).

    `append` consumes the object it is called on, because buffers are written in place where the library allows it.
    """

    def __init__(self, k: Array, v: Array, length: Any = 0) -> None:
        self._library = library_of(k, "k")
        self._device = device_of(self._library, k)
        same_library(self._library, v, "v")
        same_device(self._library, self._device, v, "v")
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or dtype_name(k.dtype) != dtype_name(v.dtype):
            expected = "k (batch, Hkv, capacity, d_k) and v (batch, Hkv, capacity, d_v) of one dtype"
            raise CacheError("k, v", expected, f"{describe(k)} and {describe(v)}")
        _check_kind(k, "k, v")
        self._k, self._v = k, self._library.xp.astype(v, v.dtype) if v is k else v  # each is written on its own
        self._consumed = False
        self._length = self._counts(length, "length", self.capacity, CapacityError)

    @classmethod
    def allocate(
        cls, like: Array, batch: int, kv_heads: int, capacity: int, d_k: int, d_v: int | None = None
    ) -> KVCache:
        """An empty cache in the library, device and dtype of `like`; d_v is d_k by default. Raises CacheError (K3)."""
        xp = library_of(like, "like").xp
        _check_kind(like, "like")
        sizes = {
            "batch": batch,
            "kv_heads": kv_heads,
            "capacity": capacity,
            "d_k": d_k,
            "d_v": d_k if d_v is None else d_v,
        }
        for name, size in sizes.items():
            number = as_int(size)
            if number is None or number < 0:
                raise CacheError(name, "an int >= 0", describe(size))
        shape, device = (batch, kv_heads, capacity), device_of(library_of(like, "like"), like)
        k, v = (xp.zeros((*shape, sizes[d]), dtype=like.dtype, device=device) for d in ("d_k", "d_v"))
        return cls(k, v)

    @property
    def k(self) -> Array:
        """The key buffer, (batch, Hkv, capacity, d_k)."""
        return self._live()._k

    @property
    def v(self) -> Array:
        """The value buffer, (batch, Hkv, capacity, d_v)."""
        return self._live()._v

    @property
    def length(self) -> Any:
        """Used slots: an int, or (batch,) ints if the entries differ or their counts came as arrays."""
        return self._live()._length

    @property
    def capacity(self) -> int:
        """Slots per batch entry."""
        return int(self._k.shape[2])

    def append(self, k: Array, v: Array, counts: Any = None) -> KVCache:
        """The cache with n new positions per entry, or with the first counts[b] of them in entry b  # K3, K5

        k (batch, Hkv, n, d_k) and v (batch, Hkv, n, d_v) in the cache's library, device and dtype; counts an int or
        (batch,) ints up to n. Raises CacheError for what does not fit and CapacityError (K6) if an entry would
        overflow; the cache is then as it was. Where counts and lengths may not be looked at (N3), an entry whose count
        is not from 0 to n or would overflow is left as it was, and the length says so.
        """
        self._live()
        self._check_new(k, v)
        new = int(k.shape[2])
        added = new if counts is None else self._counts(counts, "counts", new, CacheError)
        if _known(self._length) and _known(added):
            length = self._length + added
            most = length if isinstance(length, int) else int(length.max(initial=0))
            if most > self.capacity:
                raise CapacityError("k, v", f"at most {self.capacity} positions per entry, the capacity", f"{most}")
            keys, values = self._write(self._k, k, added), self._write(self._v, v, added)
        else:
            length, fits = self._traced_length(added, new)
            keys, values = self._select(self._k, k, added, fits), self._select(self._v, v, added, fits)
        self._consumed = True  # K5
        return KVCache(keys, values, _tidy(length))

    def fork(self) -> KVCache:
        """A copy with buffers of its own; both go on independently  # K5"""
        self._live()
        k, v = (self._library.xp.astype(x, x.dtype) for x in (self._k, self._v))  # a copy that derivatives pass
        return KVCache(k, v, self._length)

    def __copy__(self) -> KVCache:
        return self.fork()  # two caches with one buffer would overwrite each other

    def __reduce__(self) -> tuple[type[KVCache], tuple[Any, ...]]:
        return type(self), (self.k, self.v, self.length)

    def position(self, slot: Any, k_start: Any) -> Any:
        """The position of a slot, an int or (batch,) ints, where key 0 is at k_start (M3)."""
        k_start = check_start(k_start, "k_start", (self._k.shape[0],))
        if not (isinstance(slot, int) or isinstance(k_start, int)):
            slot, k_start = (into_library(x, self._library, self._device, "k_start") for x in (slot, k_start))
        return slot + k_start

    def after(self, count: int) -> int:
        """Slots that a call after an append of `count` positions looks at: Lk of its masks."""
        length = self.length
        if isinstance(length, int):
            return length + count
        return int(length.max(initial=0)) + count if is_host(length) else self.capacity

    def _live(self) -> KVCache:
        if self._consumed:
            raise ConsumedCacheError("cache", "the cache that append returned", "one that an append has consumed")
        return self

    def _counts(self, counts: Any, argument: str, most: int, error: type[CacheError]) -> Any:
        number = as_int(counts)
        expected = f"an int from 0 to {most}, or {self._k.shape[0]} of them, one per batch entry"
        if number is not None:
            if not 0 <= number <= most:
                raise error(argument, expected, number)
            return number
        values = from_list(counts)
        if not hasattr(values, "dtype") or not is_integer(values.dtype):
            raise CacheError(argument, expected, describe(counts))
        if tuple(values.shape) not in ((), (self._k.shape[0],)):
            raise CacheError(argument, expected, describe(counts))
        if is_host(values):
            if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
                raise error(argument, expected, values.tolist())
            return _tidy(values.astype("int64"))
        same_library(self._library, values, argument)
        same_device(self._library, self._device, values, argument)
        return self._library.xp.astype(values, self._index_dtype(), copy=False)  # length - Lq must not wrap around

    def _index_dtype(self) -> Any:
        return self._library.xp.arange(1, device=self._device).dtype

    def _check_new(self, k: Array, v: Array) -> None:
        for argument, x, buffer in (("k", k, self._k), ("v", v, self._v)):
            same_library(self._library, x, argument)
            same_device(self._library, self._device, x, argument)
            batch, heads, _, width = buffer.shape
            fits = x.ndim == 4 and (x.shape[0], x.shape[1], x.shape[3]) == (batch, heads, width)
            same_count = argument == "k" or (fits and x.shape[2] == k.shape[2])
            dtype = dtype_name(buffer.dtype)
            if not fits or not same_count or dtype_name(x.dtype) != dtype:
                new = "n" if same_count else k.shape[2]
                shape = f"(batch, Hkv, n, width) = ({batch}, {heads}, {new}, {width})"
                raise CacheError(argument, f"{shape} in the dtype of the cache, {dtype}", describe(x))

    def _write(self, buffer: Array, new: Array, added: Any) -> Array:
        """The buffer with new positions in known slots; in place where that is allowed and disturbs no derivative."""
        xp = self._library.xp
        if self._in_place(buffer, new):
            # PyTorch refuses to write into tensors of inference mode from outside, and across a vmap.
            with contextlib.suppress(RuntimeError):
                return self._overwrite(buffer, new, added)
        if isinstance(added, int) and isinstance(self._length, int):
            start, stop = self._length, self._length + added
            return xp.concat((buffer[:, :, :start, :], new[:, :, :added, :], buffer[:, :, stop:, :]), axis=2)
        return self._select(buffer, new, added, None)

    def _overwrite(self, buffer: Array, new: Array, added: Any) -> Array:
        if isinstance(added, int) and isinstance(self._length, int):
            buffer[:, :, self._length : self._length + added, :] = new[:, :, :added, :]
            return buffer
        for entry, (start, count) in enumerate(zip(self._each(self._length), self._each(added), strict=True)):
            buffer[entry, :, start : start + count, :] = new[entry, :, :count, :]
        return buffer

    def _select(self, buffer: Array, new: Array, added: Any, fits: Array | None) -> Array:
        """The same, neither writing in place nor looking at lengths: each slot picks its new position or stays."""
        xp, count = self._library.xp, new.shape[2]
        if 0 in new.shape:
            return buffer
        batch, heads, capacity, width = buffer.shape
        slots = xp.arange(capacity, device=self._device)
        start, stop = self._column(self._length), self._column(added)  # (batch, 1) or (1, 1)
        index = slots[None, :] - start  # (batch, capacity): which new position belongs here
        index, entries = xp.broadcast_to(index, (batch, capacity)), xp.arange(batch, device=self._device)[:, None]
        written = (index >= 0) & (index < stop)
        if fits is not None:
            written = written & fits  # K6
        flat = xp.reshape(xp.moveaxis(new, 1, 2), (batch * count, heads, width))
        picked = xp.take(flat, xp.reshape(xp.clip(index, 0, count - 1) + entries * count, (-1,)), axis=0)
        picked = xp.moveaxis(xp.reshape(picked, (batch, capacity, heads, width)), 2, 1)
        return xp.where(written[:, None, :, None], picked, buffer)

    def _traced_length(self, added: Any, most: int) -> tuple[Array, Array]:
        """The new length, (batch,), and which entries fit, (batch, 1) or (1, 1); the others stay as they are."""
        xp = self._library.xp
        length, more = self._column(self._length), self._column(added)
        fits = (length + more <= self.capacity) & (more >= 0) & (more <= most)  # K6
        length = xp.broadcast_to(xp.where(fits, length + more, length), (self._k.shape[0], 1))
        return length[:, 0], fits

    def _column(self, counts: Any) -> Array:
        xp = self._library.xp
        if isinstance(counts, int):
            return xp.full((1, 1), counts, dtype=self._index_dtype(), device=self._device)
        return xp.reshape(into_library(counts, self._library, self._device, "counts"), (-1, 1))

    def _each(self, counts: Any) -> list[int]:
        return [counts] * self._k.shape[0] if isinstance(counts, int) else counts.tolist()

    def _in_place(self, buffer: Array, new: Array) -> bool:
        if self._library.name not in _IN_PLACE or getattr(buffer, "requires_grad", False):
            return False
        if getattr(new, "requires_grad", False):
            return False
        if self._library.name == "torch" and 0 in buffer.stride():
            return False  # an expanded tensor: one write would reach all entries
        return not self._library.host or bool(buffer.flags.writeable)


def attend(q: Array, cache: KVCache, *, causal: bool = True, **options: Any) -> Array:
    """Attention of the newest Lq positions over the cache: q_start = length - Lq, causal by default  # K7

    q (batch, H, Lq, d_k); options are those of `attention`; a mask has Lk = the greatest length of the entries (the
    capacity where lengths may not be looked at). Returns (batch, H, Lq, d_v).
    """
    k, v, options = cached_call(q, cache, options)
    return attention(q, k, v, causal=causal, **options)


def cached_call(q: Array, cache: KVCache, options: dict[str, Any]) -> tuple[Array, Array, dict[str, Any]]:
    """Keys, values and options with which attention over the concatenated keys is attention over the cache (K3)."""
    if not isinstance(cache, KVCache):
        raise CacheError("cache", "a KVCache", describe(cache))
    library_of(q, "q")
    if q.ndim != 4:
        raise CacheError("q", "(batch, H, Lq, d_k)", describe(q))
    length = cache.length
    if isinstance(length, int) and q.shape[2] > length:  # K7
        raise CacheError("q", f"at most the {length} newest positions, all that the cache holds", describe(q))
    most = cache.after(0)
    options = dict(options)
    if options.get("q_start") is None:
        options["q_start"] = cache.position(length - q.shape[2], options.get("k_start", 0))  # K7
    if not isinstance(length, int):
        used = masks.lengths(length)  # K4
        mask = options.get("mask")
        options["mask"] = used if mask is None else used & mask
    return cache.k[:, :, :most, :], cache.v[:, :, :most, :], options


def _check_kind(x: Array, argument: str) -> None:
    if not (is_float(x.dtype) or is_float8(x.dtype)):
        raise CacheError(argument, f"a dtype out of {', '.join(COMPUTED)} or float8", describe(x))


def _known(counts: Any) -> bool:
    return isinstance(counts, int) or is_host(counts)


def _tidy(counts: Any) -> Any:
    """Equal host counts as one int, so that equal caches have equal lengths."""
    if is_host(counts) and counts.size and (counts == counts.flat[0]).all():
        return int(counts.flat[0])
    return counts
