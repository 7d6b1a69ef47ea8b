"""`python -m refattn.conformance.diagnosis.measure`: is the first sentence right, for every fault in every dtype?

Each function of the catalogue is judged by all cases that a foreign implementation can run, and the fault that the
report names first is compared with the one that was planted. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from refattn.conformance.cases import problem_cases
from refattn.conformance.faults import FAULTS, Fault
from refattn.conformance.faults.catch import target_of
from refattn.conformance.records import DEFAULT_SEED, Report
from refattn.conformance.runner import run_suite
from refattn.conformance.targets.find import find_target

# The share of first sentences that must be right.
ENOUGH = 0.95
# Faults that are one and the same function, each with the reason.
SAME: dict[frozenset[str], str] = {
    frozenset({"maximum starts at 0", "running maximum starts at 0"}): (
        "max(0, largest logit) over all keys at once is what a running maximum from 0 comes to over tiles"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes what is asked for; exit code 1 if too few sentences are right."""
    parser = argparse.ArgumentParser(prog="python -m refattn.conformance.diagnosis.measure", description=__doc__)
    parser.add_argument("--library", default="numpy", help="array library of the wrong implementations (numpy)")
    parser.add_argument("--dtype", nargs="+", help="these dtypes alone")
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args(arguments)
    started = time.monotonic()
    figures = measure([fault for fault in FAULTS if not fault.backward], chosen.library, chosen.dtype)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for row in figures["wrong"]:
        print(f"{row['fault']} in {row['dtype']}: {row['sentence']}")
    print(f"{figures['right']} of {figures['pairs']} first sentences are right, {time.monotonic() - started:.0f} s")
    return 0 if figures["right"] >= ENOUGH * figures["pairs"] else 1


def measure(faults: Iterable[Fault], library: str, dtypes: Sequence[str] | None = None) -> dict[str, Any]:
    """How many first sentences name the planted fault and its clause, and those that do not."""
    offered = find_target(f"refattn-{library}").dtypes if dtypes is None else dtypes
    functions = [one for one in faults if not one.patches and (not one.libraries or library in one.libraries)]
    asked = [(one, dtype) for one in functions for dtype in one.dtypes if dtype in offered]
    rows: list[dict[str, Any]] = []
    for one, dtype in asked:
        rows.append({"fault": one.name, "dtype": dtype, **_named(one, library, dtype)})
        if not rows[-1]["right"] or len(rows) % 20 == 0:
            right = sum(row["right"] for row in rows)
            print(f"{right} of {len(rows)} right, last {one.name} in {dtype}", file=sys.stderr, flush=True)
    return {
        "library": library,
        "seed": DEFAULT_SEED,
        "pairs": len(rows),
        "right": sum(row["right"] for row in rows),
        "same": [[*sorted(names), reason] for names, reason in SAME.items()],
        "wrong": [row for row in rows if not row["right"]],
    }


def report_of(fault: Fault, library: str, dtype: str) -> Report:
    """The report on a fault, of all problems in one dtype."""
    return run_suite(target_of(fault, library), [(case, dtype) for case in problem_cases(dtype)], DEFAULT_SEED)


def _named(fault: Fault, library: str, dtype: str) -> dict[str, Any]:
    diagnosis = report_of(fault, library, dtype).diagnosis
    if diagnosis is None or not diagnosis["hypotheses"]:
        return {"right": False, "sentence": diagnosis["sentence"] if diagnosis else "nothing failed"}
    name = diagnosis["hypotheses"][0]["name"]
    right = name == fault.name and diagnosis["hypotheses"][0]["clause"] == fault.clause
    return {"right": right or frozenset({name, fault.name}) in SAME, "sentence": diagnosis["sentence"]}


if __name__ == "__main__":
    raise SystemExit(main())
