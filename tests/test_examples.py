"""Every example of the pages and of the docstrings gives what stands below it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import refattn
from refattn.cli import COMMANDS

CHECKOUT = Path(__file__).resolve().parents[1]
SESSION = re.compile(r"^ *```pycon\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PAGES = {
    path.relative_to(CHECKOUT).as_posix(): path
    for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
    if SESSION.search(path.read_text(encoding="utf-8"))
}
MODULES = [
    module.name
    for module in pkgutil.iter_modules(refattn.__path__, "refattn.")
    if not module.ispkg and module.name != "refattn.__main__"
]


def run(test: doctest.DocTest) -> int:
    """Runs the examples, which must give what they show; how many there are."""
    printed: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert results.failed == 0, "".join(printed)
    return results.attempted


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page: str) -> None:
    """The sessions of a page, one after the other, give what it shows."""
    text = "\n".join(SESSION.findall(PAGES[page].read_text(encoding="utf-8")))
    assert run(doctest.DocTestParser().get_doctest(text, {}, page, page, 0))


def test_the_examples_of_docstrings() -> None:
    """The sessions of docstrings give what they show, and each of the functions that all import has one."""
    shown = set()
    for name in MODULES:
        for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
            if run(test):
                shown.add(test.name.rpartition(".")[2])
    public = {name for name in refattn.__all__ if callable(getattr(refattn, name)) and name[0].islower()}
    # What is there depends on the machine.
    assert public - shown == {"backends"}


def test_the_page_of_commands() -> None:
    """The page of commands has a section for each, which runs its help."""
    text = (CHECKOUT / "docs" / "api" / "commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## refattn (\w+)$", text, re.MULTILINE)) == sorted(COMMANDS)
    assert [name for name in COMMANDS if f'main(["{name}", "--help"])' not in text] == []
