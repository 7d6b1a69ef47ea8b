"""Dask's tiled path: chunk pairs as tasks, what NumPy says as the answer, and no more memory than a tile."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn
from refattn import biases, masks

pytestmark = pytest.mark.library("dask")
da = pytest.importorskip("dask.array", reason="Dask is not installed")
import dask  # noqa: E402  # after the reason why this file may be skipped

RNG = np.random.default_rng(3)
BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 37, 8
Q = RNG.standard_normal((BATCH, HEADS, LENGTH, WIDTH), dtype=np.float32)
K, V = (RNG.standard_normal((BATCH, KV_HEADS, LENGTH, WIDTH), dtype=np.float32) for _ in range(2))
KEEP = RNG.random((BATCH, LENGTH)) > 0.4
DENSE = RNG.random((HEADS, LENGTH, LENGTH)) > 0.5
BIAS = np.where(DENSE, RNG.standard_normal((HEADS, LENGTH, LENGTH)), -np.inf).astype(np.float32)
IDS = np.sort(RNG.integers(0, 4, (BATCH, LENGTH)), axis=-1)
STARTS = np.array([0, -30])
SINKS = RNG.standard_normal(HEADS).astype(np.float32)
TABLE = RNG.standard_normal((HEADS, 7)).astype(np.float32)

OPTIONS: dict[str, Any] = {
    "plain": lambda a: {},
    "causal": lambda a: {"causal": True},
    "window": lambda a: {"mask": masks.window(5, 0)},
    "prefix": lambda a: {"mask": masks.causal() | masks.prefix(3)},
    "host padding": lambda a: {"mask": masks.padding(KEEP)},
    "dask padding": lambda a: {"mask": masks.padding(a(KEEP)), "causal": True},
    "dask dense mask": lambda a: {"mask": masks.dense(a(DENSE)) | masks.prefix(2)},
    "host documents": lambda a: {"mask": masks.documents(IDS)},
    "blocks": lambda a: {"mask": masks.blocks(DENSE[0, :8, :8], 5)},
    "nothing visible": lambda a: {"mask": masks.lengths(0)},
    "array bias": lambda a: {"bias": a(BIAS)},
    "alibi": lambda a: {"bias": biases.alibi(HEADS), "causal": True},
    "relative": lambda a: {"bias": biases.relative(a(TABLE)) + biases.alibi(HEADS)},
    "sinks": lambda a: {"sinks": a(SINKS), "causal": True},
    "softcap and scale": lambda a: {"softcap": 2.0, "scale": a(np.float32(0.7))},
    "host starts": lambda a: {"causal": True, "q_start": STARTS},
    "dask starts": lambda a: {"causal": True, "q_start": a(STARTS)},
}
# Each array's axes are cut like the last ones of these: entries, heads, rows or keys, width.
CHUNKS = {"whole": (2, 4, 64, 8), "sequence": (2, 4, 10, 8), "all axes": (1, 2, 16, 3), "within groups": (2, 1, 19, 8)}


def chunked(x: Any, sizes: tuple[int, ...] = CHUNKS["sequence"]) -> Any:
    x = np.asarray(x)
    return da.from_array(x, chunks=tuple(min(pair) for pair in zip(x.shape, sizes[len(sizes) - x.ndim :], strict=True)))


def assert_agrees(actual: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    golden = refattn.golden(q, k, v, **options)
    assert (np.abs(actual - golden.output) <= golden.bound("float32")).all()


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("option", OPTIONS)
def test_results_stay_within_the_bound_however_the_arrays_are_chunked(option: str, sizes: tuple[int, ...]) -> None:
    """Output and log-sum-exp are NumPy's within the bound, for chunks on any axis and options of either library."""
    given, plain = OPTIONS[option](lambda x: chunked(x, sizes)), OPTIONS[option](np.asarray)
    q, k, v = (chunked(x, sizes) for x in (Q, K, V))
    output, lse = dask.compute(*refattn.attention_with_lse(q, k, v, path="tiled", **given), scheduler="synchronous")
    golden = refattn.golden(Q, K, V, **plain)
    assert output.dtype == np.float32
    assert (np.abs(output - golden.output) <= golden.bound("float32")).all()
    empty = np.isneginf(golden.lse)
    assert (np.isneginf(lse) == empty).all()
    assert np.allclose(lse[~empty], golden.lse[~empty], rtol=0, atol=1e-5)


def tiled_gradients(q: Any, k: Any, v: Any, gradient: Any, **options: Any) -> dict[str, Any]:
    """The gradients of path="tiled" as lazy arrays by name."""
    return by_name(refattn.attention_vjp(q, k, v, gradient, **options, path="tiled"))


def by_name(gradients: refattn.Gradients) -> dict[str, Any]:
    """All gradients that there are, those of biases by number too."""
    found = gradients._asdict()
    terms = found.pop("bias")
    found |= {f"bias {number}": x for number, x in enumerate(terms if isinstance(terms, tuple) else (terms,))}
    return {name: x for name, x in found.items() if x is not None}


