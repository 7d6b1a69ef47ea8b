"""Docstrings as they stand in the code, made ready for reStructuredText before napoleon reads their sections."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

from refattn.clauses import CLAUSES
from refattn.conformance.trace import LABEL

LABELS = {one.label for one in CLAUSES}
CODE = re.compile(r"(`[^`]+`)")
REMARK = re.compile(r"  # ([A-Z0-9, ]+)$")
ENTRY = re.compile(r"(\S+(?: \S+)*?) {2,}(\S.*)")


def inline(text: str) -> str:
    """One line: `code` as a literal, labels as links, and no mark that means something else."""
    parts = CODE.split(text)
    return "".join(f"`{part}`" if at % 2 else _linked(part) for at, part in enumerate(parts))


def _linked(text: str) -> str:
    text = re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", text)
    return LABEL.sub(lambda label: f":refattn:clause:`{label[0]}`" if label[0] in LABELS else label[0], text)


def summary(thing: Any) -> str:
    """The first line of a docstring as Markdown."""
    first = REMARK.sub(r" (\1)", (inspect.getdoc(thing) or "").partition("\n")[0])
    first = first.replace("|", "\\|")
    return LABEL.sub(lambda label: f"{{clause}}`{label[0]}`" if label[0] in LABELS else label[0], first)


def converted(lines: list[str]) -> Iterator[str]:
    """All lines: sessions and indented code as they are, `name   meaning` as a definition."""
    before, kind = "", "text"
    for line in lines:
        indented = line.startswith("    ")
        if not line.strip():
            kind = kind if kind == "code" else "text"
        elif line.startswith(">>>"):
            kind = "session"
        elif kind == "code" and not indented:
            kind = "text"
        elif kind == "text" and indented and not before.strip():
            kind = "code"
            yield from ("::", "")
        line = REMARK.sub(r" (\1)", line)
        entry = ENTRY.fullmatch(line) if kind in ("text", "table") else None
        if entry:
            yield from ([""] if kind == "text" and before.strip() else [])
            kind = "table"
            yield from (inline(entry[1]), f"    {inline(entry[2])}")
        elif kind == "table":
            if not indented:
                kind = "text"
                yield ""
            yield f"    {inline(line.strip())}" if indented else inline(line)
        else:
            yield line if kind in ("session", "code") else inline(line)
        before = line


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What autodoc calls for each docstring."""
    lines[:] = converted(lines)


def sign(app: Sphinx, what: str, name: str, obj: Any, options: Any, *signature: str | None) -> tuple[str | None, ...]:
    """The signature with aliases by their names alone."""
    return tuple(part and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", part) for part in signature)


def setup(app: Sphinx) -> dict[str, Any]:
    """Comes before napoleon, whose place is 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-signature", sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
