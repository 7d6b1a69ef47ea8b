"""The tiled path on PyTorch: when its fused kernels run, that derivatives flow through them, and that it compiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn
from libraries import Library
from refattn import masks

pytestmark = pytest.mark.library("torch")

CALLS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "triangle": {"causal": True, "q_start": 0},
    "triangle further right": {"causal": True, "q_start": 4},
    "first rows empty": {"causal": True, "q_start": -3},
    "all rows empty": {"causal": True, "q_start": -100},
    "decode": {"causal": True, "q_start": 100, "k_start": 20},
    "negative scale": {"causal": True, "q_start": 1, "scale": -0.7},
    "scale 0": {"causal": True, "q_start": 1, "scale": 0.0},
    "one mask for all": {"mask": masks.window(2, 0) & ~masks.prefix(1), "q_start": -2},
    "soft cap": {"softcap": 2.0},
}
SHAPES = {
    "grouped": ((2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16)),
    "narrow values": ((6, 5, 8), (3, 13, 8), (3, 13, 4)),
    "wide values, batch broadcast": ((2, 1, 4, 9, 3), (1, 3, 1, 11, 3), (2, 1, 1, 11, 5)),
}


def drawn(library: Library, *shapes: tuple[int, ...], dtype: str = "float64") -> list[Any]:
    """Normal tensors."""
    generator = np.random.default_rng(5)
    return [library.array(generator.standard_normal(shape), dtype) for shape in shapes]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the fused kernel was asked for since the test began: whether causal."""
    from refattn_backends import torch_tiles

    calls: list[bool] = []
    kernel = torch_tiles.fused

    def counting(q: Any, k: Any, v: Any, scale: float, causal: bool, summand: Any) -> Any:
        calls.append(causal)
        return kernel(q, k, v, scale, causal, summand)

    monkeypatch.setattr(torch_tiles, "fused", counting)
    return calls


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_results_and_derivatives_are_the_dense_ones(library: Library, name: str, shapes: str) -> None:
    """Output, log-sum-exp, and the derivatives of both by q, k, v and sinks, agree with the specification's."""
    import torch

    inputs = drawn(library, *SHAPES[shapes], (SHAPES[shapes][0][-3],))
    results = []
    for path in ("dense", "tiled"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output, lse = refattn.attention_with_lse(*leaves[:3], sinks=leaves[3], path=path, **CALLS[name])
        weighed = (output * torch.cos(torch.arange(output.numel()).reshape(output.shape))).sum() + (lse**2).sum()
        results.append((output, lse, *torch.autograd.grad(weighed, leaves)))
    for dense, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, dense, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["all keys", "triangle further right", "one mask for all", "negative scale"])
def test_second_derivatives_are_the_dense_ones(library: Library, fused_calls: list[bool], name: str) -> None:
    """A gradient of a gradient, as a penalty takes it, past the kernel too; one tensor is keys and values."""
    import torch

    q, k = drawn(library, (2, 4, 9, 16), (2, 2, 11, 16))
    found = []
    for path in ("dense", "tiled"):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        output, lse = refattn.attention_with_lse(leaves[0], leaves[1], leaves[1], path=path, **CALLS[name])
        first = torch.autograd.grad(output.sum() + lse.sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum((x**2).sum() for x in first), leaves))
    assert fused_calls
    for dense, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, dense, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_autocast_takes_no_precision(library: Library, path: str) -> None:
    """Under autocast float32 stays float32 in every product, also where it is compiled (N1)."""
    import torch

    q, k, v = drawn(library, *SHAPES["grouped"], dtype="float32")
    weights = refattn.AttentionWeights(*drawn(library, (16, 8), (16, 8), (16, 8), dtype="float32"))

    def calls() -> list[Any]:
        options: dict[str, Any] = {"causal": True, "q_start": 2, "softcap": 2.0, "path": path}
        found = [*refattn.attention_with_lse(q, k, v, **options)]
        found += refattn.attention_vjp(q, k, v, torch.ones_like(q), **options)[:3]
        return [*found, refattn.multi_head_attention(v[:, 0], weights, heads=2, path=path).output]

    expected = calls()
    torch.compiler.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = calls()
        one = torch.compile(lambda: refattn.attention(q, k, v, path=path), fullgraph=True, backend="eager")()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(one, refattn.attention(q, k, v), rtol=1e-5, atol=1e-6)


GRADIENTS = {name: name not in ("scale 0", "soft cap") for name in CALLS}  # whether the kernel's derivative is asked


