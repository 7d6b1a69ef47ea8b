"""The same lines trace: jax.jit, vmap, grad, torch.compile, torch.export, lazy Dask, meta tensors."""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oracle
import refattn
from drawn_calls import Call, Floats, Ints
from libraries import Library

BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, D_K, D_V = 2, 4, 2, 4, 4, 3, 2


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Reproducible normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def arrays(library: Library, dtype: str = "float64") -> list[Any]:
    """q, k, v of one grouped call."""
    shapes = ((HEADS, Q_LEN, D_K), (KV_HEADS, K_LEN, D_K), (KV_HEADS, K_LEN, D_V))
    return [library.array(draw(BATCH, *shape), dtype) for shape in shapes]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_start": 0},
    "decode": {"causal": True, "q_start": Ints(np.asarray([1, 3]), "library"), "k_start": -1},
    "masks": {
        "mask": (
            "or",
            ("and", ("window", 1, 0), ("lengths", Ints(np.asarray([2, 4]), "library"))),
            ("not", ("or", ("chunks", 2), ("prefix", 1))),
        )
    },
    "arrays": {
        "mask": ("and", ("padding", Ints(draw(BATCH, K_LEN) > -1, "library")),
                 ("documents", Ints(np.asarray([[0, 0, 1, 1]]), "library"))),
        "bias": [("array", Floats(draw(HEADS, 1, K_LEN), "float32"))],
    },
    "scores": {
        "bias": [("alibi", HEADS), ("relative", Floats(draw(HEADS, 5), None))],
        "scale": -0.5, "softcap": 3.0, "sinks": Floats(draw(HEADS), None), "q_start": 2,
    },
    "dense": {"mask": ("raw", Ints(draw(HEADS, Q_LEN, K_LEN) > 0, "library"))},
    "blocks": {"mask": ("blocks", Ints(draw(HEADS, 2, 2) > 0, "library"), 2)},
}  # fmt: skip


def example(library: Library, name: str) -> tuple[list[Any], dict[str, Any], oracle.Result]:
    """Arrays, options and the oracle's answer."""
    call = Call.of([library.host(x) for x in arrays(library)], OPTIONS[name])
    inputs, options = call.arguments(library, "float64")
    return inputs, options, call.expected("float64")


def assert_agrees(library: Library, actual: Any, expected: oracle.Result) -> None:
    """(output, lse) within the float64 tolerance of the specification."""
    output, lse = actual
    np.testing.assert_allclose(library.host(output), expected.output, rtol=0, atol=4e-12)
    np.testing.assert_allclose(library.host(lse), expected.lse, rtol=1e-12, atol=1e-12)


def calling(options: dict[str, Any]) -> Callable[..., Any]:
    """The function of q, k, v that a tracer sees."""
    return lambda q, k, v: refattn.attention_with_lse(q, k, v, **options)


# ---- JAX --------------------------------------------------------------------------------------------------


@pytest.mark.library("jax")
@pytest.mark.parametrize("name", OPTIONS)
def test_jit(library: Library, name: str) -> None:
    """Every kind of option traces under jax.jit and agrees with the oracle."""
    import jax

    inputs, options, expected = example(library, name)
    assert_agrees(library, jax.jit(calling(options))(*inputs), expected)


@pytest.mark.library("jax")
@pytest.mark.parametrize("shape", [(), (BATCH,)])
def test_jit_with_traced_options(library: Library, shape: tuple[int, ...]) -> None:
    """Starts, lengths, scale, bias, sinks and a boolean mask may be traced themselves."""
    import jax

    start, count = np.full(shape, 3), np.full(shape, 2)
    shown, bias, sinks = draw(Q_LEN, K_LEN) > -0.5, draw(Q_LEN, K_LEN, seed=1), draw(HEADS)

    def traced(q: Any, k: Any, v: Any, start: Any, count: Any, scale: Any, shown: Any, bias: Any, sinks: Any) -> Any:
        mask = refattn.masks.dense(shown) & (refattn.masks.lengths(count) | refattn.masks.window(1, None))
        return refattn.attention_with_lse(
            q,
            k,
            v,
            causal=True,
            mask=mask,
            bias=bias,
            scale=scale,
            sinks=sinks,
            q_start=start,
            k_start=start - 2,
        )

    inputs = arrays(library)
    traced_too = [library.array(x) for x in (start, count, np.asarray(0.7), shown, bias, sinks)]
    rule = oracle.dense(shown) & (oracle.lengths(count) | oracle.window(1, None))
    expected = oracle.attention(
        *map(library.host, inputs), causal_too=True, mask=rule, bias=oracle.array_bias(bias), scale=0.7,
        sinks=sinks, q_start=start, k_start=start - 2,
    )  # fmt: skip
    assert_agrees(library, jax.jit(traced)(*inputs, *traced_too), expected)


