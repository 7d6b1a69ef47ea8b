"""Random combinations of shapes and options: refattn and the oracle read the specification the same way."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import refattn
from drawn_calls import KINDS, Call, calls, combined
from libraries import Library, host_cast

ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149, "float64": 2.0**-1074}


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: Any, what: str) -> None:
    """Equal shapes, equal NaN and infinities, and elsewhere at most `bound` apart."""
    assert actual.shape == expected.shape, what
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=what)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(actual - expected), 0.0)
    worst = np.max(error - bound, initial=-np.inf)
    assert worst <= 0, f"{what}: {np.max(error)} off, {worst} beyond the bound"


def compute_dtype(call: Call, dtype: str) -> str:
    """promote(float32, q, bias, sinks) by name."""
    given_too = [*(t[1] for t in call.options.get("bias", ()) if t[0] != "alibi"), call.options.get("sinks")]
    names = [dtype, *(x.named(dtype) for x in given_too if x is not None)]
    return "float64" if "float64" in names else "float32"


def check(library: Library, call: Call, dtype: str, bounds: Any) -> None:
    """Compare output, weights, visibility and LSE of one call with the oracle, and its formal properties."""
    arrays, options = call.arguments(library, dtype)
    expected = call.expected(dtype)
    bound = bounds(call, expected)
    output = refattn.attention(*arrays, **options)
    again, lse = refattn.attention_with_lse(*arrays, **options)
    stages = refattn.attention_stages(*arrays, **options)

    assert type(output) is type(lse) is type(arrays[0])
    assert output.dtype == arrays[0].dtype
    assert lse.dtype == stages.weights.dtype == library.dtype(compute_dtype(call, dtype))
    assert array_api_compat.device(output) == array_api_compat.device(arrays[0])
    assert output.shape == expected.output.shape
    assert lse.shape == expected.lse.shape

    assert_within(library.host(output), expected.output, bound["output"], "output")
    for other in (again, stages.output):
        np.testing.assert_array_equal(library.host(other), library.host(output))
    assert_within(library.host(lse), expected.lse, bound["lse"], "lse")
    visible, weights, logits = (library.host(stage) for stage in (stages.visible, stages.weights, stages.logits))
    np.testing.assert_array_equal(visible, expected.visible)
    assert_within(weights, expected.weights, bound["weights"], "weights")
    assert_within(logits[visible], expected.logits[visible], bound["lse"].max(initial=0.0), "visible logits")
    for array, host in zip(arrays, (call.q, call.k, call.v), strict=True):
        np.testing.assert_array_equal(library.host(array), host_cast(host, dtype).astype(np.float64))


def float64_bounds(call: Call, expected: Any) -> dict[str, Any]:
    size = 1e-12 * max(1.0, np.max(np.abs(call.v), initial=0.0))
    largest = np.max(np.abs(expected.logits[expected.visible]), initial=0.0)
    lse = 1e-12 * np.maximum(1.0, np.nan_to_num(np.abs(expected.lse), posinf=0.0))
    return {"output": size, "weights": size, "lse": np.maximum(lse, 1e-12 * largest)}


def rounded_bounds(dtype: str) -> Any:
    """First-principle bounds: float32 arithmetic (unit u) on exact inputs, then one rounding to `dtype`.

    A logit is a sum of d_k products, scaled, capped and biased: off by at most

        ds = u ((d_k + 5) A + 16 c + 8 b + 4 s)

    with A = |scale| * max |q|.|k|, c and b the largest capped score and bias, s the largest logit; 16 and 8
    leave the library's tanh and powers 8 u. Numerators and denominator move by a factor e^ds each, exp and a
    sum of Lk + 1 terms add (Lk + 10) u each, so weights are off by r = e^(2 ds) - 1 + 2 (Lk + 10) u of
    themselves. The output is their sum over v with Lk more roundings, then stored.
    """
    unit, stored = ROUNDOFF["float32"], ROUNDOFF[dtype]

    def bounds(call: Call, expected: Any) -> dict[str, Any]:
        d_k, k_len = call.q.shape[-1], call.k.shape[-2]
        scale = call.options.get("scale")
        scale = float(getattr(scale, "values", scale)) if scale is not None else 1 / math.sqrt(max(d_k, 1))
        largest = np.max(np.abs(call.q), initial=0.0) * np.max(np.abs(call.k), initial=0.0)
        products = largest * d_k * abs(scale) * (1 + stored) ** 3
        capped = min(products, call.options.get("softcap", 0.0))
        logits = np.max(np.abs(expected.logits[expected.visible]), initial=0.0)
        ds = unit * ((d_k + 5) * products + 16 * capped + 8 * (logits + products) + 4 * logits)
        relative = math.expm1(2 * ds) + 2 * (k_len + 10) * unit
        v_max = np.max(np.abs(call.v), initial=0.0) * (1 + stored)
        lse_size = np.nan_to_num(np.abs(expected.lse), posinf=0.0)
        return {
            "output": (relative + k_len * unit) * v_max + stored * np.abs(expected.output) * (1 + relative)
            + stored * relative * v_max + SMALLEST[dtype],
            "weights": relative * expected.weights + SMALLEST["float32"],
            "lse": ds + (k_len + 10) * unit + 4 * unit * (lse_size + logits),
        }  # fmt: skip

    return bounds


@given(data=st.data())
def test_float64_agrees_with_the_oracle(library: Library, data: st.DataObject) -> None:
    """Output and weights to 1e-12 max(1, max |v|), LSE to 1e-12 max(1, |lse|), and the inputs unchanged."""
    call = data.draw(calls(few_shapes=library.name == "jax"))
    check(library, call, "float64", float64_bounds)


@pytest.mark.parametrize("kind", KINDS)
@settings(settings.get_profile("few"))
@given(data=st.data())
def test_every_kind_of_mask_agrees_with_the_oracle(library: Library, kind: str, data: st.DataObject) -> None:
    """Each mask kind alone, with any other options, shows the oracle's pairs."""
    call = data.draw(calls(few_shapes=library.name == "jax", kind=kind))
    check(library, call, "float64", float64_bounds)


