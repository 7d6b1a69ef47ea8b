"""The rolling cache against a window over all keys ever appended (K9)."""

from typing import Any

import numpy as np
import pytest

import refattn
from cached import BATCH, D_K, D_V, KV_HEADS, Tokens
from libraries import LIBRARIES, NOT_JAX, Library
from refattn import RollingKVCache, errors
from refusals import assert_refused


def allocate(library: Library, window: int) -> RollingKVCache:
    """An empty cache in float64."""
    return RollingKVCache.allocate(library.array(np.zeros(1)), BATCH, KV_HEADS, window, D_K, D_V)


@pytest.mark.parametrize("window", [1, 4])
def test_new_queries_see_the_window_over_all_keys(library: Library, window: int) -> None:
    """One token, a few, or more than the window at once: each new query sees itself and W - 1 before it."""
    tokens, cache = Tokens(library, 20), allocate(library, window)
    for new in (2, 4, 1, 7, 1, 0, 3):
        cache = tokens.append(cache, (new, new), given="none")
        if not tokens.slow:
            tokens.check(cache, new or 1)
    tokens.check(cache, 3)
    assert cache.length == 18 and cache.k.shape[2] <= 2 * window + 2


@pytest.mark.parametrize("given", ["list", "array"])
def test_entries_roll_on_their_own(library: Library, given: str) -> None:
    """Counts per entry, known or not (N3): every entry's newest queries see its own window; NaN fills the rest."""
    tokens, cache = Tokens(library, 16), allocate(library, 3)
    for counts in ((2, 1), (1, 3), (0, 1), (6, 5), (1, 1)):
        cache = tokens.append(cache, counts, given)
        if not tokens.slow:
            tokens.check(cache)
    tokens.check(cache)
    assert (cache.length if given == "list" else library.host(cache.length)).tolist() == tokens.done == [10, 11]


def test_a_window_wider_than_all_tokens_is_no_window(library: Library) -> None:
    """Until W tokens have come, a rolling cache gives what a contiguous one gives."""
    tokens, cache = Tokens(library, 6), allocate(library, 6)
    whole = refattn.KVCache.allocate(library.array(np.zeros(1)), BATCH, KV_HEADS, 6, D_K, D_V)
    for new in (4, 2):
        start, stop = tokens.done[0], tokens.done[0] + new
        whole = whole.append(*(library.array(x[:, :, start:stop]) for x in (tokens.k, tokens.v)))
        cache = tokens.append(cache, (new, new))
        q = library.array(tokens.newest(new))
        outputs = [library.host(refattn.attend(q, each)) for each in (cache, whole)]
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_options_and_paths_pass_through(library: Library, path: str) -> None:
    """A narrower window, soft caps and scales mean in attend what they mean in attention, on every path."""
    tokens, cache = Tokens(library, 9), allocate(library, 4)
    cache = tokens.append(tokens.append(cache, (6, 6)), (3, 3))
    tokens.check(cache, 3, path=path, softcap=2.0, scale=0.3, mask=refattn.masks.window(1, 0))
    cache = tokens.append(cache, (0, 0))
    counts = cache.fork().append(*(library.array(np.ones((BATCH, KV_HEADS, 1, w))) for w in (D_K, D_V)), counts=[1, 0])
    assert library.host(refattn.attend(library.array(tokens.newest(1)), counts, path=path)).shape == (2, 4, 1, D_V)


def test_masks_by_key_index_count_the_newest_positions(library: Library) -> None:
    """Padding has one entry per position that is shown, the newest W - 1 + Lq, whatever the buffer still holds."""
    tokens, cache = Tokens(library, 9), allocate(library, 3)
    for new in (4, 1, 1):
        cache = tokens.append(cache, (new, new))
    keep = np.asarray([[True, False, True, True], [True, True, False, True]])
    mask = refattn.masks.padding(library.array(keep))
    output = library.host(refattn.attend(library.array(tokens.newest(2)), cache, mask=mask))
    for entry in range(BATCH):
        k, v = tokens.k[entry, :, 2:6], tokens.v[entry, :, 2:6]
        seen = refattn.masks.window(2, 0) & refattn.masks.padding(keep[entry])
        golden = refattn.golden(tokens.newest(2)[entry], k, v, mask=seen, q_start=2)
        assert (np.abs(output[entry] - golden.output) <= golden.bound("float64")).all()


@NOT_JAX
def test_keys_that_are_gone_are_never_missed_in_silence(library: Library) -> None:
    """Queries whose keys have rolled away are an error, or rows that see nothing where the entries differ."""
    tokens, cache = Tokens(library, 9), allocate(library, 2)
    cache = tokens.append(tokens.append(cache, (7, 7)), (1, 1))
    q = library.array(tokens.newest(6))
    assert_refused(errors.CacheError, "q", ["newest positions"], refattn.attend, q, cache)
    tokens.check(cache, 1)
    cache = tokens.append(cache, (1, 0))
    output = library.host(refattn.attend(library.array(tokens.newest(6)), cache))
    assert (output[:, :, :4] == 0).all() and (output[:, :, -1] != 0).all()


def test_forks_and_consumption(library: Library) -> None:
    """append consumes the old object; a fork goes on alone (K5)."""
    tokens, old = Tokens(library, 8), allocate(library, 3)
    cache = tokens.append(old, (3, 3))
    assert_refused(errors.ConsumedCacheError, "cache", ["append"], lambda: old.start)
    assert_refused(errors.ConsumedCacheError, "cache", ["append"], tokens.append, old, (1, 1))
    fork, others = cache.fork(), tokens.twin()
    others.k[:, :, 3:], others.v[:, :, 3:], others.done = -tokens.k[:, :, 3:], -tokens.v[:, :, 3:], [3, 3]
    tokens.done = [3, 3]
    for new in (2, 2):
        cache, fork = tokens.append(cache, (new, new)), others.append(fork, (new, new))
        tokens.check(cache, new)
        others.check(fork, new)


