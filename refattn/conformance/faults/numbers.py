"""Faults of precision, shape, dtype, memory and repeatability (chapters A and N)."""

from __future__ import annotations

import itertools
from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.fault import Attention, Fault
from refattn.conformance.faults.pipeline import Plain, shortened
from refattn.dtypes import FULL, LOW, dtype_name


def _sum_in_storage(run: Any, weights: Array) -> Array:
    """A running sum that is rounded after every key."""
    total = run.full((*weights.shape[:-1], 1), 0.0)
    for j in range(weights.shape[-1]):
        total = run.rounded(total + weights[..., j : j + 1])
    return total


def _weighted_in_storage(run: Any, weights: Array, v: Array) -> Array:
    total = run.full((*weights.shape[:-1], v.shape[-1]), 0.0)
    for j in range(weights.shape[-1]):
        total = run.rounded(total + weights[..., j : j + 1] * v[..., j : j + 1, :])
    return total


def _products_in_storage(run: Any, q: Array, k: Array) -> Array:
    total = run.full((), 0.0) * run.xp.matmul(q, run.xp.matrix_transpose(k))
    for c in range(q.shape[-1]):
        total = run.rounded(total + q[..., c : c + 1] * run.xp.matrix_transpose(k[..., c : c + 1]))
    return total


