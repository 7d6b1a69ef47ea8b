"""The paged cache: block tables, shared pages, counts, refusals, against attention over all keys (K8)."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import refattn
from cached import BATCH, D_K, D_V, KV_HEADS, Tokens
from libraries import EAGER, NOT_JAX, Library
from refattn import PagedKVCache, errors
from refusals import assert_refused


def allocate(library: Library, pages: int = 12, page_size: int = 2) -> PagedKVCache:
    """An empty cache in float64."""
    return PagedKVCache.allocate(library.array(np.zeros(1)), BATCH, KV_HEADS, pages, page_size, D_K, D_V)


@NOT_JAX
@pytest.mark.parametrize("page_size", [1, 3])
def test_any_page_size_gives_what_all_keys_give(library: Library, page_size: int) -> None:
    """Prefill, several tokens at once and one at a time, equal and unequal counts."""
    tokens, cache = Tokens(library, 9), allocate(library, 20, page_size)
    for counts in ((4, 4), (3, 1), (0, 2), (1, 1)):
        cache = tokens.append(cache, counts)
        if not tokens.slow:
            tokens.check(cache)
    tokens.check(cache, 4)
    used = sum(-(-done // page_size) for done in tokens.done)
    assert cache.free_pages == 20 - used
    assert [len(table) for table in cache.tables] == [-(-done // page_size) for done in tokens.done]


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_options_and_paths_pass_through(library: Library, path: str) -> None:
    """Windows, soft caps and scales mean in attend what they mean in attention, on every path."""
    tokens, cache = Tokens(library, 5), allocate(library)
    cache = tokens.append(cache, (5, 5), given="none")
    tokens.check(cache, 2, path=path, softcap=2.0, mask=refattn.masks.window(2, 0))


def test_counts_that_may_not_be_looked_at(library: Library) -> None:
    """Counts as arrays of the library write just their tokens; a count beyond what came leaves its entry alone (N3)."""
    tokens, cache = Tokens(library, 8), allocate(library, 10)
    for counts in ((3, 2), (1, 2)):
        cache = tokens.append(cache, counts, given="array")
    if not tokens.slow:
        tokens.check(cache)
    if library.name != "numpy":
        k, v = (library.array(np.ones((BATCH, KV_HEADS, 2, width))) for width in (D_K, D_V))
        cache = cache.append(k, v, counts=library.array(np.asarray([3, -1])))
        assert library.host(cache.length).tolist() == tokens.done
    cache = tokens.append(cache, (2, 2), given="none")
    tokens.check(cache, 2)


@pytest.mark.library("torch", "jax", "dask", "strict")
def test_no_room_that_is_known_of_later(library: Library) -> None:
    """Where lengths are not known and no page is free, what does not fit is not written, as the length says (K6)."""
    tokens, cache = Tokens(library, 4), allocate(library, 4)
    cache = tokens.append(cache, (2, 3), given="array")
    k, v = (library.array(np.ones((BATCH, KV_HEADS, 2, width))) for width in (D_K, D_V))
    cache = cache.append(k, v)
    assert library.host(cache.length).tolist() == [4, 3]
    tokens.k[0, :, 2:4], tokens.v[0, :, 2:4], tokens.done = 1.0, 1.0, [4, 3]
    tokens.check(cache)


def test_forks_share_what_is_full(library: Library) -> None:
    """A fork takes no page until it writes into one that is shared, and neither sees the other's tokens."""
    tokens, cache = Tokens(library, 8), allocate(library, 8)
    cache = tokens.append(cache, (3, 4))
    fork, others = cache.fork(), tokens.twin()
    others.k[:, :, 3:], others.v[:, :, 3:] = -tokens.k[:, :, 3:], -tokens.v[:, :, 3:]
    others.k[1, :, 3], others.v[1, :, 3] = tokens.k[1, :, 3], tokens.v[1, :, 3]
    assert fork.free_pages == 4
    cache, fork = tokens.append(cache, (2, 2)), others.append(fork, (1, 2))
    for each, own in ((tokens, cache), (others, fork)):
        each.check(own, 2)
    assert cache.free_pages == 0
    shared = [set(ours) & set(theirs) for ours, theirs in zip(cache.tables, fork.tables, strict=True)]
    assert [len(pages) for pages in shared] == [1, 2]
    del own, cache
    assert fork.free_pages == 4 - 1


