"""`python -m refattn.conformance.matrix`: which case catches which fault, in which dtype and by how much.

Beside it stands what an ordinary test with a fixed tolerance sees of the same faults, and how often such a tolerance
accuses the right ones. Writes JSON and a page in Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from refattn.conformance.cases import problem_cases
from refattn.conformance.faults import CONTROLS, FAULTS, Fault
from refattn.conformance.faults.catch import ENOUGH, catch, records_of, target_of
from refattn.conformance.faults.ordinary import DEFAULT, LOOSE, close, seen_by_ordinary_tests
from refattn.conformance.faults.page import page_of
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import rounded
from refattn.conformance.records import DEFAULT_SEED
from refattn.conformance.targets.find import find_target

# Right implementations whose results fixed tolerances are tried on.
RIGHT = ("plain", "scores stored in the dtype of q")


def main(arguments: Sequence[str] | None = None) -> int:
    """Computes the matrix and writes what is asked for; exit code 1 if a fault is missed or a right one accused."""
    parser = argparse.ArgumentParser(prog="python -m refattn.conformance.matrix", description=__doc__)
    parser.add_argument("--library", default="numpy", help="array library of the wrong implementations (numpy)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--page", type=Path, help="file for the page in Markdown")
    chosen = parser.parse_args(arguments)
    started = time.monotonic()
    figures = matrix(chosen.library)
    summary = figures["summary"]
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if chosen.page:
        chosen.page.write_text(page_of(figures), encoding="utf-8")
    print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in summary.items()))
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if summary["caught"] == summary["pairs"] and not summary["accused"] else 1


def matrix(library: str) -> dict[str, Any]:
    """All figures, as they are written to JSON."""
    dtypes = find_target(f"refattn-{library}").dtypes
    faults = [_fault(fault, library, dtypes) for fault in FAULTS if not fault.libraries or library in fault.libraries]
    controls = [_control(control, library, dtypes) for control in CONTROLS]
    pairs = [pair for fault in faults for pair in fault["dtypes"].values()]
    tolerances = _tolerances(library, dtypes)
    asked = [pair for pair in pairs if pair["default"] is not None]
    ratios = sorted(pair["ratio"] for pair in pairs if not isinstance(pair["ratio"], str))
    return {
        "library": library,
        "versions": find_target(f"refattn-{library}").versions(),
        "seed": DEFAULT_SEED,
        "enough": ENOUGH,
        "summary": {
            "faults": len(faults),
            "pairs": len(pairs),
            "caught": sum(pair["caught"] for pair in pairs),
            "least_ratio": ratios[0],
            "median_ratio": ratios[len(ratios) // 2],
            "ordinary_pairs": len(asked),
            "ordinary_missed_by_assert_close": sum(not pair["default"] for pair in asked),
            "ordinary_missed_by_one_percent": sum(not pair["loose"] for pair in asked),
            "ordinary_missed_by_the_bound": sum(not pair["bound"] for pair in asked),
            "right_results": sum(control["judged"] for control in controls),
            "accused": sum(len(control["accused"]) for control in controls),
            "right_results_of_fixed_tolerances": sum(tried["results"] for tried in tolerances),
            "accused_by_assert_close": sum(tried["default"] for tried in tolerances),
            "accused_by_one_percent": sum(tried["loose"] for tried in tolerances),
        },
        "faults": faults,
        "controls": controls,
    }


def _fault(fault: Fault, library: str, dtypes: Iterable[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for dtype in (one for one in fault.dtypes if one in dtypes):
        found, seen = catch(fault, library, dtype), seen_by_ordinary_tests(fault, library, dtype)
        ratio = "inf" if math.isinf(found.ratio) else float(f"{found.ratio:.2g}")
        rows[dtype] = {"caught": found.caught, "case": found.case, "ratio": ratio, **seen._asdict()}
    return {"name": fault.name, "clause": fault.clause, "kind": fault.kind, "dtypes": rows}


def _control(control: Fault, library: str, dtypes: Iterable[str]) -> dict[str, Any]:
    verdicts: list[tuple[str, str, str]] = []
    for dtype in dtypes:
        found = records_of(control, library, problem_cases(dtype), dtype)
        verdicts += [(record.verdict, record.case, dtype) for record in found]
    accused = [
        f"{case} {dtype}" for verdict, case, dtype in verdicts if verdict in ("fail", "crashed") and case not in EXEMPT
    ]
    return {
        "name": control.name,
        "judged": sum(verdict in ("pass", "fail", "crashed") for verdict, _, _ in verdicts),
        "accused": accused,
    }


# Storing raw scores in float16 is what these cases forbid; the control that does so fails them, and rightly.
EXEMPT = (
    *("numbers.scores_beyond_float16", "levels.negative_scores_beyond_float16"),
    "vectors.N1.scores_beyond_float16.base-2",
)


def _tolerances(library: str, dtypes: Iterable[str]) -> list[dict[str, int]]:
    """How many results of right implementations a fixed tolerance calls wrong, on all problems."""
    right = [control for control in CONTROLS if control.name in RIGHT]
    return [_tried(control, library, dtype) for control in right for dtype in dtypes]


def _tried(control: Fault, library: str, dtype: str) -> dict[str, int]:
    target, tried = target_of(control, library), {"results": 0, "default": 0, "loose": 0}
    for case in problem_cases(dtype):
        problem = case.problem(dtype, DEFAULT_SEED)
        if target.unsupported(problem.needs, dtype):
            continue
        output, expected = target.call(problem).output, rounded(golden_of(problem).output, dtype)
        tried["results"] += 1
        tried["default"] += not close(output, expected, DEFAULT[dtype])
        tried["loose"] += not close(output, expected, LOOSE[dtype])
    return tried


if __name__ == "__main__":
    raise SystemExit(main())
