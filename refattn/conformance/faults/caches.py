"""Faults planted into refattn's caches (chapter K)."""

from __future__ import annotations

from typing import Any

from refattn import cache, cached, contiguous, layer, paged, pages, rolling
from refattn.arrays import Array
from refattn.cache import Seen
from refattn.conformance.faults.fault import ONE, Fault, Patch
from refattn.dtypes import COMPUTED, FULL


def _positions_from_zero(library: Any, x: Array, start: Any) -> Array:
    """Every decoded token is rotated for position 0."""
    return _POSITIONS(library, x, 0)


def _positions_drift(library: Any, x: Array, start: Any) -> Array:
    at = _POSITIONS(library, x, start)
    return at if isinstance(start, int) and start == 0 else at + 1


_POSITIONS = layer._positions


def _without_newest(self: Any, q_len: int, first: Any = None) -> Seen:
    """The newest key is not seen before the next step."""
    seen = _SEEN_BY(self, q_len, first)
    count = seen.k.shape[2] - 1
    return Seen(seen.k[:, :, :count, :], seen.v[:, :, :count, :], seen.k_start, None)


def _all_slots(self: Any, q_len: int, first: Any = None) -> Seen:
    return Seen(self.k, self.v, 0, None)


_SEEN_BY = contiguous.KVCache.seen_by


def _moved_back(self: Any, buffer: Array, new: Array, at: Any, added: Any) -> Array:
    """Each append but the first begins one slot too early, on the newest token."""
    return _WRITE(self, buffer, new, at - 1 if isinstance(at, int) and at > 0 else at, added)


def _at_the_front(self: Any, buffer: Array, new: Array, at: Any, added: Any) -> Array:
    return _WRITE(self, buffer, new, 0 if isinstance(at, int) else at * 0, added)


def _copied_first(self: Any, buffer: Array, new: Array, at: Any, added: Any) -> Array:
    return _WRITE(self, self._library.xp.astype(buffer, buffer.dtype), new, at, added)


_WRITE = cache.Cache._write


def _counts_ignored(self: Any, k: Array, v: Array, added: Any) -> Any:
    return _APPENDED(self, k, v, int(k.shape[2]))


def _clamped(self: Any, k: Array, v: Array, added: Any) -> Any:
    """An append over capacity is moved back until it fits."""
    if isinstance(added, int) and isinstance(self._length, int):
        self._length = min(self._length, self.capacity - added)
    return _APPENDED(self, k, v, added)


_APPENDED = contiguous.KVCache._appended


def _causal_by_request(q: Array, held: Any, *, causal: bool = False, **options: Any) -> Array:
    return _ATTEND(q, held, causal=causal, **options)


_ATTEND = cached.attend


def _at(start: Any) -> Any:
    """The newest queries at other positions than the newest."""

    def cached_call(q: Array, held: Any, options: dict[str, Any], first: Any = None) -> Any:
        k, v, options = _CALL(q, held, options, first)
        return k, v, options | {"q_start": start(options["q_start"])}

    return cached_call


_CALL = cached.cached_call


def _tables(change: Any) -> Any:
    """The pages are read as if each entry's table were another one."""

    def ordered(self: Any, pool: Array, longest: int) -> Array:
        rows = self._tables.rows
        self._tables.rows = [change(row) for row in rows]
        try:
            return _ORDERED(self, pool, longest)
        finally:
            self._tables.rows = rows

    return ordered


_ORDERED = paged.PagedKVCache._ordered


def _shared_for_good(self: Any, entry: int, index: int, change: Any) -> int:
    """A page is written to although others name it too."""
    row = self.rows[entry]
    return _OWN(self, entry, index, change) if index == len(row) else int(row[index])


_OWN = pages.Tables._own


def _too_early(self: Any, q_len: int, first: Any = None) -> Seen:
    """One position fewer is kept than the new queries see."""
    return _newest(_ROLLING_SEEN(self, q_len, first), self.window - 2 + q_len)