def assert_gradients_agree(given: dict[str, Any], plain: dict[str, Any]) -> None:
    """Lazy gradients, computed, are NumPy's dense ones but for float32's rounding."""
    (found,) = dask.compute(given, scheduler="synchronous")
    assert found.keys() == plain.keys()
    for name, x in plain.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5 * np.max(np.abs(x), initial=1.0), err_msg=name)


@pytest.mark.parametrize(
    ("option", "cut"),
    [
        *(("relative", "all axes"), ("sinks", "all axes"), ("plain", "within groups"), ("causal", "whole")),
        *((option, "sequence") for option in ("array bias", "softcap and scale", "dask starts", "nothing visible")),
    ],
)
def test_gradients_are_the_dense_ones_however_the_arrays_are_chunked(option: str, cut: str) -> None:
    """Those by q, k, v, biases and sinks are NumPy's, for chunks on any axis and options of either library."""
    sizes = CHUNKS[cut]
    given, plain = OPTIONS[option](lambda x: chunked(x, sizes)), OPTIONS[option](np.asarray)
    found = tiled_gradients(*(chunked(x, sizes) for x in (Q, K, V, -Q)), **given)
    assert_gradients_agree(found, by_name(refattn.attention_vjp(Q, K, V, -Q, **plain)))


def test_gradients_of_what_entries_share() -> None:
    """A batch of one key, and biases of fewer axes than the pairs, sum over chunks of entries, heads and rows."""
    sizes, keys = CHUNKS["all axes"], BIAS[0, 0]
    arrays = Q, K[:1], V, -Q
    found = tiled_gradients(*(chunked(x, sizes) for x in arrays), bias=chunked(keys, sizes), causal=True)
    assert_gradients_agree(found, by_name(refattn.attention_vjp(*arrays, bias=keys, causal=True)))


def test_poison_and_the_gradients() -> None:
    """Chunks that lie beyond the lengths have gradients of 0 whatever they hold; a row of NaN breaks what it sees."""
    k, v, gradient = K.copy(), V.copy(), -Q
    k[:, :, 15:], v[:, :, 15:] = np.nan, np.inf
    gradient[0, 1, 3] = np.nan
    options: dict[str, Any] = {"mask": masks.lengths(15), "causal": True}
    lazy = tiled_gradients(*(chunked(x) for x in (Q, k, v, gradient)), **options, sinks=chunked(SINKS))
    (found,) = dask.compute(lazy, scheduler="synchronous")
    expected = refattn.attention_vjp(Q, k, v, gradient, **options, sinks=SINKS)._asdict()
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert not found["k"][:, :, 15:].any() and not found["v"][:, :, 15:].any()
    assert np.isnan(found["k"][0, 0, :4]).all()
    assert np.isnan(found["sinks"]).tolist() == [False, True, False, False]


def test_invisible_pairs_of_chunks_have_no_gradient_in_the_graph() -> None:
    """Of n x n chunk pairs a causal graph holds n (n + 1) / 2, forwards and back."""
    count, size = 6, 16
    q = da.zeros((count * size, 4), chunks=(size, 4), dtype=np.float32)
    found = refattn.attention_vjp(q, q, q, q, causal=True, path="tiled")
    for x in found[:3]:
        keys = [str(key) for key in x.__dask_graph__()]
        assert sum(key.startswith("_pair_vjp-") for key in keys) == count * (count + 1) // 2
        assert sum(key.startswith("_pair-") for key in keys) == count * (count + 1) // 2


def test_entries_and_heads_broadcast_across_chunks() -> None:
    """A batch of one key serves chunked batches of queries and values, and rank 2 is one head."""
    parts = (Q, K[:1], V), (Q[0, 0], K[0, 0], V[0, 0])
    for q, k, v in parts:
        sizes = CHUNKS["all axes"]
        output = refattn.attention(*(chunked(x, sizes) for x in (q, k, v)), causal=True, path="tiled")
        assert_agrees(output.compute(scheduler="synchronous"), q, k, v, causal=True)


def test_poison_in_invisible_keys_is_harmless() -> None:
    """NaN and infinities in chunks that partly or wholly lie beyond the lengths change nothing."""
    k, v = K.copy(), V.copy()
    k[:, :, 15:], v[:, :, 15:] = np.nan, np.inf
    output = refattn.attention(*(chunked(x) for x in (Q, k, v)), mask=masks.lengths(15), path="tiled")
    assert_agrees(output.compute(scheduler="synchronous"), Q, K, V, mask=masks.lengths(15))


@pytest.mark.parametrize("sinks", [None, np.asarray([-np.inf, 1.0], np.float32)], ids=["no sink", "sinks"])
def test_logits_of_minus_infinity(sinks: Any) -> None:
    """Chunks whose logits are all -inf harm a row only if it sees nothing else, and has no finite sink either."""
    q, v = np.full((2, 6, 1), 1e30, np.float32), V[0, :, :9]
    k = np.where(np.arange(9)[:, None] < 8, -1e30, [[[1e-30]], [[-1e30]]]).astype(np.float32)
    expected = refattn.attention(q, k, v, sinks=sinks)
    given = None if sinks is None else da.from_array(sinks)
    lazy = refattn.attention(*(chunked(x, (2, 3, 8)) for x in (q, k, v)), sinks=given, path="tiled")
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(expected[1]).all() == (sinks is None)


