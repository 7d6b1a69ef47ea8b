"""Faults of kernels that work tile by tile, for tiles of other sizes than the catalogue's: one key, or a warp's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.hypotheses import Hypothesis, of_fault
from refattn.conformance.diagnosis.words import meaning
from refattn.conformance.faults import FAULTS, Fault
from refattn.conformance.faults.pipeline import Tiled

SIZES = (1, 2, 4, 8, 16, 32, 128, 256)


@cache
def tilings() -> tuple[Hypothesis, ...]:
    """Each fault of a tiled function, for each size of tile."""
    return tuple(_tiling(fault, size) for fault in FAULTS if fault.base is Tiled for size in SIZES)


def _tiling(fault: Fault, size: int) -> Hypothesis:
    planted = of_fault(replace(fault, lse=True, base=type("Tiled", (Tiled,), {"tile": size})))

    def says(problem: Problem) -> str:
        return f"{meaning(fault.name, problem)} (tiles of {size} key{'s' * (size > 1)})"

    return replace(planted, says=says, fitted={"tile": size})
