"""The judge is judged: every clause has cases, wrong implementations fail on them, right ones never do."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planted_faults
import refattn
from refattn import CLAUSES, errors
from refattn.conformance.case import Case, Problem
from refattn.conformance.cases import all_cases
from refattn.conformance.judge import Result, error_over_bound, golden_of, judge, worst_place
from refattn.conformance.plain import Draw, rounded
from refattn.conformance.records import Record
from refattn.conformance.reports.terminal import verdict_line
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets.function import FunctionTarget
from refattn.conformance.trace import labels_in, prose_of, trace
from refattn.goldens import golden

CASES = {case.name: case for case in all_cases()}
PROBLEMS = [case for case in CASES.values() if case.build is not None]
LABELS = {clause.label for clause in CLAUSES}
PACKAGE = Path(refattn.__file__).parent
ROOT = Path(__file__).parents[1]


# ---- the relation of clauses, cases, errors and code ------------------------------------------------------


def test_every_clause_has_a_case() -> None:
    """No clause is without a case, and no case names an unknown clause."""
    tested = {label for case in CASES.values() for label in case.clauses}
    assert tested <= LABELS
    assert tested >= LABELS, "write a case that names each that is lacking, in refattn/conformance/cases"


def test_every_error_names_a_clause() -> None:
    """No error class names an unknown clause."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.RefattnError)]
    assert {c.clause for c in classes} <= LABELS


def mentioned_in(path: Path) -> set[str]:
    """The labels in the comments and docstrings of a Python file, or in all of any other."""
    if path.suffix != ".py":
        return labels_in(path.read_text(encoding="utf-8"))
    return set().union(*(labels_in(text) for _, text in prose_of(path)))


def test_every_label_stands_at_the_code() -> None:
    """Each label appears in a comment or docstring of the specification's code, where the rule is realised; the texts
    of the clauses and the classes of the errors do not count."""
    for label in sorted(LABELS):
        for place in trace(label).code:
            line = (PACKAGE / f"{place.module}.py").read_text(encoding="utf-8").splitlines()[place.line - 1]
            assert label in labels_in(line), (label, place)
    without = [label for label in sorted(LABELS) if not trace(label).code]
    assert without == [], "write each label in a comment at the line of refattn/*.py that realises it"


def test_every_label_that_is_mentioned_is_one() -> None:
    """Comments, docstrings and pages, of code and tests alike, mention no label that does not exist."""
    folders = (PACKAGE, ROOT / "backends", ROOT / "tests", ROOT / "docs")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    assert len(files) > 80
    mentioned = {path.name: mentioned_in(path) for path in [*files, *ROOT.glob("*.md"), ROOT / "noxfile.py"]}
    assert {name: found - LABELS for name, found in mentioned.items() if found - LABELS} == {}
    assert mentioned["README.md"]


def test_cases_can_be_told_apart_and_read() -> None:
    """Names are unique, every case has one sentence, clauses, dtypes, and exactly one of problem and check."""
    assert len(CASES) == len(all_cases())
    for case in CASES.values():
        assert case.says.endswith("."), case.name
        assert case.clauses
        assert case.dtypes
        assert (case.build is None) != (case.check is None)


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda case: case.name)
def test_a_problem_says_the_same_twice(case: Case) -> None:
    """Inputs are exact in their dtype, the plain visible pairs and biases are those of refattn's options, published
    numbers are the golden value's, and the same seed gives the same problem."""
    for dtype in case.dtypes:
        problem = case.problem(dtype, 3)
        for name in ("q", "k", "v", "bias", "sinks"):
            values = getattr(problem, name)
            if values is not None:
                np.testing.assert_array_equal(rounded(values, dtype), values, err_msg=name)
        again = case.problem(dtype, 3)
        np.testing.assert_array_equal(again.q, problem.q)
        plain = golden_of(replace(problem, certified={}), weights=True)
        for name, (values, error) in problem.known.items():
            got = getattr(plain, name)
            got = got.reshape(-1, *got.shape[got.ndim - values.ndim + 1 :])[: values.shape[0]] if values.ndim else got
            np.testing.assert_allclose(got.reshape(-1)[: values.size], values.reshape(-1), rtol=0, atol=error or 1e-15)
        options: dict[str, Any] = {
            "causal": problem.causal,
            "mask": problem.shown if problem.mask is None else problem.mask(np.asarray),
            "bias": problem.bias if problem.bias_of is None else problem.bias_of(np.asarray),
            "q_start": problem.q_start,
            "k_start": problem.k_start,
            "scale": problem.scale,
            "softcap": problem.softcap,
            "sinks": problem.sinks,
        }
        asked = golden(problem.q, problem.k, problem.v, **options)
        np.testing.assert_allclose(asked.output, plain.output, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(asked.lse, plain.lse, rtol=1e-12, atol=1e-14)


def test_the_narrower_bound_judges_where_the_wider_one_is_infinite() -> None:
    """Where one model says nothing, an element within the other's bound is right, and one beyond it stays open."""
    expected, wide, narrow = np.asarray([1.0, 2.0]), np.asarray([np.inf, 1e-3]), np.full(2, 1e-3)
    for error, ratio in ((5e-4, 0.5), (2e-3, np.nan)):
        place = worst_place("output", np.asarray([1.0 + error, 2.0]), expected, wide, narrow)
        assert place is not None
        np.testing.assert_allclose(place.ratio, ratio, rtol=1e-9)


# ---- faults are caught, right implementations are not accused ---------------------------------------------


def records(
    target: Any, label: str | None = None, dtypes: tuple[str, ...] = planted_faults.ALL, seed: int = 20
) -> list[Record]:
    labels = None if label is None else frozenset({label})
    return list(run_suite(target, chosen_pairs(PROBLEMS, labels, dtypes), seed, explained=False).records)


def target_of(function: str) -> FunctionTarget:
    pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes")
    return FunctionTarget(f"planted_faults:{function}")


@pytest.mark.parametrize("function", ["correct", "correct_unfused"])
def test_right_implementations_are_not_accused(function: str) -> None:
    """Plain implementations, scores stored wide or low, fail nothing with any of several seeds."""
    target = target_of(function)
    for seed in range(2):
        found = records(target, seed=seed)
        # Scores beyond float16 are what these cases are about, and storing them low is a fault there.
        broken = {(r.case, r.message) for r in found if r.verdict in ("fail", "crashed")}
        if function == "correct_unfused":
            broken = {one for one in broken if "scores_beyond_float16" not in one[0]}
        assert broken == set()
        assert sum(r.verdict == "pass" for r in found) > 500


def test_the_model_met_is_reported() -> None:
    """Storing scores in bfloat16 passes as "unfused", and the report says so; float32 has one model."""
    assert run_suite(target_of("correct"), chosen_pairs(PROBLEMS), 0, explained=False).models["bfloat16"] == "fused"
    report = run_suite(target_of("correct_unfused"), chosen_pairs(PROBLEMS, frozenset({"S1"})), 0)
    assert report.models == {"bfloat16": "unfused", "float16": "unfused", "float32": "fused", "float64": "fused"}
    assert "rounded to the storage type in bfloat16, float16" in verdict_line(report)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("returns_a_list", "expected an array"),
        ("raises", "no kernel image"),
        ("asserts", "width must be 128"),
        ("exits", "SystemExit: 0"),
        ("nothing_but_nan", "is nan, expected"),
    ],
)
def test_foul_play_is_caught(function: str, words: str) -> None:
    """Answers of the wrong type, errors, exits and NaN each speak against a target."""
    report = run_suite(
        target_of(function), chosen_pairs(PROBLEMS, frozenset({"G1", "S1"}), ("float32",)), 20, explained=False
    )
    assert not report.conforms
    assert report.broken
    assert any(words in record.message for record in report.broken), [r.message for r in report.broken]


