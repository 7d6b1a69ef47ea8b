"""NumPy's own tiled gradients: those of the specification for any tiles and threads, in memory linear in the length."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from drawn_calls import Call, Floats, Ints, calls
from libraries import Library
from refattn.conformance.cases import all_cases
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets.refattn import RefattnTarget
from refattn.golden_gradients import GoldenGradients
from refattn_backends import numpy_backward, numpy_tiles, tiles_backward, workers
from test_gradients import HEADS, LENGTH, POISONED, in_float64, output_gradient, parts_found

pytestmark = pytest.mark.library("numpy")


@pytest.fixture(params=[(1, 1, 1), (2, 3, 16), (5, 2, 4)], ids=str)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiles that small calls have many of: rows, keys, and jobs at once."""
    for name, value in zip(("ROWS", "KEYS", "JOBS"), request.param, strict=True):
        monkeypatch.setattr(numpy_backward, name, value)
    monkeypatch.setattr(numpy_backward, "EDGE", 2)
    monkeypatch.setattr(numpy_backward, "FEW", 0)
    return request.param


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were left to the generic tiles."""
    calls_left: list[Any] = []
    generic = tiles_backward.tiled_vjp

    def watched(call: Any, gradient: Any) -> Any:
        calls_left.append(call)
        return generic(call, gradient)

    monkeypatch.setattr(tiles_backward, "tiled_vjp", watched)
    return calls_left


def gradients(
    library: Library, call: Call, gradient: np.ndarray, dtype: str = "float64", path: str = "tiled"
) -> dict[str, np.ndarray]:
    """The gradients of a call, by name."""
    (q, k, v), options = call.arguments(library, dtype)
    found = refattn.attention_vjp(q, k, v, library.array(gradient, dtype), **options, path=path)
    return parts_found(library, call, found)


def keep_bounds(library: Library, call: Call, found: dict[str, np.ndarray], gradient: np.ndarray, dtype: str) -> None:
    """All gradients lie within the bounds of the golden ones, those of tables within rounding of the dense path's."""
    arrays, options = call.arguments(library, dtype)
    exact = refattn.golden(*arrays, **options)
    kinds = {f"bias{i}": kind for i, (kind, *_) in enumerate(call.options.get("bias") or [])}
    for name, x in found.items():
        if kinds.get(name) == "relative":
            expected = gradients(library, call, gradient, dtype, "dense")[name]
            np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-11 * np.max(np.abs(expected), initial=1.0))
            continue
        known = "bias" if name in kinds else name
        golden = GoldenGradients(exact, gradient, {known: x.shape})
        # A few roundings more than the dense path's, of sums over tiles.
        assert np.all(np.abs(x - golden.values[known]) <= 2 * golden.bounds(dtype)[known]), name


def test_any_tiles_agree_with_golden_gradients(tile: Any, library: Library, left: list[Any]) -> None:
    """Random shapes and options in tiles of any size keep the bound, and many are not left to others."""
    count = 0

    @given(call=calls(), seed=st.integers(0, 2**32 - 1))
    @settings(settings.get_profile("few"), max_examples=40)
    def each(call: Call, seed: int) -> None:
        nonlocal count
        count, call = count + 1, in_float64(call)
        gradient = output_gradient(call, seed)
        keep_bounds(library, call, gradients(library, call, gradient), gradient, "float64")

    each()
    assert len(left) < 0.8 * count  # a third of the calls have no pairs, a sixth a scale of 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": ("window", 100, 30), "softcap": 5.0}], ids=str)
