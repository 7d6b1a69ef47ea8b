"""The Sphinx domain of the specification: `{clause}` defines a clause on its page, and links to one elsewhere."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.domains import Domain
from sphinx.errors import SphinxError
from sphinx.roles import XRefRole
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

from refattn.clauses import CHAPTERS, CLAUSES, Clause, clause
from refattn.conformance.cards import cards_in
from refattn.conformance.case import Case
from refattn.conformance.cases import all_cases
from refattn.conformance.trace import Trace, trace

LOG = logging.getLogger(__name__)
DOCS = Path(__file__).parents[1]
CASES_PAGE, VECTORS_PAGE, FAULTS_PAGE, REPORTS_PAGE = "spec/cases", "vectors/README", "faults/README", "reports"
BOARD_PAGE = "scoreboard/README"


class UnknownLabel(SphinxError):
    """A page names a clause that does not exist."""

    category = "clauses"


def known(label: str, where: str) -> Clause:
    """The clause with this label; stops the build if there is none."""
    try:
        return clause(label)
    except KeyError as fault:
        raise UnknownLabel(f"{where}: {fault.args[0]}") from fault


def departing(label: str) -> dict[str, tuple[int, int]]:
    """The recorded implementations that fail cases of a clause: how many they fail, of how many they could express."""
    found = {}
    for name, figures in json.loads((DOCS / "scoreboard" / "scoreboard.json").read_bytes()).items():
        counts = figures["clauses"].get(label, {})
        if failed := counts.get("fail", 0):
            found[name] = (failed, failed + counts.get("pass", 0))
    return found


@functools.cache
def differing(label: str) -> dict[str, dict[str, list[str]]]:
    """Who answers otherwise by the recorded cards: question -> answer -> implementations."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, card in cards_in(DOCS / "cards").items():
        for one in card.findings:
            if one.clause == label and one.verdict == "departs":
                found.setdefault(one.name, {}).setdefault(one.found, []).append(name)
    return found


class ClauseDirective(SphinxDirective):
    """Defines a clause on this page: its text, and links to all that belongs to it. What is inside is its rationale."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The clause as a box."""
        one = known(self.arguments[0], self.get_location())
        self.env.domains["refattn"].define(one.label, self.env.docname, self.get_location())
        box = nodes.container(classes=["clause", one.level.lower()], ids=[one.label])
        head = nodes.paragraph(classes=["clause-head"])
        link = nodes.reference("", one.label, refid=one.label, classes=["clause-label"])
        head += [link, nodes.Text(" "), nodes.strong("", one.title), nodes.Text(" ")]
        head += nodes.inline("", one.level, classes=["clause-level"])
        box += [head, nodes.paragraph("", one.text, classes=["clause-text"])]
        if one.note:
            box += nodes.paragraph("", "", nodes.emphasis("", one.note), classes=["clause-note"])
        self.state.nested_parse(self.content, self.content_offset, box)
        box += differences(one.label)
        box += leads(one.label, trace(one.label))
        return [box]


def differences(label: str) -> list[nodes.Node]:
    """A line on each question of the cards that somebody answers otherwise."""
    lines = []
    for question, answers in differing(label).items():
        line = nodes.paragraph(classes=["clause-differs"])
        line += [page_link("cards/README", "", "differs"), nodes.Text(f", {question}: ")]
        parts = [f"{answer} ({', '.join(names)})" for answer, names in answers.items()]
        line += nodes.Text("; ".join(parts))
        lines.append(line)
    return lines


def leads(label: str, found: Trace) -> nodes.Node:
    """Links to the code, errors, cases, vectors, faults, reports and the scoreboard."""
    line = nodes.paragraph(classes=["clause-leads"])
    for title, parts in parts_of(label, found):
        if parts:
            if len(line):
                line += nodes.Text(" · ")
            line += nodes.inline("", f"{title} ", classes=["clause-lead"])
            for index, part in enumerate(parts):
                line += [*([nodes.Text(", ")] if index else []), part]
    return line


def parts_of(label: str, found: Trace) -> list[tuple[str, list[nodes.Node]]]:
    """What a clause leads to, by title: links and words."""
    counted = {
        "cases": [page_link(CASES_PAGE, f"cases-{label}", str(len(found.cases)))] if found.cases else [],
        "vectors": [page_link(VECTORS_PAGE, "", str(len(found.vectors)))] if found.vectors else [],
        "faults": [page_link(FAULTS_PAGE, "", str(len(found.faults)))] if found.faults else [],
        "reports": [page_link(REPORTS_PAGE, "", str(len(found.reports)))] if found.reports else [],
        "fail some of its cases": [page_link(BOARD_PAGE, "", str(len(board)))] if (board := departing(label)) else [],
    }
    return [
        ("code", [code_link(place.module, place.line, str(place)) for place in found.code]),
        ("error", [nodes.literal("", name) for name in found.errors]),
        *counted.items(),
    ]


def page_link(page: str, anchor: str, text: str) -> nodes.Node:
    """A link to a place on another page, made whole when pages are written."""
    return nodes.inline("", text, classes=["to-page"], page=page, anchor=anchor)


def code_link(module: str, line: int, text: str) -> nodes.Node:
    """A link to a line of refattn's code, on the page that shows the module."""
    return page_link(f"code/{module}", f"line-{line}", text)


