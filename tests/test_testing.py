"""The help for other people's test suites: what the assertion lets pass, what it says, and what inputs are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import planted_faults
import refattn
from libraries import Library
from refattn import errors, masks, testing
from refattn.arrays import Array
from refattn.conformance.inputs import Inputs, edges
from refattn.conformance.plain import rounded
from refattn.testing import assert_attention_close


def draw(q_len: int = 3, k_len: int = 5, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> tuple[Array, ...]:
    """Float32 arrays q, k and v whose values bfloat16 and float16 hold too."""
    rng = np.random.default_rng(seed)
    shapes = ((2, heads, q_len, 8), (2, kv_heads, k_len, 8), (2, kv_heads, k_len, 6))
    return tuple(rounded(rounded(rng.standard_normal(s), "bfloat16"), "float16").astype(np.float32) for s in shapes)


Q, K, V = draw()
CAUSAL: dict[str, Any] = {"causal": True, "q_start": 2}


def said(actual: Any, *arrays: Array, **options: Any) -> list[str]:
    """The lines of the message that the assertion must raise."""
    with pytest.raises(AssertionError) as raised:
        assert_attention_close(actual, *(arrays or (Q, K, V)), **options)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("options", [{}, CAUSAL, {"softcap": 2.0, "scale": 0.3}], ids=str)
def test_right_results_of_every_library_and_dtype_pass(library: Library, options: dict[str, Any]) -> None:
    """Output and log-sum-exp of the specification pass, as arrays of any library and dtype, against arrays of any."""
    for dtype in library.dtypes:
        arrays = [library.array(x, dtype) for x in (Q, K, V)]
        output, lse = refattn.attention_with_lse(*arrays, **options)
        assert_attention_close(output, *arrays, lse=lse, **options)
        assert_attention_close(output, *arrays, lse=lse, dtype=dtype, model="unfused", coherent=True, **options)
        # The same numbers on NumPy, bfloat16 in a wider container.
        assert_attention_close(library.host(output), Q, K, V, dtype=dtype, **options)


def test_masks_biases_and_sinks_are_those_of_attention() -> None:
    """Lazy masks, arrays, biases and sinks mean what they mean in attention."""
    options: dict[str, Any] = {"mask": masks.window(1, 0), "q_start": 2, "sinks": np.ones(4, dtype=np.float32)}
    options["bias"] = refattn.biases.alibi(4)
    assert_attention_close(refattn.attention(Q, K, V, **options), Q, K, V, **options)
    assert "sinks are ignored" in said(refattn.attention(Q, K, V, **{**options, "sinks": None}), **options)[0]


KEEP = np.asarray([True, False, True, True, False])
READINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    '"causal from the top left" [M5]: causal aligned top-left, q_start=0 instead of 2 (Lq=3, Lk=5)': (
        CAUSAL,
        {"causal": True, "q_start": 0},
    ),
    '"causal from the bottom right" [M5]: causal aligned bottom-right, q_start=2 instead of 0 (Lq=3, Lk=5)': (
        {"causal": True, "q_start": 0},
        CAUSAL,
    ),
    '"causal hides itself" [M4]': (CAUSAL, {"causal": True, "q_start": 1}),
    '"causal shows the next" [M4]': (CAUSAL, {"causal": True, "q_start": 3}),
    '"causal is ignored" [M4]': (CAUSAL, {}),
    '"causal from the bottom right, unasked" [M4]': ({}, CAUSAL),
    '"mask polarity" [M1]': ({"mask": KEEP}, {"mask": ~KEEP}),
    '"mask is ignored" [M1]': ({"mask": KEEP}, {}),
    '"scale is ignored" [S2]': ({"scale": 0.7}, {}),
    '"no scale" [S1]': ({}, {"scale": 1.0}),
    '"cap is ignored" [S3]: softcap=0.5 is ignored': ({"softcap": 0.5}, {}),
    '"bias is ignored" [B4]': ({"bias": np.linspace(-2, 2, 5, dtype=np.float32)}, {}),
}


@pytest.mark.parametrize("words", READINGS)
def test_another_reading_is_recognised(words: str) -> None:
    """The first sentence names the reading of the options that gives the result, and where it is worst."""
    asked, meant = READINGS[words]
    first, second, *_ = said(refattn.attention(Q, K, V, **meant), **asked)
    assert first.startswith(f"the output matches {words}")
    assert "; output[" in first
    assert " times the bound " in first
    assert second.endswith("elements are beyond the bound of model 'fused' in float32")


def test_heads_in_the_wrong_groups_are_recognised() -> None:
    """Query heads that read key/value heads by turns are named, and which heads are wrong."""
    wrong = planted_faults.faulty("heads are interleaved")(Q, K, V)
    first, *rest = said(wrong)
    assert "query head h reads key/value head h % Hkv" in first
    assert "heads: 1, 2" in rest


def test_a_wrong_row_is_located() -> None:
    """A fault that is no reading is given by place, size and the rows, heads and columns that it is in."""
    output = refattn.attention(Q, K, V)
    output[1, 3, 2, 4] += 0.1
    first, *rest = said(output)
    assert first.startswith("output[1, 3, 2, 4] is ")
    assert rest[0].startswith("1 of 144 elements ")
    assert rest[1:] == ["query rows: 2", "heads: 3", "columns: 4"]


def test_nan_is_said_to_be_nan() -> None:
    """NaN where none is expected is counted, and rows without a key are called that."""
    output = refattn.attention(Q, K, V)
    output[0, 1, 2] = np.nan
    assert said(output)[0] == (
        "the output is NaN in 6 of 144 elements, and should not be: output[0, 1, 2, 0] is nan, expected "
        f"{float(refattn.golden(Q, K, V).output[0, 1, 2, 0]):.9g}"
    )
    nothing = np.zeros((3, 5), dtype=bool)
    output = np.full_like(output, np.nan)
    assert "in rows that see no key, and should not be" in said(output, mask=nothing)[0]


def test_shapes_dtypes_and_kinds_are_said() -> None:
    """A wrong shape, dtype or kind of result is the first sentence, with what to do about it."""
    output, lse = refattn.attention_with_lse(Q, K, V)
    swapped = said(np.swapaxes(output, 1, 2))[0]
    assert swapped.startswith("the output has shape (2, 3, 4, 6), expected (2, 4, 3, 6)")
    assert swapped.endswith("it seems to be (..., tokens, heads, width)")
    narrow = said(output.astype(np.float16))[0]
    assert (
        narrow == "the output has dtype float16, expected that of q, float32 [A4]; say dtype='float16' if that is meant"
    )
    assert_attention_close(output.astype(np.float16), Q, K, V, dtype="float16")
    assert "has dtype float16, expected float32" in said(output.astype(np.float16), dtype=np.dtype("float32"))[0]
    assert said(output.astype(np.int32))[0] == "the output has dtype int32, expected float32 [A4]"
    assert "hand over output and log-sum-exp as actual and lse=" in said((output, lse))[0]
    assert said(None)[0] == "the output is None, expected an array [A7]"
    assert "log-sum-exp, the second of the pair, has shape" in said(output, lse=lse[..., None])[0]


def test_a_log_sum_exp_in_base_2_is_recognised() -> None:
    """A right output does not excuse the log-sum-exp, whose base is named."""
    output, lse = refattn.attention_with_lse(Q, K, V)
    assert said(output, lse=(lse / np.log(2)).astype(np.float32))[0].startswith(
        'the log-sum-exp matches "log-sum-exp in base 2" [P4]: the log-sum-exp is in base 2; multiply it by ln 2; '
    )
    assert said(output, lse=lse + np.float32(0.1))[0].startswith(
        'the log-sum-exp matches "log-sum-exp plus a constant" [P4]: the log-sum-exp is 0.1 too large everywhere; '
    )


def test_the_model_that_holds_is_named() -> None:
    """Scores stored in bfloat16 fail the fused bound, are said to be that, and pass once it is asked for."""
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes").bfloat16
    arrays = [(2 * x).astype(bfloat16) for x in draw(8, 16)]
    output = planted_faults.correct_unfused(*arrays)[0]
    assert said(output, *arrays)[0].startswith(
        "the output is within the bound of model='unfused', not of 'fused': output["
    )
    assert_attention_close(output, *arrays, model="unfused")


def test_float64_computed_in_float32_is_recognised() -> None:
    """A float64 result that is right to float32 alone says so (N1)."""
    arrays = [x.astype(np.float64) for x in (Q, K, V)]
    output = planted_faults.faulty("float64 in float32")(*arrays).astype(np.float64)
    assert "float64 seems to be computed in float32 [N1]" in said(output, *arrays)[-1]


def test_rows_of_large_inputs() -> None:
    """rows= judges these rows, of a result that holds all or them alone, and names them by their own numbers."""
    q, k, v = draw(40, 60)
    options: dict[str, Any] = {"causal": True, "q_start": 20}
    output, lse = refattn.attention_with_lse(q, k, v, **options)
    rows = [0, 17, -1]
    assert_attention_close(output, q, k, v, lse=lse, rows=rows, **options)
    assert_attention_close(output[..., rows, :], q, k, v, lse=lse[..., rows], rows=rows, **options)
    output[0, 0, 17, 0] += 1
    first, *rest = said(output, q, k, v, rows=rows, **options)
    assert first.startswith("output[0, 0, 17, 0] is ")
    assert "query rows: 17" in rest
    assert_attention_close(output, q, k, v, rows=[16, 18], **options)
    assert "has shape (2, 4, 2, 6)" in said(output[..., :2, :], q, k, v, rows=rows, **options)[0]


def test_what_cannot_be_judged_is_no_pass() -> None:
    """Where rounding may move a logit by 1 the assertion says that nothing follows."""
    q, k = np.full((1, 1, 4), 64.0, dtype=np.float16), np.full((1, 3, 4), 64.0, dtype=np.float16)
    k[0, 1] = 63
    v = np.arange(3, dtype=np.float16).reshape(1, 3, 1)
    right = refattn.attention(q, k, v)
    assert_attention_close(right, q, k, v)
    bfloat16 = {"dtype": "bfloat16", "model": "unfused"}
    assert said((right + 1).astype(np.float32), q, k, v, **bfloat16)[0].startswith("nothing follows: ")


def test_arguments_are_checked_as_everywhere() -> None:
    """Options that do not fit, unknown models and dtypes raise their own errors, not AssertionError."""
    output = refattn.attention(Q, K, V)
    with pytest.raises(errors.PositionError):
        assert_attention_close(output, Q, K, V, causal=True)
    with pytest.raises(TypeError, match=r"assert_attention_close\(\) got .*'is_causal'; expected causal, mask, "):
        assert_attention_close(output, Q, K, V, is_causal=True)
    with pytest.raises(TypeError, match=r"assert_gradients_close\(\) got .*'rtol'; the bound is derived"):
        testing.assert_gradients_close({}, Q, K, V, output, rtol=0.1)
    with pytest.raises(errors.ModelError, match=r"model: expected .*fused.*unfused.*'magic' \[refattn N6\]"):
        assert_attention_close(output, Q, K, V, model="magic")
    with pytest.raises(errors.ModelError, match="dtype"):
        assert_attention_close(output, Q, K, V, dtype="int8")
    with pytest.raises(errors.InputsError, match="features"):
        testing.inputs(features=("causal", "windows"))
    with pytest.raises(errors.InputsError, match="dtypes"):
        testing.inputs(dtypes="float32")
    wrong: list[Any] = [[len(output[0, 0])], [0.5], [[0]]]
    for rows in wrong:
        with pytest.raises(errors.InputsError, match="rows: expected indices of query rows"):
            assert_attention_close(output, Q, K, V, rows=rows)


def test_poison_is_drawn_most_of_the_time() -> None:
    """A kernel that lets hidden values through is found out soon: half of the calls with poison hold some."""
    held: list[bool] = []

    @settings(max_examples=100, database=None)
    @given(call=testing.inputs(features=("causal", "mask", "poison")))
    def count(call: Inputs) -> None:
        held.append(not np.all(np.isfinite(call.v)) or bool(np.max(np.abs(call.v), initial=0.0) > 1e30))

    count()
    assert sum(held) > len(held) / 2


@given(call=testing.inputs(dtypes=("bfloat16", "float16", "float32", "float64")))
def test_drawn_inputs_are_legal(call: Inputs) -> None:
    """Every drawn call is one that attention takes, and its answer passes; what is poison there, nobody sees."""
    arrays = (call.q, call.k, call.v)
    output, lse = refattn.attention_with_lse(*arrays, **call.options)
    coherent = not np.any(call.q)
    assert_attention_close(output, *arrays, lse=lse, coherent=coherent, **call.options)
    assert np.all(np.isfinite(np.asarray(output, dtype=np.float64)))


@settings(settings.get_profile("few"))
@given(data=st.data())
def test_features_are_kept_to(data: st.DataObject) -> None:
    """Options stay within the named features, and rows see a key unless emptiness is asked for."""
    features = data.draw(st.sets(st.sampled_from([x for x in testing.FEATURES if x not in ("empty", "poison")])))
    call = data.draw(testing.inputs(features=features, longest=9, widths=(2, 4)))
    assert set(call.options) <= features
    assert max(call.q.shape[-2], call.k.shape[-2]) <= 9
    assert "rank" in features or call.q.ndim == 4
    assert "gqa" in features or call.q.shape[:-2] == call.k.shape[:-2]
    assert "d_v" in features or call.q.shape[-1] == call.v.shape[-1]
    plain = {name: x for name, x in call.options.items() if name != "sinks"}
    assert np.all(np.isfinite(refattn.golden(call.q, call.k, call.v, **plain).lse))


@pytest.mark.parametrize(
    "fault", ["poison leaks from v", "empty row is NaN", "causal from the top left", "heads are interleaved"]
)
def test_drawn_inputs_find_faults(fault: str) -> None:
    """Kernels with the usual faults fail on some drawn call."""

    @settings(settings.get_profile("refattn"), phases=[Phase.generate], report_multiple_bugs=False)  # one, unshrunk
    @given(call=testing.inputs(longest=9))
    def holds(call: Inputs) -> None:
        with np.errstate(all="ignore"):
            output = planted_faults.faulty(fault)(call.q, call.k, call.v, **call.options)
        assert_attention_close(output, call.q, call.k, call.v, coherent=True, **call.options)

    with pytest.raises(AssertionError):
        holds()


def test_edge_lengths() -> None:
    """Lengths stand around powers of two, up to the longest."""
    assert edges(33) == [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    assert edges(6) == [1, 2, 3, 4, 5, 6]