def test_many_rows_and_keys(library: Library, left: list[Any], dtype: str, options: dict[str, Any]) -> None:
    """Lengths that no tile size divides, with grouped heads and more keys than rows, keep the bound."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((heads, n, 16)) for heads, n in ((4, 333), (2, 555), (2, 555)))
    q, k, v = (x.astype(dtype).astype(np.float64) for x in (q, k, v))
    call = Call(q, k, v, options | {"q_start": 222})
    gradient = output_gradient(call, 1).astype(dtype)
    keep_bounds(library, call, gradients(library, call, gradient, dtype), gradient.astype(np.float64), dtype)
    assert not left


def test_small_tiles_conform(monkeypatch: pytest.MonkeyPatch, left: list[Any]) -> None:
    """The conformance suite, whose problems are small, passes on gradients where no head is too small for tiles."""
    for name, value in {"ROWS": 5, "KEYS": 3, "EDGE": 2, "FEW": 0}.items():
        monkeypatch.setattr(numpy_backward, name, value)
    labels = frozenset(clause.label for clause in refattn.CLAUSES if clause.label.startswith("D"))
    pairs = chosen_pairs(all_cases(), labels, ("float32", "float16"))
    report = run_suite(RefattnTarget("numpy", "tiled"), pairs, 20, explained=False)
    assert report.conforms, [record.message for record in report.broken]
    assert len(left) < 0.2 * len(report.records)


BIASES: dict[str, list[tuple[Any, ...]]] = {
    "pairs of each head": [("array", Floats(np.random.default_rng(3).standard_normal((2, HEADS, 6, 6)), None))],
    "keys of each entry": [("array", Floats(np.random.default_rng(3).standard_normal((2, 1, 1, 6)), None))],
    "rows": [("array", Floats(np.random.default_rng(3).standard_normal((HEADS, 6, 1)), None)), ("alibi", HEADS)],
    "table": [("relative", Floats(np.random.default_rng(3).standard_normal((HEADS, 5)), None))],
    "number": [("array", Floats(np.asarray(0.5), None))],
    "shared pairs": [("array", Floats(np.random.default_rng(3).standard_normal((6, 6)), None))],
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_hold_arrays(tile: Any, library: Library, left: list[Any], name: str) -> None:
    """Each entry of an array or table gets the sum of its pairs; pairs that heads share are left to others."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, heads, 6, 3)) for heads in (HEADS, 2, 2))
    call = Call(q, k, v, {"bias": BIASES[name], "q_start": np.asarray([0, 2]), "causal": True, "softcap": 3.0})
    gradient = output_gradient(call, 1)
    keep_bounds(library, call, gradients(library, call, gradient), gradient, "float64")
    assert bool(left) == (name == "shared pairs")


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e308], ids=["nan", "inf", "1e308"])
@pytest.mark.parametrize("name", POISONED)
def test_invisible_data_influence_no_gradient(
    tile: Any, library: Library, left: list[Any], name: str, poison: float
) -> None:
    """Whatever invisible keys and the gradient of empty rows hold, gradients are the same bits, and zeros there."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, LENGTH, 3)) for heads in (HEADS, 2, 2))
    call = Call(q, k, v, POISONED[name])
    gradient = output_gradient(call, 1)
    found = gradients(library, call, gradient)
    keep_bounds(library, call, found, gradient, "float64")
    q, k, v, gradient = (x.copy() for x in (q, k, v, gradient))
    k[..., 3:, :], v[..., 3:, :] = poison * np.asarray([1, -1, 1]), poison
    empty = {"empty rows": slice(0, 2), "nothing": slice(None)}.get(name, slice(0, 0))
    gradient[..., empty, :], q[..., empty, :] = poison, poison
    got = gradients(library, replace(call, q=q, k=k, v=v), gradient)
    for part, x in found.items():
        np.testing.assert_array_equal(got[part], x, err_msg=part)
    assert not got["k"][..., 3:, :].any()
    assert not got["v"][..., 3:, :].any()
    assert not got["q"][..., empty, :].any()
    assert not left


@pytest.mark.parametrize("where", ["k", "v"])
def test_invisible_pairs_that_overflow(tile: Any, library: Library, left: list[Any], where: str) -> None:
    """Scores of hidden keys beyond the dtype's range, even without a sign, and such products are no harm."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((LENGTH, 4)) for _ in range(3))
    q[:, :2] = 1.0
    seen = np.asarray([True, False, True, False, True])  # no stretch of hidden keys is passed over as such
    call = Call(q, k, v, {"mask": ("raw", Ints(seen, "library")), "softcap": 2.0, "scale": 4.0})
    gradient = np.full((LENGTH, 4), 4.0)
    found = gradients(library, call, gradient)
    keep_bounds(library, call, found, gradient, "float64")
    {"k": k, "v": v}[where][~seen] = np.asarray([1.0, -1.0, 1.0, 1.0]) * 1.7e308
    got = gradients(library, call, gradient)
    for part, x in found.items():
        np.testing.assert_array_equal(got[part], x, err_msg=part)
    assert not left


