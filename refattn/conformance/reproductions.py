"""Departures of public implementations, each shown by a few lines of that library alone, in docs/scoreboard.

A file holds one library's departures. Each is a function whose docstring is one sentence, and a line
"Clauses: M19, K4. Implementations: torch, torch-math."; it asserts what it shows, so that it fails where the departure
has gone. One whose name ends in `_ends_the_process` shows just that.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ENDS = "_ends_the_process"
SECONDS = 300
ABOUT = re.compile(r"Clauses: (?P<clauses>[^.]+)\.\s+Implementations: (?P<names>[^.]+)\.")
# As a module of its own: some libraries look functions up by the name of their module.
RUN = """\
import importlib, sys
from pathlib import Path
path = Path(sys.argv[1])
sys.path.insert(0, str(path.parent))
getattr(importlib.import_module(path.stem), sys.argv[2])()
"""


class Reproduction(NamedTuple):
    """One function of a file, and what it shows."""

    path: Path
    function: str
    says: str
    clauses: tuple[str, ...]
    names: tuple[str, ...]

    def shows(self, name: str, clause: str) -> bool:
        """Whether it stands behind an implementation's failures of a clause."""
        return name in self.names and clause in self.clauses


def read_all(folder: Path) -> list[Reproduction]:
    """All of a folder, in order; nothing is run. Raises ValueError for a function that does not say what it shows."""
    found: list[Reproduction] = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            words = " ".join((ast.get_docstring(node) or "").split())
            about = ABOUT.search(words)
            if about is None:
                raise ValueError(f"{path.name}: {node.name} does not say its clauses and implementations")
            clauses, names = (tuple(part.strip() for part in about[key].split(",")) for key in ("clauses", "names"))
            found.append(Reproduction(path, node.name, words[: about.start()].strip(), clauses, names))
    return found


def failures(chosen: Iterable[Reproduction]) -> list[str]:
    """Runs each in a process of its own; a sentence for each that no longer shows what it says."""
    wrong: list[str] = []
    for one in chosen:
        command = [sys.executable, "-c", RUN, str(one.path), one.function]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        ended = ran.returncode < 0
        if ended != one.function.endswith(ENDS) or (ran.returncode > 0):
            last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
            wrong.append(f"{one.path.name}: {one.function} no longer shows its departure: {last}")
    return wrong
