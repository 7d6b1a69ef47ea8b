"""The judge is judged by the catalogue of faults: all are caught, and no right implementation is accused."""

from __future__ import annotations

import pytest

from libraries import Library
from refattn import CLAUSES
from refattn.conformance.faults import CONTROLS, FAULTS, Fault
from refattn.conformance.faults.catch import catch

LABELS = {clause.label: clause for clause in CLAUSES}
# Chapters whose every MUST has a fault.
CHAPTERS = "SMPGBKTN"
# MUST clauses without a fault, each with the reason.
WITHOUT_FAULT: dict[str, str] = {}


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
    assert must - {fault.clause for fault in FAULTS} == WITHOUT_FAULT.keys()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.identifier)
def test_a_fault_is_caught(fault: Fault, library: Library) -> None:
    """A case of its clause fails by ten times the bound or more, in every dtype of the library that can show it."""
    if fault.libraries and library.name not in fault.libraries:
        pytest.skip(f"on {', '.join(fault.libraries)} alone")
    found = [catch(fault, library.name, dtype) for dtype in fault.dtypes if dtype in library.dtypes]
    assert [one for one in found if not one.caught] == []
