"""The built book: it links to what there is, asks for nothing from outside, and leads from each clause to its code.

`nox -s docs` builds it and names the folder in REFATTN_BOOK.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup, Tag
from markdown_it import MarkdownIt

import refattn

DOCS = Path(__file__).parents[2] / "docs"
OUTSIDE = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)
# Whatever a browser fetches by itself, and the attribute that says from where.
FETCHED = {
    **dict.fromkeys(("script", "img", "iframe", "embed", "audio", "video", "source", "track", "input"), "src"),
    "link": "href",
    "object": "data",
    "use": "href",
    "image": "href",
}
IN_STYLES = re.compile(r"url\(\s*['\"]?([^'\")]*)['\"]?\s*\)|@import\s+['\"]([^'\"]*)")
CODE = ("pre", "code", "script", "style", "annotation")


class Page(NamedTuple):
    """A page: its path from the book's folder, its elements, and the anchors in it."""

    path: str
    soup: BeautifulSoup
    anchors: frozenset[str]


@pytest.fixture(scope="module")
def book() -> Path:
    """The folder of the built book."""
    if not (folder := os.environ.get("REFATTN_BOOK")):
        pytest.skip("REFATTN_BOOK names no built book; `nox -s docs` builds one")
    return Path(folder).resolve()


@pytest.fixture(scope="module")
def pages(book: Path) -> dict[str, Page]:
    """All pages, by path."""
    found = [read(path, book) for path in sorted(book.rglob("*.html"))]
    assert len(found) > 80
    return {page.path: page for page in found}


def read(path: Path, book: Path) -> Page:
    """One page."""
    soup = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
    names = [
        *(tag["id"] for tag in soup.find_all(id=True)),
        *(tag["name"] for tag in soup.find_all("a", {"name": True})),
    ]
    return Page(path.relative_to(book).as_posix(), soup, frozenset(map(str, names)))


def links(page: Page) -> list[tuple[Tag, str]]:
    """Each element that leads or fetches, and its address."""
    wanted = {**FETCHED, "a": "href"}
    found = [(tag, str(tag[wanted[tag.name]])) for tag in page.soup.find_all(wanted) if tag.get(wanted[tag.name])]
    assert len(found) > 10, page.path
    return found


def target(page: str, address: str) -> tuple[str, str]:
    """The path from the book's folder, and the anchor, to which an address on a page leads."""
    parts = urlsplit(address)
    path = os.path.normpath(Path(page).parent / unquote(parts.path)) if parts.path else page
    return Path(path).as_posix(), unquote(parts.fragment)


def test_the_edition_for_print_is_whole(book: Path) -> None:
    """One page holds every clause, and its links lead to its own places or out of the book."""
    folder = book.parent / "print"
    page = read(folder / "print.html", folder)
    assert {one.label for one in refattn.CLAUSES} <= page.anchors
    broken = set()
    for tag, address in links(page):
        # The theme names a page of search that one page does not have, and no browser asks for it.
        inside = not (urlsplit(address).scheme or OUTSIDE.match(address) or tag.get("rel") == ["search"])
        path, anchor = target(page.path, address)
        if inside and (not (folder / path).is_file() or (tag.name == "a" and anchor not in page.anchors | {""})):
            broken.add(address)
    assert not broken


def test_links_lead_somewhere(book: Path, pages: dict[str, Page]) -> None:
    """The file of every link within the book exists, and so does its anchor."""
    files = {path.relative_to(book).as_posix() for path in book.rglob("*") if path.is_file()}
    broken = set()
    for page in pages.values():
        for _, address in links(page):
            if urlsplit(address).scheme or OUTSIDE.match(address):
                continue
            path, anchor = target(page.path, address)
            if path not in files or (anchor and path in pages and anchor not in pages[path].anchors):
                broken.add((page.path, address))
    assert not broken


