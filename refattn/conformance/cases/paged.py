"""Chapter K: the paged cache."""

from __future__ import annotations

import numpy as np

from refattn import PagedKVCache, attend
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.cases.caches import PROMPT, STEPS, generate
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.models import Decoder
from refattn.dtypes import FULL
from refattn.errors import CacheError, CapacityError, ConsumedCacheError

CASES = Chapter("paged")


@CASES.check("K8", "K1", "L4")
def generation(api: Api) -> None:
    """The same model over paged caches gives the logits and greedy tokens of full passes."""
    model, size = Decoder(api.draw), 2
    generate(api, model, model.caches(api, 2, 2 * -(-(PROMPT + STEPS) // size), size, kind="PagedKVCache"))


def _parts(api: Api, data: dict[str, Array], start: int, stop: int) -> tuple[Array, Array]:
    return api.array(data["k"][:, :, start:stop]), api.array(data["v"][:, :, start:stop])


@CASES.check("K8", "K7", dtypes=FULL)
def pages(api: Api) -> None:
    """attend gives what attention over each entry's concatenated keys gives, for every page size and any counts."""
    data = api.draw.ramp(2, 6, heads=4, kv_heads=2)
    for size, counts in ((1, (6, 6)), (4, (6, 3))):
        cache = PagedKVCache.allocate(api.array(np.zeros(1)), 2, 2, 12, size, 8)
        cache = cache.append(*_parts(api, data, 0, 2))
        cache = cache.append(*_parts(api, data, 2, 6), counts=[counts[0] - 2, counts[1] - 2])
        expect_equal("length", np.broadcast_to(np.asarray(cache.length), (2,)), counts)
        expect_equal("free pages", cache.free_pages, 12 - sum(-(-count // size) for count in counts))
        output = api.host(attend(api.array(data["q"]), cache))
        for entry, count in enumerate(counts):
            parts = {"q": data["q"][entry], "k": data["k"][entry, :, :count], "v": data["v"][entry, :, :count]}
            golden = golden_of(Problem(dtype=api.dtype, causal=True, q_start=count - 2, **parts))
            what = f"output of entry {entry}, page size {size}, lengths {counts}"
            expect_within(what, output[entry], golden.output, golden.bound(api.dtype))


@CASES.check("K8", "K4", "M19")
def any_order_of_pages(api: Api) -> None:
    """Where the pages lie in the pool, and what NaN lies in slots that no position uses, changes no bit."""
    data = api.draw.qkv(1, 5)
    outputs = []
    for tables in (((0, 1, 2), (3, 4, 5)), ((5, 0, 6), (2, 4, 1))):
        pools = [np.full((7, 2, 2, 8), 0.0 if tables[0][0] == 0 else np.nan) for _ in "kv"]
        for entry, table in enumerate(tables):
            for position in range(5):
                for pool, name in zip(pools, ("k", "v"), strict=True):
                    pool[table[position // 2], position % 2] = data[name][entry, :, position]
        cache = PagedKVCache(api.array(pools[0]), api.array(pools[1]), tables, 5)
        outputs.append(api.host(attend(api.array(data["q"]), cache)))
        last = api.array(data["k"][:, :, :1])
        outputs.append(api.host(attend(api.array(data["q"]), cache.append(last, last, counts=[1, 0]))))
    expect_equal("output with pages elsewhere", outputs[2], outputs[0])
    expect_equal("output with pages elsewhere, after an append", outputs[3], outputs[1])


@CASES.check("K8", "K5")
def forks_share_pages(api: Api) -> None:
    """A fork takes no page until it writes; then each has the page it writes into to itself, and goes on alone."""
    data = api.draw.qkv(1, 5)
    q = api.array(data["q"])
    cache = PagedKVCache.allocate(q, 2, 2, 8, 2, 8).append(*_parts(api, data, 0, 3))
    fork = cache.fork()
    expect_equal("free pages after the fork", fork.free_pages, 4)
    old = cache
    cache, fork = cache.append(*_parts(api, data, 3, 4)), fork.append(*_parts(api, data, 4, 5))
    expect_error(ConsumedCacheError, "cache", lambda: attend(q, old))
    expect_equal("free pages after an append to each", fork.free_pages, 2)
    expect_equal("first pages", [table[0] for table in cache.tables], [table[0] for table in fork.tables])
    expect(cache.tables[0][1] != fork.tables[0][1], "both caches write into one page")
    for name, each, keys in (("cache", cache, [0, 1, 2, 3]), ("fork", fork, [0, 1, 2, 4])):
        parts = {"q": data["q"], "k": data["k"][:, :, keys], "v": data["v"][:, :, keys]}
        golden = golden_of(Problem(dtype=api.dtype, causal=True, q_start=3, **parts))
        expect_within(f"output of the {name}", api.host(attend(q, each)), golden.output, golden.bound(api.dtype))
    del cache
    expect_equal("free pages when one is gone", fork.free_pages, 4)


@CASES.check("K8", "K6", "E3")
def no_free_page(api: Api) -> None:
    """An append for which too few pages are free is an error, takes none of them, and leaves the cache as it was."""
    data = api.draw.qkv(1, 5)
    q, like = api.array(data["q"]), api.array(np.zeros(1))
    cache = PagedKVCache.allocate(like, 2, 2, 4, 2, 8).append(*_parts(api, data, 0, 3))
    before = api.host(attend(q, cache))
    expect_error(CapacityError, "k", cache.append, *_parts(api, data, 0, 2))
    expect_error(CapacityError, "k", cache.append, *_parts(api, data, 0, 2), counts=[1, 2])
    fork = cache.fork()
    expect_error(CapacityError, "k", fork.append, *_parts(api, data, 3, 4))
    expect_equal("output after refused appends", api.host(attend(q, cache)), before)
    expect_equal("length after refused appends", cache.length, 3)
    del fork
    expect_equal("length after one that fits", cache.append(*_parts(api, data, 3, 4)).length, 4)
    expect_error(CacheError, "page_size", PagedKVCache.allocate, like, 2, 2, 4, 0, 8)
    pool = api.array(np.zeros((2, 2, 2, 8)))
    expect_error(CacheError, "tables", PagedKVCache, pool, pool, [[0], [2]])