def test_entries_may_share_a_prompt(library: Library) -> None:
    """Tables may name one page for several entries; the first to write into it takes a page of its own."""
    tokens, cache = Tokens(library, 5), allocate(library, 6)
    tokens.k[1, :, :3], tokens.v[1, :, :3] = tokens.k[0, :, :3], tokens.v[0, :, :3]
    cache = tokens.append(cache, (3, 0))
    cache, tokens.done = PagedKVCache(cache.k, cache.v, [cache.tables[0]] * 2, 3), [3, 3]
    tokens.check(cache, 3)
    cache = tokens.append(cache, (1, 2))
    tokens.check(cache, 2)
    assert cache.tables[0][0] == cache.tables[1][0] and cache.free_pages == 6 - 4


def test_no_free_page_changes_nothing(library: Library) -> None:
    """An append that needs more pages than are free is refused, and the same cache takes one that fits."""
    tokens, cache = Tokens(library, 6), allocate(library, 5)
    cache = tokens.append(cache, (4, 4))
    k, v = (library.array(np.ones((BATCH, KV_HEADS, 1, width))) for width in (D_K, D_V))
    assert_refused(errors.CapacityError, "k", ["1 more pages"], cache.append, k, v)
    assert (cache.free_pages, cache.length) == (1, 4)
    tokens.check(cache)
    cache = tokens.append(cache, (1, 0))
    tokens.check(cache)


@NOT_JAX
def test_a_refused_layer_call_takes_no_page(library: Library) -> None:
    """A layer call that is refused leaves the cache, and what was forked from it, as they were (E3)."""
    x = library.array(np.ones((BATCH, 3, 4)))
    weights = refattn.AttentionWeights(*(library.array(np.ones((4, width))) for width in (8, 4, 4)))
    empty = PagedKVCache.allocate(x, BATCH, 1, 6, 2, 4)
    cache: Any = refattn.multi_head_attention(x, weights, heads=2, kv_heads=1, cache=empty).cache
    fork = cache.fork()
    tables = cache.tables
    with pytest.raises(errors.RefattnError):
        refattn.multi_head_attention(x[:, :1, :], weights, heads=2, kv_heads=1, cache=cache, softcap=-1.0)
    assert (cache.tables, cache.length, cache.free_pages) == (tables, 3, 2)
    output = refattn.multi_head_attention(x[:, :1, :], weights, heads=2, kv_heads=1, cache=cache).output
    again = refattn.multi_head_attention(x[:, :1, :], weights, heads=2, kv_heads=1, cache=fork).output
    np.testing.assert_array_equal(library.host(output), library.host(again))


def test_consumed_caches_are_refused(library: Library) -> None:
    """append consumes the old object: its further use is an error, and keeps no page from being free (K5)."""
    tokens, old = Tokens(library, 4), allocate(library)
    cache = tokens.append(old, (3, 3))
    q = library.array(tokens.newest(1))
    uses: list[Any] = [lambda: old.k, lambda: old.length, lambda: old.tables, lambda: old.free_pages, old.fork]
    for use in (*uses, lambda: refattn.attend(q, old), lambda: tokens.append(old, (1, 1))):
        assert_refused(errors.ConsumedCacheError, "cache", ["append"], use)
    fork = cache.fork()
    del cache
    assert fork.free_pages == 8


