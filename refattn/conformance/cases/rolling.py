"""Chapter K: the rolling cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import RollingKVCache, attend
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.cases.caches import generate
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.models import Decoder
from refattn.conformance.plain import Draw, known_output, positions, precision, published
from refattn.dtypes import FULL
from refattn.errors import CacheError, ConsumedCacheError

CASES = Chapter("rolling")


@CASES.check("K9", "K1", "L4")
def generation(api: Api) -> None:
    """A model whose tokens see three tokens, over rolling caches, gives the logits and greedy tokens of full passes."""
    model = Decoder(api.draw)
    generate(api, model, model.caches(api, 2, 3, kind="RollingKVCache"), window=3)


def _recent(q_len: int, k_len: int, window: int, q_start: Any) -> Array:
    """key > query - window, in positions."""
    query, key = positions(q_len, k_len, q_start)
    return key > query - window


@CASES.problem("K9", "M6", "M3")
def three_new_tokens(draw: Draw) -> Problem:
    """The last three of eight tokens, each seeing three: the window goes by position, not by place among the new."""
    data = draw.given(*published(110, (1, 1, 3, 4), (1, 1, 8, 4), (1, 1, 8, 4)))
    rows = [
        [1.104929, -0.006865, -0.732045, 1.141791],
        [-0.114509, -0.704122, -0.676793, -0.463217],
        [-0.104771, -0.878797, -0.393218, -0.73456],
    ]
    shown, known = _recent(3, 8, 3, 5), known_output(draw, rows, (1, 1, 3, 4))
    return Problem(**data, causal=True, shown=shown, q_start=5, known=known)


@CASES.check("K9", "K7", dtypes=FULL)
def windows(api: Api) -> None:
    """Whatever is appended at once, one token or many, the new queries get what the window over all keys gives."""
    # Each key outweighs the one after it, so that a key too many or too few shows.
    data = api.draw.ramp(16, step=-1.0, heads=4, kv_heads=2)
    cache, start = RollingKVCache.allocate(api.array(np.zeros(1)), 2, 2, 3, 8), 0
    for new in (2, 4, 1, 6, 3):
        stop = start + new
        q, k, v = (api.array(data[name][:, :, start:stop]) for name in ("q", "k", "v"))
        cache = cache.append(k, v)
        output = api.host(attend(q, cache))
        parts = {"q": data["q"][:, :, start:stop], "k": data["k"][:, :, :stop], "v": data["v"][:, :, :stop]}
        shown = _recent(new, stop, 3, start)
        golden = golden_of(Problem(dtype=api.dtype, causal=True, shown=shown, q_start=start, **parts))
        expect_within(f"output of tokens {start} to {stop - 1}", output, golden.output, golden.bound(api.dtype))
        start = stop
    expect_equal("length", cache.length, 16)


@CASES.check("K9", dtypes=FULL)
def window_just_full(api: Api) -> None:
    """Token after token through the length at which a window of 8 is full: 8 keep all eight, 9 lose the first alone."""
    data = api.draw.qkv(10, batch=(1,), heads=1, d_v=10)
    data["q"], data["v"] = np.zeros_like(data["q"]), np.eye(10)[None, None]
    cache = RollingKVCache.allocate(api.array(np.zeros(1)), 1, 1, 8, 8, 10)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9), (9, 10)):
        cache = cache.append(*(api.array(data[name][:, :, start:stop]) for name in ("k", "v")))
        output = api.host(attend(api.array(data["q"][:, :, stop - 1 : stop]), cache))
        expected = (np.arange(10) < stop) & (np.arange(10) >= stop - 8)
        expect_equal(f"keys seen at length {stop}", output[0, 0, 0] > 0, expected)
        exact = expected / np.sum(expected)
        expect_within(f"output at length {stop}", output[0, 0, 0], exact, 16 * precision(api.dtype) * exact)


@CASES.check("K9", "K4", "K5")
def entries_that_differ(api: Api) -> None:
    """Entries of different lengths roll on their own; NaN in a token beyond an entry's count never matters."""
    data = api.draw.ramp(8, step=-1.0)
    cache, done = RollingKVCache.allocate(api.array(np.zeros(1)), 2, 2, 2, 8), np.asarray([0, 0])
    for counts in ((1, 1), (2, 0), (1, 3), (3, 3)):
        new = max(counts)
        fresh = {name: np.full((2, 2, new, 8), np.nan) for name in ("k", "v")}
        for name, x in fresh.items():
            for entry, count in enumerate(counts):
                x[entry, :, :count] = data[name][entry, :, done[entry] : done[entry] + count]
        old, cache = cache, cache.append(api.array(fresh["k"]), api.array(fresh["v"]), counts=list(counts))
        expect_error(ConsumedCacheError, "cache", lambda old=old: old.length)
        done = done + counts
        queries = np.stack([data["q"][entry][:, [done[entry] - 1]] for entry in range(2)])
        output = api.host(attend(api.array(queries), cache))
        for entry, count in enumerate(done.tolist()):
            parts = {"k": data["k"][entry, :, :count], "v": data["v"][entry, :, :count]}
            shown = _recent(1, count, 2, count - 1)
            problem = Problem(dtype=api.dtype, q=queries[entry], causal=True, shown=shown, q_start=count - 1, **parts)
            golden = golden_of(problem)
            what = f"output of entry {entry} at length {count}"
            expect_within(what, output[entry], golden.output, golden.bound(api.dtype))


@CASES.check("K9", "E3")
def keys_that_are_gone(api: Api) -> None:
    """Queries whose keys have rolled away are an error where all lengths are one, else rows that see nothing."""
    data = api.draw.qkv(8)
    k, v = api.array(data["k"]), api.array(data["v"])
    one = [api.array(data[name][:, :, :1]) for name in ("q", "k", "v")]
    cache = RollingKVCache.allocate(k, 2, 2, 2, 8).append(k, v).append(*one[1:])
    fork = cache.fork()
    expect_error(CacheError, "q", attend, api.array(data["q"]), cache)
    expect_equal("length after a refused attend", cache.length, 9)
    cache = cache.append(one[1], one[2], counts=[1, 0])
    output = api.host(attend(api.array(data["q"][:, :, :6]), cache))
    expect_equal("rows whose keys are gone", output[:, :, :3], np.zeros((2, 2, 3, 8)))
    expect(bool(np.all(np.any(output[:, :, -1] != 0, axis=-1))), "the newest row sees nothing")
    expect_equal("length of the fork", fork.length, 9)
    expect_error(CacheError, "window", RollingKVCache.allocate, k, 2, 2, 0, 8)