def mapping(library: Library, function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """The library's own vmap of `function` over these axes of its arguments."""
    if library.name == "jax":
        import jax

        mapped: Callable[..., Any] = jax.vmap(function, in_axes=axes)
    else:
        import torch

        mapped = torch.func.vmap(function, in_dims=axes)
    return mapped


@pytest.mark.library("jax", "torch")
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (2, None, 0), (None, 1, 3)])
def test_vmap(library: Library, axes: tuple[int | None, ...]) -> None:
    """Mapping over an axis of any of q, k, v gives what a batch axis gives."""

    def one(q: Any, k: Any, v: Any) -> Any:
        mask = refattn.masks.window(2, 0) | refattn.masks.lengths(1)
        return refattn.attention_with_lse(q, k, v, mask=mask, q_start=1)

    # An argument that is not mapped is one entry, and so an entry that the whole batch shares.
    hosts = [library.host(x)[: 1 if axis is None else BATCH] for x, axis in zip(arrays(library), axes, strict=True)]
    inputs = [
        library.array(x[0] if axis is None else np.moveaxis(x, 0, axis)) for x, axis in zip(hosts, axes, strict=True)
    ]
    rule = oracle.window(2, 0) | oracle.lengths(1)
    expected = oracle.attention(*hosts, mask=rule, q_start=1)
    assert_agrees(library, mapping(library, one, axes)(*inputs), expected)


@pytest.mark.library("jax", "torch")
def test_vmap_over_starts(library: Library) -> None:
    """Each mapped example may have a start of its own."""
    inputs = arrays(library)
    starts = library.array(np.asarray([1, 3]))

    def one(q: Any, k: Any, v: Any, start: Any) -> Any:
        return refattn.attention_with_lse(q, k, v, causal=True, q_start=start)

    expected = oracle.attention(*map(library.host, inputs), causal_too=True, q_start=[1, 3])
    assert_agrees(library, mapping(library, one, (0, 0, 0, 0))(*inputs, starts), expected)


# ---- derivatives by the library's own autodiff ------------------------------------------------------------