class CasesDirective(Directive):
    """Every case, clause by clause, with what must hold and a way back to the clause."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """A section for each clause."""
        cases = {case.name: case for case in all_cases()}
        made: list[nodes.Node] = []
        for letter, title in CHAPTERS.items():
            chapter = nodes.section("", nodes.title("", f"{letter}: {title}"), ids=[f"chapter-{letter}"])
            for one in (one for one in CLAUSES if one.chapter == letter):
                chapter += cases_of(one, [cases[name] for name in trace(one.label).cases])
            made.append(chapter)
        return made


def cases_of(one: Clause, cases: list[Case]) -> nodes.Node:
    """The cases of a clause, as a list of definitions."""
    section = nodes.section("", nodes.title("", f"{one.label} {one.title}"), ids=[f"cases-{one.label}"])
    section += nodes.paragraph("", "", nodes.Text("Of "), clause_link(one.label), nodes.Text(f": {one.text}"))
    entries = nodes.definition_list()
    for case in cases:
        build = case.build or case.check
        place = code_link(f"cases/{build.__module__.rpartition('.')[2]}", build.__code__.co_firstlineno, case.name)
        term = nodes.term("", "", nodes.literal("", "", place), nodes.Text(f"  {', '.join(case.dtypes)}"))
        entries += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", case.says)))
    section += entries if cases else nodes.paragraph("", "Certified vectors alone test it.")
    return section


def clause_link(label: str, text: str = "") -> nodes.Node:
    """A reference to a clause that the domain resolves."""
    from sphinx.addnodes import pending_xref

    target = pending_xref("", nodes.inline("", text or label), reftype="clause", refdomain="refattn", reftarget=label)
    target["refexplicit"], target["refwarn"] = bool(text), True
    return target


class TraceabilityDirective(SphinxDirective):
    """A table of all clauses and how much of each kind belongs to them."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        columns = ("clause", "level", "code", "errors", "cases", "vectors", "faults", "reports", "failed by")
        table, group, head, body = nodes.table(), nodes.tgroup(cols=len(columns)), nodes.thead(), nodes.tbody()
        group += [nodes.colspec(colwidth=1) for _ in columns]
        head += row([nodes.Text(column) for column in columns])
        for one in CLAUSES:
            found = trace(one.label)
            link = nodes.inline("", "", clause_link(one.label), nodes.Text(f" {one.title}"))
            code = nodes.inline()
            for index, place in enumerate(found.code):
                code += [*([nodes.Text(", ")] if index else []), code_link(place.module, place.line, str(place))]
            counts = (found.errors, found.cases, found.vectors, found.faults, found.reports, departing(one.label))
            body += row([link, nodes.Text(one.level), code, *(nodes.Text(str(len(some) or "")) for some in counts)])
        group += [head, body]
        table += group
        return [nodes.container("", table, classes=["wide-table"])]


def row(cells: list[nodes.Node]) -> nodes.row:
    """A row of a table."""
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


class ClausesDomain(Domain):
    """The clauses: where each is defined, and references to them."""

    name, label = "refattn", "Clauses of the specification"
    directives: ClassVar[dict[str, Any]] = {"clause": ClauseDirective}
    roles: ClassVar[dict[str, Any]] = {"clause": XRefRole(warn_dangling=True, innernodeclass=nodes.inline)}
    initial_data: ClassVar[dict[str, Any]] = {"pages": {}}

    def define(self, label: str, docname: str, where: str) -> None:
        """Notes the page of a clause; a second one stops the build."""
        before = self.data["pages"].setdefault(label, docname)
        if before != docname:
            raise UnknownLabel(f"{where}: {label} is defined on {before} already")

    def clear_doc(self, docname: str) -> None:
        """Forgets what a page that changed has defined."""
        self.data["pages"] = {label: page for label, page in self.data["pages"].items() if page != docname}

    def merge_domaindata(self, docnames: Any, otherdata: dict[str, Any]) -> None:
        """Takes over what a parallel reader found."""
        self.data["pages"] |= {label: page for label, page in otherdata["pages"].items() if page in docnames}

    def check_consistency(self) -> None:
        """Every clause stands on one page."""
        for one in CLAUSES:
            if one.label not in self.data["pages"]:
                LOG.warning("clause %s is on no page of the specification", one.label)

    def resolve_xref(
        self, env: Any, fromdocname: str, builder: Any, typ: str, target: str, node: Any, contnode: Any
    ) -> Any:
        """The link to a clause, its sentence as the hint."""
        one = known(target, fromdocname)
        if target not in self.data["pages"]:
            return None
        return make_refnode(
            builder, fromdocname, self.data["pages"][target], target, contnode, f"{one.title}: {one.text}"
        )

    def resolve_any_xref(self, *args: Any) -> list[Any]:
        """Clauses are linked by their own role alone."""
        return []

    def get_objects(self) -> Any:
        """What the search finds by name, first of all, and other books by label.

        Two entries, since the search takes what it shows for the anchor where name and anchor are the same.
        """
        for label, page in self.data["pages"].items():
            titled = f"{label} {clause(label).title}"
            yield label, label, "clause", page, label, -1
            yield titled, titled, "clause", page, label, 0


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the domain and the generated lists."""
    app.add_domain(ClausesDomain)
    app.add_directive("cases", CasesDirective)
    app.add_directive("traceability", TraceabilityDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1", "env_version": 1}