@pytest.mark.parametrize("where", ["q", "k", "v", "gradient"])
def test_visible_data_that_are_not_finite_are_those_of_the_dense_path(
    tile: Any, library: Library, left: list[Any], where: str
) -> None:
    """A NaN that is visible breaks the elements that it breaks on the dense path, a value none, and no others."""
    rng = np.random.default_rng(5)
    data = {name: rng.standard_normal((LENGTH, 3)) for name in ("q", "k", "v", "gradient")}
    data[where][1, 1] = np.nan
    call = Call.of([data[name] for name in "qkv"], {"causal": True})
    dense, found = (gradients(library, call, data["gradient"], path=path) for path in ("dense", "tiled"))
    for part, x in dense.items():
        np.testing.assert_allclose(found[part], x, rtol=1e-12, atol=1e-12, err_msg=part)
    assert bool(left) == (where != "v")


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, left: list[Any]) -> None:
    """One, two and seven threads give the same bits, whether heads or rows are shared out among them."""
    monkeypatch.setattr(numpy_tiles, "SOLO", 0)
    rng = np.random.default_rng(6)
    for heads, kv_heads in ((6, 3), (1, 1)):
        q, k, v, gradient = (
            rng.standard_normal((2, h, 1100, 8)).astype(np.float32) for h in (heads, kv_heads, kv_heads, heads)
        )
        options: dict[str, Any] = {"causal": True, "bias": rng.standard_normal(1100).astype(np.float32)}
        results = []
        for threads in (1, 2, 7):
            monkeypatch.setattr(workers, "count", lambda threads=threads: threads)
            found = refattn.attention_vjp(q, k, v, gradient, **options, path="tiled")
            results.append([x.tobytes() for x in (found.q, found.k, found.v, found.bias)])
        assert results[0] == results[1] == results[2]
    assert not left


