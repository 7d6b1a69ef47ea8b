"""Golden values and error bounds: independent of the pipeline, right, and neither too tight nor too loose."""

from __future__ import annotations

import ast
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
import planted_faults
from libraries import Library
from refattn import biases, bounds, errors, golden_gradients, goldens, masks, on_host
from refattn.arrays import Array
from refattn.conformance.judge import error_over_bound
from refattn.conformance.plain import rounded
from refattn.goldens import golden, golden_visible

DTYPES = ("bfloat16", "float16", "float32", "float64")


def draw(seed: int, dtype: str = "float64", q_len: int = 5, k_len: int = 7, **sizes: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    heads, kv_heads, d_k, d_v = (sizes.get(n, d) for n, d in (("heads", 4), ("kv_heads", 2), ("d_k", 8), ("d_v", 5)))
    shapes = {"q": (2, heads, q_len, d_k), "k": (2, kv_heads, k_len, d_k), "v": (2, kv_heads, k_len, d_v)}
    return {name: rounded(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def combinations() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Options of golden() and the same options of the oracle."""
    rng = np.random.default_rng(5)
    array, table = rng.standard_normal((4, 5, 7)), rng.standard_normal((4, 5))
    keep, counts, starts = rng.random((2, 7)) < 0.6, np.asarray([3, 6]), np.asarray([2, -1])
    dense = rng.random((2, 1, 5, 7)) < 0.5
    yield {}, {}
    yield {"causal": True, "q_start": 2}, {"causal_too": True, "q_start": 2}
    yield {"causal": True, "q_start": starts, "k_start": -1}, {"causal_too": True, "q_start": starts, "k_start": -1}
    yield {"mask": masks.window(2, 1), "q_start": 1}, {"mask": oracle.window(2, 1), "q_start": 1}
    yield {"mask": masks.lengths(counts) & masks.prefix(5)}, {"mask": oracle.lengths(counts) & oracle.prefix(5)}
    yield {"mask": ~masks.padding(keep)}, {"mask": ~oracle.padding(keep)}
    yield {"mask": dense, "causal": True, "q_start": 2}, {"mask": oracle.dense(dense), "causal_too": True, "q_start": 2}
    yield (
        {"bias": array, "softcap": 2.0, "scale": -0.5},
        {"bias": oracle.array_bias(array), "softcap": 2.0, "scale": -0.5},
    )
    both = (
        {"bias": biases.alibi(4) + array, "q_start": 1},
        {"bias": oracle.sum_of(oracle.alibi(4), oracle.array_bias(array))},
    )
    yield both[0], {**both[1], "q_start": 1}
    relative = {"bias": biases.relative(table), "q_start": starts}, {"bias": oracle.relative(table), "q_start": starts}
    yield relative
    sinks = np.asarray([0.5, -np.inf, np.nan, 3.0])
    yield {"sinks": sinks, "mask": masks.prefix(0)}, {"sinks": sinks, "mask": oracle.prefix(0)}


@pytest.mark.parametrize("options", list(combinations()), ids=lambda pair: "-".join(pair[0]) or "plain")
def test_golden_is_the_oracle(options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Output, weights and log-sum-exp are those of pure-Python loops, whatever the options."""
    data = draw(1)
    ours, theirs = golden(**data, weights=True, **options[0]), oracle.attention(**data, **options[1])
    np.testing.assert_allclose(ours.output, theirs.output, rtol=1e-13, atol=1e-14)
    # In a row that is NaN, hidden pairs hold what one likes.
    judgeable = theirs.visible | ~np.isnan(theirs.lse)[..., None]
    np.testing.assert_allclose(ours.weights[judgeable], theirs.weights[judgeable], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(ours.lse, theirs.lse, rtol=1e-13, atol=1e-14)


def test_non_finite_data_as_the_oracle_has_them() -> None:
    """NaN and infinities in q, k and v, visible and not, give what the rules say, to the NaN."""
    data, seen = draw(2), np.tril(np.ones((5, 7), dtype=bool), 1)
    data["q"][0, 1, 2, 3] = np.nan
    data["k"][0, 0, 4, 1], data["k"][1, 1, 6, 0] = np.inf, np.nan
    data["v"][1, 0, 1, 0], data["v"][1, 0, 3, 0], data["v"][0, 1, 5, 2] = np.inf, -np.inf, np.nan
    ours = golden_visible(**data, visible=seen, weights=True)
    theirs = oracle.attention(**data, mask=oracle.dense(seen))
    np.testing.assert_allclose(ours.output, theirs.output, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(ours.lse, theirs.lse, rtol=1e-13, atol=1e-14)
    assert np.all(np.isfinite(ours.bound("float32")))


def test_golden_shares_nothing_with_what_it_judges() -> None:
    """The modules that golden values come from import neither the pipeline nor its softmax."""
    for module in (goldens, golden_gradients, on_host, bounds):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {part for node in found for part in (node.module or "").split(".")}
        imported |= {alias.name for node in found for alias in node.names}
        assert "bounds" in imported or module in (on_host, bounds)
        assert not imported & {"pipeline", "softmax", "layer", "heads", "attention", "attention_stages"}


def test_rows_keep_their_positions() -> None:
    """rows= picks query rows, negative indices too, each with the value it has in the whole."""
    data = draw(3)
    whole = golden(**data, causal=True, q_start=1, weights=True)
    some = golden(**data, causal=True, q_start=1, weights=True, rows=[4, 0, -2])
    for name in ("output", "weights", "lse"):
        axis = -1 if name == "lse" else -2
        np.testing.assert_array_equal(getattr(some, name), np.take(getattr(whole, name), [4, 0, 3], axis=axis))
    np.testing.assert_array_equal(some.bound("float16"), whole.bound("float16")[..., [4, 0, 3], :])


def test_long_sequences_fit_into_memory() -> None:
    """At L = 8192 neither value nor bound of sampled rows makes an L x L array; all rows stay below 200 MB."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8192, 16)) for _ in range(3))
    tracemalloc.start()
    try:
        whole = golden(q, k, v, causal=True)
        some = golden(q, k, v, causal=True, rows=[0, 4000, 8191])
        bound = some.bound("float32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200e6
    np.testing.assert_allclose(whole.output[:, [0, 4000, 8191]], some.output, rtol=0, atol=1e-14)
    assert np.all((bound > 0) & (bound < 1e-3))


def test_rank_two_and_empty_sizes() -> None:
    """Rank 2 has no head axis; no keys, no width and no queries give zeros, means and nothing."""
    data = {name: x[0, 0] for name, x in draw(4).items()}
    flat = golden(**data, weights=True)
    assert (flat.output.shape, flat.lse.shape) == ((5, 5), (5,))
    assert flat.bound("float32").shape == (5, 5)
    none = golden(data["q"], data["k"][:0], data["v"][:0])
    assert np.all(none.output == 0)
    assert np.all(np.isneginf(none.lse))
    assert np.all(none.bound("float32") == 0)
    narrow = golden(data["q"][:, :0], data["k"][:, :0], data["v"])
    np.testing.assert_allclose(narrow.output, np.broadcast_to(np.mean(data["v"], axis=0), (5, 5)), rtol=1e-14)
    assert golden(data["q"][:0], data["k"], data["v"]).output.shape == (0, 5)


def test_the_same_arguments_are_refused() -> None:
    """golden checks its arguments where attention does."""
    data = draw(5)
    with pytest.raises(errors.PositionError):
        golden(**data, causal=True)
    with pytest.raises(errors.MaskShapeError):
        golden(**data, mask=np.ones((3, 3), dtype=bool))


def test_any_library_exactly(library: Library) -> None:
    """Arrays of any library and dtype are taken exactly, masks and biases of theirs too."""
    for dtype in library.dtypes:
        data = draw(6, dtype)
        keep = np.asarray([[True] * 6 + [False], [True, False] * 3 + [True]])
        bias = rounded(np.random.default_rng(0).standard_normal((5, 7)), dtype)
        ours = {name: library.array(x, dtype) for name, x in data.items()}
        mask = masks.padding(library.array(keep))
        got = golden(**ours, mask=mask, bias=library.array(bias, dtype))
        wanted = golden_visible(**data, visible=keep[:, None, None, :], bias=bias)
        np.testing.assert_array_equal(got.output, wanted.output)


def judged(result: tuple[Array, Array], exact: goldens.Golden, dtype: str, model: str, coherent: bool = False) -> float:
    output, lse = (x.astype(np.float64) for x in result)
    ratios = (
        error_over_bound(output, exact.output, exact.bound(dtype, model, coherent)),
        error_over_bound(lse, exact.lse, exact.lse_bound(dtype, model, coherent)),
    )
    return max(ratios)


def options_of(rng: np.random.Generator, dtype: str) -> dict[str, Any]:
    return {
        "bias": rounded(rng.standard_normal((5, 7)), dtype),
        "softcap": 4.0,
        "sinks": rounded(rng.standard_normal(4), dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_computations_keep_the_bound(dtype: str) -> None:
    """Plain computations, scores stored wide or low, stay within the bound of their model for many inputs."""
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes").bfloat16
    kind = bfloat16 if dtype == "bfloat16" else dtype
    worst = {"fused": 0.0, "unfused": 0.0}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        data = {name: rounded(x * [0.5, 1.0, 2.0][seed % 3], dtype) for name, x in draw(seed, dtype).items()}
        options = options_of(rng, dtype) if seed % 2 else {}
        exact = golden_visible(**data, visible=np.ones((1, 1), dtype=bool), **options)
        arrays = [x.astype(kind) for x in data.values()]
        narrow = {name: x.astype(kind) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        for model in worst:
            run = planted_faults.correct_unfused if model == "unfused" else planted_faults.correct
            worst[model] = max(worst[model], judged(run(*arrays, **narrow), exact, dtype, model))
    assert worst["fused"] <= 1
    assert worst["unfused"] <= 1
    # A bound that is never approached would not be worth much.
    assert max(worst.values()) > {"float32": 0.05, "float64": 0.02}.get(dtype, 0.3)


def test_a_stored_softmax_exceeds_the_fused_bound() -> None:
    """In bfloat16 scores that are stored low are told from scores kept wide."""
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes").bfloat16
    data = {name: rounded(2 * x, "bfloat16") for name, x in draw(7, "bfloat16").items()}
    exact = golden_visible(**data, visible=np.ones((1, 1), dtype=bool))
    result = planted_faults.correct_unfused(*(x.astype(bfloat16) for x in data.values()))
    assert judged(result, exact, "bfloat16", "fused") > 1
    assert judged(result, exact, "bfloat16", "unfused") <= 1


def test_a_small_error_of_the_scale_shows_in_float32() -> None:
    """A scale 0.1 % off is far beyond the bound in float32."""
    data = {name: rounded(2 * x, "float32") for name, x in draw(8, "float32").items()}
    exact = golden_visible(**data, visible=np.ones((1, 1), dtype=bool))
    arrays = [x.astype(np.float32) for x in data.values()]
    assert judged(planted_faults.correct(*arrays, scale=1.001 / np.sqrt(8)), exact, "float32", "fused") > 10


def test_coherent_data_need_the_worst_case() -> None:
    """A sequential float32 sum of equal terms exceeds 4 sqrt(n), but never n; the golden value says so."""
    v = np.full((1, 20000, 1), 1.575, dtype=np.float32)
    q, k = np.zeros((1, 1, 4), dtype=np.float32), np.zeros((1, 20000, 4), dtype=np.float32)
    total = np.cumsum(v[0, :, 0], dtype=np.float32)[-1] / np.float32(20000)  # one term after the other
    exact = golden_visible(q, k, v, np.ones((1, 1), dtype=bool))
    error = abs(float(total) - float(exact.output[0, 0, 0]))
    assert error > exact.bound("float32")[0, 0, 0]
    assert error <= exact.bound("float32", coherent=True)[0, 0, 0]


def test_not_judgeable_is_said() -> None:
    """Where rounding may move a logit by more than one, the bound is infinite, and a wrong result is not passed."""
    q, k, v = np.full((1, 1, 4), 64.0), np.full((1, 3, 4), 64.0), np.arange(3.0).reshape(1, 3, 1)
    k[0, 1] = 63.0
    exact = golden_visible(q, k, v, np.ones((1, 1), dtype=bool))
    assert np.all(np.isinf(exact.bound("bfloat16", "unfused")))
    assert np.all(np.isfinite(exact.bound("bfloat16", "fused")))
    assert np.isnan(error_over_bound(exact.output + 1, exact.output, exact.bound("bfloat16", "unfused")))


def test_weights_keep_their_bound() -> None:
    """Weights computed in float32 lie within their bound, and those at hidden pairs must be exactly 0."""
    data, seen = draw(9, "float32"), np.tril(np.ones((5, 7), dtype=bool))
    exact = golden_visible(**data, visible=seen, weights=True)
    q, k = (x.astype(np.float32) for x in (data["q"], np.repeat(data["k"], 2, axis=1)))
    scores = np.where(seen, q @ np.swapaxes(k, -1, -2) / np.sqrt(np.float32(8)), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    bound = exact.weights_bound("float32")
    assert error_over_bound(weights, exact.weights, bound) <= 1
    assert np.all(bound[..., ~seen] == 0)
    assert error_over_bound(np.where(seen, weights, 1e-30), exact.weights, bound) == np.inf


def test_errors_of_the_inputs_are_included() -> None:
    """With errors= the bound holds for every input within them, here at their corners."""
    data, rng = draw(10), np.random.default_rng(0)
    sizes = tuple(1e-3 * np.abs(x) for x in data.values())
    exact = golden_visible(**data, visible=np.ones((1, 1), dtype=bool), errors=sizes)
    worst = 0.0
    for _ in range(50):
        moved = [x + size * rng.choice([-1.0, 1.0], x.shape) for x, size in zip(data.values(), sizes, strict=True)]
        other = golden_visible(moved[0], moved[1], moved[2], np.ones((1, 1), dtype=bool))
        worst = max(worst, judged((other.output, other.lse), exact, "float64", "fused"))
    assert 0.05 < worst <= 1
