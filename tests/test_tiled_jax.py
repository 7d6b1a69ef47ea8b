"""The tiled path on JAX: loops over tiles that trace, with every option, and derivatives that store no tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn
from libraries import Library
from refattn import biases, masks

pytestmark = pytest.mark.library("jax")

generator = np.random.default_rng(4)
SHAPES = ((2, 4, 8, 6), (2, 2, 9, 6), (2, 2, 9, 5))
HEADS, Q_LEN, K_LEN = 4, 8, 9


def options_of(library: Library, name: str) -> dict[str, Any]:
    """One of a few calls that between them use every kind of option."""

    def floats(*shape: int) -> Any:
        return library.array(generator.standard_normal(shape))

    if name == "positions":
        start, count = library.array(np.asarray([1, 3])), library.array(np.asarray([3, 8]))
        return {"causal": True, "q_start": start, "k_start": -1, "mask": masks.lengths(count) | masks.chunks(3)}
    if name == "arrays":
        keep = masks.padding(library.array(generator.random((2, K_LEN)) > 0.3))
        documents = masks.documents(library.array(np.arange(Q_LEN) // 4), np.arange(K_LEN)[None] // 5)
        return {"mask": keep & documents, "bias": floats(HEADS, 1, K_LEN)}
    if name == "scores":
        bias = biases.alibi(HEADS) + biases.relative(floats(HEADS, 5)) + floats(Q_LEN, K_LEN)
        return {"bias": bias, "scale": -0.5, "softcap": 3.0, "sinks": floats(HEADS), "q_start": 2}
    shown = masks.dense(library.array(generator.random((HEADS, Q_LEN, K_LEN)) > 0.5))
    return {"mask": shown | masks.blocks(generator.random((3, 3)) > 0.5, 3)}


@pytest.fixture(params=[(3, 4)])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few rows and keys, by default so that short calls have whole and ragged ones."""
    from refattn import registry
    from refattn_backends.jax_backward import tiled_vjp
    from refattn_backends.jax_tiles import tiled

    sizes = request.param
    monkeypatch.setitem(registry._FOUND["tiled"], "jax", lambda call: tiled(call, *sizes))
    monkeypatch.setitem(registry._FOUND["tiled_vjp"], "jax", lambda call, gradient: tiled_vjp(call, gradient, *sizes))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["positions", "arrays", "dense"])
