"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from refattn.backend import has_module
from refattn_backends.bench import __doc__ as description
from refattn_backends.bench.curves import draw
from refattn_backends.bench.page import page
from refattn_backends.bench.report import as_json, gathered, row, tasks
from refattn_backends.bench.rows import COLUMNS, cells


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark: 0 whatever the verdicts, which are no test, and 2 if a measurement fails."""
    parser = argparse.ArgumentParser(prog="python -m refattn_backends.bench", description=description)
    parser.add_argument(
        "--quick", action="store_true", help="short lengths, for a look (1 minute); limits are for long ones"
    )
    parser.add_argument("--tiny", action="store_true", help="lengths at which times mean nothing, for tests")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to FILE")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="plot time and memory against the length in FILE")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write a page of Markdown to FILE")
    chosen = parser.parse_args(arguments)
    size = "tiny" if chosen.tiny else "quick" if chosen.quick else "full"
    if chosen.svg and not has_module("matplotlib"):
        parser.error("--svg needs matplotlib, which is not installed")
    total = len(tasks(size))
    result: dict[str, Any] = {}
    for done, (words, so_far) in enumerate(gathered(size), start=1):
        result = so_far
        print(f"[{done}/{total}] {' '.join(words)}", file=sys.stderr, flush=True)
    _print([COLUMNS, *(cells(row(entry)) for entry in result["rows"])])
    for where in filter(None, (chosen.json, chosen.svg, chosen.page)):
        where.parent.mkdir(parents=True, exist_ok=True)
    if chosen.json:
        chosen.json.write_text(as_json(result), encoding="utf-8")
    if chosen.svg:
        draw(result["curves"], chosen.svg)
    if chosen.page:
        chosen.page.write_text(page(result), encoding="utf-8")
    for failure in result["failures"]:
        print(f"not measured: {failure}")
    return 2 if result["failures"] else 0


def _print(table: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
