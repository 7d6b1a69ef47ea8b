"""Chapter N: precision, tracing, repeatability, warnings, and the bound itself at larger sizes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from refattn import attention, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem, Unsupported
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw
from refattn.dtypes import COMPUTED, LOW
from refattn.errors import MaskArgumentError
from refattn.goldens import golden

CASES = Chapter("numbers")


@CASES.problem("N1", "N6", dtypes=("float64",))
def float64_stays_float64(draw: Draw) -> Problem:
    """float64 is computed in float64: a detour through float32 is nine decimal digits off."""
    return Problem(**draw.qkv(4, 6), causal=True, q_start=1, bias=draw.normal(4, 6))


@CASES.problem("N1", "N6", dtypes=("float32",))
def float32_is_not_truncated(draw: Draw) -> Problem:
    """All 24 bits of float32 inputs count: products in bfloat16 or TF32 are thousands of times the bound off."""
    return Problem(**draw.qkv(9, 17, batch=(1,), d_k=32, spread=1.5))


@CASES.problem("N1", dtypes=("float16",))
def scores_beyond_float16(draw: Draw) -> Problem:
    """Raw scores of 262144 exceed float16; the scaled ones, 32768 and 32256, are far apart: the first value wins."""
    q, k, v = np.full((1, 1, 2, 64), 64.0), np.full((1, 1, 2, 64), 64.0), np.ones((1, 1, 2, 64))
    k[..., 1, :], v[..., 1, :] = 63.0, 2.0
    known = {"output": (np.ones((1, 1, 2, 64)), 0.0)}
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=0.125, known=known)


@CASES.problem("N1", dtypes=LOW)
def sum_of_many_weights(draw: Draw) -> Problem:
    """The sum of 512 like weights is accumulated in at least float32: in 8 or 11 bits it would stop growing."""
    data = draw.qkv(2, 512, batch=(1,), d_k=16, d_v=4, spread=0.25)
    data["v"] = np.abs(data["v"]) + 0.5
    return Problem(**{**data, "v": draw.exact(data["v"])}, coherent=True)


@CASES.problem("N1", dtypes=LOW)
def output_of_many_weights(draw: Draw) -> Problem:
    """The mean of 8192 like values is accumulated in at least float32: each adds less than 8 or 11 bits can show."""
    data = draw.qkv(1, 8192, batch=(1,), heads=1, d_k=1, d_v=2)
    data["q"], data["v"] = np.zeros_like(data["q"]), draw.exact(1.0 + 0.125 * np.tanh(data["v"]))
    return Problem(**data, coherent=True)


@CASES.problem("N1", dtypes=LOW)
def scores_of_many_products(draw: Draw) -> Problem:
    """Scores of 4096 and 2048 ones are 8 and 4 when scaled: a sum in 8 or 11 bits stops growing and ends with a tie."""
    q, k, v = np.ones((1, 1, 1, 4096)), np.ones((1, 1, 2, 4096)), np.asarray([[[[0.0], [8.0]]]])
    k[..., 1, 2048:] = 0.0
    return Problem(dtype=draw.dtype, q=q, k=k, v=v, scale=1 / 512)


@CASES.problem("N1", "P1")
def large_scores(draw: Draw) -> Problem:
    """Scores near a thousand, close to each other, need a maximum subtracted before the exponential."""
    data = draw.qkv(4, 6)
    data["q"][..., 0], data["k"][..., 0] = 32.0, 128.0
    return Problem(**data)


@CASES.problem("N6")
def odd_sizes(draw: Draw) -> Problem:
    """Sizes that fit no tile: 33 queries, 65 keys, width 24."""
    return Problem(**draw.qkv(33, 65, batch=(1,), d_k=24, spread=1.25), causal=True, q_start=32)


@CASES.problem("N6")
def long_row(draw: Draw) -> Problem:
    """A thousand keys, a random half of them hidden, scores of up to a hundred."""
    data = draw.qkv(1, 1000, batch=(1,), heads=1, d_k=64, d_v=16, spread=2.0)
    return Problem(**data, shown=draw.rng.random((1, 1000)) < 0.58)


@CASES.problem("N6", "P1")
def heavy_tails(draw: Draw) -> Problem:
    """Channels of very unequal size, as trained models have them."""
    data = draw.qkv(4, 6)
    gains = np.exp2(np.round(draw.rng.standard_normal(8)))
    data["q"], data["k"] = draw.exact(data["q"] * gains), draw.exact(data["k"] * gains)
    data["v"][..., 3] = draw.exact(64.0 * data["v"][..., 3])
    return Problem(**data, causal=True, q_start=2)


@CASES.check("N2")
def traced_like_eager(api: Api) -> None:
    """Traced, compiled or evaluated lazily, attention gives its eager result within the bound."""
    data = api.draw.qkv(6, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    counts = np.asarray([4, 2])
    shown = np.arange(6) < counts[:, None, None, None]
    golden = golden_of(Problem(**data, causal=True, shown=shown))

    def run(q: Array, k: Array, v: Array, counts: Array) -> Array:
        return attention(q, k, v, causal=True, mask=masks.lengths(counts))

    try:
        output = _compiled(api, run)(q, k, v, api.array(counts))
    except Unsupported:
        raise
    except Exception as fault:  # whatever a library raises where values are needed that it does not have yet
        raise AssertionError(f"attention cannot be traced by {api.name}: {type(fault).__name__}") from fault
    if "lazy" in api.capabilities:
        expect(hasattr(output, "dask"), "the result of a lazy library must still be lazy")
    expect_within("output", api.host(output), golden.output, golden.bound(api.dtype))


@CASES.check("N3")
def values_are_checked_on_the_host(api: Api) -> None:
    """Counts out of range are errors as Python numbers, lists or NumPy arrays; else they mean what they say."""
    data = api.draw.qkv(4, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    for counts in (7, [2, 7], np.asarray([2, 7])):
        expect_error(MaskArgumentError, "lengths", attention, q, k, v, mask=masks.lengths(counts))
    if api.name == "numpy":
        return
    shown = np.asarray([[True] * 6, [False] * 6])[:, None, None, :]
    golden = golden_of(Problem(**data, shown=shown))
    output = attention(q, k, v, mask=masks.lengths(api.array(np.asarray([9, -1]))))
    expect_within("output for counts 9 and -1", api.host(output), golden.output, golden.bound(api.dtype))


@CASES.check("N4", dtypes=COMPUTED)
def repeatable(api: Api) -> None:
    """Three calls give the same bits, whatever ran in between."""
    data, other = (api.draw.qkv(9, 17, batch=(1,), d_k=32) for _ in range(2))
    first = api.host(attention(*(api.array(data[name]) for name in ("q", "k", "v"))))
    for _ in range(2):
        attention(*(api.array(other[name]) for name in ("q", "k", "v")))
        again = api.host(attention(*(api.array(data[name]) for name in ("q", "k", "v"))))
        expect_equal("output", again, first)


@CASES.problem("N4", "N6")
def among_other_calls(draw: Draw) -> Problem:
    """Calls with other data of the same shapes, before and after, change no bit of an answer."""
    return Problem(**draw.qkv(4, 6), among_others=True)


@CASES.problem("N4", "A7")
def the_same_twice(draw: Draw) -> Problem:
    """A second call on the same arrays gives the same bits, and neither call writes to them."""
    return Problem(**draw.qkv(9, 17, batch=(1,), d_k=32), causal=True, q_start=8)


@CASES.check("N5", dtypes=COMPUTED)
def no_warnings_about_hidden_poison(api: Api) -> None:
    """Non-finite data behind a mask, empty rows and -inf biases raise no floating-point warning."""
    data = api.draw.qkv(4, 6)
    data["k"][..., 4, :], data["v"][..., 4, :], data["k"][..., 5, :] = np.nan, np.inf, -np.inf
    shown = np.broadcast_to(np.arange(6) < 4, (4, 6)).copy()
    shown[1] = False
    bias = np.where(np.eye(4, 6) > 0, -np.inf, 0.0)
    arrays = [api.array(data[name]) for name in ("q", "k", "v")]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        api.host(attention(*arrays, mask=api.array(shown), bias=api.array(bias), softcap=5.0))
    floating = [str(warning.message) for warning in warned if issubclass(warning.category, RuntimeWarning)]
    expect(not floating, f"warnings were raised: {floating}")


@CASES.check("N6", dtypes=COMPUTED)
def golden_of_any_library(api: Api) -> None:
    """golden() takes arrays of any library and picks rows without moving them; refattn keeps its bound."""
    data = api.draw.qkv(6, 6, heads=4, kv_heads=2)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    options: dict[str, Any] = {"causal": True, "mask": masks.window(2, 0), "softcap": 4.0}
    whole, some = golden(q, k, v, **options), golden(q, k, v, rows=[1, 5], weights=True, **options)
    expect_equal("picked rows", some.output, whole.output[..., [1, 5], :])
    expect_equal("shape of the weights", np.shape(some.weights), (2, 4, 2, 6))
    output = api.host(attention(q, k, v, **options))
    expect_within("output", output, whole.output, whole.bound(api.dtype))
    expect_within("picked output", output[..., [1, 5], :], some.output, some.bound(api.dtype))


def _compiled(api: Api, function: Any) -> Any:
    """The function as its library traces it; as it is where a library evaluates lazily by itself."""
    if api.name == "jax":
        import jax

        return jax.jit(function)
    if api.name == "torch":
        import torch

        return torch.compile(function, fullgraph=True, backend="eager")
    if "lazy" in api.capabilities:
        return function
    raise Unsupported(f"{api.name} neither traces nor evaluates lazily")