def test_results_are_the_dense_ones(library: Library, name: str) -> None:
    """Output and log-sum-exp under jit agree with the specification's."""
    import jax

    inputs = [library.array(generator.standard_normal(shape)) for shape in SHAPES]
    options = options_of(library, name)
    expected = refattn.attention_with_lse(*inputs, **options)
    tiled = jax.jit(lambda *x: refattn.attention_with_lse(*x, path="tiled", **options))(*inputs)
    for dense, actual in zip(expected, tiled, strict=True):
        np.testing.assert_allclose(actual, dense, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("small_tiles", [(4, 3)], indirect=True, ids=["4x3"])  # none of them ragged, to compile less
def test_derivatives_are_the_dense_ones(library: Library) -> None:
    """Derivatives of output and log-sum-exp by q, k and v agree with the specification's."""
    import jax

    inputs = [library.array(generator.standard_normal(shape)) for shape in SHAPES]
    options, weigh = options_of(library, "scores"), generator.standard_normal((2, HEADS, Q_LEN, 5))

    def weighed(path: str, *x: Any) -> Any:
        output, lse = refattn.attention_with_lse(*x, path=path, **options)
        return (output * weigh).sum() + (lse**2).sum()

    gradients = jax.jit(jax.grad(weighed, (1, 2, 3)), static_argnums=0)
    for expected, actual in zip(gradients("dense", *inputs), gradients("tiled", *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("small_tiles")
def test_gradients_are_the_dense_ones(library: Library) -> None:
    """attention_vjp(path="tiled") under jit gives NumPy's gradients by every argument, whatever hidden keys hold."""
    import jax

    drawn = [generator.standard_normal(shape) for shape in (*SHAPES, (2, HEADS, Q_LEN, 5))]
    _, k, v, gradient = drawn
    k[1, :, 8], v[1, :, 8], gradient[0, 1, 2, 3] = np.nan, np.inf, np.nan  # a hidden key, and a row of NaN
    start, count = np.asarray([1, 3]), np.asarray([3, 8])
    table, array, sinks = (generator.standard_normal(shape) for shape in ((HEADS, 5), (Q_LEN, 1), (HEADS,)))

    def call(make: Any, *arrays: Any) -> Any:
        mask = masks.lengths(make(count)) | masks.chunks(3) & masks.prefix(7)
        bias = biases.alibi(HEADS) + biases.relative(make(table)) + make(array)
        options = {"mask": mask, "bias": bias, "sinks": make(sinks), "q_start": make(start), "softcap": 3.0}
        path = "dense" if make is np.asarray else "tiled"
        return refattn.attention_vjp(*arrays, **options, causal=True, k_start=-1, path=path)

    expected = call(np.asarray, *drawn)
    found = jax.jit(lambda *x: call(library.array, *x))(*map(library.array, drawn))
    for dense, tiled in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(tiled, dense, rtol=1e-11, atol=1e-11)
    assert np.isnan(expected.k[0]).any()
    assert not np.isnan(expected.k[1]).any()


@pytest.mark.usefixtures("small_tiles")
def test_logits_of_minus_infinity(library: Library) -> None:
    """Tiles whose logits are all -inf harm a row only if it sees nothing else, and has no finite sink either."""
    q, v = np.full((2, 6, 1), 1e200), np.random.default_rng(1).standard_normal((2, 9, 3))
    k = np.where(np.arange(9)[:, None] < 8, -1e200, [[[1e-200]], [[-1e200]]])
    for sinks in (None, np.asarray([-np.inf, 1.0])):
        expected = refattn.attention_with_lse(q, k, v, sinks=sinks)
        given = None if sinks is None else library.array(sinks)
        found = refattn.attention_with_lse(*map(library.array, (q, k, v)), sinks=given, path="tiled")
        for dense, tiled in zip(expected, found, strict=True):
            np.testing.assert_allclose(tiled, dense, rtol=1e-11, atol=1e-11)
        assert np.isnan(expected[1][1]).all() == (sinks is None)


@pytest.mark.usefixtures("small_tiles")
def test_hidden_poison_under_vmap(library: Library) -> None:
    """Mapped over entries and eagerly, hidden keys influence nothing and visible ones do, as on the dense path."""
    import jax

    q, k, v = (generator.standard_normal(shape) for shape in SHAPES)
    k[:, :, -1], v[:, :, 2] = np.nan, np.inf

    def call(*x: Any, path: str = "tiled") -> Any:
        return refattn.attention_with_lse(*x, causal=True, q_start=0, path=path)

    mapped = jax.vmap(call)(*(library.array(x) for x in (q, k, v)))
    for expected, actual in zip(call(q, k, v, path="dense"), mapped, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("derivative", ["none", "grad", "vjp"])
def test_memory_is_not_that_of_all_pairs(library: Library, derivative: str) -> None:
    """Compiled for a long call, output and gradients need a sixteenth of the memory of all scores."""
    import jax

    def call(x: Any) -> Any:
        return refattn.attention(x, x, x, causal=True, path="tiled").sum()

    def closed(x: Any) -> Any:
        return refattn.attention_vjp(x, x, x, x, causal=True, path="tiled")

    function, length = {"none": call, "grad": jax.grad(call), "vjp": closed}[derivative], 16384
    shape = jax.ShapeDtypeStruct((1, length, 8), "float32")
    scratch = jax.jit(function).lower(shape).compile().memory_analysis().temp_size_in_bytes
    assert scratch < 4 * length**2 // 16