@pytest.fixture
def generic_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose gradients the generic tiles computed since the test began."""
    from refattn_backends import torch_backward
    from refattn_backends.tiles_backward import tiled_vjp as generic

    calls: list[Any] = []

    def counting(call: Any, gradient: Any) -> Any:
        calls.append(call)
        return generic(call, gradient)

    monkeypatch.setattr(torch_backward, "generic", counting)
    return calls


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_tiled_gradients_are_the_dense_ones(library: Library, generic_calls: list[Any], name: str, shapes: str) -> None:
    """By the kernel's derivative where it satisfies the clauses, with sinks and without, and elsewhere by tiles."""
    q, k, v, given = drawn(library, *SHAPES[shapes], (SHAPES[shapes][0][-3],))
    (gradient,) = drawn(library, tuple(refattn.attention(q, k, v, **CALLS[name]).shape))
    for sinks in (None, given):
        dense, tiled = (
            refattn.attention_vjp(q, k, v, gradient, sinks=sinks, path=path, **CALLS[name])
            for path in ("dense", "tiled")
        )
        for expected, actual in zip(dense, tiled, strict=True):
            if expected is not None:
                np.testing.assert_allclose(library.host(actual), library.host(expected), rtol=1e-10, atol=1e-10)
    assert bool(generic_calls) != GRADIENTS[name]


@pytest.mark.parametrize(
    ("which", "poison"),
    [(which, poison) for which in ("q", "k", "v", "sinks") for poison in (float("nan"), float("inf"), 1e308)]
    + [("gradient", float("nan")), ("gradient", float("inf"))],
)
def test_data_that_the_derivative_breaks_on_takes_the_tiles(
    library: Library, generic_calls: list[Any], which: str, poison: float
) -> None:
    """What is not finite or overflows never reaches the kernel, but for large sinks; the result is the dense one."""
    shapes = (*SHAPES["grouped"], (2, 4, 9, 16), (4,))
    arrays = dict(zip(("q", "k", "v", "gradient", "sinks"), drawn(library, *shapes)))
    arrays[which][(..., -2) if which == "sinks" else (..., -2, slice(None))] = poison
    options: dict[str, Any] = {"causal": True, "q_start": 0, "sinks": arrays.pop("sinks")}
    dense, tiled = (refattn.attention_vjp(*arrays.values(), path=path, **options) for path in ("dense", "tiled"))
    assert bool(generic_calls) == (which != "sinks" or not poison < float("inf"))
    for expected, actual in zip(dense, tiled, strict=True):
        if expected is not None:
            np.testing.assert_allclose(library.host(actual), library.host(expected), rtol=1e-10, atol=1e-10)


def test_gradients_of_masked_tiles(library: Library, generic_calls: list[Any]) -> None:
    """A mask over several tiles, with rows that see nothing, and inputs with odd strides."""
    q, k, v, gradient = (x[..., ::2] for x in drawn(library, (4, 700, 8), (2, 1100, 8), (2, 1100, 8), (4, 700, 8)))
    q[:, 391:] *= 1e4  # rows that see nothing, whose logits have no exponential
    mask = masks.window(90, 0) & masks.lengths(600) & ~masks.prefix(2)
    dense, tiled = (
        refattn.attention_vjp(q, k, v, gradient, mask=mask, q_start=300, path=path) for path in ("dense", "tiled")
    )
    assert not generic_calls
    for part in "qkv":
        expected, actual = (library.host(getattr(found, part)) for found in (dense, tiled))
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10)
        assert not expected.all()


def test_gradients_can_be_differentiated(library: Library, generic_calls: list[Any]) -> None:
    """autograd takes derivatives of the gradients, which the kernel's derivative has not, by the generic tiles."""
    import torch

    found = []
    for path in ("dense", "tiled"):
        leaves = [x.requires_grad_() for x in drawn(library, *SHAPES["grouped"])]
        q, k, v = leaves
        options: dict[str, Any] = {"causal": True, "q_start": -2, "path": path}
        first = refattn.attention_vjp(q, k, v, torch.cos(q.detach()), **options)
        found.append(torch.autograd.grad(sum((x**2).sum() for x in first[:3]), leaves))
    assert len(generic_calls) == 1
    for dense, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, dense, rtol=1e-10, atol=1e-10)