def test_unfit_arguments_are_refused(library: Library) -> None:
    """A window is at least 1, and slots hold the positions from start to length."""
    like, slots = library.array(np.zeros(1)), library.array(np.zeros((BATCH, KV_HEADS, 4, D_K)))
    for window in (0, -1, 1.5, None):
        assert_refused(errors.CacheError, "window", [">= 1"], RollingKVCache.allocate, like, 2, 2, window, 4)
    assert_refused(errors.CacheError, "length", ["start + slots"], RollingKVCache, slots, slots, 2, 5)
    assert_refused(errors.CacheError, "length", ["start + slots"], RollingKVCache, slots, slots, 2, 3, 4)
    cache = RollingKVCache(slots, slots, 2, 9, 6)
    assert (cache.window, cache.length, cache.start) == (2, 9, 6)


@NOT_JAX
def test_a_layer_rolls_with_its_positions(library: Library) -> None:
    """A rotary layer over a rolling cache gives what it gives over all tokens under a window (L4)."""
    x = np.random.default_rng(1).standard_normal((BATCH, 9, 4))
    rng = np.random.default_rng(2)
    weights = refattn.AttentionWeights(*(library.array(rng.standard_normal((4, width))) for width in (8, 4, 4)))
    options: dict[str, Any] = {"heads": 2, "kv_heads": 1, "rope": refattn.Rotary("half")}
    whole = refattn.multi_head_attention(
        library.array(x), weights, causal=True, mask=refattn.masks.window(2, 0), **options
    )
    cache: Any = RollingKVCache.allocate(library.array(x), BATCH, 1, 3, 4)
    for start, stop in ((0, 6), (6, 9)):
        part = refattn.multi_head_attention(library.array(x[:, start:stop]), weights, cache=cache, **options)
        cache = part.cache
        expected = library.host(whole.output)[:, start:stop]
        np.testing.assert_allclose(library.host(part.output), expected, rtol=1e-10, atol=1e-11)


@NOT_JAX
def test_masks_of_a_layer_have_one_key_per_position_shown(library: Library) -> None:
    """Beside a rolling cache a padding mask that fits all keys ever appended is refused before anything is written."""
    x = library.array(np.random.default_rng(1).standard_normal((BATCH, 4, 4)))
    weights = refattn.AttentionWeights(*(library.array(np.ones((4, 4))) for _ in range(3)))
    cache: Any = RollingKVCache.allocate(x, BATCH, 1, 3, 4)
    cache = refattn.multi_head_attention(x, weights, heads=1, cache=cache).cache
    for count in (6, 3):
        mask = refattn.masks.padding(library.array(np.ones((BATCH, count), dtype=bool)))
        call: dict[str, Any] = {"heads": 1, "cache": cache, "mask": mask, "rope": refattn.Rotary("half"), "k_start": 5}
        if count == 6:
            with pytest.raises(errors.BatchError):
                refattn.multi_head_attention(x[:, :1, :], weights, **call)
            assert cache.length == 4
        else:
            longer: Any = refattn.multi_head_attention(x[:, :1, :], weights, **call).cache
            assert longer.length == 5


def test_each_token_is_moved_at_most_now_and_then() -> None:
    """On NumPy most appends write in place; the window moves to new slots once per W + 1 tokens at most."""
    library = LIBRARIES["numpy"]()
    window, tokens, buffers = 8, Tokens(library, 60), []
    cache = allocate(library, window)
    for _ in range(60):
        cache = tokens.append(cache, (1, 1))
        buffers.append(cache.k)  # kept, so that no two have one id
    assert len({id(buffer) for buffer in buffers}) <= 1 + 60 // (window + 1)
    tokens.check(cache)


@pytest.mark.library("jax")
def test_rolling_decoding_can_be_jitted(library: Library) -> None:
    """Inside jit, with lengths and starts that are traced, one compiled step decodes as outside."""
    import jax

    tokens, cache = Tokens(library, 12), allocate(library, 2)
    cache = tokens.append(cache, (2, 1), given="array")

    @jax.jit  # type: ignore[untyped-decorator]  # JAX is not typed here
    def step(k: Any, v: Any, length: Any, start: Any, q: Any, new_k: Any, new_v: Any) -> tuple[Any, ...]:
        newer = RollingKVCache(k, v, 2, length, start).append(new_k, new_v)
        return refattn.attend(q, newer), newer.k, newer.v, newer.length, newer.start

    state: Any = (cache.k, cache.v, cache.length, library.array(np.zeros(BATCH, dtype=int)))
    for _ in range(6):
        wholes = (tokens.q, tokens.k, tokens.v)
        new = [np.stack([x[e, :, d : d + 1] for e, d in enumerate(tokens.done)]) for x in wholes]
        output, *state = step(*state, *(library.array(x) for x in new))
        tokens.done = [done + 1 for done in tokens.done]
        assert library.host(state[2]).tolist() == tokens.done
        for entry, done in enumerate(tokens.done):
            k, v = tokens.k[entry, :, :done], tokens.v[entry, :, :done]
            golden = refattn.golden(new[0][entry], k, v, mask=refattn.masks.window(1, 0), q_start=done - 1)
            assert (np.abs(library.host(output)[entry] - golden.output) <= golden.bound("float64")).all()