def test_a_copy_is_a_fork_and_a_pickle_has_a_pool_of_its_own() -> None:
    """copy shares pages as fork does; deepcopy and pickle share nothing."""
    tokens, cache = Tokens(_numpy(), 4), PagedKVCache.allocate(np.zeros(1), BATCH, KV_HEADS, 6, 2, D_K, D_V)
    cache = tokens.append(cache, (3, 2))
    for twin, free in ((copy.copy(cache), 3), (copy.deepcopy(cache), 3), (pickle.loads(pickle.dumps(cache)), 3)):  # noqa: S301  # its own
        tokens.check(twin)
        assert twin.free_pages == free
    twin = copy.deepcopy(cache)
    done = list(tokens.done)
    twin = tokens.append(twin, (1, 1))
    assert cache.free_pages == 3
    tokens.check(twin)
    tokens.done = done
    tokens.check(cache)


def test_malformed_tables_are_refused(library: Library) -> None:
    """Tables name pages that exist, and have room for the length."""
    pool = library.array(np.zeros((3, 2, KV_HEADS, D_K)))
    wrong: list[Any] = [[[0], [3]], [[0], [-1]], [0, 1], [[0], ["a"]], None]
    for tables in wrong:
        assert_refused(errors.CacheError, "tables", ["page numbers"], PagedKVCache, pool, pool, tables)
    assert_refused(errors.CapacityError, "length", ["2"], PagedKVCache, pool, pool, [[0], [1]], 3)
    assert_refused(errors.CapacityError, "length", ["entry 0"], PagedKVCache, pool, pool, [[0], [1, 2]], [3, 3])


