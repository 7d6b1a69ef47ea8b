"""Chapter A: shapes, batch, dtypes, memory layout."""

from __future__ import annotations

import numpy as np

from refattn import attention, attention_stages, attention_with_lse
from refattn.conformance.case import LAYOUTS, Api, Chapter, Problem, Unsupported
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw, rounded
from refattn.dtypes import COMPUTED
from refattn.errors import DTypeError, HeadCountError, LibraryMismatchError, NotAnArrayError

CASES = Chapter("arrays")


@CASES.problem("A1", "N6")
def wider_values(draw: Draw) -> Problem:
    """Values may be wider than keys, and Lq and Lk may differ: the output is (..., H, Lq, d_v)."""
    return Problem(**draw.qkv(4, 6, d_v=12))


@CASES.problem("A1")
def narrower_values(draw: Draw) -> Problem:
    """Values may be narrower than keys; an output allocated like q has the wrong width."""
    return Problem(**draw.qkv(4, 6, d_v=3))


@CASES.problem("A1")
def one_query_one_key(draw: Draw) -> Problem:
    """The smallest problem: softmax over one key is 1, the output is the value."""
    return Problem(**draw.qkv(1, 1, batch=(1,), heads=1, d_k=16, spread=3.0), scale=0.25)


@CASES.problem("A2")
def rank_two(draw: Draw) -> Problem:
    """Rank 2 is one head without a head axis."""
    data = draw.qkv(4, 6, batch=(), heads=1)
    return Problem(**{name: x if name == "dtype" else x[0] for name, x in data.items()})


@CASES.problem("A2")
def rank_three(draw: Draw) -> Problem:
    """In rank 3 axis -3 is the head axis."""
    return Problem(**draw.qkv(4, 6, batch=(), heads=3))


@CASES.problem("A3")
def batch_of_queries(draw: Draw) -> Problem:
    """Batch axes broadcast: two batch entries of queries over one of keys and values."""
    data = draw.qkv(4, 6)
    return Problem(**{**data, "k": data["k"][:1], "v": data["v"][:1]})


@CASES.problem("A3")
def two_batch_axes(draw: Draw) -> Problem:
    """There may be several batch axes, and each broadcasts."""
    data = draw.qkv(4, 6, batch=(2, 3))
    return Problem(**{**data, "q": data["q"][:, :1], "k": data["k"][:1]})


@CASES.problem("A3", "P1")
def batch_entries_differ(draw: Draw) -> Problem:
    """Each batch entry and head reads its own keys and values: they differ in size by orders of magnitude."""
    data = draw.qkv(4, 6, batch=(3,))
    data["v"] = data["v"] * np.asarray([1.0, 16.0, 256.0])[:, None, None, None]
    return Problem(**data)


@CASES.problem("A4", "N1")
def result_dtype(draw: Draw) -> Problem:
    """The output has the dtype of q, and its rounding is the last step."""
    return Problem(**draw.qkv(4, 6, spread=1.25))


@CASES.check("A4")
def float8_is_storage(api: Api) -> None:
    """float8 is accepted as storage: the result is that of the same numbers in float32, in float32."""
    values = [np.clip(np.round(4 * api.draw.normal(1, 2, 4, 8)), -8, 8) / 4 for _ in range(3)]
    q, k, v = (_float8(api, x) for x in values)
    output = attention(q, k, v)
    expect(api.dtype_of(output) == "float32", f"the output has dtype {api.dtype_of(output)}, expected float32")
    wide = attention(*(api.array(x, "float32") for x in values))
    expect_equal("output", api.host(output), api.host(wide))


@CASES.check("A4")
def dtypes_that_are_refused(api: Api) -> None:
    """Integers, booleans and a mixture of dtypes are errors."""
    x = api.array(np.ones((1, 4, 8)), "float32")
    whole = api.array(np.ones((1, 4, 8), dtype=np.int32))
    truth = api.array(np.ones((1, 4, 8), dtype=bool))
    expect_error(DTypeError, "q", attention, whole, whole, whole)
    expect_error(DTypeError, "v", attention, x, x, truth)
    if "float64" in api.capabilities:
        wide = api.array(np.ones((1, 4, 8)), "float64")
        expect_error(DTypeError, "k", attention, x, wide, wide)


