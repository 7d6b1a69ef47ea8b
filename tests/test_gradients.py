"""attention_vjp is the derivative: of the oracle by finite differences, and the one that autograd and jax.vjp take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from drawn_calls import Call, Floats, Ints, calls
from libraries import Library, eager, host_cast
from refattn import errors
from refattn.bounds import ROUNDOFF
from refattn.conformance.targets.autodiff import differentiated
from refusals import Maker, assert_refused

STEP = 1e-4


def output_gradient(call: Call, seed: int) -> np.ndarray:
    """Random numbers of the shape of the output."""
    shape = (*np.broadcast_shapes(call.q.shape[:-3], call.k.shape[:-3], call.v.shape[:-3]), *call.q.shape[-3:-1])
    return np.random.default_rng(seed).standard_normal((*shape, call.v.shape[-1]))


def parts_of(call: Call) -> dict[str, np.ndarray]:
    """Every array that has a gradient, by name: bias0, bias1, ... are the terms of the bias that hold one."""
    parts = {"q": call.q, "k": call.k, "v": call.v}
    terms = call.options.get("bias") or []
    parts |= {f"bias{i}": term[1].values for i, term in enumerate(terms) if isinstance(term[1], Floats)}
    return parts | ({"sinks": call.options["sinks"].values} if "sinks" in call.options else {})


def moved(call: Call, steps: dict[str, np.ndarray]) -> Call:
    """The call with something added to its arrays."""
    options = dict(call.options)
    if "bias" in options:
        options["bias"] = [
            (term[0], Floats(term[1].values + steps[f"bias{i}"], term[1].dtype)) if f"bias{i}" in steps else term
            for i, term in enumerate(options["bias"])
        ]
    if "sinks" in options:
        options["sinks"] = Floats(options["sinks"].values + steps["sinks"], options["sinks"].dtype)
    return replace(call, options=options, **{name: getattr(call, name) + steps[name] for name in "qkv"})


def in_float64(call: Call) -> Call:
    """The call with biases and sinks in float64, so that steps are not rounded away."""
    options = dict(call.options)
    if "bias" in options:
        terms = [(t[0], Floats(t[1].values, None)) if isinstance(t[1], Floats) else t for t in options["bias"]]
        options["bias"] = terms
    if "sinks" in options:
        options["sinks"] = Floats(options["sinks"].values, None)
    return replace(call, options=options)


def parts_found(library: Library, call: Call, found: refattn.Gradients) -> dict[str, np.ndarray]:
    """The gradients on the host, by the names of `parts_of`."""
    terms = call.options.get("bias") or []
    # As in Call.arguments: array-api-strict has arrays on the right.
    order = (
        sorted(range(len(terms)), key=lambda i: terms[i][0] == "array")
        if library.name == "strict"
        else range(len(terms))
    )
    biases = dict(zip(order, found.bias if len(terms) > 1 else (found.bias,))) if terms else {}
    for i, gradient in biases.items():
        assert (gradient is None) == (terms[i][0] == "alibi")
    named = {"q": found.q, "k": found.k, "v": found.v, "sinks": found.sinks}
    named |= {f"bias{i}": gradient for i, gradient in biases.items()}
    return {name: library.host(x) for name, x in named.items() if x is not None}


def compiled(library: Library, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one program on JAX, which would compile each of its steps, and on Dask, for each result again."""
    if library.name == "dask":
        import dask

        return lambda *given: dask.persist(function(*given))[0]
    if library.name != "jax":
        return function
    import jax

    whole: Callable[..., Any] = jax.jit(function)
    return whole


def vjp(
    library: Library, call: Call, gradient: np.ndarray, dtype: str = "float64", path: str = "dense"
) -> dict[str, np.ndarray]:
    """The gradients of a call by attention_vjp, whose shapes and dtypes are those of the arguments."""
    (q, k, v), options = call.arguments(library, dtype)
    given = library.array(gradient, dtype)
    found = compiled(library, lambda *given: refattn.attention_vjp(*given, **options, path=path))(q, k, v, given)
    for x, got in [(q, found.q), (k, found.k), (v, found.v), (options.get("sinks"), found.sinks)]:
        assert (x is None) == (got is None)
        assert x is None or (got.shape == x.shape and got.dtype == x.dtype)
    return parts_found(library, call, found)


@pytest.mark.library("numpy", "strict", "torch", "dask", "cupy")
@given(data=st.data())
def test_gradients_are_the_slope_of_the_oracle(library: Library, data: st.DataObject) -> None:
    """Along a random direction of all arguments at once, the oracle rises as attention_vjp says."""
    call, seed = in_float64(data.draw(calls())), data.draw(st.integers(0, 2**32 - 1))
    gradient = output_gradient(call, seed)
    rises(call, gradient, vjp(library, call, gradient), seed)


