"""No right implementation is accused, whatever the problem: random ones, and the suite's own with fresh data."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from libraries import EAGER, Library
from refattn.conformance.alarms import judge_all
from refattn.conformance.case import Problem
from refattn.conformance.cases import problem_cases
from refattn.conformance.drawn import drawn_problem
from refattn.conformance.faults import CONTROLS, Fault
from refattn.conformance.faults.catch import records_of, target_of
from refattn.conformance.matrix import EXEMPT
from refattn.conformance.targets import find_target

# Random problems in each dtype; the sweep draws other ones each time.
FEW, MANY = 12, 400
# The session `alarms` judges slow libraries too.


def seeds(request: pytest.FixtureRequest, library: Library) -> range:
    """The seeds of the random problems."""
    if (request.config.getoption("--hypothesis-profile") or "") == "sweep":
        start = secrets.randbelow(10**9)
        return range(start, start + MANY)
    return range(FEW if library.name == "numpy" else FEW // 3)


def problems_of(dtype: str, chosen: range) -> Iterator[tuple[int, Problem]]:
    """Random problems, each with its seed."""
    return ((seed, drawn_problem(dtype, seed)) for seed in chosen)


@EAGER
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.identifier)
def test_right_functions_on_random_problems(control: Fault, library: Library, request: pytest.FixtureRequest) -> None:
    """Plain, tiled and split pipelines, and changes that cancel, fail no random problem in any dtype."""
    chosen = seeds(request, library)
    for dtype in library.dtypes:
        tally = judge_all(target_of(control, library.name), dtype, problems_of(dtype, chosen))
        assert tally.accused == []
        assert tally.verdicts["pass"] >= len(chosen) / 4


@EAGER
@pytest.mark.parametrize("path", ["", "-tiled"])
def test_refattn_on_random_problems(path: str, library: Library, request: pytest.FixtureRequest) -> None:
    """refattn's dense and tiled paths fail no random problem in any dtype."""
    chosen, target = seeds(request, library), find_target(f"refattn-{library.name}{path}")
    for dtype in library.dtypes:
        tally = judge_all(target, dtype, problems_of(dtype, chosen))
        assert tally.accused == []
        assert tally.verdicts["pass"] == len(chosen)


@pytest.mark.library("torch")
@pytest.mark.parametrize("kernel", ["MATH", "FLASH_ATTENTION", ""])
def test_torch_on_random_problems(kernel: str, library: Library, request: pytest.FixtureRequest) -> None:
    """torch's own kernels fail no random problem that their convention can express, but for what is known."""
    attention = pytest.importorskip("torch.nn.attention")
    target = find_target("torch")
    for dtype in library.dtypes:
        problems = problems_of(dtype, seeds(request, library))
        if kernel == "FLASH_ATTENTION":  # which takes neither masks nor groups of heads
            problems = ((seed, replace(p, shown=None, bias=None, causal=False, q_start=None)) for seed, p in problems)
            problems = ((seed, p) for seed, p in problems if "gqa" not in p.needs and p.k.shape[-1] == p.v.shape[-1])
        with attention.sdpa_kernel(getattr(attention.SDPBackend, kernel)) if kernel else nullcontext():
            tally = judge_all(target, dtype, problems)
        assert tally.accused == []
        assert tally.verdicts["pass"] > 0 or kernel == "FLASH_ATTENTION"


@EAGER
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.identifier)
def test_right_functions_on_fresh_cases(control: Fault, library: Library, request: pytest.FixtureRequest) -> None:
    """The suite's own problems with other data accuse none of them either."""
    if library.name == "strict":
        pytest.skip("each case is computed by NumPy, as in its own session")
    sweep = (request.config.getoption("--hypothesis-profile") or "") == "sweep"
    for seed in range(5) if sweep else (1 + CONTROLS.index(control),):
        for dtype in library.dtypes if sweep else library.dtypes[:2]:
            found = records_of(control, library.name, problem_cases(dtype), dtype, seed)
            broken = {(one.case, one.message) for one in found if one.verdict in ("fail", "crashed")}
            assert {one for one in broken if one[0] not in EXEMPT} == set()
