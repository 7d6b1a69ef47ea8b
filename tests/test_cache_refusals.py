"""What a contiguous cache refuses, and that nothing is changed by it (K1, K6, K7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from libraries import Library
from refattn import KVCache, attend, errors
from refusals import Maker, assert_refused
from test_cache import BATCH, D_K, D_V, HEADS, KV_HEADS, empty


def test_bad_sizes(library: Library) -> None:
    """allocate takes an array of a storable dtype, and ints of at least 0."""
    like = Maker(library)(1)
    for position, name in enumerate(("batch", "kv_heads", "capacity", "d_k", "d_v")):
        for value in (-1, 2.0, "2", True, [2], np.True_, None):
            sizes: list[Any] = [2, 2, 4, 3, 3]
            sizes[position] = value
            if (name, value) != ("d_v", None):
                assert_refused(errors.CacheError, name, (">= 0", type(value).__name__), KVCache.allocate, like, *sizes)
    for dtype in ("int32", "bool", "complex64"):
        other = Maker(library)(1, dtype=dtype)
        assert_refused(errors.CacheError, "like", ("(1,)", dtype), KVCache.allocate, other, 2, 2, 4, 3)
    things: list[Any] = [None, [0.0], "x"]
    for thing in things:
        assert_refused(errors.NotAnArrayError, "like", (type(thing).__name__,), KVCache.allocate, thing, 2, 2, 4, 3)


def test_bad_buffers_and_lengths(library: Library) -> None:
    """The constructor takes two buffers of rank 4 that agree, and lengths that fit."""
    make = Maker(library)
    k = make(2, 2, 4, 3)
    for v in (make(2, 2, 4), make(3, 2, 4, 3), make(2, 1, 4, 3), make(2, 2, 5, 3), make(2, 2, 4, 3, dtype="float64")):
        assert_refused(errors.CacheError, "k", ("(2, 2, 4, 3)", str(tuple(v.shape))), KVCache, k, v)
    whole = make(2, 2, 4, 3, dtype="int32")
    assert_refused(errors.CacheError, "k", ("int32",), KVCache, whole, whole)
    assert_refused(errors.NotAnArrayError, "k", ("list",), KVCache, [[[[1.0]]]], k)
    assert_refused(errors.LibraryMismatchError, "v", (), KVCache, k, make.other(2, 2, 4, 3))
    for length in (5, -1, [0, 5], [-1, 0], np.asarray([5, 5])):
        assert_refused(errors.CapacityError, "length", ("0 to 4",), KVCache, k, k, length)
    wrong: list[Any] = [1.0, "1", None, True, [0.5, 1.0], [True, False], [1, 2, 3], [[1, 2]], [[1], [1, 2]]]
    for length in (*wrong, make(2), make(3, dtype="int32")):
        assert_refused(errors.CacheError, "length", ("0 to 4", "2 of them"), KVCache, k, k, length)


def test_bad_appends(library: Library) -> None:
    """New keys and values must fit the buffers and each other, counts must fit them; nothing is consumed."""
    make, cache = Maker(library), empty(library, "float32")
    k, v = make(BATCH, KV_HEADS, 2, D_K), make(BATCH, KV_HEADS, 2, D_V)
    for shape in ((BATCH, KV_HEADS, D_K), (3, KV_HEADS, 2, D_K), (BATCH, 4, 2, D_K), (BATCH, KV_HEADS, 2, D_K + 1)):
        assert_refused(errors.CacheError, "k", ("(2, 2, n, 3)", str(shape)), cache.append, make(*shape), v)
    for shape in ((BATCH, KV_HEADS, 3, D_V), (BATCH, KV_HEADS, 2, D_K)):
        assert_refused(errors.CacheError, "v", (str(shape),), cache.append, k, make(*shape))
    double = make(BATCH, KV_HEADS, 2, D_K, dtype="float64")
    assert_refused(errors.CacheError, "k", ("float32", "float64"), cache.append, double, v)
    assert_refused(errors.LibraryMismatchError, "v", (), cache.append, k, make.other(BATCH, KV_HEADS, 2, D_V))
    assert_refused(errors.NotAnArrayError, "k", ("None",), cache.append, None, v)
    wrong: list[Any] = [3, -1, 1.0, True, "1", [1], [1, 2, 0], [3, 0], [-1, 0], [0.5, 1], np.ones((2, 1), dtype=int)]
    for counts in (*wrong, make(2), make(1, 2, dtype="int32")):
        assert_refused(errors.CacheError, "counts", ("0 to 2",), cache.append, k, v, counts)
    assert cache.append(k, v).length == 2


def test_bad_attention_over_a_cache(library: Library) -> None:
    """attend takes q of rank 4, at most as many rows as the cache has positions, and a cache."""
    make = Maker(library)
    cache = empty(library, "float32").append(make(BATCH, KV_HEADS, 2, D_K), make(BATCH, KV_HEADS, 2, D_V))
    q = make(BATCH, HEADS, 2, D_K)
    assert_refused(errors.CacheError, "q", ("(4, 2, 3)",), attend, make(HEADS, 2, D_K), cache)
    assert_refused(
        errors.CacheError, "q", ("2 newest", "(2, 4, 3, 3)", "K7"), attend, make(BATCH, HEADS, 3, D_K), cache
    )
    assert_refused(errors.NotAnArrayError, "q", ("list",), attend, [[[[1.0]]]], cache)
    assert_refused(errors.LibraryMismatchError, "k", (), attend, make.other(BATCH, HEADS, 2, D_K), cache)
    things: list[Any] = [None, {}, q]
    for thing in things:
        assert_refused(errors.CacheError, "cache", ("KVCache",), attend, q, thing)
    assert_refused(errors.CausalError, "causal", ("int 1",), attend, q, cache, causal=1)
    assert_refused(errors.HeadCountError, "q", ("Hkv = 2",), attend, make(BATCH, 3, 2, D_K), cache)
    mask = make(2, 5, dtype="bool")
    assert_refused(errors.MaskShapeError, "mask", ("(2, 4, 2, 2)", "(2, 5)"), attend, q, cache, mask=mask)
    assert tuple(attend(q, cache).shape) == (BATCH, HEADS, 2, D_V)