def rises(call: Call, gradient: np.ndarray, found: dict[str, np.ndarray], seed: int) -> None:
    """The rise of the oracle along a random direction is the sum of the gradients times the steps."""
    parts, rng = parts_of(call), np.random.default_rng(seed)
    assert found.keys() == parts.keys()
    steps = {name: rng.standard_normal(x.shape) for name, x in parts.items()}

    def rise(step: float) -> float:
        ahead, behind = (moved(call, {n: sign * step * x for n, x in steps.items()}) for sign in (1, -1))
        difference = ahead.expected("float64").output - behind.expected("float64").output
        return float(np.sum(difference * gradient)) / (2 * step)

    # Two central differences whose errors of second order cancel; what is left is of fourth order.
    slope = (4 * rise(STEP / 2) - rise(STEP)) / 3
    terms = [found[name] * x for name, x in steps.items()]
    size = sum(float(np.sum(np.abs(x))) for x in terms)
    assert sum(float(np.sum(x)) for x in terms) == pytest.approx(slope, rel=0, abs=1e-7 * (1 + size))


@pytest.mark.library("torch")
@given(data=st.data())
def test_autograd_of_the_core_agrees(library: Library, data: st.DataObject) -> None:
    """torch's autograd takes the same gradients of the core."""
    call = in_float64(data.draw(calls()))
    agree(library, call, output_gradient(call, data.draw(st.integers(0, 2**32 - 1))))


@pytest.mark.library("jax")
@settings(settings.get_profile("few"))
@given(data=st.data())
def test_vjp_of_the_core_agrees(library: Library, data: st.DataObject) -> None:
    """jax.vjp takes the same gradients of the core, both compile, and they are the slope of the oracle."""
    call, seed = in_float64(data.draw(calls(few_shapes=True))), data.draw(st.integers(0, 2**32 - 1))
    gradient = output_gradient(call, seed)
    rises(call, gradient, agree(library, call, gradient), seed)


def agree(library: Library, call: Call, gradient: np.ndarray) -> dict[str, np.ndarray]:
    """The library's own gradients and those of attention_vjp, which are returned, are the same but for rounding."""
    _, given_options = call.arguments(library, "float64")

    def options(arrays: dict[str, Any]) -> dict[str, Any]:
        own = given_options | ({"bias": sum_of_terms(call, arrays)} if "bias" in given_options else {})
        return own | ({"sinks": arrays["sinks"]} if "sinks" in arrays else {})

    def attention(arrays: dict[str, Any]) -> Any:
        return refattn.attention(*(arrays[name] for name in "qkv"), **options(arrays))

    def both(arrays: dict[str, Any], g: Any) -> Any:
        closed = refattn.attention_vjp(arrays["q"], arrays["k"], arrays["v"], g, **options(arrays))
        return differentiated(library.name, attention, arrays, g)[1], closed

    arrays = {name: library.array(x, "float64") for name, x in parts_of(call).items()}
    own, closed = compiled(library, both)(arrays, library.array(gradient, "float64"))
    found = parts_found(library, call, closed)
    for name, x in found.items():
        size = max(1.0, float(np.max(np.abs(x), initial=0.0)))
        np.testing.assert_allclose(library.host(own[name]), x, rtol=1e-9, atol=1e-11 * size, err_msg=name)
    return found


def sum_of_terms(call: Call, arrays: dict[str, Any]) -> Any:
    """The bias of a call, made of the given arrays."""
    made = []
    for i, term in enumerate(call.options["bias"]):
        if term[0] == "array":
            made.append(arrays[f"bias{i}"])
        elif term[0] == "relative":
            made.append(refattn.biases.relative(arrays[f"bias{i}"]))
        else:
            made.append(refattn.biases.alibi(term[1]))
    total = made[0]
    for one in made[1:]:
        total = total + one
    return total


@pytest.mark.library("torch")
@given(data=st.data())
def test_autograd_stays_apart_from_poison(library: Library, data: st.DataObject) -> None:
    """Autograd gives the same whatever hidden keys, queries of empty rows and gradients of their outputs hold."""
    call, seed = in_float64(data.draw(calls())), data.draw(st.integers(0, 2**32 - 1))
    gradient = output_gradient(call, seed)
    found = agree(library, call, gradient)
    again = agree(library, *poisoned(call, gradient, np.random.default_rng(seed)))
    for name, x in found.items():
        np.testing.assert_array_equal(again[name], x, err_msg=name)
        assert np.isfinite(x).all(), name