def test_nothing_is_computed_before_the_result_is_asked_for() -> None:
    """A block that raises when computed raises at compute(), not at the call."""

    def fails() -> Any:
        raise RuntimeError("computed")

    broken = da.from_delayed(dask.delayed(fails)(), (4, 4), dtype=np.float32)
    sizes = {"mask": masks.padding(broken[0] > 0), "bias": broken, "scale": broken[0, 0]}
    output = refattn.attention(broken, broken, broken, path="tiled", **sizes)
    with pytest.raises(RuntimeError, match="computed"):
        output.compute(scheduler="synchronous")


def pair_tasks(result: Any) -> int:
    return sum(str(key).startswith("_pair") for key in result.__dask_graph__())


def test_invisible_pairs_of_chunks_are_not_in_the_graph() -> None:
    """Of n x n chunk pairs a causal graph holds n (n + 1) / 2, a window of one chunk two per row, one in the first."""
    count, size = 12, 16
    q = da.zeros((count * size, 4), chunks=(size, 4), dtype=np.float32)
    assert pair_tasks(refattn.attention(q, q, q, path="tiled")) == count * count
    assert pair_tasks(refattn.attention(q, q, q, causal=True, path="tiled")) == count * (count + 1) // 2
    assert pair_tasks(refattn.attention(q, q, q, mask=masks.window(size, 0), path="tiled")) == 2 * count - 1


def test_no_task_of_the_gradients_holds_more_than_tiles_of_scores() -> None:
    """One chunk pair of 4096 x 4096, forwards and back, runs in less than half of the memory of its scores."""
    x = da.from_array(RNG.standard_normal((4096, 16), dtype=np.float32), chunks=-1)
    found = refattn.attention_vjp(x, x, x, x, causal=True, path="tiled")
    tracemalloc.start()
    dask.compute(found.q, found.k, found.v, scheduler="synchronous")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 4096 * 4 / 2


@pytest.mark.parametrize("options", [{"causal": True}, {"bias": biases.alibi(1)}], ids=["mask", "bias"])
def test_no_task_holds_more_than_tiles_of_scores(options: dict[str, Any]) -> None:
    """One chunk pair of 4096 x 4096 runs in a quarter of the memory that its scores would take."""
    x = da.from_array(RNG.standard_normal((4096, 16), dtype=np.float32), chunks=-1)
    output = refattn.attention(x, x, x, path="tiled", **options)
    tracemalloc.start()
    output.compute(scheduler="synchronous")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 4096 * 4 / 4


def test_arrays_of_dask_are_cut_into_tiles() -> None:
    """A bias that Dask holds as one chunk reaches the tasks in pieces of at most 512 x 512."""
    x = da.zeros((1030, 4), chunks=-1, dtype=np.float32)
    bias = da.zeros((1030, 1030), chunks=-1, dtype=np.float32)
    assert pair_tasks(refattn.attention(x, x, x, bias=bias, path="tiled")) == 9


def test_memory_mapped_arrays_are_read_chunk_by_chunk(tmp_path: Path) -> None:
    """Keys and values in files give what the same arrays in memory give."""
    mapped = []
    for name, x in (("q", Q), ("k", K), ("v", V)):
        np.save(tmp_path / f"{name}.npy", x)
        file = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        assert isinstance(file, np.memmap)
        mapped.append(da.from_array(file, chunks=(1, 2, 10, 8)))
    output = refattn.attention(*mapped, causal=True, path="tiled")
    assert_agrees(output.compute(scheduler="threads"), Q, K, V, causal=True)


def test_the_same_bits_from_any_scheduler() -> None:
    """The order of merging is part of the graph, so threads and a single thread give the same bits."""
    output = refattn.attention(*(chunked(x) for x in (Q, K, V)), causal=True, path="tiled")
    assert np.array_equal(output.compute(scheduler="synchronous"), output.compute(scheduler="threads"))


def test_blas_has_its_threads_back_after_many_calls_at_once() -> None:
    """The tasks of a threaded run limit BLAS together, and the limit ends with the last of them."""
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")

    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    before = threads()
    x = da.from_array(RNG.standard_normal((256, 8), dtype=np.float32), chunks=(16, 8))
    refattn.attention(x, x, x, causal=True, path="tiled").compute(scheduler="threads", num_workers=4)
    assert threads() == before


def test_a_cluster_of_two_processes_computes_it() -> None:
    """Two worker processes, both of which take part, give what one process gives; masks and biases travel along."""
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        client.wait_for_workers(2)
        q, k, v = (chunked(x, CHUNKS["all axes"]) for x in (Q, K, V))
        options = {"mask": masks.padding(KEEP) & masks.causal(), "bias": biases.alibi(HEADS), "sinks": chunked(SINKS)}
        output = refattn.attention(q, k, v, path="tiled", **options).persist()
        distributed.wait(output)
        assert_agrees(output.compute(), Q, K, V, **{**options, "sinks": SINKS})
        assert sum(bool(keys) for keys in client.has_what().values()) == 2
