"""Chapter K: the contiguous cache, and generation with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import KVCache, attend, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem, Unsupported
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import error_over_bound, golden_of
from refattn.conformance.models import Decoder, expect_logits
from refattn.conformance.plain import Draw, indices
from refattn.conformance.tracked import Tracked, turned
from refattn.dtypes import COMPUTED, FULL
from refattn.errors import CacheError, CapacityError, ConsumedCacheError

CASES = Chapter("caches")

PROMPT, STEPS = 4, 2


@CASES.check("K1", "L4", dtypes=FULL)
def generation(api: Api) -> None:
    """A small decoder language model, rotary: prefill and decode give the logits and greedy tokens of full passes."""
    model = Decoder(api.draw)
    generate(api, model, model.caches(api, 2, PROMPT + STEPS))


def generate(api: Api, model: Decoder, caches: list[Any], window: int | None = None) -> None:
    """Prefill and decode over empty caches against full passes, of tokens that see no more than the window."""
    tokens = api.draw.rng.integers(0, 24, (2, PROMPT))
    new, written = tokens, tokens
    for step in range(STEPS):
        exact = model.exact(written, window)
        last = Tracked(exact.value[:, -1], exact.error[:, -1])
        expect_logits(f"over the caches, step {step}", model.logits(api, new, caches)[:, -1], last)
        if step == STEPS - 1 and window is None:
            expect_logits(f"without caches, step {step}", model.logits(api, written), exact)
        new = np.argmax(last.value, axis=-1)[:, None]
        written = np.concatenate((written, new), axis=1)


@CASES.check("K2", "L4", "B7")
def drift_shows(api: Api) -> None:
    """A cache with right shapes whose tokens are rotated one position too far gives logits beyond the bound."""
    model, tokens = Decoder(api.draw), api.draw.rng.integers(0, 24, (2, PROMPT + 1))
    exact = model.exact(tokens)
    for drift in (0, 1):
        caches = model.caches(api, 2, PROMPT + 1)
        model.logits(api, tokens[:, :PROMPT], caches)
        last = model.logits(api, tokens[:, PROMPT:], caches, drift)[:, -1]
        error = error_over_bound(last, exact.value[:, -1], exact.error[:, -1])
        if drift:
            expect(error > 2, f"with drifted positions the error is only {error:.3g} times the bound")
        else:
            expect(error <= 1, f"without drift the error is {error:.3g} times the bound")


@CASES.problem("K1", "M5")
def decode_over_a_prefix(draw: Draw) -> Problem:
    """The last two of six tokens over all six keys are the last two rows of the full pass."""
    return Problem(**draw.qkv(2, 6, heads=4, kv_heads=2, spread=1.5), causal=True, q_start=4)


@CASES.problem("K1", "M4")
def prefill_from_the_start(draw: Draw) -> Problem:
    """A prefill of six tokens into an empty cache, q_start = 0 given, is causal: its first row is the first value."""
    return Problem(**draw.ramp(6, 6), causal=True, q_start=0)


@CASES.problem("K2", "B7")
def rotary_at_the_position_of_the_token(draw: Draw) -> Problem:
    """A new query rotated as position 5 over keys at positions 0 to 5; the data are rotated beforehand."""
    data = draw.qkv(1, 6, spread=1.5)
    data["q"] = draw.exact(turned(data["q"], np.asarray([5]), "half", 10000.0, 8))
    data["k"] = draw.exact(turned(data["k"], np.arange(6), "half", 10000.0, 8))
    return Problem(**data, causal=True, q_start=5)


def _filled(api: Api, data: dict[str, Array], counts: Array, poison: float = 0.0) -> Any:
    """A cache of capacity 8 with the first counts[b] of data in entry b, its unused slots holding poison."""
    batch, heads = data["k"].shape[:2]
    buffers = [np.full((batch, heads, 8, data[name].shape[-1]), poison) for name in ("k", "v")]
    cache = KVCache(*(api.array(buffer) for buffer in buffers))
    expect_equal("length of an empty cache", cache.length, 0)
    first = api.array(data["k"][:, :, :2]), api.array(data["v"][:, :, :2])
    rest = api.array(data["k"][:, :, 2:]), api.array(data["v"][:, :, 2:])
    return cache.append(*first).append(*rest, counts=np.asarray(counts) - 2)


@CASES.check("K3", "K7", dtypes=COMPUTED)
def contiguous(api: Api) -> None:
    """attend gives what attention over each entry's own concatenated keys gives, for equal and unequal lengths."""
    data = api.draw.qkv(2, 6, heads=4, kv_heads=2)
    for counts in (np.asarray([6, 6]), np.asarray([3, 5])):
        cache = _filled(api, data, counts)
        expect_equal("length", np.broadcast_to(np.asarray(cache.length), (2,)), counts)
        output = api.host(attend(api.array(data["q"]), cache))
        for entry, count in enumerate(counts.tolist()):
            parts = {"q": data["q"][entry], "k": data["k"][entry, :, :count], "v": data["v"][entry, :, :count]}
            golden = golden_of(Problem(dtype=api.dtype, causal=True, q_start=count - 2, **parts))
            expect_within(f"output of entry {entry}, {counts}", output[entry], golden.output, golden.bound(api.dtype))


