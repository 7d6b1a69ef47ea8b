"""Heads: splitting, merging, pooling and grouping, against plain loops."""

from typing import Any

import numpy as np
import pytest

import refattn
from libraries import Library, eager
from refattn import errors
from refusals import Maker, assert_refused


def draw(*shape: int) -> np.ndarray:
    """Reproducible normal numbers."""
    return np.random.default_rng(list(shape)).standard_normal(shape)


SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((3, 6), 2), ((2, 3, 6), 3), ((2, 2, 3, 8), 4), ((2, 3, 6), 1), ((2, 3, 6), 6),
    ((0, 6), 2), ((2, 0, 6), 2), ((2, 3, 0), 2),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "heads"), SHAPES)
def test_splitting_takes_consecutive_components(library: Library, shape: tuple[int, ...], heads: int) -> None:
    """Component c of head h is component h * D / H + c of the token, and merging puts it back."""
    x = draw(*shape)
    *batch, length, width = shape
    split = refattn.split_heads(library.array(x), heads)
    assert tuple(split.shape) == (*batch, heads, length, width // heads)
    host = library.host(split)
    for index in np.ndindex(*host.shape):
        *entry, h, i, c = index
        assert host[index] == x[(*entry, i, h * (width // heads) + c)]
    merged = refattn.merge_heads(split)
    assert merged.dtype == split.dtype
    np.testing.assert_array_equal(library.host(merged), x)


def test_any_dtype_can_be_split(library: Library, storage_dtype: str) -> None:
    """Splitting and merging move components and compute nothing, in every dtype."""
    x = library.array(draw(3, 6), storage_dtype)
    merged = refattn.merge_heads(refattn.split_heads(x, 2))
    assert merged.dtype == x.dtype
    np.testing.assert_array_equal(library.host(merged), library.host(x))
    whole = library.array(np.arange(6)[None, :])
    np.testing.assert_array_equal(library.host(refattn.split_heads(whole, 3)), [[[0, 1]], [[2, 3]], [[4, 5]]])


@pytest.mark.parametrize(("heads", "kv_heads"), [eager(8, 8), (8, 2), eager(8, 1), eager(6, 3), eager(1, 1)])
def test_a_query_head_reads_the_head_of_its_group(library: Library, heads: int, kv_heads: int) -> None:
    """kv_head_of says which head attention reads: sharing equals repeating each KV head, never tiling them."""
    q, k, v = draw(heads, 3, 4), draw(kv_heads, 5, 4), draw(kv_heads, 5, 2)
    read = [refattn.kv_head_of(h, heads, kv_heads) for h in range(heads)]
    assert read == sorted(read)
    assert all(read.count(g) == heads // kv_heads for g in range(kv_heads))
    shared = refattn.attention(*map(library.array, (q, k, v)))
    repeated = refattn.attention(*map(library.array, (q, k[read], v[read])))
    np.testing.assert_allclose(library.host(shared), library.host(repeated), atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 4, 2), (2, 6, 4, 2), (6, 0, 2)])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_pooling_averages_the_heads_of_a_group(library: Library, shape: tuple[int, ...], kv_heads: int) -> None:
    """Group g is the mean of the heads that later read it, and pooling into as many heads changes nothing."""
    w = draw(*shape)
    pooled = refattn.pool_kv_heads(library.array(w), kv_heads)
    members = [[h for h in range(6) if refattn.kv_head_of(h, 6, kv_heads) == g] for g in range(kv_heads)]
    expected = np.stack([sum(w[..., h, :, :] for h in group) / len(group) for group in members], axis=-3)
    np.testing.assert_allclose(library.host(pooled), expected, rtol=1e-14, atol=1e-15)


def test_pooling_rounds_once(library: Library, storage_dtype: str) -> None:
    """The mean is taken in at least float32 and rounded to the dtype of the weights."""
    # A running sum in a half precision would stop growing at its last exact integer, or overflow.
    w = library.array(np.full((1024, 1, 1), 200.0), storage_dtype)
    pooled = refattn.pool_kv_heads(w, 1)
    assert pooled.dtype == w.dtype
    np.testing.assert_array_equal(library.host(pooled), [[[200.0]]])


BAD: list[tuple[str, Any, type[errors.RefattnError], str, tuple[str, ...]]] = [
    ("width", lambda m: refattn.split_heads(m(3, 7), 2), errors.HeadSplitError, "x", ("heads = 2", "(3, 7)")),
    ("rank", lambda m: refattn.split_heads(m(6), 2), errors.HeadSplitError, "x", ("(6,)",)),
    ("merge rank", lambda m: refattn.merge_heads(m(3, 6)), errors.HeadSplitError, "x", ("(..., H, S, d)", "(3, 6)")),
    ("pool rank", lambda m: refattn.pool_kv_heads(m(4, 6), 2), errors.HeadSplitError, "w", ("(4, 6)",)),
    ("pool heads", lambda m: refattn.pool_kv_heads(m(4, 2, 6), 3), errors.HeadSplitError, "w", ("= 3", "(4, 2, 6)")),
    ("pool dtype", lambda m: refattn.pool_kv_heads(m(4, 2, 6, dtype="int32"), 2), errors.HeadSplitError, "w", ("int",)),
    ("no multiple", lambda m: refattn.kv_head_of(0, 6, 4), errors.HeadCountError, "heads", ("Hkv = 4", "H = 6")),
    ("beyond", lambda m: refattn.kv_head_of(6, 6, 3), errors.HeadSplitError, "h", ("heads = 6", "6")),
    ("split list", lambda m: refattn.split_heads([[1.0, 2.0]], 2), errors.NotAnArrayError, "x", ("list",)),
    ("merge list", lambda m: refattn.merge_heads([[[1.0]]]), errors.NotAnArrayError, "x", ("list",)),
    ("pool list", lambda m: refattn.pool_kv_heads(None, 2), errors.NotAnArrayError, "w", ("None",)),
]  # fmt: skip
for number in (0, -1, 2.0, "2", True, None, [2], np.True_, np.ones(1, dtype=int)):
    word = (type(number).__name__,)
    error = errors.HeadSplitError
    BAD += [
        (f"split {number!r}", lambda m, n=number: refattn.split_heads(m(3, 6), n), error, "heads", word),
        (f"pool {number!r}", lambda m, n=number: refattn.pool_kv_heads(m(4, 2, 6), n), error, "kv_heads", word),
        (f"heads {number!r}", lambda m, n=number: refattn.kv_head_of(0, n, 1), error, "heads", word),
        (f"kv_heads {number!r}", lambda m, n=number: refattn.kv_head_of(0, 4, n), error, "kv_heads", word),
    ]
    if number != 0:
        BAD.append((f"h {number!r}", lambda m, n=number: refattn.kv_head_of(n, 4, 2), error, "h", word))


@pytest.mark.parametrize(("call", "error", "argument", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_arguments(library: Library, call: Any, error: Any, argument: str, words: tuple[str, ...]) -> None:
    """Each is an error of its own class that names the argument and what came."""
    assert_refused(error, argument, words, call, Maker(library))


def test_numpy_integers_serve_as_counts() -> None:
    """Counts may be NumPy's integers of any size."""
    kinds: list[Any] = [np.int8, np.uint8, np.int64]
    for kind in kinds:
        assert refattn.kv_head_of(kind(5), kind(6), kind(3)) == 2
        assert refattn.split_heads(np.ones((3, 6)), kind(2)).shape == (2, 3, 3)
        assert refattn.pool_kv_heads(np.ones((4, 2, 3)), kind(2)).shape == (2, 2, 3)
