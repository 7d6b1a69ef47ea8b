"""A known departure excuses no more than it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from refattn.conformance.case import Problem
from refattn.conformance.departures import DEPARTURES, excused
from refattn.conformance.judge import Result, golden_of, judge
from refattn.conformance.plain import Draw, rounded

MEAN = "a row that sees no key is the mean of the values"
NARROW = "float64 is computed, or given back, in float32"


def problem_of(dtype: str) -> Problem:
    """Four rows, the second of which sees nothing."""
    draw = Draw(dtype, np.random.default_rng(3))
    shown = np.ones((4, 6), dtype=bool)
    shown[1] = False
    return Problem(**draw.qkv(4, 6, heads=2), shown=shown)


def right(problem: Problem) -> Result:
    """The specified result."""
    golden = golden_of(problem)
    return Result(
        output=rounded(golden.output, problem.dtype), dtype=problem.dtype, lse=golden.lse, lse_dtype="float64"
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_said_is_excused(dtype: str) -> None:
    """The mean of the values in the empty row, and float32's precision in float64, are what is known of jax."""
    problem, result = problem_of(dtype), right(problem_of(dtype))
    result.output[..., 1, :] = rounded(np.mean(problem.v, axis=-2), dtype)
    result = replace(result, output=rounded(result.output, "float32") if dtype == "float64" else result.output)
    assert excused("jax", problem, result) == ((MEAN, NARROW) if dtype == "float64" else (MEAN,))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("row", [0, 3])
def test_another_row_is_not(dtype: str, row: int) -> None:
    """A wrong number in a row that sees keys is held against it, whatever else it departs in."""
    problem, result = problem_of(dtype), right(problem_of(dtype))
    result.output[..., 1, :], result.output[0, 0, row, 0] = 7.0, result.output[0, 0, row, 0] * 1.05
    assert excused("jax", problem, result) == ()


def test_an_inexact_log_sum_exp_does_not_excuse_the_output() -> None:
    """In 16 bits torch's tiled kernel has an inexact one, and its output must still be right."""
    problem, result = problem_of("float16"), right(problem_of("float16"))
    assert result.lse is not None
    result.lse[..., 0] += 0.01
    assert len(excused("torch-flash", problem, result)) == 2
    result.output[0, 0, 0, 0] *= 1.05
    assert excused("torch-flash", problem, result) == ()


def test_a_crash_is_excused_only_where_nothing_must_hold() -> None:
    """A refused scale is known of onnxruntime, a crash without one of nobody."""
    problem = problem_of("float32")
    assert excused("onnxruntime", problem, None) == excused("jax", problem, None) == ()
    assert len(excused("onnxruntime", replace(problem, scale=-1.0), None)) == 1


def test_a_written_input_is_not_excused() -> None:
    """Side effects are no departure that is known."""
    problem = problem_of("float32")
    assert excused("jax", problem, right(problem)) == (MEAN,)
    assert excused("jax", problem, replace(right(problem), changed=("q",))) == ()
    assert excused("jax", problem, replace(right(problem), repeated=False)) == ()
    for effect in ({"beside": ("v",)}, {"shared": ("v",)}, {"undisturbed": False}):
        assert excused("jax", problem, replace(right(problem), **effect)) == ()


def test_another_dtype_or_shape_is_not_excused() -> None:
    """The right numbers in another dtype, or in another shape, are held against it beside an empty row."""
    problem = problem_of("float32")
    assert excused("jax", problem, replace(right(problem), dtype="float64")) == ()
    assert excused("jax", problem, replace(right(problem), output=right(problem).output[..., :-1])) == ()


def test_a_wrong_log_sum_exp_is_not_excused() -> None:
    """What departs in the rows that see no key says nothing of the log-sum-exp of the others."""
    problem, result = problem_of("float32"), right(problem_of("float32"))
    assert result.lse is not None
    result.lse[..., 3] += 0.01
    assert excused("jax", problem, result) == ()


def test_a_bias_of_minus_infinity_empties_a_row() -> None:
    """A row that a bias hides altogether is an empty row too."""
    problem = problem_of("float32")
    bias = np.where(problem.visible, 0.0, -np.inf)
    problem = replace(problem, shown=None, bias=bias)
    result = right(problem)
    result.output[..., 1, :] = np.nan
    assert len(excused("torch-mha-weights", problem, result)) == 1
    assert excused("torch-mha-weights", replace(problem, bias=None), result) == ()


def test_what_cannot_be_judged_is_excused() -> None:
    """Where rounding alone may move a logit by 1, nothing follows from the rows that see keys."""
    problem = problem_of("float16")
    problem = replace(problem, q=problem.q * 2.0**11, k=problem.k * 2.0**11)
    result = right(problem)
    result.output[..., 1, :] = rounded(np.mean(problem.v, axis=-2), "float16")
    assert excused("jax", problem, replace(result, lse=None)) == (MEAN,)


def test_16_bits_excuse_the_log_sum_exp_of_torch_alone() -> None:
    """It is inexact in 16 bits whether or not a row is empty, and held to its bound in float32."""
    for dtype, count in (("float16", 1), ("float32", 0)):
        problem = replace(problem_of(dtype), shown=None)
        result = right(problem)
        assert result.lse is not None
        result.lse[..., 0] += 0.01
        assert len(excused("torch-flash", problem, result)) == count


def test_sums_in_16_bits_are_excused_where_they_are_known() -> None:
    """ONNX's evaluator sums in the dtype of q, which explains its rounding, and that of nobody else."""
    draw = Draw("bfloat16", np.random.default_rng(3))
    problem = Problem(**draw.qkv(4, 60, heads=2))
    result = replace(right(problem), lse=None)
    unfused = golden_of(problem).bound("bfloat16", "unfused", problem.coherent)
    result = replace(result, output=rounded(result.output + 1.5 * unfused, "bfloat16"))
    assert judge(problem, result).verdict == "fail"
    assert len(excused("onnx-reference", problem, result)) == 1
    assert excused("torch-flash", problem, result) == ()


def test_a_scale_of_zero_is_none_that_is_positive() -> None:
    """Scales of 0 and below are what torch's kernels are known for; positive ones are not."""
    problem = problem_of("float32")
    result = replace(right(problem), output=np.full_like(right(problem).output, np.nan))
    for scale, count in ((-1.0, 1), (0.0, 1), (1.0, 0), (None, 0)):
        assert len(excused("torch", replace(problem, scale=scale), result)) == count


def test_a_crash_is_told_by_what_explains_it() -> None:
    """Of several departures, those that say what must hold of a result explain no crash."""
    told = excused("onnxruntime-mha", replace(problem_of("float32"), scale=-1.0), None)
    assert told == ("a scale that is not positive gives NaN, or is refused",)


def test_every_departure_has_targets_of_that_name() -> None:
    """No departure is about a target that is not there."""
    from refattn.conformance.targets.names import NAMES

    assert {target for one in DEPARTURES for target in one.targets} <= set(NAMES)
