"""What each clause leads to: lines of code, errors, cases, certified vectors, planted faults and public reports."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import refattn
from refattn import errors
from refattn.clauses import CHAPTERS
from refattn.conformance.cases import all_cases
from refattn.conformance.faults import FAULTS
from refattn.conformance.public_reports import REPORTS
from refattn.conformance.records import CERTIFIED
from refattn.vectors import Vector, load

PACKAGE = Path(refattn.__file__).parent
# Three digits make a name something else, such as a rule of a linter.
LABEL = re.compile(rf"\b[{''.join(CHAPTERS)}][0-9]{{1,2}}\b")
# These say what a rule is, and do not realise it.
TEXTS = ("clauses.py", "errors.py")
OWNERS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Place(NamedTuple):
    """A line of refattn's code: module ("pipeline"), line from 1, and the function or class around it, or ""."""

    module: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class Trace(NamedTuple):
    """What leads from one clause, by name; `code` are the places that realise it, `errors` classes."""

    code: tuple[Place, ...]
    errors: tuple[str, ...]
    cases: tuple[str, ...]
    vectors: tuple[str, ...]
    faults: tuple[str, ...]
    reports: tuple[str, ...]


def trace(label: str) -> Trace:
    """Everything that belongs to the clause with this label."""
    return Trace(
        code=_places().get(label, ()),
        errors=tuple(name for name, error in inspect.getmembers(errors, inspect.isclass) if _enforces(error, label)),
        cases=tuple(case.name for case in all_cases() if label in case.clauses and not case.name.startswith(CERTIFIED)),
        vectors=tuple(vector.name for vector in _vectors() if label in vector.clauses),
        faults=tuple(fault.name for fault in FAULTS if fault.clause == label),
        reports=tuple(report.id for report in REPORTS if label in report.clauses),
    )


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines, numbered from 1, of the comments and docstrings of a Python file."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, *OWNERS)) and ast.get_docstring(node):
            string = node.body[0]
            for line in range(string.lineno, (string.end_lineno or string.lineno) + 1):
                yield line, text.splitlines()[line - 1]


def labels_in(text: str) -> set[str]:
    """What reads like a label of a clause, whether there is one or not."""
    return set(LABEL.findall(text))


@functools.cache
def _places() -> dict[str, tuple[Place, ...]]:
    found: dict[str, dict[str, Place]] = defaultdict(dict)
    for path in sorted(PACKAGE.glob("*.py")):
        if path.name not in TEXTS:
            for line, text in sorted(prose_of(path)):
                place = Place(path.stem, line, _around(path, line))
                for label in labels_in(text):
                    found[label].setdefault(str(place), place)  # the first line of each function is enough
    return {label: tuple(places.values()) for label, places in found.items()}


@functools.cache
def _owners(path: Path) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, OWNERS)]


def _around(path: Path, line: int) -> str:
    """The dotted name of the innermost function or class around a line, a comment right above it included."""
    around = [node for node in _owners(path) if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


def _enforces(error: type, label: str) -> bool:
    return issubclass(error, errors.RefattnError) and error.clause == label


@functools.cache
def _vectors() -> tuple[Vector, ...]:
    return load()