def test_an_append_copies_new_tokens_alone() -> None:
    """On NumPy the pool is written in place, and pages that exist are never moved."""
    tokens, cache = Tokens(_numpy(), 8), PagedKVCache.allocate(np.zeros(1), BATCH, KV_HEADS, 8, 2, D_K, D_V)
    pool = cache.k
    for counts in ((3, 3), (1, 2), (1, 1)):
        before, tables = pool.copy(), cache.tables
        filled = list(tokens.done)
        cache = tokens.append(cache, counts)
        assert cache.k is pool
        for table, now, done in zip(tables, cache.tables, filled, strict=True):
            assert now[: len(table)] == table
            for position in range(done):
                at = (table[position // 2], position % 2)
                np.testing.assert_array_equal(pool[at], before[at])


@pytest.mark.library("torch")
@pytest.mark.parametrize("kind", ["KVCache", "PagedKVCache", "RollingKVCache"])
def test_derivatives_pass_through_appends(library: Library, kind: str) -> None:
    """Keys and values that came in several appends get the derivatives of attention over all of them."""
    import torch

    tokens = Tokens(library, 7)
    q, k, v = (library.array(x) for x in (tokens.q[:, :, 5:], tokens.k, tokens.v))
    k, v = k.requires_grad_(), v.requires_grad_()
    room = {"KVCache": (8,), "PagedKVCache": (8, 2), "RollingKVCache": (3,)}[kind]
    mask = refattn.masks.window(2, 0) if kind == "RollingKVCache" else None
    output = refattn.attention(q, k, v, causal=True, q_start=5, mask=mask)
    expected = torch.autograd.grad((output * output).sum(), (k, v))
    for counts in (None, [2, 2], torch.tensor([2, 2])):
        cache = getattr(refattn, kind).allocate(k, BATCH, KV_HEADS, *room, D_K, D_V)
        cache = cache.append(k[:, :, :4], v[:, :, :4]).append(k[:, :, 4:5], v[:, :, 4:5])
        output = refattn.attend(q, cache.append(k[:, :, 5:], v[:, :, 5:], counts=counts))
        found = torch.autograd.grad((output * output).sum(), (k, v))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(library.host(ours), library.host(theirs), rtol=1e-12, atol=1e-13)


@EAGER
@pytest.mark.parametrize("kind", ["KVCache", "PagedKVCache", "RollingKVCache"])
def test_caches_of_nothing(library: Library, kind: str) -> None:
    """No entry, no head, no token: every cache takes them and shows them, its counts known or not (A6)."""
    room = {"KVCache": (4,), "PagedKVCache": (4, 2), "RollingKVCache": (3,)}[kind]
    for batch, heads, new in ((0, 1, 2), (2, 0, 2), (2, 1, 0), (0, 0, 0)):
        k = library.array(np.zeros((batch, heads, new, D_K)))
        for counts in (None, library.array(np.full(batch, new))):
            cache = getattr(refattn, kind).allocate(k, batch, heads, *room, D_K).append(k, k, counts=counts)
            assert library.host(refattn.attend(k, cache)).shape == (batch, heads, new, D_K)


@NOT_JAX
@pytest.mark.parametrize("given", ["none", "list", "array"])
@pytest.mark.parametrize("kind", ["KVCache", "PagedKVCache", "RollingKVCache"])
def test_a_cache_knows_how_many_keys_it_will_show(library: Library, kind: str, given: str) -> None:
    """Before an append `after` gives the number of keys that the new queries will see, whatever the kind (L4, E3)."""
    room = {"KVCache": (12,), "PagedKVCache": (11, 2), "RollingKVCache": (2,)}[kind]
    cache = getattr(refattn, kind).allocate(library.array(np.zeros(1)), BATCH, KV_HEADS, *room, D_K, D_V)
    tokens = Tokens(library, 12)
    for counts in ((2, 2), (1, 1) if given == "none" else (2, 0), (1, 1), (5, 5), (1, 1)):
        new = max(counts)
        if counts[0] == counts[1]:
            expected = cache.after(new)
            cache = tokens.append(cache, counts, given="none")
            assert cache.seen_by(new).k.shape[2] == expected
        else:
            cache = tokens.append(cache, counts, given)


@pytest.mark.library("jax")
def test_paged_decoding_can_be_jitted(library: Library) -> None:
    """Inside jit, with lengths and counts that are traced, one compiled step decodes as outside."""
    import jax

    tokens, cache = Tokens(library, 5), allocate(library, 6)
    cache = tokens.append(cache, (3, 2))
    tables = [[0, 1, 4], [2, 5, 3]]

    @jax.jit  # type: ignore[untyped-decorator]  # JAX is not typed here
    def step(pools: Any, q: Any, k: Any, v: Any, length: Any) -> tuple[Any, Any, Any]:
        newer = PagedKVCache(pools[0], pools[1], tables, length).append(k, v)
        return refattn.attend(q, newer), (newer.k, newer.v), newer.length

    pools = [np.zeros((6, 2, KV_HEADS, width)) for width in (D_K, D_V)]
    for entry, done in enumerate(tokens.done):
        for position in range(done):
            for pool, x in zip(pools, (tokens.k, tokens.v), strict=True):
                pool[tables[entry][position // 2], position % 2] = x[entry, :, position]
    state: Any = tuple(library.array(pool) for pool in pools)
    length = library.array(np.asarray(tokens.done))
    for _ in range(2):
        wholes = (tokens.q, tokens.k, tokens.v)
        new = [np.stack([x[e, :, d : d + 1] for e, d in enumerate(tokens.done)]) for x in wholes]
        output, state, length = step(state, *(library.array(x) for x in new), length)
        tokens.done = [done + 1 for done in tokens.done]
        assert library.host(length).tolist() == tokens.done
        for entry, done in enumerate(tokens.done):
            k, v = tokens.k[entry, :, :done], tokens.v[entry, :, :done]
            golden = refattn.golden(new[0][entry], k, v, causal=True, q_start=done - 1)
            assert (np.abs(library.host(output)[entry] - golden.output) <= golden.bound("float64")).all()


def _numpy() -> Library:
    from libraries import LIBRARIES

    library = LIBRARIES["numpy"]()
    return Library("numpy", library.xp, True, library.make, library.read)