@CASES.check("K3")
def an_empty_cache(api: Api) -> None:
    """A cache that is attached but empty is filled by a prefill, whose first row is the first value."""
    data = api.draw.qkv(4, 4, batch=(2,))
    cache = KVCache.allocate(api.array(np.zeros(1)), 2, 2, 4, 8).append(api.array(data["k"]), api.array(data["v"]))
    output = api.host(attend(api.array(data["q"]), cache))
    expect_within("first row", output[:, :, 0], data["v"][:, :, 0], 4 * 2.0**-24 * np.abs(data["v"][:, :, 0]))


@CASES.check("K3")
def appends_in_place(api: Api) -> None:
    """Where the library writes in place, token after token lands in the buffers that the cache was allocated with."""
    if "mutable" not in api.capabilities:
        raise Unsupported(f"{api.name} does not write in place")
    token, counted = (api.array(api.draw.normal(2, 2, 1, 8)) for _ in range(2))
    cache = KVCache.allocate(token, 2, 2, 4, 8)
    keys, values = cache.k, cache.v
    cache = cache.append(token, token).append(counted, counted, counts=[1, 0])
    expect(cache.k is keys and cache.v is values, "an append made new buffers")
    expect_equal("the first token in the buffer", api.host(keys)[:, :, 0], api.host(token)[:, :, 0])
    expect_equal("the next of the first entry", api.host(keys)[0, :, 1], api.host(counted)[0, :, 0])


@CASES.check("K3", "E3")
def appends_that_do_not_fit(api: Api) -> None:
    """Keys of another shape, counts beyond what came, and queries of another rank are errors; the cache stays."""
    cache = KVCache.allocate(api.array(np.zeros(1)), 2, 2, 4, 8)
    good, wrong = api.array(np.ones((2, 2, 1, 8))), api.array(np.ones((2, 1, 1, 8)))
    expect_error(CacheError, "k", cache.append, wrong, good)
    expect_error(CacheError, "v", cache.append, good, wrong)
    expect_error(CacheError, "counts", cache.append, good, good, counts=[1, 2])
    expect_error(CacheError, "q", attend, api.array(np.ones((2, 1, 8))), cache)
    expect_error(CacheError, "capacity", KVCache.allocate, good, 2, 2, -1, 8)
    expect_equal("length after refused appends", cache.length, 0)


@CASES.check("K4", "M19", dtypes=COMPUTED)
def unused_slots(api: Api) -> None:
    """NaN or infinities in unused slots change no bit, also where the entries' lengths differ."""
    data = api.draw.qkv(1, 6)
    for counts in (np.asarray([6, 6]), np.asarray([3, 6])):
        clean = api.host(attend(api.array(data["q"]), _filled(api, data, counts)))
        for poison in (np.nan, np.inf):
            dirty = api.host(attend(api.array(data["q"]), _filled(api, data, counts, poison)))
            expect_equal(f"output with {poison} in unused slots, lengths {counts}", dirty, clean)


@CASES.check("K4", "K7", dtypes=COMPUTED)
def unused_slots_without_causal(api: Api) -> None:
    """Without causal, which would hide them as well, slots beyond the length are no keys."""
    data = api.draw.qkv(1, 6)
    for counts in (np.asarray([6, 6]), np.asarray([3, 6])):
        output = api.host(attend(api.array(data["q"]), _filled(api, data, counts), causal=False))
        for entry, count in enumerate(counts.tolist()):
            parts = {"q": data["q"][entry], "k": data["k"][entry, :, :count], "v": data["v"][entry, :, :count]}
            golden = golden_of(Problem(dtype=api.dtype, **parts))
            expect_within(f"output of entry {entry}, {counts}", output[entry], golden.output, golden.bound(api.dtype))