@CASES.check("A5", dtypes=COMPUTED)
def bias_and_sink_dtypes(api: Api) -> None:
    """bias and sinks of any real dtype are used at their own precision and leave the result's dtype alone."""
    data = api.draw.qkv(4, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    for dtype in COMPUTED:
        if dtype not in api.capabilities:
            continue
        bias, sinks = api.array(np.eye(4, 6), dtype), api.array(np.ones(2), dtype)
        output = attention(q, k, v, bias=bias, sinks=sinks)
        expect(api.dtype_of(output) == api.dtype, f"{dtype} bias gives an output of {api.dtype_of(output)}")
        stages = attention_stages(q, k, v, bias=bias, sinks=sinks)
        wide = "float64" if "float64" in (api.dtype, dtype) else "float32"
        got = api.dtype_of(stages.logits)
        expect(got == wide, f"q in {api.dtype} with a bias in {dtype} computes in {got}, expected {wide}")


@CASES.check("A5", dtypes=COMPUTED)
def values_of_a_bias_in_another_dtype(api: Api) -> None:
    """A bias and sinks of every dtype count with their own values: neither rounded to the dtype of q, nor beyond it."""
    data = api.draw.qkv(4, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    for dtype in COMPUTED:
        if dtype not in api.capabilities:
            continue
        bias, sinks = rounded(api.draw.rng.standard_normal((4, 6)), dtype), rounded(np.asarray([0.3, -0.7]), dtype)
        if dtype != "float16":
            bias[1] = -131072.0  # the row's constant; float16 would make it -inf, and the row empty
        wide = golden_of(Problem(**data, bias=bias))
        output = attention(q, k, v, bias=api.array(bias, dtype))
        expect_within(f"output with a bias in {dtype}", api.host(output), wide.output, wide.bound(api.dtype))
        wide = golden_of(Problem(**data, sinks=sinks))
        output = attention(q, k, v, sinks=api.array(sinks, dtype))
        expect_within(f"output with sinks in {dtype}", api.host(output), wide.output, wide.bound(api.dtype))


@CASES.problem("A6")
def no_width(draw: Draw) -> Problem:
    """With d_k = 0 every score is 0 and the default scale is 1: the output is the mean of the values."""
    return Problem(**draw.qkv(4, 6, d_k=0, d_v=8))


@CASES.problem("A6", "P2")
def no_keys(draw: Draw) -> Problem:
    """Without keys the output is 0."""
    return Problem(**draw.qkv(4, 0))


@CASES.problem("A6")
def no_queries(draw: Draw) -> Problem:
    """Without queries the output is empty, of the right shape."""
    return Problem(**draw.qkv(0, 6))


@CASES.problem("A6")
def no_value_width(draw: Draw) -> Problem:
    """With d_v = 0 the output is empty, of the right shape."""
    return Problem(**draw.qkv(4, 6, d_v=0))


@CASES.problem("A6")
def no_batch(draw: Draw) -> Problem:
    """A batch of nothing gives an output of nothing, of the right shape."""
    return Problem(**draw.qkv(4, 6, batch=(0,)))


@CASES.check("A6", "G1")
def no_heads(api: Api) -> None:
    """H = 0 is legal only with Hkv = 0."""
    none, one = api.array(np.ones((0, 3, 4))), api.array(np.ones((1, 3, 4)))
    expect(tuple(attention(none, none, none).shape) == (0, 3, 4), "H = Hkv = 0 must give an output (0, 3, 4)")
    expect_error(HeadCountError, "q", attention, one, none, none)
    expect_error(HeadCountError, "q", attention, none, one, one)


def _layout(layout: str) -> None:
    def build(draw: Draw) -> Problem:
        data = draw.qkv(4, 6)
        if layout == "expanded":
            data |= {name: np.repeat(data[name][:, :1], 2, axis=1) for name in ("q", "k", "v")}
        return Problem(**data, layout=layout)

    build.__name__ = f"{layout}_memory"
    build.__doc__ = f"The result depends on values alone, not on how they lie in memory: {layout} views."
    CASES.problem("A1", "A7")(build)


for _name in LAYOUTS[1:]:
    _layout(_name)


@CASES.check("A7", dtypes=COMPUTED)
def results_stay_in_the_library(api: Api) -> None:
    """Output and every stage are arrays of the library that came in, on its device."""
    data = api.draw.qkv(4, 6)
    q, k, v = (api.array(data[name]) for name in ("q", "k", "v"))
    results = {**dict(zip(("output", "lse"), attention_with_lse(q, k, v), strict=True))}
    results |= {f"stage {name}": x for name, x in attention_stages(q, k, v)._asdict().items()}
    for name, x in results.items():
        expect(api.same_library(x), f"{name} is a {type(x).__name__}, not an array of {api.name}")
        if hasattr(q, "device"):
            expect(x.device == q.device, f"{name} is on {x.device}, q on {q.device}")


@CASES.check("A7")
def libraries_do_not_mix(api: Api) -> None:
    """Arrays of two libraries in one call are an error, and so is what is no array."""
    x = api.array(np.ones((1, 3, 4)), "float32")
    if api.name != "numpy":
        foreign = np.ones((1, 3, 4), dtype=np.float32)
        expect_error(LibraryMismatchError, "k", attention, x, foreign, x)
        expect_error(LibraryMismatchError, "bias", attention, x, x, x, bias=np.zeros((3, 3), dtype=np.float32))
    expect_error(NotAnArrayError, "q", attention, [[1.0]], x, x)
    expect_error(NotAnArrayError, "v", attention, x, x, None)


def _float8(api: Api, values: np.ndarray) -> object:
    """The values, which float8 holds exactly, as a float8 array of the library."""
    if api.name == "torch":
        import torch

        return api.array(values).to(torch.float8_e4m3fn)
    if api.name in ("numpy", "jax"):
        try:
            import ml_dtypes
        except ImportError:
            raise Unsupported("float8 on NumPy needs ml_dtypes") from None
        return api.array(values).astype(ml_dtypes.float8_e4m3fn)
    raise Unsupported(f"{api.name} has no float8")