def test_many_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from several threads at once give what each gives alone."""
    for least in ("QUICK", "SOLO"):
        monkeypatch.setattr(numpy_tiles, least, 0)
    rng = np.random.default_rng(7)
    q, k, v, gradient = (rng.standard_normal((12, 2, 300, 16)) for _ in range(4))

    def one(i: int) -> list[bytes]:
        found = refattn.attention_vjp(q[i], k[i], v[i], gradient[i], causal=True, path="tiled")
        return [x.tobytes() for x in (found.q, found.k, found.v)]

    alone = [one(i) for i in range(len(q))]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(len(q)))) == alone


def test_what_is_broadcast_is_summed(tile: Any, library: Library, left: list[Any]) -> None:
    """Keys and values that all entries share, and a query that all entries share, get the sums over the entries."""
    rng = np.random.default_rng(8)
    for shapes in (((3, 4, 5, 2), (1, 2, 5, 2), (1, 2, 5, 3)), ((1, 4, 5, 2), (3, 2, 5, 2), (1, 2, 5, 3))):
        call = Call.of([rng.standard_normal(shape) for shape in shapes], {"causal": True})
        gradient = output_gradient(call, 1)
        keep_bounds(library, call, gradients(library, call, gradient), gradient, "float64")
    assert not left


@pytest.mark.parametrize("length", [64, 65])
def test_heads_of_few_pairs_are_left_to_others(library: Library, left: list[Any], length: int) -> None:
    """Jobs are for heads that are worth them."""
    rng = np.random.default_rng(9)
    call = Call.of([rng.standard_normal((3, length, 2)) for _ in range(3)], {})
    gradient = output_gradient(call, 1)
    keep_bounds(library, call, gradients(library, call, gradient), gradient, "float64")
    assert bool(left) == (length == 64)


def test_zero_sizes(library: Library) -> None:
    """Where there is no query, key or width, gradients have the shapes of the arguments and are 0."""
    for shapes in (
        ((4, 3, 2), (2, 0, 2), (2, 0, 5)),
        ((4, 0, 2), (2, 3, 2), (2, 3, 5)),
        ((4, 3, 0), (2, 3, 0), (2, 3, 0)),
    ):
        call = Call.of([np.ones(shape) for shape in shapes], {})
        found = gradients(library, call, output_gradient(call, 0))
        assert [x.shape for x in found.values()] == list(shapes)
        assert not any(x.any() for x in found.values())


@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_the_length(masked: bool) -> None:
    """Beyond arguments and results a call takes a few tiles and arrays of the results' size, nothing of the pairs'."""
    beyond = []
    for length in (2048, 8192):
        q = np.random.default_rng(9).standard_normal((1, length, 8)).astype(np.float32)
        mask = refattn.masks.window(600, 0) & ~refattn.masks.prefix(5) if masked else None
        refattn.attention_vjp(q[:, :999], q[:, :999], q[:, :999], q[:, :999], path="tiled")  # scratch that is kept
        tracemalloc.start()
        found = refattn.attention_vjp(q, q, q, q, mask=mask, path="tiled")
        beyond.append(tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in (found.q, found.k, found.v)))
        tracemalloc.stop()
    assert beyond[1] < 16 * 2**20 < length * length
    assert beyond[1] < 4.5 * max(beyond[0], 2**20)


BEYOND: dict[str, dict[str, Any]] = {
    "an infinite query under a soft cap": {"q": np.inf, "softcap": 2.0},
    "an infinite query beside sinks": {"q": np.inf, "sinks": np.asarray([0.5, -1.0])},
    "a query that overflows once scaled": {"q": 1e303, "k": 1e-303, "scale": 1e6},
    "a query that is subnormal once scaled": {"q": 5e-324, "scale": 0.3},
}


@pytest.mark.parametrize("name", BEYOND)
def test_queries_at_the_ends_of_the_range(library: Library, tile: Any, left: list[Any], name: str) -> None:
    """Where queries times the scale are infinite or lose bits, gradients are the dense ones all the same."""
    options, rng = dict(BEYOND[name]), np.random.default_rng(7)
    q, gradient = rng.standard_normal((2, 6, 1)), rng.standard_normal((2, 6, 3)) * 1e200
    k, v = -rng.uniform(0.5, 2.0, (2, 6, 1)) * options.pop("k", 1.0), rng.standard_normal((2, 6, 3))
    q[:, 2] = options.pop("q")
    dense, tiled = (refattn.attention_vjp(q, k, v, gradient, **options, path=path) for path in ("dense", "tiled"))
    assert left
    for part in ("q", "k", "v", *(["sinks"] if "sinks" in options else [])):
        x = getattr(dense, part)
        assert np.isfinite(x).all()
        np.testing.assert_allclose(getattr(tiled, part), x, rtol=1e-10, atol=1e-13 * np.max(np.abs(x)), err_msg=part)
    if "subnormal" in name:  # what reaches the keys is that row's own small number
        row = np.s_[:, 2:3]
        of_row = [refattn.attention_vjp(q[row], k, v, gradient[row], **options, path=p).k for p in ("dense", "tiled")]
        np.testing.assert_allclose(of_row[1], of_row[0], rtol=1e-10)
        assert of_row[0].all()