@CASES.check("K5")
def forks_write_apart(api: Api) -> None:
    """A cache and its fork append other tokens, and each then gives what its own tokens give."""
    data = api.draw.ramp(1, 5)
    q, tokens = (
        api.array(data["q"]),
        [(api.array(data["k"][:, :, i : i + 1]), api.array(data["v"][:, :, i : i + 1])) for i in range(5)],
    )
    cache = KVCache.allocate(q, 2, 2, 8, 8)
    for token in tokens[:3]:
        cache = cache.append(*token)
    fork = cache.fork()
    cache, fork = cache.append(*tokens[3]), fork.append(*tokens[4])
    for name, each, keys in (("cache", cache, [0, 1, 2, 3]), ("fork", fork, [0, 1, 2, 4])):
        parts = {"q": data["q"], "k": data["k"][:, :, keys], "v": data["v"][:, :, keys]}
        golden = golden_of(Problem(dtype=api.dtype, causal=True, q_start=3, **parts))
        expect_within(f"output of the {name}", api.host(attend(q, each)), golden.output, golden.bound(api.dtype))


@CASES.check("K5")
def consumption_and_forks(api: Api) -> None:
    """append consumes the old object; a fork goes on alone, and neither sees the other's tokens."""
    data = api.draw.qkv(1, 3)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    old = KVCache.allocate(q, 2, 2, 8, 8).append(k, v)
    new = old.append(q, q)
    for use in (lambda: old.append(k, v), lambda: attend(q, old), lambda: old.k, lambda: old.length, old.fork):
        expect_error(ConsumedCacheError, "cache", use)
    fork = new.fork()
    before = api.host(attend(q, fork))
    expect_equal("the fork's output", api.host(attend(q, new)), before)
    new = new.append(q, q)
    expect_equal("the fork's output afterwards", api.host(attend(q, fork)), before)
    expect_equal("lengths", (new.length, fork.length), (5, 4))


@CASES.check("K6", "E3")
def over_capacity(api: Api) -> None:
    """An append over capacity is an error and leaves the cache as it was; nothing is clamped or overwritten."""
    data = api.draw.qkv(1, 3)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    cache = KVCache.allocate(q, 2, 2, 4, 8).append(k, v)
    before = api.host(attend(q, cache))
    expect_error(CapacityError, "k", cache.append, k, v)
    expect_error(CapacityError, "k", cache.append, k, v, counts=[0, 2])
    expect_equal("output after a refused append", api.host(attend(q, cache)), before)
    expect_equal("length after a refused append", cache.length, 3)
    expect_equal("length after one that fits", cache.append(q, q).length, 4)


@CASES.check("K6", "N2")
def over_capacity_when_traced(api: Api) -> None:
    """Under tracing nothing is written over capacity, and the length says so."""
    if api.name != "jax":
        raise Unsupported(f"{api.name} traces no lengths")
    import jax

    data = api.draw.qkv(1, 3)
    k, v = api.array(data["k"]), api.array(data["v"])

    def append(length: Array) -> tuple[Array, Array, Array]:
        buffer = api.array(np.zeros((2, 2, 4, 8)))
        cache = KVCache(buffer, buffer, length).append(k, v)
        return cache.k, cache.v, cache.length

    keys, _, length = jax.jit(append)(api.array(np.asarray([1, 2])))
    expect_equal("length", api.host(length), [4, 2])
    expect_equal("keys of the entry that fits", api.host(keys)[0, :, 1:], data["k"][0])
    expect_equal("keys of the entry that does not", api.host(keys)[1], np.zeros((2, 4, 8)))


@CASES.problem("K7", "M5")
def newest_positions(draw: Draw) -> Problem:
    """q holds the newest positions: per entry q_start = length - Lq, causal, over padded buffers."""
    counts = np.asarray([6, 3])
    shown = indices(2, 6)[1] < counts[:, None, None, None]
    return Problem(**draw.ramp(2, 6), causal=True, shown=shown, q_start=counts - 2)


@CASES.check("K7", dtypes=COMPUTED)
def attend_options(api: Api) -> None:
    """attend is causal by default, and takes attention's options: causal=False, windows, sinks."""
    data = api.draw.ramp(2, 6)
    cache, q = _filled(api, data, np.asarray([6, 6])), api.array(data["q"])
    rows, keys = indices(2, 6)
    sinks = np.asarray([1.0, 2.0])
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"causal": True}),
        ({"causal": False}, {}),
        ({"mask": masks.window(1, None)}, {"causal": True, "shown": keys >= rows + 3}),
        ({"sinks": api.array(sinks)}, {"causal": True, "sinks": sinks}),
    ]
    for options, plain in runs:
        golden = golden_of(Problem(**data, q_start=4, **plain))
        expect_within(
            f"output with {[*options]}", api.host(attend(q, cache, **options)), golden.output, golden.bound(api.dtype)
        )
