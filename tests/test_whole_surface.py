"""The whole surface at once: right calls in odd layouts with extreme values, and malformed ones (E1, E3, M19, N4, N6).

Each example is one call of forward, stages, log-sum-exp and gradients, dense and tiled.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from drawn_calls import Call, Floats, calls
from hostile_values import APART, ARGUMENTS, VALUES, layouts
from libraries import SLOW, Library
from refattn import errors
from refattn.golden_gradients import GoldenGradients

# Numbers that break carelessness, by the dtype whose range they are in; NaN and infinities may stand anywhere.
SPECIAL = {
    "float16": (0.0, -0.0, 6e-8, 6e-5, 60000.0, np.inf, -np.inf, np.nan),
    "bfloat16": (0.0, -0.0, 1e-40, 1e-38, 3e38, 1e18, np.inf, -np.inf, np.nan),
    "float32": (0.0, -0.0, 1e-45, 1e-38, 3.4e38, -3.4e38, 1e18, np.inf, -np.inf, np.nan),
    "float64": (0.0, -0.0, 5e-324, 1e-308, 1.7e308, -1.7e308, 1e150, np.inf, -np.inf, np.nan),
}


def spiced(draw: st.DrawFn, x: np.ndarray, dtype: str) -> np.ndarray:
    """Some, or all, elements replaced by special numbers."""
    share = draw(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]))
    if not share:
        return x
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = draw(st.lists(st.sampled_from(SPECIAL[dtype]), min_size=1, max_size=3))
    return np.where(rng.random(x.shape) < share, rng.choice(chosen, x.shape), x)


@st.composite
def extreme_calls(draw: st.DrawFn, dtype: str, few_shapes: bool) -> Call:
    """A legal call whose arrays hold extreme values."""
    call = draw(calls(few_shapes=few_shapes))
    options = dict(call.options)
    if (sinks := options.get("sinks")) is not None:
        options["sinks"] = Floats(spiced(draw, sinks.values, sinks.named(dtype)), sinks.dtype)
    if bias := options.get("bias"):
        options["bias"] = [
            (name, Floats(spiced(draw, x.values, x.named(dtype)), x.dtype)) if name != "alibi" else (name, x)
            for name, x in bias
        ]
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from([0, -1, 1e300, -1e-300, 5e-324, 2**70]))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([1e300, 5e-324, 1e-20, 2**70]))
    q, k, v = (spiced(draw, x, dtype) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, options=options)


def silent(library: Library) -> Any:
    """Overflow that is visible may warn (N5)."""
    return warnings.catch_warnings(action="ignore") if library.name != "jax" else nullcontext()


def assert_right(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray, dtype: str, what: str) -> None:
    """NaN and infinities where they are expected, else within the bound; infinity also stands for what rounds to it."""
    actual = actual.astype(np.float64)
    assert actual.shape == expected.shape, what
    largest = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.79e308}[dtype]
    with np.errstate(all="ignore"):
        right = (actual == expected) | (np.isnan(actual) & np.isnan(expected)) | (np.abs(actual - expected) <= bound)
        right |= np.isinf(actual) & (np.abs(expected) + bound >= largest) & (np.sign(actual) == np.sign(expected))
    right |= np.isposinf(bound)  # nothing follows (N6)
    wrong = ~right
    assert right.all(), f"{what}: {actual[wrong][:3]}, expected {expected[wrong][:3]} within {bound[wrong][:3]}"


def results(library: Library, path: str, arrays: list[Any], gradient: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Output, log-sum-exp and gradients of one path, as host arrays by name."""
    output, lse = refattn.attention_with_lse(*arrays, path=path, **options)
    found = {"output": output, "lse": lse}
    q, k, v = arrays
    gradients = refattn.attention_vjp(q, k, v, gradient, path=path, **options)
    terms = gradients.bias if isinstance(gradients.bias, tuple) else (gradients.bias,)
    named = {"q": gradients.q, "k": gradients.k, "v": gradients.v, "sinks": gradients.sinks}
    named |= {f"term {number} of the bias": term for number, term in enumerate(terms)}
    found |= {f"gradient of {name}": x for name, x in named.items() if x is not None}
    return {name: library.host(x) for name, x in found.items()}


def snapshot(library: Library, arrays: list[Any]) -> list[bytes]:
    return [library.host(x).tobytes() for x in arrays]


