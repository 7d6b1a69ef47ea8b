"""JUnit XML, which continuous integration shows: one test case for each case and dtype.

Failures are `failure`, crashes and what else ended a call `error`, and what was not judged `skipped` with its reason.
A run that has no verdict, interrupted or without anything judged, has an error of its own: no reader may call it green.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from refattn.conformance.records import BROKEN, Record, Report
from refattn.conformance.reports.terminal import explain, verdict_line
from refattn.conformance.reports.text import printable


def junit_text(report: Report) -> str:
    """The report as JUnit XML."""
    suite = Element("testsuite", name=printable(f"refattn check {report.target}"))
    properties = SubElement(suite, "properties")
    facts = {"target": report.target, "seed": str(report.seed), "complete": str(report.complete).lower()}
    facts |= {f"version.{name}": version for name, version in report.versions.items()}
    for name, value in facts.items():
        SubElement(properties, "property", name=printable(name), value=printable(value))
    for record in report.records:
        _add_case(suite, record)
    if not (report.conforms or report.broken):
        verdict = SubElement(suite, "testcase", classname="refattn", name="verdict")
        _add_outcome(verdict, "error", "no verdict", verdict_line(report))
    cases = suite.findall("testcase")
    counts = {"tests": len(cases)}
    counts |= {
        plural: sum(case.find(outcome) is not None for case in cases)
        for plural, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    for name, count in counts.items():
        suite.set(name, str(count))
    suite.set("time", f"{report.seconds:.2f}")
    for note in report.notes:
        _add_output(suite, note)
    suites = Element("testsuites")
    suites.append(suite)
    indent(suites, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(suites, encoding="unicode")}\n'


def _add_case(suite: Element, record: Record) -> None:
    name = printable(f"{record.case}[{record.dtype}]")
    case = SubElement(suite, "testcase", classname=f"refattn.{record.clauses[0]}", name=name)
    if record.verdict in (*BROKEN, "missing"):
        kind = "failure" if record.verdict == "fail" else "error"
        text = explain(record, "Failure") + (f"\n{record.trace}" if record.trace else "")
        _add_outcome(case, kind, record.about if kind == "failure" else record.verdict, record.message, text)
    elif record.verdict != "pass":
        SubElement(case, "skipped", message=printable(f"{record.verdict}: {record.message}"))
    elif record.notes:
        _add_output(case, "\n".join(record.notes))


def _add_outcome(case: Element, kind: str, label: str, message: str, text: str = "") -> None:
    outcome = SubElement(case, kind, type=printable(label), message=printable(message))
    outcome.text = printable(text or message)


def _add_output(parent: Element, text: str) -> None:
    SubElement(parent, "system-out").text = printable(text)