def test_nothing_comes_from_outside(book: Path, pages: dict[str, Page]) -> None:
    """Scripts, styles, fonts and pictures all lie in the book, those that styles and pictures name included."""
    outside = {
        (page.path, address)
        for page in pages.values()
        for tag, address in links(page)
        if tag.name != "a" and OUTSIDE.match(address)
    }
    assert not outside
    inline = {
        page.path: "".join(
            [*(tag.get_text() for tag in page.soup("style")), *(tag["style"] for tag in page.soup(style=True))]
        )
        for page in pages.values()
    }
    linked = {target(page.path, address)[0] for page in pages.values() for tag, address in links(page) if is_style(tag)}
    pictures = {path.relative_to(book).as_posix() for path in book.rglob("*.svg")}
    assert len(linked) > 3 and len(pictures) > 10
    texts = inline | {path: (book / path).read_text(encoding="utf-8") for path in linked | pictures}
    missing = set()
    for path, text in texts.items():
        for match in IN_STYLES.finditer(text):
            address = match[1] or match[2] or ""
            if address.startswith(("data:", "#")):
                continue
            address = re.sub(r"\.(woff|ttf)$", ".woff2", address)  # older forms of a font that is there
            if OUTSIDE.match(address) or not (book / target(path, address)[0]).is_file():
                missing.add((path, address))
    assert not missing
    for path in pictures:
        assert not re.search(r"href=\"(?!#|data:)", texts[path]), path
        assert "<script" not in texts[path], path


def is_style(tag: Tag) -> bool:
    """Whether an element fetches a style sheet."""
    return tag.name == "link" and "stylesheet" in (tag.get("rel") or [])


def test_pictures_have_words(pages: dict[str, Page]) -> None:
    """Each picture says what is to be seen to those who cannot see it."""
    pictures = [(page.path, tag) for page in pages.values() for tag in page.soup("img")]
    assert len(pictures) > 10
    for path, tag in pictures:
        assert str(tag.get("alt", "")).strip(), (path, tag.get("src"))


def test_drawn_pictures_come_in_light_and_dark(pages: dict[str, Page]) -> None:
    """A figure that is drawn for the book has one picture for each of the theme's grounds, and a sentence for both."""
    figures = [figure for page in pages.values() for figure in page.soup.select("figure.picture")]
    assert len(figures) >= 5
    for figure in figures:
        light, dark = figure("img")
        assert "only-light" in light["class"] and "only-dark" in dark["class"]
        assert light["alt"] == dark["alt"] and str(light["alt"]).rstrip().endswith(".")


def test_formulas_are_rendered(pages: dict[str, Page]) -> None:
    """Every formula is rendered already, none of them wrongly, and no mark of one is left in the text."""
    formulas = 0
    for page in pages.values():
        assert not page.soup.select(".katex-error"), page.path
        for formula in page.soup.select(".math"):
            assert formula.select(".katex .katex-html"), (page.path, formula.get_text())
            formulas += 1
        for text in page.soup.find_all(string=re.compile(r"\$\$|\\\(|\\\[")):
            assert text.find_parent(CODE), (page.path, text)
    assert formulas > 50