def _as_for_one(self: Any, q_len: int, first: Any = None) -> Seen:
    """W positions are kept, however many were appended at once."""
    return _newest(_ROLLING_SEEN(self, q_len, first), max(self.window, q_len))


def _newest(seen: Seen, count: int) -> Seen:
    gone = max(0, seen.k.shape[2] - count)
    return Seen(seen.k[:, :, gone:, :], seen.v[:, :, gone:, :], seen.k_start + gone, seen.mask)


def _window_without_end(self: Any, q_len: int, first: Any = None) -> Seen:
    seen = _ROLLING_SEEN(self, q_len, first)
    return Seen(seen.k, seen.v, seen.k_start, None) if isinstance(self.length, int) else seen


_ROLLING_SEEN = rolling.RollingKVCache.seen_by


# Elsewhere buffers are made anew, and nobody shares them.
WRITABLE = ("numpy", "torch", "strict", "cupy")


def _cache(name: str, clause: str, dtypes: tuple[str, ...], owner: Any, attribute: str, wrong: Any) -> Fault:
    kind = "rope" if "rotated" in name else "NaN leak" if clause == "K4" else "cache drift"
    return Fault(name=name, clause=clause, kind=kind, dtypes=dtypes, patches=(Patch(owner, attribute, wrong),))


def _pages(name: str, dtypes: tuple[str, ...], change: Any) -> Fault:
    return _cache(name, "K8", dtypes, paged.PagedKVCache, "_ordered", _tables(change))


FAULTS = (
    _cache("decoded tokens are rotated for position 0", "K1", FULL, layer, "_positions", _positions_from_zero),
    _cache("newest key is not seen", "K1", FULL, contiguous.KVCache, "seen_by", _without_newest),
    _cache("positions in the cache drift by one", "K2", ONE, layer, "_positions", _positions_drift),
    _cache("append begins on the newest token", "K3", COMPUTED, cache.Cache, "_write", _moved_back),
    _cache("append overwrites from the front", "K3", COMPUTED, cache.Cache, "_write", _at_the_front),
    Fault(
        name="append makes new buffers",
        clause="K3",
        kind="",
        dtypes=ONE,
        libraries=WRITABLE,
        patches=(Patch(cache.Cache, "_write", _copied_first),),
    ),
    _cache("counts of an append are ignored", "K3", COMPUTED, contiguous.KVCache, "_appended", _counts_ignored),
    _cache("unused slots are seen", "K4", COMPUTED, contiguous.KVCache, "seen_by", _all_slots),
    _cache("old caches stay usable", "K5", ONE, cache.Cache, "_live", lambda self: self),
    Fault(
        name="forks share their buffers",
        clause="K5",
        kind="cache drift",
        dtypes=ONE,
        libraries=WRITABLE,
        patches=(Patch(cache.Cache, "_copies", lambda self: (self._k, self._v)),),
    ),
    _cache("append over capacity is clamped", "K6", ONE, contiguous.KVCache, "_appended", _clamped),
    _cache("attend is not causal", "K7", COMPUTED, cached, "attend", _causal_by_request),
    _cache("attend is one position behind", "K7", COMPUTED, cached, "cached_call", _at(lambda start: start - 1)),
    _cache("attend aligns at the top left", "K7", COMPUTED, cached, "cached_call", _at(lambda start: start * 0)),
    _pages("pages in reverse", FULL, lambda row: row[::-1]),
    _pages("pages in the order of the pool", ONE, sorted),
    _pages("first page alone is read", FULL, lambda row: row[:1] * len(row)),
    _cache("shared pages are written to", "K8", ONE, pages.Tables, "_own", _shared_for_good),
    _cache("window is rolled one step too early", "K9", FULL, rolling.RollingKVCache, "seen_by", _too_early),
    _cache("window keeps too few of many tokens", "K9", FULL, rolling.RollingKVCache, "seen_by", _as_for_one),
    _cache("rolling window has no end", "K9", FULL, rolling.RollingKVCache, "seen_by", _window_without_end),
)
