"""Pages that show refattn's code, line by line, its labels linked to the clauses, and the links that lead there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pygments
from docutils import nodes
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx import addnodes
from sphinx.application import Sphinx

import refattn
from refattn.conformance.trace import LABEL

PACKAGE = Path(refattn.__file__).parent
# The specification itself, and the cases that test it.
SHOWN = ("*.py", "conformance/cases/*.py")
# In these spans of highlighted code a label is a label.
PROSE = re.compile(r'<span class="(?:c1|sd)">.*?</span>', re.DOTALL)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page for each module, with an anchor at each line."""
    found = app.env.domains["refattn"].data["pages"]
    for path in sorted(path for pattern in SHOWN for path in PACKAGE.glob(pattern)):
        name = module_of(path)
        page = f"code/{name}"

        def linked(match: re.Match[str], page: str = page) -> str:
            label = match[0]
            if label not in found:
                return label
            return f'<a href="{app.builder.get_relative_uri(page, found[label])}#{label}">{label}</a>'

        formatter = HtmlFormatter(linenos="inline", lineanchors="line", anchorlinenos=True, wrapcode=True)
        body = pygments.highlight(path.read_text(encoding="utf-8"), PythonLexer(), formatter)
        body = PROSE.sub(lambda span: LABEL.sub(linked, span[0]), body)
        yield page, {"title": f"refattn/{name}.py", "body": f"<h1>refattn/{name}.py</h1>\n{body}"}, "page.html"


def module_of(path: Path) -> str:
    """The name of a page of code: "pipeline", "cases/masks"."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removeprefix("conformance/")


def link(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turns what `page_link` made into links, where the builder writes pages, and into words where it does not."""
    for node in list(doctree.findall(lambda node: isinstance(node, nodes.inline) and "page" in node)):
        if app.builder.format != "html" or app.builder.name == "singlehtml":
            node.replace_self(nodes.inline("", node.astext()))
            continue
        uri = app.builder.get_relative_uri(docname, node["page"]) + (f"#{node['anchor']}" if node["anchor"] else "")
        node.replace_self(nodes.reference("", node.astext(), refuri=uri, internal=True))


def within_one_page(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """On the page for print, leads links to its own places, and leaves the words of those to other pages."""
    if app.builder.name != "singlehtml":
        return
    files = {f"document-{node['docname']}" for node in doctree.findall(addnodes.start_of_file)}
    places = files | {name for node in doctree.findall(nodes.Element) for name in node.get("ids", ())}
    for node in [node for node in doctree.findall(nodes.reference) if node.get("refuri", "").startswith("#document-")]:
        place = node["refuri"].rpartition("#")[2]
        if place in places:
            node["refuri"] = f"#{place}"
        else:
            node.replace_self(nodes.inline("", "", *node.children))


def setup(app: Sphinx) -> dict[str, Any]:
    """Writes the pages with the others."""
    app.connect("html-collect-pages", pages)
    app.connect("doctree-resolved", link)
    app.connect("doctree-resolved", within_one_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
