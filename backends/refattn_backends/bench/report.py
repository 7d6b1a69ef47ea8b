"""The whole benchmark: which processes to run, and what their results are written as."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from refattn_backends.bench import curves
from refattn_backends.bench.measures import MEASURES
from refattn_backends.bench.rows import Row
from refattn_backends.bench.sizes import SIZES

LIMIT = 600  # seconds of one process
# They would choose other kernels than the machine's own, or give a peer fewer threads than there are cores.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def tasks(size: str) -> list[tuple[str, ...]]:
    """The arguments of every process, in order."""
    sizes = SIZES[size]
    rows = [("rows", name) for name in MEASURES]
    times = [("times", str(length)) for length in sizes.curve]
    tiled = [("memory", str(length), "tiled") for length in sizes.curve]
    dense = [("memory", str(length), "dense") for length in sizes.curve if length <= sizes.dense]
    return [("about",), *rows, *times, *tiled, *dense]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the measuring processes."""
    return {name: value for name, value in given.items() if name not in UNSET}


def measure(size: str, words: tuple[str, ...]) -> Any:
    """What one process measures. Raises RuntimeError if it fails or takes too long."""
    command = [sys.executable, "-m", "refattn_backends.bench.child", size, *words]
    settings: Any = {"capture_output": True, "text": True, "env": environment(os.environ), "timeout": LIMIT}
    try:
        run = subprocess.run(command, check=False, **settings)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(words)}: stopped after {LIMIT} s") from None
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        raise RuntimeError(f"{' '.join(words)}: {last[0]}")
    return json.loads(run.stdout.splitlines()[-1])


def middle(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each row as the process with its middle figure has it: times differ by where a process' memory came to lie."""

    def figure(row: dict[str, Any]) -> float:
        return float(row["ratio"] or row["ours"] or 0.0)

    return [sorted(rows, key=figure)[len(rows) // 2] for rows in zip(*runs, strict=True)]


def gathered(size: str) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """After each process, its arguments and all results so far, as `as_json` writes them."""
    result: dict[str, Any] = {
        "failures": [],
        "sizes": size,
        "versions": {},
        "machine": machine(),
        "rates": {},
        "rows": [],
        "curves": {},
    }
    for words in tasks(size):
        try:
            again = SIZES[size].processes if words[0] == "rows" else 1
            found = [measure(size, words) for _ in range(again)]
        except RuntimeError as fault:
            result["failures"].append(str(fault))
            yield words, result
            continue
        if words[0] == "rows":
            result["rows"] += middle(found)
        elif words[0] == "about":
            result |= found[0]
        else:
            curves.joined(result["curves"], int(words[1]), found[0])
        yield words, result


def row(entry: Mapping[str, Any]) -> Row:
    """A row from its JSON; ratio and verdict follow from the rest."""
    return Row(**{name: value for name, value in entry.items() if name not in ("ratio", "verdict")})


def machine() -> dict[str, Any]:
    """What kind of machine this is; no names and no paths."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def as_json(result: Mapping[str, Any]) -> str:
    """The results as JSON, numbers to four digits."""
    return json.dumps(_rounded(result), indent=1, allow_nan=False) + "\n"


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.4g}")
    if isinstance(data, Mapping):
        return {name: _rounded(value) for name, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list) else data
