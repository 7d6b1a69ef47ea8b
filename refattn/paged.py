"""The paged cache: block tables over one pool of pages (K8; Kwon et al., 2023)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Self

from .arrays import Array, as_int, describe, from_list, into_library, library_of
from .cache import Cache, Seen, allocate_buffers, known, tidy
from .errors import CacheError, CapacityError
from .masks import lengths
from .pages import Change, Pool, Tables

_NO_TABLES = Tables(Pool(0), [], 1)


class PagedKVCache(Cache):
    """Keys and values in pages of `page_size` positions, that the batch entries take from one pool as they grow.

    k (pages, page_size, Hkv, d_k) and v (pages, page_size, Hkv, d_v) are the buffers; position p of entry b lies in
    slot p % page_size of page tables[b][p // page_size]. Where a page lies never matters (K8), nor what unused slots
    hold (K4). `append` takes free pages as they are needed, never moves old ones, and fails if none is left (K6).

    `fork` copies no page: both caches read the pages filled so far, and each takes its own page from the same pool
    before it writes into one that is shared. Pages return to the pool with the last cache that names them.

    Tables are host data. Where counts may not be looked at (N3), pages are taken for all n positions.

    >>> import numpy as np, refattn
    >>> new = np.zeros((2, 1, 3, 4))  # (batch, Hkv, n, d_k)
    >>> cache = refattn.PagedKVCache.allocate(new, batch=2, kv_heads=1, pages=6, page_size=2, d_k=4)
    >>> cache = cache.append(new, new)
    >>> cache.tables, cache.free_pages
    (((0, 1), (2, 3)), 2)
    """

    _layout = "(pages, page_size, Hkv, width)"

    def __init__(self, k: Array, v: Array, tables: Sequence[Sequence[int]] | Tables, length: Any = 0) -> None:
        held = tables if isinstance(tables, Tables) else None
        rows = held.rows if held is not None else _check_tables(tables, k)
        super().__init__(k, v, batch=len(rows), heads_axis=2)
        if self.page_size < 1:
            raise CacheError("k, v", "pages of at least one position", describe(k))
        self._tables = Tables(Pool(self.pages), rows, self.page_size) if held is None else held
        room = [len(row) * self.page_size for row in rows]
        self._length = self._counts(length, "length", max(room, default=2**29), CapacityError)
        # The least and greatest length of each entry; they differ where the length may not be looked at.
        self._least = self._each(self._length) if known(self._length) else [0] * self._batch
        self._most = self._each(self._length) if known(self._length) else room
        for entry, (most, slots) in enumerate(zip(self._most, room, strict=True)):
            if most > slots:
                raise CapacityError("length", f"at most the {slots} slots in the pages of entry {entry}", most)

    @classmethod
    def allocate(
        cls, like: Array, batch: int, kv_heads: int, pages: int, page_size: int, d_k: int, d_v: int | None = None
    ) -> PagedKVCache:
        """An empty cache over a pool of free pages, in the library, device and dtype of `like`.

        pages is their number in all, shared by the entries and by forks; d_v is d_k by default. Raises CacheError.
        """
        sizes = {"batch": batch, "kv_heads": kv_heads, "pages": pages, "page_size": page_size}
        k, v = allocate_buffers(like, sizes, ("pages", "page_size", "kv_heads"), d_k, d_v)
        return cls(k, v, [[] for _ in range(batch)])

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return int(self._k.shape[1])

    @property
    def pages(self) -> int:
        """Pages of the pool, free ones included."""
        return int(self._k.shape[0])

    @property
    def free_pages(self) -> int:
        """Pages that no cache of this pool names."""
        return len(self._live()._tables.pool.free)

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The pages of each entry, in the order of positions."""
        return tuple(tuple(row) for row in self._live()._tables.rows)

    def seen_by(self, q_len: int, first: Any = None) -> Seen:
        """The used pages of each entry, brought into the order of positions."""
        length = self.length
        most = max(self._most, default=0)
        used = None if isinstance(length, int) else lengths(length)  # K4
        longest = self._tables.pages_of(most)
        k, v = (self._ordered(x, longest)[:, :, :most, :] for x in (self._k, self._v))
        return Seen(k, v, 0, used)

    def after(self, new: int, counts: Any = None) -> int:
        """The greatest length then; the most it can be where lengths may not be looked at."""
        added = self._added(new, counts)
        more = self._each(added) if known(added) else [new] * self._batch
        return max(self._stops(more, known(self.length, added)), default=0)

    def _appended(self, k: Array, v: Array, added: Any) -> Self:
        at, new = self._length, int(k.shape[2])
        counted = known(at, added)
        more = self._each(added) if known(added) else [new] * self._batch
        stops = self._stops(more, counted)
        change = self._tables.extend(self._least, stops, counted)  # K6: before anything is written
        try:
            if counted:
                length = tidy(at + added)
                keys, values = self._put(self._k, k, change), self._put(self._v, v, change)
            else:
                start, column = self._column(at), self._column(added)
                room = self._column(from_list(stops).astype("int64"))
                fits = (column >= 0) & (column <= new) & (start + column <= room)  # K6
                length = self._row(self._library.xp.where(fits, start + column, start))
                keys, values = (self._merged(x, y, change, added, fits) for x, y in ((self._k, k), (self._v, v)))
            newer = type(self)(keys, values, self._tables, length)
        except BaseException:
            self._tables.undo(change)
            raise
        newer._least = [least + (count if counted else 0) for least, count in zip(self._least, more, strict=True)]
        newer._most = stops
        self._tables = _NO_TABLES  # a consumed cache keeps no page from being free
        return newer

    def _stops(self, more: list[int], counted: bool) -> list[int]:
        """The greatest length of each entry after so many more; where lengths are not known, what there is room for."""
        stops = [most + count for most, count in zip(self._most, more, strict=True)]
        if counted or self._tables.needed(self._least, stops) <= len(self._tables.pool.free):
            return stops
        return [len(row) * self.page_size for row in self._tables.rows]

    def _put(self, pool: Array, new: Array, change: Change) -> Array:
        """The pool with what a change of known counts writes; in place where that is allowed."""
        xp = self._library.xp
        new = xp.moveaxis(new, 1, 2)  # (batch, n, Hkv, width)
        if not change.writes:
            return pool
        if self._in_place(pool, new):
            # PyTorch refuses to write into tensors of inference mode from outside, and across a vmap.
            with contextlib.suppress(RuntimeError):
                for page, source in change.copies:
                    pool[page, :, :, :] = pool[source, :, :, :]
                for page, start, stop, entry, first in change.writes:
                    pool[page, start:stop, :, :] = new[entry, first : first + stop - start, :, :]
                return pool
        pages, size, heads, width = pool.shape
        index = from_list(range(pages * size))  # which old slot, or which new position, each slot takes
        for page, source in change.copies:
            index[page * size : (page + 1) * size] = from_list(range(source * size, (source + 1) * size))
        for page, start, stop, entry, first in change.writes:
            origin = pages * size + entry * new.shape[1] + first
            index[page * size + start : page * size + stop] = from_list(range(origin, origin + stop - start))
        slots = [xp.reshape(x, (x.shape[0] * x.shape[1], heads, width)) for x in (pool, new)]
        return xp.reshape(self._take(xp.concat(slots, axis=0), index), (pages, size, heads, width))

    def _merged(self, pool: Array, new: Array, change: Change, added: Any, fits: Array) -> Array:
        """The pool with new positions that only the arrays know: every page they may lie in is written anew."""
        xp, pages = self._library.xp, int(pool.shape[0])
        copied = from_list(range(pages))
        for page, source in change.copies:
            copied[page] = source
        pool = self._take(pool, copied) if change.copies else pool
        longest = max(map(len, self._tables.rows), default=0)
        if not longest:
            return pool
        ordered = self._select(self._ordered(pool, longest), new, self._length, added, fits)
        parts = xp.reshape(
            xp.moveaxis(ordered, 1, 2), (self._batch, longest, *pool.shape[1:])
        )  # in two steps, for Dask
        parts = xp.reshape(parts, (self._batch * longest, *pool.shape[1:]))
        index = from_list(range(pages))
        for entry, (row, least) in enumerate(zip(self._tables.rows, self._least, strict=True)):
            for number in range(least // self.page_size, len(row)):
                index[row[number]] = pages + entry * longest + number
        return self._take(xp.concat((pool, parts), axis=0), index)

    def _ordered(self, pool: Array, longest: int) -> Array:
        """(batch, Hkv, longest * page_size, width): the pages of each table in a row, any page where it has no more."""
        xp, rows = self._library.xp, self._tables.rows
        _, size, heads, width = pool.shape
        index = [page for row in rows for page in (row + [0] * longest)[:longest]]
        picked = self._take(pool, from_list(index).astype("int64"))  # (batch * longest, page_size, Hkv, width)
        parts = xp.reshape(picked, (self._batch, longest, size, heads, width))  # in two steps, for Dask
        return xp.moveaxis(xp.reshape(parts, (self._batch, longest * size, heads, width)), 2, 1)

    def _take(self, x: Array, index: Array) -> Array:
        return self._library.xp.take(x, into_library(index, self._library, self._device, "tables"), axis=0)

    def _forked(self) -> Self:
        fork = type(self)(self._k, self._v, self._tables.shared(self._most), self._length)
        fork._least, fork._most = self._least, self._most
        return fork

    def _state(self) -> tuple[Any, ...]:
        return self._k, self._v, [[*row] for row in self._tables.rows], self._length


def _check_tables(tables: Any, k: Array) -> list[list[int]]:
    """Tables as lists of ints. Raises CacheError unless they name pages of the buffer k."""
    library_of(k, "k")
    pages = int(k.shape[0]) if k.ndim else 0
    expected = f"one sequence of page numbers from 0 to {pages - 1} per batch entry"
    try:
        rows = [[as_int(page) for page in row] for row in tables]
    except TypeError:
        raise CacheError("tables", expected, describe(tables)) from None
    checked = [[page for page in row if page is not None and 0 <= page < pages] for row in rows]
    if checked != rows:
        raise CacheError("tables", expected, describe(tables))
    return checked