def test_gradients_compile_in_one_graph(library: Library) -> None:
    """torch.compile takes attention_vjp(path="tiled") in one graph, and hidden poison stays harmless."""
    import torch

    from refattn import registry

    q, k, v, gradient = drawn(library, *SHAPES["grouped"], (2, 4, 9, 16))
    k[..., -1, :], v[..., -1, :] = float("nan"), float("inf")
    options = {"sinks": drawn(library, (4,))[0], "softcap": 2.0, **CALLS["one mask for all"]}
    expected = refattn.attention_vjp(q, k, v, gradient, **options)
    for found in registry._FOUND.values():
        found.clear()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: refattn.attention_vjp(*x, path="tiled", **options), fullgraph=True, backend="eager"
    )
    for dense, tiled in zip(expected, compiled(q, k, v, gradient), strict=True):
        if dense is not None:
            torch.testing.assert_close(tiled, dense, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("all keys", [False]),
        ("triangle", [True]),
        ("triangle further right", [False, True]),
        ("first rows empty", [True]),
        ("decode", [False]),
        ("scale 0", []),
        ("one mask for all", [False]),
        ("soft cap", []),
    ],
)
def test_the_fused_kernel_runs_where_it_satisfies_the_clauses(
    library: Library, fused_calls: list[bool], name: str, kernels: list[bool]
) -> None:
    """All keys and triangles go to the fused kernel, in at most two pieces; options that it lacks do not."""
    refattn.attention(*drawn(library, *SHAPES["grouped"]), path="tiled", **CALLS[name])
    assert fused_calls == kernels


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e308])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_data_that_the_kernel_breaks_on_takes_the_tiles(
    library: Library, fused_calls: list[bool], poison: float, which: int
) -> None:
    """Non-finite or overflowing data, hidden or visible, never reaches the kernel; the result is the dense one."""
    inputs = drawn(library, *SHAPES["grouped"])
    inputs[which][..., -2, :] = poison
    dense = refattn.attention_with_lse(*inputs, causal=True, q_start=0)
    tiled = refattn.attention_with_lse(*inputs, causal=True, q_start=0, path="tiled")
    assert not fused_calls
    for expected, actual in zip(dense, tiled, strict=True):
        np.testing.assert_allclose(library.host(actual), library.host(expected), rtol=1e-10, atol=1e-10)


def test_masked_tiles(library: Library) -> None:
    """A mask over several tiles, with rows that see nothing, gives the dense results and derivatives."""
    import torch

    inputs = drawn(library, (4, 700, 4), (2, 1100, 4), (2, 1100, 4), dtype="float64")
    mask = (masks.window(90, 0) | masks.prefix(3)) & masks.lengths(600)
    results = []
    for path in ("dense", "tiled"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output, lse = refattn.attention_with_lse(*leaves, mask=mask & ~masks.prefix(2), q_start=300, path=path)
        results.append((output, lse, *torch.autograd.grad((output**2).sum() + lse[:, 5].sum(), leaves)))
    for dense, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, dense, rtol=1e-10, atol=1e-10)


def test_strided_widths(library: Library) -> None:
    """Tensors whose last axis is not together in memory, which the kernel misreads, give the same as copies."""
    inputs = [x[..., ::2] for x in drawn(library, *SHAPES["grouped"])]
    expected = refattn.attention(*(x.contiguous() for x in inputs), path="tiled")
    np.testing.assert_array_equal(library.host(refattn.attention(*inputs, path="tiled")), library.host(expected))


def test_what_cuda_loads_at_once() -> None:
    """Rows of whole multiples of eight elements, each at such a place, whatever the tensor is a view of."""
    import torch

    from refattn_backends.torch_tiles import loads_at_once

    x = torch.zeros(4, 16, 24)
    views = {x: True, x[..., :16]: True, x[..., 8:]: True, x.mT: False, x[..., 1:9]: False, x[..., :12]: False}
    views |= {torch.zeros(4, 16, 17)[..., :16]: False, x[:1].expand(3, -1, -1): True}
    for view, wanted in views.items():
        assert loads_at_once(view) == wanted


@pytest.mark.parametrize("name", ["triangle", "first rows empty", "all rows empty", "one mask for all", "soft cap"])
def test_compiles_in_one_graph(library: Library, name: str) -> None:
    """torch.compile takes the tiled path in one graph, whoever calls it first, and hidden poison stays harmless."""
    import torch

    from refattn import registry

    q, k, v = drawn(library, *SHAPES["grouped"])
    k[..., -1, :], v[..., -1, :] = float("nan"), float("inf")
    options = {"sinks": drawn(library, (4,))[0], **CALLS[name]}
    expected = refattn.attention_with_lse(q, k, v, **options)
    for found in registry._FOUND.values():
        found.clear()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: refattn.attention_with_lse(*x, path="tiled", **options), fullgraph=True, backend="eager"
    )
    for dense, tiled in zip(expected, compiled(q, k, v), strict=True):
        torch.testing.assert_close(tiled, dense, rtol=1e-10, atol=1e-10, equal_nan=True)


# Forward derivatives load a part of torch that torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms(library: Library) -> None:
    """vmap, grad and forward derivatives work on the tiled path as on the dense one."""
    import torch

    inputs = drawn(library, *SHAPES["grouped"])

    def both(transform: Any) -> list[Any]:
        return [transform(lambda *x, path=path: refattn.attention(*x, path=path)) for path in ("dense", "tiled")]

    torch.testing.assert_close(*both(lambda f: torch.func.vmap(f)(*inputs)))
    torch.testing.assert_close(*both(lambda f: torch.func.grad(lambda *x: f(*x).sum())(*inputs)))
    torch.testing.assert_close(*both(lambda f: torch.func.jvp(f, tuple(inputs), tuple(inputs))[1]))
