"""The judge is judged by the catalogue of faults: all are caught, and no right implementation is accused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libraries import EAGER, SLOW, Library
from refattn import CLAUSES
from refattn.conformance import matrix
from refattn.conformance.cases import all_cases
from refattn.conformance.faults import CONTROLS, FAULTS, Fault, named
from refattn.conformance.faults.catch import cases_of, catch, records_of
from refattn.conformance.faults.page import page_of

LABELS = {clause.label: clause for clause in CLAUSES}
# Chapters whose every MUST has a fault.
CHAPTERS = "SMPGBKTDN"
# MUST clauses without a fault, each with the reason.
WITHOUT_FAULT: dict[str, str] = {}
FIGURES = Path(__file__).parents[1] / "docs" / "faults"


def test_the_catalogue_can_be_read() -> None:
    """Names and identifiers are unique, clauses exist, and each fault has an error of exactly one form."""
    faults = (*FAULTS, *CONTROLS)
    assert len({fault.name for fault in faults}) == len({fault.identifier for fault in faults}) == len(faults)
    assert {fault.clause for fault in faults} <= LABELS.keys()
    for fault in FAULTS:
        assert bool(fault.steps or fault.wrap) != bool(fault.patches), fault.name
        assert fault.dtypes
    assert len(FAULTS) >= 60


def test_every_rule_has_a_fault() -> None:
    """Every MUST of these chapters is broken by a fault, or is listed with the reason why none can show."""
    must = {label for label, clause in LABELS.items() if clause.level == "MUST" and clause.chapter in CHAPTERS}
    without = must - {fault.clause for fault in FAULTS}
    assert without == WITHOUT_FAULT.keys(), "write a fault that breaks each, or into WITHOUT_FAULT why none can show"


def shown_on(fault: Fault, library: str) -> bool:
    """Whether a fault can show on a library; on slow ones a few functions are run."""
    if fault.libraries:
        return library in fault.libraries
    return library not in SLOW or (not fault.patches and FAULTS.index(fault) % 60 == 0)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.identifier)
def test_a_fault_is_caught(fault: Fault, library: Library) -> None:
    """A case of its clause fails by ten times the bound or more, in every dtype of the library that can show it."""
    if not shown_on(fault, library.name):
        pytest.skip(f"on {', '.join(fault.libraries)} alone" if fault.libraries else "a slice of them is run here")
    dtypes = ("float32",) if library.slow else library.dtypes
    found = [catch(fault, library.name, dtype) for dtype in fault.dtypes if dtype in dtypes]
    assert [one for one in found if not one.caught] == []


# Faults that cancel, whether the log-sum-exp is offered, the cases that cannot show them, and those that do.
CANCELLING = [
    ("alibi by the key's position", False, ["biases.alibi_over_a_cache"], ["biases.alibi"]),
    ("alibi starts at 1", False, ["biases.alibi", "biases.alibi_over_a_cache"], []),
    ("alibi starts at 1", True, [], ["biases.alibi_has_no_offset"]),
    ("rows are shifted", False, ["softmax.over_the_keys", "masks.causal"], ["softmax.sinks"]),
    ("rows are shifted", True, [], ["softmax.log_sum_exp"]),
    ("rope turns backwards", False, ["biases.rotary_is_relative"], ["biases.rotary"]),
]


@EAGER
@pytest.mark.parametrize(("name", "lse", "passed", "failed"), CANCELLING)
def test_what_cancels_is_no_fault(name: str, lse: bool, passed: list[str], failed: list[str], library: Library) -> None:
    """What a row's softmax or a rotation cancels is accused only where it shows: in the log-sum-exp, sinks, angles."""
    cases = {case.name: case for case in all_cases()}
    for expected, names in (("pass", passed), ("fail", failed)):
        found = records_of(replace(named(name), lse=lse), library.name, [cases[one] for one in names], "float32")
        assert [record.verdict for record in found] == [expected] * len(names)


@pytest.mark.library("numpy")
def test_the_matrix_is_that_of_the_catalogue() -> None:
    """The committed figures name the same faults, clauses and dtypes, all caught, and are what the page shows."""
    figures = json.loads((FIGURES / "matrix.json").read_text(encoding="utf-8"))
    expected: list[dict[str, Any]] = [
        {"name": fault.name, "clause": fault.clause, "kind": fault.kind, "dtypes": list(fault.dtypes)}
        for fault in FAULTS
        if shown_on(fault, "numpy")
    ]
    measured = [{**fault, "dtypes": [*fault["dtypes"]]} for fault in figures["faults"]]
    assert measured == expected, "measure the catalogue anew: nox -s faults"
    assert all(row["caught"] for fault in figures["faults"] for row in fault["dtypes"].values())
    assert [(control["name"], control["accused"]) for control in figures["controls"]] == [
        (c.name, []) for c in CONTROLS
    ]
    assert (FIGURES / "README.md").read_text(encoding="utf-8") == page_of(figures)


@pytest.mark.library("numpy")
def test_the_matrix_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes figures and page, here of three faults, and its exit code says whether all are caught."""
    chosen = tuple(named(name) for name in ("causal shows the next", "window one too long", "output of NaN"))
    monkeypatch.setattr(matrix, "FAULTS", chosen)
    monkeypatch.setattr(matrix, "CONTROLS", CONTROLS[:1])
    monkeypatch.setattr(matrix, "problem_cases", lambda dtype: cases_of("S5", dtype)[:3])
    written, page = tmp_path / "matrix.json", tmp_path / "page.md"
    assert matrix.main(["--json", str(written), "--page", str(page)]) == 0
    figures = json.loads(written.read_text(encoding="utf-8"))
    assert [fault["name"] for fault in figures["faults"]] == [fault.name for fault in chosen]
    assert figures["summary"]["caught"] == figures["summary"]["pairs"] == 12
    assert figures["summary"]["ordinary_missed_by_the_bound"] == 0
    assert "| M4 | causal shows the next |" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(matrix, "FAULTS", (replace(chosen[0], clause="B2"),))  # whose cases are about something else
    assert matrix.main([]) == 1