def test_every_page_with_formulas_shows_them(pages: dict[str, Page]) -> None:
    """A text with formulas has become a page with formulas."""
    found = 0
    for path in DOCS.rglob("*.md"):
        text = re.sub(r"^(`{3,}).*?^\1$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        name = path.relative_to(DOCS).with_suffix(".html").as_posix()
        if name in pages and (text.count("$$") >= 2 or re.search(r"(?<![\w$])\$[^$`\n]+\$(?!\w)", text)):
            assert pages[name].soup.select(".katex"), name
            found += 1
    assert found > 3


def test_no_markup_is_left(pages: dict[str, Page]) -> None:
    """What a text marks up is rendered: no fence, role or rule of a table is left where people read."""
    for page in pages.values():
        for text in page.soup.find_all(string=re.compile(r"```|:::|\{[\w-]+\}`|\|--")):
            assert text.find_parent(CODE), (page.path, text)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_fence_says_what_it_holds(path: Path) -> None:
    """Each block that begins names its language or directive: one that does not is an end that has no beginning."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    assert [token.content for token in tokens if token.type == "fence" and not token.info.strip()] == []


@functools.cache
def lines(code: Path) -> dict[str, str]:
    """The lines of a page of code, by anchor."""
    parts = re.split(r"<a id=\"(line-\d+)\"", code.read_text(encoding="utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def plain(tag: Tag) -> str:
    """The text of an element on one line, its quotation marks as they were written."""
    return " ".join(tag.get_text().split()).translate(str.maketrans("’‘“”", "''\"\""))


@pytest.mark.parametrize("label", [clause.label for clause in refattn.CLAUSES])
def test_a_clause_and_its_code_lead_to_each_other(label: str, book: Path, pages: dict[str, Page]) -> None:
    """A clause has one place in the book; each line of code that it links to names it, and links back."""
    homes = [page for page in pages.values() if label in page.anchors]
    assert len(homes) == 1 and homes[0].path.startswith("spec/")
    (home,) = homes
    boxes = home.soup.find_all(id=label)
    assert len(boxes) == 1
    assert refattn.clause(label).text in plain(boxes[0])
    towards = [target(home.path, str(tag["href"])) for tag in boxes[0]("a", href=True)]
    code = [(path, anchor) for path, anchor in towards if path.startswith("code/")]
    assert code
    for path, anchor in code:
        line = BeautifulSoup(lines(book / path)[anchor], "html.parser")
        assert re.search(rf"\b{label}\b", line.get_text()), (path, anchor)
        assert (home.path, label) in [target(path, str(tag["href"])) for tag in line("a", href=True)], (path, anchor)


def test_the_search_knows_clauses_and_words(book: Path) -> None:
    """Labels are found by name, before anything else, and as words; "empty row" leads to the chapter on softmax."""
    text = (book / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    names = index["docnames"]

    def having(word: str) -> set[str]:
        where = index["terms"].get(word, []), index["titleterms"].get(word, [])
        return {names[one] for some in where for one in (some if isinstance(some, list) else [some])}

    assert "spec/visibility" in having("m4")
    assert "spec/softmax" in having("empti") & having("row")  # the index keeps stems
    # page, kind, priority, anchor ("" would be what is shown) and what is shown
    entries = [entry for found in index["objects"].values() for entry in found if entry[4].partition(" ")[2]]
    labels = {entry[4].partition(" ")[0]: entry for entry in entries}
    for clause in refattn.CLAUSES:
        page, _, priority, anchor, shown = labels[clause.label]
        assert names[page].startswith("spec/")
        assert (priority, anchor, shown) == (0, clause.label, f"{clause.label} {clause.title}")


def test_what_is_cited_has_an_entry() -> None:
    """Every work that a page or a docstring names is in the list of sources, and no other is."""
    cited = re.compile(r"([A-Z][a-z]+(?:, [A-Z][a-z]+)*(?: and [A-Z][a-z]+| et al\.)),? \(?((?:19|20)\d\d)")
    sources = DOCS / "spec" / "sources.md"
    code = [path for name in ("refattn", "backends") for path in (DOCS.parent / name).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in [*DOCS.rglob("*.md"), *code] if path != sources]
    named = {f"{who}, {year}" for text in texts for who, year in cited.findall(text)}
    listed = re.findall(r"^\| (.*?, \d{4}) \|", sources.read_text(encoding="utf-8"), re.MULTILINE)
    assert named == set(listed) and len(listed) == len(named) > 5


def built(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """What Sphinx says of a book of one page with the extension of clauses alone."""
    settings = (
        f"import sys; sys.path.insert(0, {str(DOCS / '_ext')!r})",
        "extensions, primary_domain = ['clauses'], 'refattn'",
    )
    (folder / "conf.py").write_text("\n".join(settings), encoding="utf-8")
    (folder / "index.rst").write_text(f"Title\n=====\n\n{text}\n", encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-b", "dummy", "-q", str(folder), str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", [".. clause:: M99", "As :clause:`M99` says."], ids=["defined", "linked"])
def test_an_unknown_label_stops_the_build(text: str, tmp_path: Path) -> None:
    """A page that defines or links a clause that does not exist is no page; the message names it and its place."""
    found = built(tmp_path, text)
    assert found.returncode != 0
    assert "no clause 'M99'" in found.stderr and "index" in found.stderr


def test_a_known_label_does_not_stop_the_build(tmp_path: Path) -> None:
    """The same page with a clause that exists is built."""
    found = built(tmp_path, ".. clause:: M4\n\nAs :clause:`M4` says.")
    assert found.returncode == 0, found.stderr


def test_a_clause_has_one_page(tmp_path: Path) -> None:
    """A clause that two pages define stops the build."""
    (tmp_path / "again.rst").write_text("Again\n=====\n\n.. clause:: M4\n", encoding="utf-8")
    found = built(tmp_path, ".. clause:: M4\n\n.. toctree::\n\n   again")
    assert found.returncode != 0
    assert "M4 is defined on" in found.stderr