@given(data=st.data())
def test_lower_precisions_stay_within_the_derived_bound(
    library: Library, storage_dtype: str, data: st.DataObject
) -> None:
    """float32 arithmetic, one rounding at the end, and the result in the dtype of q."""
    call = data.draw(calls(few_shapes=library.name == "jax"))
    check(library, call, storage_dtype, rounded_bounds(storage_dtype))


@settings(settings.get_profile("few"))
@given(call=calls(kind="any"), data=st.data())
def test_masks_answer_alike_everywhere(library: Library, call: Call, data: st.DataObject) -> None:
    """A mask's array shows the oracle's pairs, and "all" or "none" of a tile is true of each of its pairs."""
    q_len, k_len = call.q.shape[-2], call.k.shape[-2]
    starts = {name: call.options.get(name, 0) for name in ("q_start", "k_start")}
    mask = call.arguments(library, "float64")[1]["mask"]
    rule = combined(call.options["mask"], oracle, lambda x: getattr(x, "values", x))
    hosts = {name: getattr(value, "values", value) for name, value in starts.items()}
    expected = oracle.attention(call.q, call.k, call.v, mask=rule, **hosts).visible
    given_starts = {name: value.on(library) if hasattr(value, "on") else value for name, value in starts.items()}
    shown = library.host(mask.to_array(q_len, k_len, **given_starts, like=library.array(call.q)))
    np.testing.assert_array_equal(np.broadcast_to(shown, expected.shape), expected)
    rows, keys = (range(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in (q_len, k_len))
    answer = mask.tile(rows, keys, **given_starts)
    tile = expected[..., rows.start : rows.stop, keys.start : keys.stop]
    assert answer in ("all", "none", "mixed")
    assert answer != "all" or tile.all()
    assert answer != "none" or not tile.any()