@pytest.mark.library("numpy", "strict", "torch", "dask", "cupy")  # JAX would compile each of its calls for seconds
@settings(settings.get_profile("surface"))
@given(data=st.data())
def test_right_calls_give_right_results(library: Library, data: st.DataObject) -> None:
    """Golden values within their bound, dense and tiled; NumPy's bits in any layout but APART; no argument changes."""
    dtype = data.draw(st.sampled_from(library.dtypes))
    call = data.draw(extreme_calls(dtype, few_shapes=library.name in SLOW))
    arrays, options = call.arguments(library, dtype)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    with silent(library), np.errstate(all="ignore"):
        exact = refattn.golden(*arrays, **options)
        gradient = library.array(rng.standard_normal(exact.output.shape), dtype)
        before = snapshot(library, [*arrays, gradient])
        found = {path: results(library, path, arrays, gradient, options) for path in ("dense", "tiled")}
        assert snapshot(library, [*arrays, gradient]) == before
        stages = refattn.attention_stages(*arrays, **options)
        output, lse, visible = (library.host(x) for x in (stages.output, stages.lse, stages.visible))
    bounds = exact.bound(dtype, coherent=True), exact.lse_bound(dtype, coherent=True)
    for path, result in found.items():
        assert_right(result["output"], exact.output, bounds[0], dtype, f"{path} output")
        wide = "float64" if result["lse"].dtype == np.float64 else "float32"
        assert_right(result["lse"], exact.lse, bounds[1], wide, f"{path} log-sum-exp")
    terms = call.options.get("bias") or []
    shapes = {name: x.shape for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    if "sinks" in options:
        shapes["sinks"] = tuple(options["sinks"].shape)
    if [name for name, _ in terms] == ["array"]:
        shapes["bias"] = terms[0][1].values.shape
    with np.errstate(all="ignore"):
        of = GoldenGradients(exact, library.host(gradient).astype(np.float64), shapes)
        limits = {name: of.bounds(name, coherent=True) for name in {dtype, "float32", "float64"}}
    for (path, result), name in itertools.product(found.items(), shapes):
        actual = result[f"gradient of {'term 0 of the bias' if name == 'bias' else name}"]
        own = {"sinks": call.options.get("sinks"), "bias": terms and terms[0][1]}.get(name)
        stored = own.named(dtype) if own else dtype
        limit = np.maximum(limits[dtype][name], limits[stored][name])
        assert_right(actual, of.values[name], limit, stored, f"{path} gradient of {name}")
    np.testing.assert_array_equal(output, found["dense"]["output"])
    np.testing.assert_array_equal(lse, found["dense"]["lse"])
    shown = np.any(visible, axis=-1)
    for result in found.values():  # P2
        sinkless = shown | ~np.isneginf(exact.lse)
        assert np.all(result["output"][~sinkless] == 0)
    if library.name != "numpy":
        return
    kinds = [data.draw(st.sampled_from(sorted(layouts(x).keys() - {*APART}))) for x in (*arrays, gradient)]
    odd = [layouts(x)[kind] for x, kind in zip((*arrays, gradient), kinds, strict=True)]
    values = [np.array(x) for x in odd]
    path = data.draw(st.sampled_from(["dense", "tiled"]))
    with silent(library):
        actual = results(library, path, odd[:3], odd[3], options)
        expected = results(library, path, [x.copy() for x in values[:3]], values[3].copy(), options)
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=f"{path} {name}, {kinds}")
    assert [x.tobytes() for x in odd] == [x.tobytes() for x in values]


@settings(settings.get_profile("surface"))
@given(data=st.data())
def test_malformed_calls_are_refused(library: Library, data: st.DataObject) -> None:
    """A wrong value of one argument is refused by a class of refattn, or is legal; nothing else ever comes of it."""
    dtype = data.draw(st.sampled_from(library.dtypes))
    call = data.draw(calls(few_shapes=library.name in SLOW))
    arrays, options = call.arguments(library, dtype)
    given_too: dict[str, Any] = dict(zip("qkv", arrays, strict=True), **options)
    name = data.draw(st.sampled_from(ARGUMENTS))
    kind = data.draw(st.sampled_from(sorted(VALUES)))
    wrong = {**given_too, name: VALUES[kind]()}
    before = snapshot(library, arrays)
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    gradient = library.array(np.ones((*lead, *arrays[0].shape[-3:-1], arrays[2].shape[-1])), dtype)
    functions: list[Callable[..., Any]] = [
        refattn.attention,
        refattn.attention_with_lse,
        lambda **o: refattn.attention_vjp(grad_output=gradient, **o),
    ]
    if name == "grad_output":
        functions = [refattn.attention_vjp]
    elif name != "path":
        wrong["path"] = data.draw(st.sampled_from(["dense", "tiled"]))
    raised: list[errors.RefattnError] = []
    for function in functions:
        with silent(library):
            try:
                function(**wrong)
            except errors.RefattnError as error:
                raised.append(error)
    for refusal in raised:
        assert isinstance(refusal, ValueError | TypeError)
        assert str(refusal).endswith(f" [refattn {refusal.clause}]")
        assert ": expected " in str(refusal)
        assert "; got " in str(refusal)
    assert len(raised) in (0, len(functions)), raised
    assert snapshot(library, arrays) == before
