"""Batches padded on the right, in a layer with a cache: each entry has its own count of new tokens."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import refattn
from libraries import LIBRARIES, NOT_JAX, Library
from refattn import Rotary, errors, multi_head_attention
from refusals import assert_refused
from test_layer import BATCH, WIDTH, by_definition, draw, layer

KINDS = {"KVCache": (9,), "PagedKVCache": (10, 2), "RollingKVCache": (2,)}
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2}
ROPE = Rotary("half")


def allocate(library: Library, kind: str) -> Any:
    """An empty cache in float64 for the layers of this module."""
    return getattr(refattn, kind).allocate(library.array(np.zeros(1)), BATCH, 2, *KINDS[kind], 4, 3)


@NOT_JAX  # which traces counts below
@pytest.mark.parametrize("given", ["list", "array"])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_with_counts_of_their_own(library: Library, kind: str, given: str) -> None:
    """In chunks padded on the right with NaN, each entry's own rows are those of the entry alone in one pass."""
    slow = library.slow
    if slow and (kind, given) != ("KVCache", "array"):
        pytest.skip("one of the six ways on Dask, which schedules each call")
    tokens, parameters, cache = draw(BATCH, 9, WIDTH), layer(4, 2), allocate(library, kind)
    options: dict[str, Any] = {"mask": oracle.window(1, 0)} if kind == "RollingKVCache" else {}
    alone = by_definition(tokens, parameters, rope=ROPE, causal_too=True, **options)[0]
    done, arrays = np.asarray([0, 0]), parameters.on(library)
    for counts in ((3, 1), (0, 3)) if slow else ((3, 1), (0, 2), (2, 2), (1, 1), (2, 1)):
        x = np.full((BATCH, max(counts) + 1, WIDTH), np.nan)
        for entry, count in enumerate(counts):
            x[entry, :count] = tokens[entry, done[entry] : done[entry] + count]
        asked = list(counts) if given == "list" else library.array(np.asarray(counts))
        result = multi_head_attention(library.array(x), arrays, **HEADS, rope=ROPE, cache=cache, counts=asked)
        cache, output = result.cache, library.host(result.output)
        for entry, count in enumerate(counts):
            expected = alone[entry, done[entry] : done[entry] + count]
            np.testing.assert_allclose(output[entry, :count], expected, rtol=1e-10, atol=1e-11)
        done = done + counts
    assert (cache.length if given == "list" else library.host(cache.length)).tolist() == done.tolist()


@pytest.mark.library("jax")
def test_counts_can_be_traced(library: Library) -> None:
    """Inside jit one compiled step takes chunks of any counts, and gives what each entry gives alone (N3)."""
    import jax

    tokens, parameters, start = draw(BATCH, 4, WIDTH), layer(4, 2), allocate(library, "KVCache")
    alone, arrays = by_definition(tokens, parameters, rope=ROPE, causal_too=True)[0], parameters.on(library)

    @jax.jit  # type: ignore[untyped-decorator]  # JAX is not typed here
    def step(x: Any, counts: Any, *held: Any) -> Any:
        cache = refattn.KVCache(*held)
        made: Any = multi_head_attention(x, arrays, **HEADS, rope=ROPE, cache=cache, counts=counts)
        return made.output, (made.cache.k, made.cache.v, made.cache.length)

    held, done = (start.k, start.v, library.array(np.asarray([0, 0]))), np.asarray([0, 0])
    for counts in ((3, 1), (1, 3)):
        x = np.full((BATCH, 3, WIDTH), np.nan)
        for entry, count in enumerate(counts):
            x[entry, :count] = tokens[entry, done[entry] : done[entry] + count]
        output, held = step(library.array(x), library.array(np.asarray(counts)), *held)
        for entry, count in enumerate(counts):
            expected = alone[entry, done[entry] : done[entry] + count]
            np.testing.assert_allclose(library.host(output)[entry, :count], expected, rtol=1e-10, atol=1e-11)
        done = done + counts
    assert library.host(held[2]).tolist() == [4, 4]


@settings(max_examples=100)
@given(
    kind=st.sampled_from([*KINDS]),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), max_size=3),
)
def test_masks_have_one_key_per_key_that_is_shown(kind: str, steps: list[tuple[int, int, int]]) -> None:
    """Whatever came before, a mask by key index fits that has as many keys as `after` says, and no other does."""
    library = LIBRARIES["numpy"]()
    cache, arrays = allocate(library, kind), layer(4, 2).on(library)
    for first, second, padding in steps:
        if max(np.max(cache.length + np.asarray([first, second])), 0) > 9:
            break
        new, counts = max(first, second) + padding, [first, second]
        x, shown = draw(BATCH, new, WIDTH), cache.after(new, counts)
        call: dict[str, Any] = {**HEADS, "rope": ROPE, "counts": counts}
        fits, too_long = (refattn.masks.padding(np.ones((BATCH, count), dtype=bool)) for count in (shown, shown + 1))
        with pytest.raises(errors.BatchError):
            multi_head_attention(x, arrays, **call, cache=cache, mask=too_long)
        cache = multi_head_attention(x, arrays, **call, cache=cache, mask=fits).cache


def test_counts_that_do_not_fit(library: Library) -> None:
    """Counts need a cache, one per entry, from 0 to S; the cache is then as it was."""
    x, arrays, cache = library.array(draw(BATCH, 2, WIDTH)), layer(4, 2).on(library), allocate(library, "KVCache")
    assert_refused(errors.LayerError, "counts", ["cache"], multi_head_attention, x, arrays, **HEADS, counts=[1, 2])
    for counts in ([1, 3], [-1, 0], [1], 1.0, "2"):
        call: dict[str, Any] = {**HEADS, "cache": cache, "counts": counts}
        assert_refused(errors.CacheError, "counts", ["from 0 to 2"], multi_head_attention, x, arrays, **call)
    assert cache.length == 0