def _short_logits(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
    """Logits of 11 bits."""
    return Plain.softmax(run, shortened(x, 13 if run.wide == run.xp.float32 else 42), seen, sink)


def _short_products(run: Any, q: Array, k: Array) -> Array:
    """Inputs of 11 bits, as TF32 has them; of 24 where float64 is asked for."""
    bits = 13 if run.wide == run.xp.float32 else 29
    return Plain.products(run, shortened(q, bits), shortened(k, bits))


def _through_storage(run: Any, q: Array, k: Array) -> Array:
    return run.rounded(Plain.products(run, q, k))


def _width_of_q(run: Any, output: Array, seen: Array) -> Array:
    output = Plain.output(run, output, seen)
    short = max(0, run.d_k - output.shape[-1])
    zeros = run.xp.zeros((*output.shape[:-1], short), dtype=output.dtype, device=run.device)
    return run.xp.concat((output, zeros), axis=-1)[..., : run.d_k]


def _tokens_before_heads(run: Any, output: Array, seen: Array) -> Array:
    """The memory of (tokens, heads) read as (heads, tokens)."""
    output = Plain.output(run, output, seen)
    return run.xp.reshape(run.xp.moveaxis(output, -3, -2), tuple(output.shape))


def _keys_of_tokens(run: Any, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """k is read with its two last axes exchanged in memory."""
    return q, run.xp.reshape(run.xp.matrix_transpose(k), tuple(k.shape)), v


def _without_strides(run: Any, *arrays: Array) -> tuple[Array, ...]:
    """The memory from each array's first element on, as if it were contiguous."""
    return tuple(_contiguous(run.library.name, x) for x in arrays)


def _contiguous(library: str, x: Array) -> Array:
    steps, size = [], 1
    for length in reversed(x.shape):
        steps.append(size)
        size *= length
    steps.reverse()
    if library == "torch":
        return x.as_strided(tuple(x.shape), tuple(steps))
    from numpy.lib.stride_tricks import as_strided

    return as_strided(x, x.shape, tuple(step * x.itemsize for step in steps))


def _memoised(attention: Attention) -> Attention:
    """Answers with the first result that has the shapes and options asked for."""
    seen: dict[Any, Any] = {}

    def remembered(q: Array, k: Array, v: Array, **options: Any) -> Any:
        key = (*(tuple(x.shape) for x in (q, k, v)), dtype_name(q.dtype), *sorted(options))
        return seen.setdefault(key, attention(q, k, v, **options))

    return remembered


def _constant(attention: Attention) -> Attention:
    """Zeros of the right shape."""

    def zeros(q: Array, k: Array, v: Array, **options: Any) -> Any:
        return attention(q, k, v, **options)[0] * 0.0

    return zeros


def _all_nan(attention: Attention) -> Attention:
    def nothing(q: Array, k: Array, v: Array, **options: Any) -> Any:
        return attention(q, k, v, **options)[0] * float("nan")

    return nothing


def _no_kernel(attention: Attention) -> Attention:
    """Hands back the values, or what the output's buffer held."""

    def values(q: Array, k: Array, v: Array, **options: Any) -> Any:
        output = attention(q, k, v, **options)[0]
        return v if tuple(v.shape) == tuple(output.shape) else output * 0.0

    return values


def _scales_in_place(attention: Attention) -> Attention:
    """Scales q where it lies."""

    def scaled(q: Array, k: Array, v: Array, **options: Any) -> Any:
        result = attention(q, k, v, **options)
        q *= 2
        return result

    return scaled


def _one_buffer(attention: Attention) -> Attention:
    """Writes all outputs of one shape into one buffer, so that each call overwrites the answer before it."""
    buffers: dict[Any, Array] = {}

    def buffered(q: Array, k: Array, v: Array, **options: Any) -> Any:
        output = attention(q, k, v, **options)[0]
        buffer = buffers.setdefault((tuple(output.shape), dtype_name(output.dtype)), output)
        buffer[...] = output
        return buffer

    return buffered


def _every_second_differs(attention: Attention) -> Attention:
    """Right within the bound, but every second call ends in another rounding."""
    calls = itertools.count()

    def unstable(q: Array, k: Array, v: Array, **options: Any) -> Any:
        output, lse = attention(q, k, v, **options)
        unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}.get(dtype_name(output.dtype), 2.0**-52)
        return (output * (1 + unit) if next(calls) % 2 else output), lse

    return unstable


FAULTS = (
    Fault(name="output as wide as q", clause="A1", kind="layout-strides", steps={"output": _width_of_q}),
    Fault(name="tokens before heads", clause="A2", kind="layout-strides", steps={"output": _tokens_before_heads}),
    Fault(name="k is transposed in memory", clause="A2", kind="layout-strides", steps={"arguments": _keys_of_tokens}),
    Fault(
        name="strides are ignored",
        clause="A7",
        kind="layout-strides",
        libraries=("numpy", "torch"),
        steps={"arguments": _without_strides},
    ),
    Fault(
        name="result in float32",
        clause="A4",
        kind="dtype-precision",
        dtypes=("bfloat16", "float16", "float64"),
        steps={"output": lambda run, output, seen: run.xp.astype(Plain.restored(run, output, seen), run.xp.float32)},
    ),
    Fault(
        name="inputs are written to",
        clause="A7",
        kind="test oracle",
        libraries=("numpy", "torch", "strict", "cupy"),
        wrap=_scales_in_place,
    ),
    Fault(
        name="outputs share a buffer",
        clause="N4",
        kind="test oracle",
        libraries=("numpy", "torch", "strict", "cupy"),
        wrap=_one_buffer,
    ),
    Fault(name="answers are memoised by shape", clause="N4", kind="test oracle", wrap=_memoised),
    Fault(name="every second call differs", clause="N4", kind="", wrap=_every_second_differs),
    Fault(name="output of zeros", clause="N6", kind="test oracle", wrap=_constant),
    Fault(name="output of NaN", clause="N6", kind="test oracle", wrap=_all_nan),
    Fault(name="values are handed back", clause="N6", kind="test oracle", wrap=_no_kernel),
    Fault(
        name="float64 in float32",
        clause="N1",
        kind="dtype-precision",
        dtypes=("float64",),
        steps={"compute_in": lambda run, q: run.xp.float32},
    ),
    Fault(
        name="products of truncated inputs",
        clause="N1",
        kind="dtype-precision",
        dtypes=FULL,
        steps={"products": _short_products},
    ),
    Fault(
        name="overflow before scale",
        clause="N1",
        kind="overflow",
        dtypes=("float16",),
        steps={"products": _through_storage},
    ),
    Fault(
        name="sum in the storage type", clause="N1", kind="dtype-precision", dtypes=LOW, steps={"sum": _sum_in_storage}
    ),
    Fault(
        name="output accumulated in the storage type",
        clause="N1",
        kind="dtype-precision",
        dtypes=LOW,
        steps={"weighted": _weighted_in_storage},
    ),
    Fault(
        name="scores accumulated in the storage type",
        clause="N1",
        kind="dtype-precision",
        dtypes=LOW,
        steps={"products": _products_in_storage},
    ),
    Fault(
        name="softmax in half precision",
        clause="N1",
        kind="dtype-precision",
        dtypes=FULL,
        steps={"softmax": _short_logits},
    ),
)
