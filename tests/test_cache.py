"""The contiguous cache: what attention over it gives, what append keeps, and how it traces."""

import copy
import importlib
import pickle
from typing import Any

import numpy as np
import pytest

import oracle
import refattn
from libraries import EAGER, Library, eager
from refattn import KVCache, attend, errors, masks
from refusals import assert_refused

BATCH, HEADS, KV_HEADS, CAPACITY, D_K, D_V = 2, 4, 2, 8, 3, 5


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Reproducible normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def keys_and_values(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """New keys and values on the host."""
    return draw(BATCH, KV_HEADS, count, D_K, seed=seed), draw(BATCH, KV_HEADS, count, D_V, seed=seed + 1)


def empty(library: Library, dtype: str = "float64", fill: float = 0.0) -> KVCache:
    """A cache whose slots hold `fill`."""
    shape = (BATCH, KV_HEADS, CAPACITY)
    return KVCache(*(library.array(np.full((*shape, width), fill), dtype) for width in (D_K, D_V)))


def appended(library: Library, cache: KVCache, arrays: tuple[np.ndarray, ...], counts: Any = None) -> KVCache:
    """The cache with host keys and values."""
    k, v = (library.array(x) for x in arrays)
    return cache.append(k, v, counts)


def concatenated(parts: list[tuple[tuple[np.ndarray, ...], list[int]]], entry: int) -> list[np.ndarray]:
    """The keys and the values of one entry: of each part its first count, one after another."""
    return [np.concatenate([part[i][entry][:, : counts[entry]] for part, counts in parts], axis=1) for i in (0, 1)]


def lengths(library: Library, cache: KVCache) -> list[int]:
    """The length of each entry."""
    if isinstance(cache.length, int):
        return [cache.length] * BATCH
    host = cache.length if isinstance(cache.length, np.ndarray) else library.host(cache.length)
    return [int(n) for n in host]


def assert_attends(library: Library, cache: KVCache, parts: Any, rows: int = 1, **options: Any) -> None:
    """Attention over the cache is, entry by entry, attention over the concatenated keys."""
    q = draw(BATCH, HEADS, rows, D_K, seed=7)
    output = library.host(attend(library.array(q), cache, **options))
    for entry in range(BATCH):
        k, v = concatenated(parts, entry)
        expected = oracle.attention(q[entry], k, v, causal_too=options.get("causal", True), q_start=k.shape[1] - rows)
        np.testing.assert_allclose(output[entry], expected.output, rtol=1e-12, atol=1e-12)


# ---- contents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [np.nan, eager(np.inf)])
def test_uniform_appends(library: Library, fill: float) -> None:
    """Prefill, decode and an append of nothing give attention over all keys; what unused slots hold never shows."""
    cache, parts = empty(library, fill=fill), []
    for seed, count in enumerate((3, 1, 0, 2)):
        arrays = keys_and_values(count, seed)
        cache = appended(library, cache, arrays)
        parts.append((arrays, [count] * BATCH))
        assert cache.length == sum(counts[0] for _, counts in parts)
        for rows, causal in ((1, True), (3, True), (2, False)) if seed == 3 or not library.slow else ():
            assert_attends(library, cache, parts, rows, causal=causal)


@pytest.mark.parametrize("form", ["list", "numpy", "library"])
def test_ragged_appends(library: Library, form: str) -> None:
    """Each entry keeps the first counts[b] of its new positions, none included; the others are dropped."""
    cache, parts = empty(library, fill=np.nan), []
    for seed, counts in enumerate(([2, 3], [0, 2], [1, 0], [2, 2])):
        arrays = keys_and_values(3, seed)
        given: Any = {"list": counts, "numpy": np.asarray(counts), "library": library.array(np.asarray(counts))}[form]
        cache = appended(library, cache, arrays, given)
        parts.append((arrays, counts))
        assert lengths(library, cache) == np.sum([counts for _, counts in parts], axis=0).tolist()
        for rows in (1, 2) if seed == 3 or not library.slow else ():
            assert_attends(library, cache, parts, rows)


def test_one_count_for_all(library: Library) -> None:
    """An int, or an array without axes, is the count of every entry."""
    arrays = keys_and_values(4)
    for count in (2, np.int8(2), np.asarray(2), library.array(np.asarray(2))):
        cache = appended(library, empty(library, fill=np.nan), arrays, count)
        assert_attends(library, cache, [(arrays, [2, 2])], 2)


def test_given_contents(library: Library) -> None:
    """A cache made of buffers and lengths holds what they hold, whatever the integers' dtype."""
    k, v = keys_and_values(CAPACITY)
    parts = [((k, v), [1, 5])]
    small = np.asarray([1, 5], dtype=np.uint8)
    given: list[Any] = [[1, 5], small, library.array(small)]
    for length in given:
        cache = KVCache(library.array(k), library.array(v), length)
        assert_attends(library, cache, parts)
        # Entry 0 has fewer keys than there are query rows: its first rows lie before position 0 and see nothing.
        q = library.array(draw(BATCH, HEADS, 3, D_K))
        output = library.host(attend(q, cache))
        assert not output[0, :, :2].any()
        assert output[0, :, 2].any()
    full = KVCache(library.array(k), library.array(v), CAPACITY)
    assert_attends(library, full, [((k, v), [CAPACITY] * BATCH)], 4)


def test_masks_and_options_over_a_cache(library: Library) -> None:
    """A mask has as many keys as the longest entry; options are attention's, q_start=None among them."""
    arrays = keys_and_values(5)
    cache = appended(library, empty(library, fill=np.nan), arrays, [3, 5])
    q, keep = draw(BATCH, HEADS, 2, D_K), np.asarray([[0, 1, 1, 0, 0], [1, 0, 1, 1, 1]], dtype=bool)
    mask = masks.padding(library.array(keep)) & masks.window(2, 0)
    output = library.host(attend(library.array(q), cache, mask=mask, softcap=2.0, q_start=None))
    for entry, length in enumerate((3, 5)):
        k, v = (x[entry][:, :length] for x in arrays)
        rule = oracle.padding(keep[entry, :length]) & oracle.window(2, 0)
        expected = oracle.attention(q[entry], k, v, mask=rule, softcap=2.0, q_start=length - 2)
        np.testing.assert_allclose(output[entry], expected.output, rtol=1e-12, atol=1e-12)


def test_low_precisions_are_stored_as_they_came(library: Library, storage_dtype: str) -> None:
    """Buffers have the dtype of `like`, and attention over them is attention over the same keys, bit for bit."""
    k, v = (library.array(x, storage_dtype) for x in keys_and_values(4))
    cache = KVCache.allocate(k, BATCH, KV_HEADS, 4, D_K, D_V).append(k, v)
    assert cache.k.dtype == k.dtype
    q = library.array(draw(BATCH, HEADS, 2, D_K), storage_dtype)
    expected = refattn.attention(q, k, v, causal=True, q_start=2)
    np.testing.assert_array_equal(library.host(attend(q, cache)), library.host(expected))


@EAGER
@pytest.mark.parametrize("sizes", [(0, 2, 4, 3, 3), (2, 0, 4, 3, 3), (2, 2, 0, 3, 3), (2, 2, 4, 0, 3), (2, 2, 4, 3, 0)])
def test_sizes_of_zero(library: Library, sizes: tuple[int, ...]) -> None:
    """Caches may have no entries, heads, slots or components."""
    batch, heads, capacity, d_k, d_v = sizes
    cache = KVCache.allocate(library.array(np.zeros(1)), *sizes)
    count = min(capacity, 2)
    new = [library.array(np.zeros((batch, heads, count, width))) for width in (d_k, d_v)]
    for counts in (None, 1 if count else 0, np.full(batch, min(1, count))):
        after = cache.fork().append(new[0], new[1], counts)
        rows = min(count, 1)
        output = attend(library.array(np.zeros((batch, heads, rows, d_k))), after)
        assert tuple(output.shape) == (batch, heads, rows, d_v)
    assert tuple(cache.k.shape) == (batch, heads, capacity, d_k)


# ---- ownership --------------------------------------------------------------------------------------------


def test_append_consumes(library: Library) -> None:
    """The cache that append was called on is used up, whatever is asked of it."""
    old = empty(library)
    new = appended(library, old, keys_and_values(1))
    q = library.array(draw(BATCH, HEADS, 1, D_K))
    arrays = [library.array(x) for x in keys_and_values(1)]
    for use in (
        lambda: old.k, lambda: old.v, lambda: old.length, lambda: old.fork(), lambda: old.append(*arrays),
        lambda: attend(q, old), lambda: copy.copy(old), lambda: copy.deepcopy(old), lambda: pickle.dumps(old),
    ):  # fmt: skip
        assert_refused(errors.ConsumedCacheError, "cache", ("append",), use)
    assert new.length == 1


def test_forks_copies_and_pickles_are_independent(library: Library) -> None:
    """A fork, a copy, a deep copy and a pickle go on by themselves, and so does the original."""
    first, second, third = keys_and_values(2), keys_and_values(3, 10), keys_and_values(1, 20)
    forks = [lambda c: c.fork(), copy.copy, copy.deepcopy]
    if library.name not in ("strict", "dask"):  # whose arrays, or lazy graphs, are not for pickling
        forks.append(lambda c: pickle.loads(pickle.dumps(c)))  # noqa: S301  # made here
    for fork in forks:
        cache = appended(library, empty(library), first, [1, 2])
        other = appended(library, fork(cache), second)
        cache = appended(library, cache, third)
        assert_attends(library, other, [(first, [1, 2]), (second, [3, 3])])
        assert_attends(library, cache, [(first, [1, 2]), (third, [1, 1])])


@pytest.mark.library("numpy", "torch")
def test_no_token_moves_the_buffers(library: Library) -> None:
    """Appending writes into the same memory, uniformly or raggedly, one token or several."""

    def place(x: Any) -> int:
        return int(x.ctypes.data if library.name == "numpy" else x.data_ptr())

    cache = KVCache.allocate(library.array(np.zeros(1)), BATCH, KV_HEADS, CAPACITY, D_K, D_V)
    before = (place(cache.k), place(cache.v))
    for seed, counts in enumerate((None, 1, [0, 1], [2, 1])):
        cache = appended(library, cache, keys_and_values(2, seed), counts)
        assert (place(cache.k), place(cache.v)) == before


def test_read_only_buffers_are_copied() -> None:
    """A buffer that cannot be written, shared by two entries or read-only, is replaced and stays as it was."""
    arrays = keys_and_values(2)
    for counts in (None, [1, 2]):
        k, v = (np.zeros((BATCH, KV_HEADS, CAPACITY, width)) for width in (D_K, D_V))
        k.flags.writeable = False
        spread = np.broadcast_to(v[:1], v.shape)
        cache = KVCache(k, spread).append(arrays[0], arrays[1], counts)
        assert_attends_numpy(cache, arrays, [2, 2] if counts is None else [1, 2])
        assert not k.any()
        assert not v.any()
        assert not np.shares_memory(cache.k, k)


def assert_attends_numpy(cache: KVCache, arrays: tuple[np.ndarray, ...], counts: list[int]) -> None:
    q = draw(BATCH, HEADS, 1, D_K)
    output = attend(q, cache)
    for entry, count in enumerate(counts):
        k, v = (x[entry][:, :count] for x in arrays)
        expected = oracle.attention(q[entry], k, v).output
        np.testing.assert_allclose(output[entry], expected, rtol=1e-12, atol=1e-12)


def test_odd_memory_layouts() -> None:
    """Transposed buffers, one buffer given twice, and new keys that are a view of the buffer."""
    arrays = keys_and_values(2)
    k, v = (np.full((CAPACITY, KV_HEADS, BATCH, width), np.nan).transpose(2, 1, 0, 3) for width in (D_K, D_V))
    assert_attends_numpy(KVCache(k, v).append(*arrays), arrays, [2, 2])
    one = np.zeros((BATCH, KV_HEADS, CAPACITY, D_K))
    keys = arrays[0]
    twice = KVCache(one, one).append(keys, -keys)
    assert_attends_numpy(twice, (keys, -keys), [2, 2])
    again = twice.append(twice.k[:, :, :2], twice.v[:, :, :2])
    doubled = tuple(np.concatenate((x, x), axis=2) for x in (keys, -keys))
    assert_attends_numpy(again, doubled, [4, 4])


def test_lengths_are_the_caches_own() -> None:
    """The array that lengths came in may change afterwards."""
    given, (k, v) = np.asarray([1, 2]), keys_and_values(CAPACITY)
    cache = KVCache(k, v, given)
    given[:] = 7
    assert cache.length.tolist() == [1, 2]


# ---- capacity ---------------------------------------------------------------------------------------------


def test_over_capacity(library: Library) -> None:
    """An append that does not fit is refused, and the cache is as it was: same length, same keys, still usable."""
    first = keys_and_values(6)
    cache = appended(library, empty(library), first, [6, 3])
    before = [library.host(x).tobytes() for x in (cache.k, cache.v)]
    big = [library.array(x) for x in keys_and_values(3, 5)]
    refused: list[Any] = [None, 3, [3, 0], np.asarray([3, 3])]
    for counts in refused:
        assert_refused(errors.CapacityError, "k", ("8", "9"), cache.append, *big, counts)
        assert lengths(library, cache) == [6, 3]
        assert [library.host(x).tobytes() for x in (cache.k, cache.v)] == before
    last = keys_and_values(3, 9)
    cache = appended(library, cache, last, [2, 3])
    assert_attends(library, cache, [(first, [6, 3]), (last, [2, 3])], 2)


def test_counts_that_may_not_be_looked_at(library: Library) -> None:
    """Where counts are not NumPy's, an entry that would overflow, or whose count is no count, stays as it was."""
    first, more = keys_and_values(6), keys_and_values(3, 5)
    for counts, kept in (([3, 2], [0, 2]), ([2, 4], [2, 0]), ([-1, 3], [0, 3]), ([0, 3], [0, 3])):
        cache = appended(library, empty(library), first, library.array(np.asarray([6, 3])))
        if library.name == "numpy":
            if kept != counts:
                with pytest.raises(errors.CacheError):
                    appended(library, cache, more, np.asarray(counts))
            continue
        cache = appended(library, cache, more, library.array(np.asarray(counts)))
        assert lengths(library, cache) == [6 + kept[0], 3 + kept[1]]
        assert_attends(library, cache, [(first, [6, 3]), (more, kept)])


# ---- tracing and derivatives ------------------------------------------------------------------------------


@pytest.mark.library("jax")
def test_traced_lengths_and_counts(library: Library) -> None:
    """Under jax.jit the results are those of concatenation, and an entry that would overflow stays as it was."""
    jax = importlib.import_module("jax")
    first, more = keys_and_values(6), keys_and_values(3, 5)
    buffers = [np.full((BATCH, KV_HEADS, CAPACITY, width), np.nan) for width in (D_K, D_V)]
    for buffer, new in zip(buffers, first, strict=True):
        buffer[:, :, :6] = new
    q = draw(BATCH, HEADS, 1, D_K)

    def step(k: Any, v: Any, length: Any, new_k: Any, new_v: Any, counts: Any, q: Any) -> Any:
        cache = KVCache(k, v, length).append(new_k, new_v, counts)
        return attend(q, cache), cache.length, cache.k

    for counts, kept in (([2, 3], [2, 3]), ([0, 1], [0, 1]), ([3, 3], [0, 3]), ([3, 4], [0, 0])):
        output, length, keys = jax.jit(step)(*buffers, np.asarray([6, 3]), *more, np.asarray(counts), q)
        assert length.tolist() == [6 + kept[0], 3 + kept[1]]
        for entry in range(BATCH):
            k, v = concatenated([(first, [6, 3]), (more, kept)], entry)
            np.testing.assert_array_equal(keys[entry, :, : k.shape[1]], k)
            expected = oracle.attention(q[entry], k, v).output
            np.testing.assert_allclose(output[entry], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.library("jax")
def test_a_decoding_loop_in_one_program(library: Library) -> None:
    """jax.lax.scan over tokens, the buffers and the length being its state, gives the full causal pass."""
    jax = importlib.import_module("jax")
    (k, v), q = keys_and_values(CAPACITY), draw(BATCH, HEADS, CAPACITY, D_K)
    zeros = [library.array(np.zeros((BATCH, KV_HEADS, CAPACITY, width))) for width in (D_K, D_V)]

    def step(state: Any, token: Any) -> Any:
        cache = KVCache(*state).append(*(x[:, :, None, :] for x in token[:2]))
        return (cache.k, cache.v, cache.length), attend(token[2][:, :, None, :], cache)[:, :, 0]

    start = (*zeros, library.array(np.zeros(BATCH, dtype=np.int64)))
    tokens = tuple(library.array(np.moveaxis(x, 2, 0)) for x in (k, v, q))
    _, outputs = jax.jit(lambda s, t: jax.lax.scan(step, s, t))(start, tokens)
    expected = oracle.attention(q, k, v, causal_too=True).output
    np.testing.assert_allclose(np.moveaxis(library.host(outputs), 0, 2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.library("torch")
@pytest.mark.parametrize("form", ["none", "list", "tensor"])
def test_derivatives_pass_through_appended_keys(library: Library, form: str) -> None:
    """The derivative with respect to appended keys and values is that of attention over them; dropped ones get 0."""
    torch = importlib.import_module("torch")
    counts: Any = {"none": None, "list": [2, 3], "tensor": torch.tensor([2, 3])}[form]
    kept = [3, 3] if counts is None else [2, 3]
    first, second = ([library.array(x).requires_grad_() for x in keys_and_values(n, n)] for n in (2, 3))
    q = library.array(draw(BATCH, HEADS, 1, D_K))
    cache = empty(library, fill=np.nan).append(*first).append(second[0], second[1], counts)
    got = torch.autograd.grad(attend(q, cache).square().sum(), (*first, *second))
    total = 0.0
    for entry, count in enumerate(kept):
        k, v = (torch.cat((a[entry], b[entry][:, :count]), dim=1) for a, b in zip(first, second, strict=True))
        total = total + refattn.attention(q[entry], k, v).square().sum()
    for actual, expected in zip(got, torch.autograd.grad(total, (*first, *second)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.library("torch")
def test_appending_after_attention_disturbs_no_derivative(library: Library) -> None:
    """The query's derivative of an earlier step survives later writes into the same buffers."""
    torch = importlib.import_module("torch")
    q = library.array(draw(BATCH, HEADS, 1, D_K)).requires_grad_()
    arrays = keys_and_values(2)
    cache = appended(library, empty(library), arrays)
    early = attend(q, cache).square().sum()
    cache = appended(library, cache, keys_and_values(2, 5))
    (got,) = torch.autograd.grad(early, q)
    alone = attend(q, appended(library, empty(library), arrays)).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(alone, q)[0])
    assert cache.length == 4


@pytest.mark.library("torch")
def test_buffers_that_torch_does_not_write(library: Library) -> None:
    """Expanded tensors, tensors of inference mode and vmap: the cache goes on in buffers of its own."""
    torch = importlib.import_module("torch")
    arrays = keys_and_values(2)
    new = [library.array(x) for x in arrays]
    expanded = [
        torch.zeros(1, KV_HEADS, CAPACITY, w, dtype=torch.float64).expand(BATCH, -1, -1, -1) for w in (D_K, D_V)
    ]
    with torch.inference_mode():
        frozen = KVCache.allocate(new[0], BATCH, KV_HEADS, CAPACITY, D_K, D_V)
    for counts in (None, [2, 1]):
        for cache in (KVCache(*expanded), KVCache(frozen.k, frozen.v)):
            after = cache.append(new[0], new[1], counts)
            assert_attends(library, after, [(arrays, [2, 2] if counts is None else [2, 1])])
    assert not expanded[0].any()

    def last(q: Any, k: Any, v: Any) -> Any:
        return attend(q, KVCache.allocate(k, BATCH, KV_HEADS, CAPACITY, D_K, D_V).append(k, v))

    q = library.array(draw(3, BATCH, HEADS, 2, D_K))
    k, v = (torch.stack([x, x + 1, -x]) for x in new)
    mapped = torch.func.vmap(last)(q, k, v)
    torch.testing.assert_close(mapped, torch.stack([last(q[i], k[i], v[i]) for i in range(3)]))