# ---- judging ----------------------------------------------------------------------------------------------


def one_problem(dtype: str = "float32", **options: Any) -> Problem:
    return Problem(**Draw(dtype, np.random.default_rng(0)).qkv(3, 4), **options)


def test_what_a_judgement_says() -> None:
    """The worst place is named with its values; NaN in the wrong place is no wildcard, and none is in the right one."""
    problem = one_problem()
    output = golden_of(problem).output.copy()
    assert judge(problem, Result(output=output, dtype="float32")).verdict == "pass"
    output[1, 0, 2, 3] += 0.5
    judged = judge(problem, Result(output=output, dtype="float32"))
    assert (judged.verdict, judged.place and judged.place.at) == ("fail", (1, 0, 2, 3))
    assert "output[1, 0, 2, 3]" in judged.message
    assert judged.error_over_bound is not None
    assert judged.error_over_bound > 1e4
    for wrong in (np.nan, np.inf):
        assert judge(problem, Result(output=np.full_like(output, wrong), dtype="float32")).error_over_bound == np.inf
    hidden = one_problem(shown=np.zeros((3, 4), dtype=bool))
    assert judge(hidden, Result(output=np.full_like(output, 1e-30), dtype="float32")).verdict == "fail"
    assert error_over_bound(np.nan, np.nan, 0.0) == 0
    assert error_over_bound([], [], []) == 0


def test_form_comes_before_numbers() -> None:
    """Shape, dtype and library of the output, and those of the log-sum-exp, are judged first."""
    problem = one_problem("float16")
    right = golden_of(problem, weights=True)
    good: dict[str, Any] = {"output": right.output, "dtype": "float16", "lse": right.lse, "lse_dtype": "float32"}
    assert judge(problem, Result(**good)).verdict == "pass"
    for change, words in (
        ({"output": right.output[..., :-1]}, "shape"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"library": False}, "library"),
        ({"lse": right.lse[..., None]}, "has shape (2, 2, 3, 1)"),
        ({"lse_dtype": "float16"}, "at least float32"),
        ({"weights": right.lse}, "weights have shape"),
        ({"changed": ("k",)}, "wrote to k"),
        ({"repeated": False}, "other bits"),
    ):
        judged = judge(problem, Result(**{**good, **change}))
        assert judged.verdict == "fail"
        assert words in judged.message


def test_float64_in_float32_is_recognised() -> None:
    """A float64 result that is right to float32's precision is a failure, and the message says what it looks like."""
    problem = one_problem("float64")
    output = golden_of(problem).output
    narrow = judge(problem, Result(output=output.astype("float32").astype("float64"), dtype="float64"))
    assert narrow.verdict == "fail"
    assert "computed in float32" in narrow.message
    assert "computed in float32" not in judge(problem, Result(output=output + 1, dtype="float64")).message


def test_what_cannot_be_judged_is_not_passed() -> None:
    """Where the unfused model says nothing, a result beyond the fused bound is neither right nor wrong."""
    case = CASES["numbers.large_scores"]
    problem = case.problem("bfloat16", 20)
    exact = golden_of(problem)
    near = exact.output + 3 * exact.bound("bfloat16")
    assert judge(problem, Result(output=near, dtype="bfloat16")).verdict == "not judgeable"
    record = Record(case="x", clauses=("S1",), says="", dtype="bfloat16", verdict="not judgeable")
    assert record.as_dict()["error_over_bound"] is None
