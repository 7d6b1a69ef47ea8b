"""A known departure excuses no more than it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from refattn.conformance.case import Problem
from refattn.conformance.departures import DEPARTURES, excused
from refattn.conformance.judge import Result, golden_of
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
    assert excused("jax", problem, replace(right(problem), changed=("q",))) == ()


def test_every_departure_has_targets_of_that_name() -> None:
    """No departure is about a target that is not there."""
    from refattn.conformance.targets.names import NAMES

    assert {target for one in DEPARTURES for target in one.targets} <= set(NAMES)