def gradients(library: Library, inputs: list[Any], options: dict[str, Any]) -> list[np.ndarray]:
    """d sum(output * fixed numbers) by q, k and v."""
    weigh = library.array(draw(BATCH, HEADS, Q_LEN, D_V, seed=3), "float64")

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (refattn.attention(q, k, v, **options) * weigh).sum()

    if library.name == "jax":
        import jax

        return [library.host(x) for x in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    return [library.host(x.grad) for x in leaves]


GRADIENT_OPTIONS: dict[str, dict[str, Any]] = {
    "half the keys": {"mask": ("prefix", 2)},
    "softcap": {"mask": ("prefix", 2), "softcap": 2.0},
    "sinks": {"mask": ("prefix", 2), "sinks": Floats(draw(HEADS), None)},
    "empty rows": {"mask": ("and", ("causal",), ("prefix", 2)), "q_start": -2},
    "minus infinity bias": {"bias": [("array", Floats(np.asarray([0.0, 1.0, -np.inf, -np.inf]), None))]},
    "nothing": {"mask": ("lengths", 0)},
}


@pytest.mark.library("jax", "torch")
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e308], ids=["nan", "inf", "1e308"])
@pytest.mark.parametrize("name", GRADIENT_OPTIONS)
def test_gradients_never_see_invisible_poison(library: Library, name: str, poison: float) -> None:
    """Autodiff gives the same finite gradients whatever invisible keys hold, and zeros for those keys."""
    hosts = [library.host(x) for x in arrays(library)]
    poisoned = [x.copy() for x in hosts]
    poisoned[0] = hosts[0] = np.abs(hosts[0]) + 10
    poisoned[1][..., 2:, :] = poison * np.asarray([1, -1, 1])
    poisoned[2][..., 2:, :] = poison
    grads = []
    for q, k, v in (hosts, poisoned):
        inputs, options = Call(q, k, v, GRADIENT_OPTIONS[name]).arguments(library, "float64")
        grads.append(gradients(library, inputs, options))
    for clean, got in zip(*grads, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_allclose(got, clean, rtol=1e-12, atol=1e-12)
    assert not grads[1][1][..., 2:, :].any()
    assert not grads[1][2][..., 2:, :].any()
    if name == "nothing":
        assert not any(x.any() for x in grads[1])


@pytest.mark.library("jax", "torch")
@pytest.mark.parametrize("name", ["causal", "masks", "scores"])
def test_gradients_are_the_derivative(library: Library, name: str) -> None:
    """The slope of the oracle's output along a random direction, by central differences, is theirs."""
    inputs, options, _ = example(library, name)
    hosts = [library.host(x) for x in inputs]
    got = gradients(library, inputs, options)
    directions = [draw(*x.shape, seed=9) for x in hosts]
    step, weigh = 1e-5, draw(BATCH, HEADS, Q_LEN, D_V, seed=3)
    ahead, behind = (
        Call.of([x + move * d for x, d in zip(hosts, directions, strict=True)], OPTIONS[name]) for move in (step, -step)
    )
    difference = ahead.expected("float64").output - behind.expected("float64").output
    slope = (difference * weigh).sum() / (2 * step)
    # Rounding: 1e-16 / step; truncation: step squared.
    assert sum((g * d).sum() for g, d in zip(got, directions, strict=True)) == pytest.approx(slope, abs=1e-7)


# ---- PyTorch ----------------------------------------------------------------------------------------------


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_compile(library: Library, name: str) -> None:
    """Every kind of option compiles into one graph and agrees with the oracle."""
    import torch

    inputs, options, expected = example(library, name)
    torch.compiler.reset()
    compiled = torch.compile(calling(options), fullgraph=True, backend="eager")
    assert_agrees(library, compiled(*inputs), expected)


@pytest.mark.library("torch")
def test_torch_compile_with_tensor_options(library: Library) -> None:
    """Starts and lengths that are tensors compile in the same graph."""
    import torch

    def call(q: Any, k: Any, v: Any, start: Any, count: Any) -> Any:
        return refattn.attention_with_lse(q, k, v, causal=True, mask=refattn.masks.lengths(count), q_start=start)

    inputs, start, count = arrays(library), np.asarray([1, 3]), np.asarray([3, 2])
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    expected = oracle.attention(*map(library.host, inputs), causal_too=True, mask=oracle.lengths(count), q_start=start)
    assert_agrees(library, compiled(*inputs, library.array(start), library.array(count)), expected)


# Loading inductor uses a part of torch that torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.library("torch")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_with_gradients(library: Library, backend: str) -> None:
    """Forward and backward through an ahead-of-time graph and generated code agree with eager ones."""
    import torch

    if backend == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch's inductor needs a C++ compiler: install g++")
    inputs, options, expected = example(library, "scores")
    torch.compiler.reset()
    compiled = torch.compile(calling(options), fullgraph=True, backend=backend)
    leaves = [x.clone().requires_grad_() for x in inputs]
    output, lse = compiled(*leaves)
    assert_agrees(library, (output, lse), expected)
    (output * library.array(draw(BATCH, HEADS, Q_LEN, D_V, seed=3))).sum().backward()
    for leaf, eager in zip(leaves, gradients(library, inputs, options), strict=True):
        np.testing.assert_allclose(library.host(leaf.grad), eager, rtol=1e-10, atol=1e-12)


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", ["plain", "masks", "scores"])
def test_torch_export(library: Library, name: str) -> None:
    """torch.export gives a program that still agrees with the oracle."""
    import torch

    inputs, options, expected = example(library, name)

    class Attention(torch.nn.Module):  # type: ignore[misc]
        """What export wants to see."""

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return calling(options)(q, k, v)

    program = torch.export.export(Attention(), tuple(inputs))
    assert_agrees(library, program.module()(*inputs), expected)


@pytest.mark.library("torch")
def test_torch_export_leaves_the_batch_open(library: Library) -> None:
    """An exported program serves batches of other sizes."""
    import torch

    class Attention(torch.nn.Module):  # type: ignore[misc]
        """What export wants to see."""

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return refattn.attention_with_lse(q, k, v, causal=True)

    batch = {0: torch.export.Dim("batch", min=2, max=16)}
    program = torch.export.export(Attention(), tuple(arrays(library)), dynamic_shapes=(batch, batch, batch))
    longer = [library.array(draw(5, *x.shape[1:])) for x in arrays(library)]
    expected = oracle.attention(*map(library.host, longer), causal_too=True)
    assert_agrees(library, program.module()(*longer), expected)


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_meta_tensors_are_never_read(library: Library, name: str) -> None:
    """Tensors without data give results without data, of the right shape and dtype."""
    import torch

    call = Call.of([library.host(x) for x in arrays(library)], OPTIONS[name])
    with torch.device("meta"):
        meta = Library(library.name, library.xp, library.mutable, meta_array, library.read)
        inputs, options = call.arguments(meta, "float32")
        output, lse = refattn.attention_with_lse(*inputs, **options)
    assert output.device.type == lse.device.type == "meta"
    assert output.shape == (BATCH, HEADS, Q_LEN, D_V)
    assert lse.shape == (BATCH, HEADS, Q_LEN)
    assert output.dtype == torch.float32


def meta_array(host: np.ndarray, dtype: str | None) -> Any:
    """A tensor without data."""
    import torch

    return torch.empty(host.shape, dtype=getattr(torch, dtype or str(host.dtype)), device="meta")


# ---- Dask -------------------------------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> None:
    """A scheduler that computes nothing."""
    pytest.fail("the call computed a Dask graph")


@pytest.mark.library("dask")
@pytest.mark.parametrize("name", OPTIONS)
def test_dask_stays_lazy(library: Library, name: str) -> None:
    """The call builds a graph and computes nothing; the graph's result agrees with the oracle."""
    import dask

    inputs, options, expected = example(library, name)
    with dask.config.set(scheduler=refuse):
        results = refattn.attention_with_lse(*inputs, **options)
    assert all(hasattr(x, "dask") for x in results)
    assert_agrees(library, results, expected)