def poisoned(call: Call, gradient: np.ndarray, rng: np.random.Generator) -> tuple[Call, np.ndarray]:
    """The call and its gradient with NaN, infinities and huge numbers wherever nothing visible is."""
    visible = call.expected("float64").visible
    if call.q.ndim == 2:
        visible = visible.reshape(1, *visible.shape[-2:])
    poison = (np.nan, np.inf, -np.inf, 1e308)

    def spoiled(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """x with poison in tokens that are not seen; seen (..., heads, tokens) may have more batch entries."""
        extra = seen.ndim - (x.ndim - 1)
        kept = np.any(seen, axis=tuple(range(extra))) if extra > 0 else seen
        for axis in range(x.ndim - 1):
            if x.shape[axis] == 1 != kept.shape[axis]:
                kept = np.any(kept, axis=axis, keepdims=True)
        x = x.copy()
        hidden = ~np.broadcast_to(kept, x.shape[:-1])
        x[hidden] = rng.choice(poison, size=(np.count_nonzero(hidden), x.shape[-1]))
        return x

    rows, kv_heads = np.any(visible, axis=-1), call.k.shape[-3] if call.k.ndim > 2 else 1
    group = visible.shape[-3] // max(1, kv_heads)
    by_group = visible.reshape(*visible.shape[:-3], kv_heads, group, *visible.shape[-2:])
    keys = np.any(by_group, axis=(-3, -2))
    arrays: dict[str, Any] = {"q": spoiled(call.q, rows), "k": spoiled(call.k, keys), "v": spoiled(call.v, keys)}
    return replace(call, **arrays), spoiled(gradient, rows)


HEADS, LENGTH = 4, 5
POISONED: dict[str, dict[str, Any]] = {
    "mask": {"mask": ("prefix", 3)},
    "softcap and sinks": {
        "mask": ("prefix", 3), "softcap": 2.0, "sinks": Floats(np.asarray([0.0, 1.0, -np.inf, 2.0]), None),
    },
    "empty rows": {"mask": ("and", ("causal",), ("prefix", 3)), "q_start": -2},
    "bias": {"bias": [("array", Floats(np.asarray([0.0, 1.0, 2.0, -np.inf, -np.inf]), None)), ("alibi", HEADS)]},
    "nothing": {"mask": ("lengths", Ints(np.asarray(0), "library"))},
}  # fmt: skip


@pytest.mark.parametrize("poison", [np.nan, eager(np.inf), eager(1e308)], ids=["nan", "inf", "1e308"])
@pytest.mark.parametrize("name", POISONED)
def test_invisible_data_influence_no_gradient(library: Library, name: str, poison: float) -> None:
    """Whatever invisible keys hold, and the gradient of empty rows, gradients are the same bits, and zeros there."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, LENGTH, 3)) for heads in (HEADS, 2, 2))
    call = Call(q, k, v, POISONED[name])
    gradient = output_gradient(call, 1)
    found = vjp(library, call, gradient)
    k, v, gradient = k.copy(), v.copy(), gradient.copy()
    k[..., 3:, :], v[..., 3:, :] = poison * np.asarray([1, -1, 1]), poison
    empty = {"empty rows": slice(0, 2), "nothing": slice(None)}.get(name, slice(0, 0))
    gradient[..., empty, :] = poison
    got = vjp(library, replace(call, k=k, v=v), gradient)
    for part, x in found.items():
        np.testing.assert_array_equal(got[part], x, err_msg=part)
        assert np.isfinite(x).all()
    assert not got["k"][..., 3:, :].any()
    assert not got["v"][..., 3:, :].any()
    assert not got["q"][..., empty, :].any()
    assert name == "nothing" or all(got[part].any() for part in "qkv")
    assert name != "bias" or not got["bias0"][3:].any()


@pytest.mark.parametrize("where", ["q", "grad_output"])
def test_a_broken_row_breaks_no_other(library: Library, where: str) -> None:
    """A NaN in a query, or in the gradient of its output, is NaN for its row and the keys that it sees, alone."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((LENGTH, 3)) for _ in range(3))
    call = Call(q, k, v, {"causal": True})
    gradient = output_gradient(call, 1)
    whole = vjp(library, call, gradient)
    (q if where == "q" else gradient)[1, 1] = np.nan
    got = vjp(library, call, gradient)
    assert np.isnan(got["q"][1]).all()
    np.testing.assert_array_equal(got["q"][[0, 2, 3, 4]], whole["q"][[0, 2, 3, 4]])
    broken = np.isnan(got["v"])
    assert broken[:2].all() if where == "q" else (broken[:2] == [False, True, False]).all()
    assert np.isnan(got["k"][:2]).all()
    for part in "kv":
        np.testing.assert_array_equal(got[part][2:], whole[part][2:])


def test_each_gradient_is_rounded_once(library: Library, storage_dtype: str) -> None:
    """In 16 bits and float32 they are those of the same numbers in float64, but for float32's arithmetic."""
    rng = np.random.default_rng(0)
    drawn = (host_cast(rng.standard_normal((2, 2, 9, 4)), storage_dtype).astype(np.float64) for _ in range(3))
    call = Call.of([*drawn], {})
    gradient = host_cast(output_gradient(call, 1), storage_dtype).astype(np.float64)
    low, exact = vjp(library, call, gradient, storage_dtype), vjp(library, call, gradient)
    for part, x in exact.items():
        np.testing.assert_allclose(low[part], x, rtol=ROUNDOFF[storage_dtype] * (1 + 1e-3), atol=2e-6, err_msg=part)


def test_zero_sizes_have_gradients(library: Library) -> None:
    """Where there is no query, key, width or head, gradients have the shapes of the arguments and are 0."""
    for shapes in (
        ((2, 4, 3, 2), (2, 2, 0, 2), (2, 2, 0, 5)),
        ((2, 4, 0, 2), (1, 2, 3, 2), (2, 2, 3, 5)),
        ((2, 0, 3, 2), (2, 0, 3, 2), (2, 0, 3, 5)),
        ((0, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 5)),
        ((3, 0), (0, 0), (0, 0)),
        ((2, 3, 0), (2, 4, 0), (2, 4, 0)),
    ):
        call = Call.of([np.ones(shape) for shape in shapes], {"bias": [("array", Floats(np.zeros(1), None))]})
        assert not any(x.any() for x in vjp(library, call, output_gradient(call, 0)).values())


@pytest.mark.parametrize(
    ("shape", "dtype", "got"),
    [((2, 4, 3, 2), "float32", "(2, 4, 3, 2)"), ((4, 3, 6), "float32", "(4, 3, 6)"), ((2, 4, 3, 6), "int32", "int32")],
)
def test_other_gradients_of_the_output_are_refused(
    library: Library, shape: tuple[int, ...], dtype: str, got: str
) -> None:
    """grad_output has the output's shape and is floating."""
    make = Maker(library)
    q, k, v = make(2, 4, 3, 8), make(2, 2, 5, 8), make(2, 2, 5, 6)
    words = ("(2, 4, 3, 6)", got)
    assert_refused(
        errors.GradientError, "grad_output", words, refattn.attention_vjp, q, k, v, make(*shape, dtype=dtype)
    )


def test_other_paths_are_refused(library: Library) -> None:
    """The error lists the two paths."""
    make = Maker(library)
    x = make(2, 3, 4)
    words = ("'dense' or 'tiled'", "fast")
    assert_refused(errors.PathError, "path", words, refattn.attention_vjp, x, x, x, x, path="fast")


@pytest.mark.parametrize("path", ["dense", "tiled"])
@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_a_broken_sink_has_no_share_of_empty_rows(library: Library, sink: float, path: str) -> None:
    """Rows that see no key add 0 to the gradient of a sink of NaN or infinity (D3), others make it NaN."""
    rng = np.random.default_rng(1)
    q, k, v, gradient = (library.array(rng.standard_normal((2, 5, 3))) for _ in range(4))
    sinks = library.array(np.asarray([sink, 0.5]))
    for start, reached in ((-5, False), (-2, True)):
        options = {"causal": True, "q_start": start, "sinks": sinks, "path": path}
        with np.errstate(invalid="ignore"):  # a lazy library computes here, and rows of NaN may warn (N5)
            found = compiled(library, partial(refattn.attention_vjp, **options))(q, k, v, gradient)
            of_sinks = library.host(found.sinks)
        assert np.isnan(of_sinks[0]) == reached
        assert reached or not of_sinks.any()
        assert np.isfinite(of_sinks[1])


@pytest.mark.library("numpy")
@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_a_wider_gradient_of_empty_rows_raises_no_warning(library: Library, path: str) -> None:
    """grad_output may be wider than q; what an empty row holds beyond q's range is no one's concern (N5, D3)."""
    q = library.array(np.ones((1, 3, 2)), "float32")
    gradient = np.ones((1, 3, 2))
    gradient[:, 0] = 1e300
    found = refattn.attention_vjp(q, q, q, library.array(gradient), causal=True, q_start=-1, path=path)
    assert np.isfinite(found.k).all()
    assert found.v.any()
