"""`python -m refattn.conformance.scoreboard`: public implementations that are installed, judged and drawn as a page.

Each is judged by `refattn check` in a process of its own. What it gets wrong is shown by a few lines of its library
alone, which are run too, see `refattn.conformance.reproductions`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refattn.conformance.records import BROKEN
from refattn.conformance.reproductions import Reproduction, failures, read_all
from refattn.conformance.scoreboard_page import page_of
from refattn.conformance.targets.names import NAMES, chosen_names

# Those that take minutes for each dtype are judged in float32 alone.
QUICK = ("tinygrad",)
# Characters of a message that are kept.
LONGEST = 120
# How notes begin that say how a run went, not what was judged.
OF_THE_RUN = ("while it was imported", "built on refattn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges, runs the reproductions, writes what is asked for; exit code 1 if a departure has none that works."""
    parser = argparse.ArgumentParser(prog="python -m refattn.conformance.scoreboard", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="as `refattn check --list` shows them (all installed)")
    parser.add_argument(
        "--folder", type=Path, default=Path("docs/scoreboard"), help="for results and page (%(default)s)"
    )
    parser.add_argument("--reports", type=Path, help="judge nothing that has a NAME.json of `refattn check` here")
    parser.add_argument("--draw", action="store_true", help="judge nothing: draw the page, run the reproductions")
    chosen = parser.parse_args(arguments)
    names = chosen_names(chosen.names, parser)
    results = chosen.folder / "scoreboard.json"
    board: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    for name in () if chosen.draw else names:
        started = time.monotonic()
        kept = chosen.reports / f"{name}.json" if chosen.reports else None
        board[name] = figures_of(json.loads(kept.read_bytes())) if kept and kept.exists() else judged(name)
        # After each: what an hour has judged outlives what stops the next one.
        _keep(board, results)
        print(f"{name}: {board[name]['counts']} in {time.monotonic() - started:.0f} s", flush=True)
    board = _keep(board, results)
    found = read_all(chosen.folder / "reproductions")
    (chosen.folder / "README.md").write_text(page_of(board, found), encoding="utf-8")
    wrong = [*uncovered(board, found), *failures(one for one in found if all(NAMES[n].installed for n in one.names))]
    print(
        "\n".join([*wrong, f"{len(board)} implementations, {len(found)} reproductions, {len(wrong)} faults of these"])
    )
    return 1 if wrong else 0


def _keep(board: dict[str, Any], results: Path) -> dict[str, Any]:
    """Writes the board in the order of the targets' table, and returns it so."""
    board = {name: board[name] for name in NAMES if name in board}
    results.write_text(json.dumps(board, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return board


def judged(name: str) -> dict[str, Any]:
    """The figures of one implementation, as they are written to JSON."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            sys.executable,
            "-m",
            "refattn",
            "check",
            name,
            "--json",
            str(report),
            *["--quick"] * (name in QUICK),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"refattn check {name} left no report (exit code {ran.returncode}): {ran.stderr[-500:]}")
        return figures_of(json.loads(report.read_text(encoding="utf-8")))


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a report: counts by clause, and each failing case with the dtypes that it fails in."""
    clauses: dict[str, Counter[str]] = {}
    failing: dict[tuple[str, str], dict[str, Any]] = {}
    for record in report["records"]:
        # Slow is not wrong: an answer that never came is counted, and no departure.
        broken = record["verdict"] in BROKEN and record["verdict"] != "timed out"
        verdict = "fail" if broken else record["verdict"]
        about = _about(record)
        # What a failure is about may be no clause of the case: a dtype, a float64 that was computed in float32.
        for label in record["clauses"] if not broken or about in record["clauses"] else (about,):
            clauses.setdefault(label, Counter())[verdict] += 1
        if broken:
            row = failing.setdefault(
                (record["case"], about),
                {
                    "case": record["case"],
                    "clause": about,
                    "verdict": record["verdict"],
                    "message": _short(record["message"]),
                    "dtypes": {},
                },
            )
            row["dtypes"][record["dtype"]] = record["error_over_bound"]
    return {
        "versions": {name: version for name, version in report["versions"].items() if name != "refattn"},
        "notes": [note for note in report["notes"] if not note.startswith(OF_THE_RUN)],
        "seed": report["seed"],
        "counts": {verdict: count for verdict, count in report["counts"].items() if count},
        "models": report["models"],
        "clauses": {label: dict(counts) for label, counts in clauses.items()},
        "failing": list(failing.values()),
    }


def uncovered(board: dict[str, Any], found: list[Reproduction]) -> list[str]:
    """A sentence for each implementation and clause whose failures no reproduction stands behind."""
    lacking = {
        (name, row["clause"]): row["case"]
        for name, figures in board.items()
        for row in figures["failing"]
        if not any(one.shows(name, row["clause"]) for one in found)
    }
    return [f"{name}: no reproduction shows {clause} ({case})" for (name, clause), case in lacking.items()]


def _about(record: dict[str, Any]) -> str:
    """The clause that a record is about: N1 where all is right to float32's precision but for that."""
    in_float32 = record["message"].endswith("[N1]") and not isinstance(record["error_over_bound"], str)
    return "N1" if in_float32 else str(record["about"])


def _short(message: str) -> str:
    """The first line of a message, without what differs from machine to machine."""
    line = " ".join(message.split("\n")[0].split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


if __name__ == "__main__":
    raise SystemExit(main())
