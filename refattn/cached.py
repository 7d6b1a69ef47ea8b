"""Attention over a cache, of whatever kind (K7)."""

from __future__ import annotations

from typing import Any

from .arrays import Array, describe, library_of
from .cache import Cache
from .errors import CacheError
from .pipeline import attention


def attend(q: Array, cache: Cache, *, causal: bool = True, **options: Any) -> Array:
    """Attention of the newest Lq positions over the cache: q_start = length - Lq, causal by default  # K7

    q (batch, H, Lq, d_k); options are those of `attention`. A mask that goes by key index has as many keys as the
    cache shows: the greatest length of the entries (all slots where lengths may not be looked at), and of a rolling
    cache the newest W - 1 + Lq positions. Returns (batch, H, Lq, d_v). Raises CacheError (K7) for more queries than the
    cache holds positions.

    >>> import numpy as np, refattn
    >>> k, v = np.zeros((1, 1, 3, 4)), np.arange(3.0).reshape(1, 1, 3, 1)
    >>> cache = refattn.KVCache.allocate(k, batch=1, kv_heads=1, capacity=8, d_k=4, d_v=1)
    >>> q = np.ones((1, 2, 2, 4))  # of two heads, at the newest two positions
    >>> refattn.attend(q, cache.append(k, v))[0, 0].ravel()
    array([0.5, 1. ])
    """
    k, v, options = cached_call(q, cache, options)
    return attention(q, k, v, causal=causal, **options)


def cached_call(
    q: Array, cache: Cache, options: dict[str, Any], first: Any = None
) -> tuple[Array, Array, dict[str, Any]]:
    """Keys, values and options with which attention over the concatenated keys is attention over the cache (K3).

    q stands at the newest positions of each entry, or from position `first` on, an int or (batch,) ints.
    """
    if not isinstance(cache, Cache):
        raise CacheError("cache", "a cache, such as a KVCache", describe(cache))
    library_of(q, "q")
    if q.ndim != 4:
        raise CacheError("q", "(batch, H, Lq, d_k)", describe(q))
    length, q_len = cache.length, int(q.shape[2])
    if first is None and isinstance(length, int) and q_len > length:  # K7
        raise CacheError("q", f"at most the {length} newest positions, all that the cache holds", describe(q), "K7")
    seen = cache.seen_by(q_len) if first is None else cache.seen_by(q_len, first)
    options = dict(options)
    k_start = options.get("k_start", 0)
    if options.get("q_start") is None:
        options["q_start"] = cache.position(length - q_len if first is None else first, k_start)  # K7
    options["k_start"] = cache.position(seen.k_start, k_start)
    if seen.mask is not None:
        mask = options.get("mask")
        options["mask"] = seen.mask if mask is None else seen.mask & mask
    return seen.k, seen.v, options
