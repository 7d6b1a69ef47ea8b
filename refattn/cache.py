"""What all caches share (chapter K).

`KVCache` is contiguous, `PagedKVCache` hands out pages, `RollingKVCache` keeps a window. Each holds two buffers and a
length, and says which keys the newest queries see; checks, consumption and the writing of slots have their home here.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Self

from .arrays import (
    LARGEST_SIZE,
    Array,
    as_int,
    as_size,
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
from .errors import CacheError, ConsumedCacheError
from .frames import check_start
from .masks import Mask

_IN_PLACE = ("numpy", "torch", "cupy", "array_api_strict")


class Seen(NamedTuple):
    """The part of a cache that its newest queries may see."""

    k: Array  # (batch, Hkv, Lk, d_k)
    v: Array  # (batch, Hkv, Lk, d_v)
    k_start: Any  # position of the first key: int or (batch,)
    mask: Mask | None  # what hides unused slots and keys that have left the window


class Cache:
    """Two buffers, a length, and the right to write: `append` consumes the object that it is called on (K5).

    Buffers are written in place where the library allows it, else every append makes new ones.
    """

    _layout = "(batch, Hkv, slots, width)"

    def __init__(self, k: Array, v: Array, batch: int | None = None, heads_axis: int = 1) -> None:
        self._library = library_of(k, "k")
        self._device = device_of(self._library, k)
        same_library(self._library, v, "v")
        same_device(self._library, self._device, v, "v")
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or dtype_name(k.dtype) != dtype_name(v.dtype):
            expected = f"k and v {self._layout} of one dtype, that differ in width alone"
            raise CacheError("k, v", expected, f"{describe(k)} and {describe(v)}")
        check_kind(k, "k, v")
        self._k, self._v = k, self._library.xp.astype(v, v.dtype) if v is k else v  # each is written on its own
        self._batch, self._heads = int(k.shape[0]) if batch is None else batch, int(k.shape[heads_axis])
        self._length: Any = 0
        self._consumed = False

    @property
    def k(self) -> Array:
        """The key buffer."""
        return self._live()._k

    @property
    def v(self) -> Array:
        """The value buffer."""
        return self._live()._v

    @property
    def length(self) -> Any:
        """Positions appended so far, an int, or (batch,) ints if the entries differ or their counts came as arrays."""
        return self._live()._length

    def append(self, k: Array, v: Array, counts: Any = None) -> Self:
        """The cache with n new positions per entry, or with the first counts[b] of them in entry b.

        k (batch, Hkv, n, d_k) and v (batch, Hkv, n, d_v) in the cache's library, device and dtype; counts an int or
        (batch,) ints up to n. Raises CacheError for what does not fit and CapacityError (K6) if there is no room; the
        cache is then as it was. Where counts and lengths may not be looked at (N3), an entry whose count is not from 0
        to n or would overflow is left as it was, and the length says so.
        """
        self._live()
        self._check_new(k, v)
        new = int(k.shape[2])
        added = self._added(new, counts)
        newer = self._appended(k, v, added)
        self._consumed = True  # K5
        return newer

    def fork(self) -> Self:
        """A second cache with what this one holds; both go on independently  # K5"""
        self._live()
        return self._forked()

    def seen_by(self, q_len: int, first: Any = None) -> Seen:
        """The keys and values that q_len queries may see, the newest ones, or those from position `first` on.

        Raises CacheError if they are not held.
        """
        raise NotImplementedError

    def after(self, new: int, counts: Any = None) -> int:
        """How many keys `seen_by` shows the n new queries of an `append` of n positions: Lk of a call's masks."""
        raise NotImplementedError

    def _appended(self, k: Array, v: Array, added: Any) -> Self:
        raise NotImplementedError

    def _forked(self) -> Self:
        raise NotImplementedError

    def _state(self) -> tuple[Any, ...]:
        """The arguments of the constructor that make an equal cache."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self.fork()  # two caches with one buffer would overwrite each other

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        self._live()
        return type(self), self._state()

    def position(self, index: Any, k_start: Any) -> Any:
        """The position of the index-th token appended, an int or (batch,) ints, where the first is at k_start (M3)."""
        k_start = check_start(k_start, "k_start", (self._batch,))
        if isinstance(k_start, int):
            return index + k_start
        if known(index, k_start):
            return index + k_start.astype("int64")
        k_start = into_library(k_start, self._library, self._device, "k_start")
        index = index if isinstance(index, int) else into_library(index, self._library, self._device, "length")
        return index + self._library.xp.astype(k_start, self._index_dtype(), copy=False)

    def _live(self) -> Self:
        if self._consumed:
            raise ConsumedCacheError("cache", "the cache that append returned", "one that an append has consumed")
        return self

    def _copies(self) -> tuple[Array, Array]:
        """Copies of the buffers that derivatives pass."""
        xp = self._library.xp
        return xp.astype(self._k, self._k.dtype), xp.astype(self._v, self._v.dtype)

    def _added(self, new: int, counts: Any) -> Any:
        """How many of the new positions count in each entry, all by default."""
        return new if counts is None else self._counts(counts, "counts", new, CacheError)

    def _counts(self, counts: Any, argument: str, most: int, error: type[CacheError]) -> Any:
        """An int, or (batch,) ints: host ones checked, others as they are, in the dtype of an index."""
        number = as_int(counts)
        expected = f"an int from 0 to {most}, or {self._batch} of them, one per batch entry"
        if number is not None:
            if not 0 <= number <= most:
                raise error(argument, expected, number)
            return number
        values = from_list(counts)
        if not hasattr(values, "dtype") or not is_integer(values.dtype):
            raise CacheError(argument, expected, describe(counts))
        if tuple(values.shape) not in ((), (self._batch,)):
            raise CacheError(argument, expected, describe(counts))
        if is_host(values):
            if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
                raise error(argument, expected, values.tolist())
            return tidy(values.astype("int64"))
        same_library(self._library, values, argument)
        same_device(self._library, self._device, values, argument)
        return self._library.xp.astype(values, self._index_dtype(), copy=False)  # length - Lq must not wrap around

    def _index_dtype(self) -> Any:
        return self._library.xp.arange(1, device=self._device).dtype

    def _check_new(self, k: Array, v: Array) -> None:
        for argument, x, buffer in (("k", k, self._k), ("v", v, self._v)):
            same_library(self._library, x, argument)
            same_device(self._library, self._device, x, argument)
            batch, heads, width = self._batch, self._heads, buffer.shape[3]
            fits = x.ndim == 4 and (x.shape[0], x.shape[1], x.shape[3]) == (batch, heads, width)
            same_count = argument == "k" or (fits and x.shape[2] == k.shape[2])
            dtype = dtype_name(buffer.dtype)
            if not fits or not same_count or dtype_name(x.dtype) != dtype:
                new = "n" if same_count else k.shape[2]
                shape = f"(batch, Hkv, n, width) = ({batch}, {heads}, {new}, {width})"
                raise CacheError(argument, f"{shape} in the dtype of the cache, {dtype}", describe(x))

    def _write(self, buffer: Array, new: Array, at: Any, added: Any) -> Array:
        """buffer (batch, Hkv, slots, width) with added new positions from slot `at` on, both known.

        In place where that is allowed and disturbs no derivative.
        """
        xp = self._library.xp
        if self._in_place(buffer, new):
            # PyTorch refuses to write into tensors of inference mode from outside, and across a vmap.
            with contextlib.suppress(RuntimeError):
                return self._overwrite(buffer, new, at, added)
        if isinstance(added, int) and isinstance(at, int):
            parts = buffer[:, :, :at, :], new[:, :, :added, :], buffer[:, :, at + added :, :]
            return xp.concat(parts, axis=2)
        return self._select(buffer, new, at, added, None)

    def _overwrite(self, buffer: Array, new: Array, at: Any, added: Any) -> Array:
        if isinstance(added, int) and isinstance(at, int):
            buffer[:, :, at : at + added, :] = new[:, :, :added, :]
            return buffer
        for entry, (start, count) in enumerate(zip(self._each(at), self._each(added), strict=True)):
            buffer[entry, :, start : start + count, :] = new[entry, :, :count, :]
        return buffer

    def _select(self, buffer: Array, new: Array, at: Any, added: Any, fits: Array | None) -> Array:
        """The same, neither writing in place nor looking at counts: each slot picks its new position or stays."""
        xp = self._library.xp
        if 0 in new.shape:
            return buffer
        slots = xp.arange(buffer.shape[2], device=self._device)
        start, stop = self._column(at), self._column(added)  # (batch, 1) or (1, 1)
        index = slots[None, :] - start  # (batch, slots): which new position belongs here
        written = (index >= 0) & (index < stop)
        if fits is not None:
            written = written & fits  # K6
        return xp.where(written[:, None, :, None], self._gather(new, index), buffer)

    def _gather(self, x: Array, index: Array) -> Array:
        """x (batch, Hkv, n, width) at the index (batch or 1, slots) of each entry, clipped to what x has."""
        xp = self._library.xp
        batch, heads, count, width = x.shape
        index = xp.broadcast_to(xp.clip(index, 0, count - 1), (batch, index.shape[1]))
        entries = xp.arange(batch, device=self._device)[:, None]
        flat = xp.reshape(xp.moveaxis(x, 1, 2), (batch * count, heads, width))
        picked = xp.take(flat, xp.reshape(index + entries * count, (-1,)), axis=0)
        return xp.moveaxis(xp.reshape(picked, (batch, index.shape[1], heads, width)), 2, 1)

    def _column(self, counts: Any) -> Array:
        """Counts as (batch, 1), or (1, 1) if they are one int."""
        xp = self._library.xp
        if isinstance(counts, int):
            return xp.full((1, 1), counts, dtype=self._index_dtype(), device=self._device)
        return xp.reshape(into_library(counts, self._library, self._device, "counts"), (-1, 1))

    def _row(self, column: Array) -> Array:
        """(batch, 1) or (1, 1) counts as (batch,)."""
        return self._library.xp.broadcast_to(column, (self._batch, 1))[:, 0]

    def _each(self, counts: Any) -> list[int]:
        return [counts] * self._batch if isinstance(counts, int) else counts.tolist()

    def _in_place(self, buffer: Array, new: Array) -> bool:
        if self._library.name not in _IN_PLACE or getattr(buffer, "requires_grad", False):
            return False
        if getattr(new, "requires_grad", False):
            return False
        if self._library.name == "torch" and 0 in buffer.stride():
            return False  # an expanded tensor: one write would reach all entries
        return not self._library.host or bool(buffer.flags.writeable)


def allocate_buffers(
    like: Array, sizes: dict[str, Any], shape: tuple[str, ...], d_k: Any, d_v: Any
) -> tuple[Array, Array]:
    """Zeros of the shape that the sizes named make, d_k and d_v wide. Raises CacheError for what is no size."""
    library = library_of(like, "like")
    check_kind(like, "like")
    sizes = {**sizes, "d_k": d_k, "d_v": d_k if d_v is None else d_v}
    checked = {name: size_of(size, name, 1 if name in ("page_size", "window") else 0) for name, size in sizes.items()}
    lead, device = tuple(checked[name] for name in shape), device_of(library, like)
    k, v = (library.xp.zeros((*lead, checked[d]), dtype=like.dtype, device=device) for d in ("d_k", "d_v"))
    return k, v


def size_of(size: Any, argument: str, least: int) -> int:
    """A size of a cache as a Python int. Raises CacheError for what is none."""
    number = as_size(size, least)
    if number is None:
        raise CacheError(argument, f"an int >= {least}, at most {LARGEST_SIZE}", describe(size))
    return number


def check_kind(x: Array, argument: str) -> None:
    """Raises CacheError unless x has a dtype that keys may have."""
    if not (is_float(x.dtype) or is_float8(x.dtype)):
        raise CacheError(argument, f"a dtype out of {', '.join(COMPUTED)} or float8", describe(x))


def known(*counts: Any) -> bool:
    """Whether all counts may be looked at (N3)."""
    return all(isinstance(count, int) or is_host(count) for count in counts)


def greatest(counts: Any) -> int:
    """The greatest of known counts."""
    return counts if isinstance(counts, int) else int(counts.max(initial=0))


def tidy(counts: Any) -> Any:
    """Equal host counts as one int, so that equal caches have equal lengths."""
    if is_host(counts) and counts.size and (counts == counts.flat[0]).all():
        return int(counts.flat[0])
    return counts
