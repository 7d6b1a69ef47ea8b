"""One HTML page about one run: the verdict, a table by clause, and each failing case with its pictures.

The page is whole in itself: no script, and no style, font or image from elsewhere, which its content security policy
states too. What a target named, printed or raised is text and nothing else.
"""

from __future__ import annotations

import re
import shlex
from importlib.resources import files

from refattn.clauses import clause
from refattn.conformance.alignment import note_on
from refattn.conformance.headline import most_telling
from refattn.conformance.records import BROKEN, Record, Report
from refattn.conformance.reports.pictures import Picture, pictures_of
from refattn.conformance.reports.terminal import unsupported_lines, verdict_line
from refattn.conformance.reports.text import escaped
from refattn.conformance.table import in_order, sections, shown_verdicts

STYLES = ("map.css", "page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_text(report: Report, command: str = "") -> str:
    """The page; command is how the target is called again."""
    command = command or f"refattn check {report.target}"
    parts = [
        *_head(report),
        *_verdict(report),
        *_table(report),
        *_failures(report, command),
        *_not_judged(report),
        *_clauses(report),
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def styles(*names: str) -> str:
    """The style sheets of those names, one after the other."""
    return "".join(files("refattn.conformance.reports").joinpath(name).read_text(encoding="utf-8") for name in names)


def _head(report: Report) -> list[str]:
    title = escaped(f"refattn check {report.target}")
    return [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        # Without it a browser asks the place that the page came from for an icon.
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title>\n<style>\n{styles(*STYLES)}</style>\n</head>\n<body>\n<main>",
        f"<h1>{title}</h1>",
    ]


def _verdict(report: Report) -> list[str]:
    """The summary sentence, and what it is about."""
    state = "right" if report.conforms else "wrong" if report.broken else "none"
    facts = {
        "Versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "Seed": str(report.seed),
        "Time": f"{report.seconds:.1f} s",
        "Rounding": ", ".join(f"{model} in {dtype}" for dtype, model in report.models.items()),
    }
    notes = [*report.notes, *((note_on(report.alignment),) if report.alignment else ())]
    return [
        f'<p class="verdict {state}">{escaped(verdict_line(report))}</p>',
        "<dl>",
        *(f"<div><dt>{name}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items() if value),
        "</dl>",
        *(f'<p class="note">{escaped(note)}</p>' for note in notes),
    ]


def _table(report: Report) -> list[str]:
    """One row for each clause that was judged, with its verdicts."""
    found = [*sections(report)]
    if not found:
        return []
    verdicts = shown_verdicts(found)
    parts = ['<h2 id="by-clause">By clause</h2>']
    parts.append('<div class="scroll" tabindex="0" role="region" aria-labelledby="by-clause"><table>')
    heads = "".join(f'<th scope="col" class="count">{verdict}</th>' for verdict in verdicts)
    parts.append(f'<thead><tr><th scope="col">clause</th><th scope="col">title</th>{heads}</tr></thead>')
    for one in found:
        span = len(verdicts) + 2
        parts.append(f'<tbody><tr><th colspan="{span}" scope="rowgroup">{one.letter} · {escaped(one.title)}</th></tr>')
        for row in one.rows:
            cells = "".join(_count(verdict, row.counts[verdict]) for verdict in verdicts)
            state = ' class="broken"' if row.broken else "" if row.counts["pass"] else ' class="dim"'
            title = f"<td>{escaped(row.title)}</td>"
            parts.append(f'<tr{state}><th scope="row">{_link_to_clause(row.label)}</th>{title}{cells}</tr>')
        if one.unsupported:
            links = ", ".join(map(_link_to_clause, one.unsupported))
            parts.append(f'<tr class="dim"><td colspan="{span}">unsupported: {links}</td></tr>')
        parts.append("</tbody>")
    parts.append("</table></div>")
    parts.append('<p class="small">A case of several clauses is counted with each, and once for each dtype.</p>')
    return parts


def _count(verdict: str, count: int) -> str:
    broken = " bad" if verdict in BROKEN and count else ""
    return f'<td class="count{broken}">{count or ""}</td>'


def _failures(report: Report, command: str) -> list[str]:
    """Each failing case, the most telling one first; its dtypes together."""
    if not report.broken:
        return []
    groups: dict[str, list[Record]] = {most_telling(report).case: []}
    for record in report.broken:
        groups.setdefault(record.case, []).append(record)
    parts = [f'<h2 id="failures">{_failing_cases(len(groups))}, the most telling one first</h2>']
    if len(groups) > 1:
        links = (f'<li><a href="#{_slug(name)}">{escaped(name)}</a></li>' for name in groups)
        parts.append(f'<nav aria-labelledby="failures"><ul class="index">{"".join(links)}</ul></nav>')
    for name, records in groups.items():
        parts += _failure(name, records, command)
    return parts


def _failing_cases(count: int) -> str:
    return f"{count} failing case{'s' * (count != 1)}"


def _failure(name: str, records: list[Record], command: str) -> list[str]:
    """One case: what must hold, what came instead in the first dtype that shows it, pictures, the other dtypes."""
    first = next((record for record in records if record.evidence is not None), records[0])
    others = [record for record in records if record is not first]
    labels = dict.fromkeys(label for record in records for label in (record.about, *record.clauses))
    told = first.diagnosis or {}
    diagnosis, where = told.get("sentence", ""), told.get("where", "")
    facts = {
        "Clauses": ", ".join(f"{_link_to_clause(label)} {escaped(clause(label).title)}" for label in labels),
        "Must hold": escaped(first.says),
        "Called with": escaped(first.called),
        f"In {first.dtype}": f'<span class="bad">{escaped(_outcome(first))}</span>',
        "Diagnosis": f"<strong>{escaped(diagnosis)}</strong>" if diagnosis else "",
        "Where": escaped(where),
        "At": f"<code>{escaped(first.place)}</code>" if first.place else "",
        "To repeat": _shell(f"{command} --case {shlex.quote(name)}"),
    }
    parts = [
        f'<article id="{_slug(name)}" aria-labelledby="{_slug(name)}-h"><h3 id="{_slug(name)}-h">{escaped(name)}</h3>'
    ]
    parts.append("<dl>")
    parts += [f"<div><dt>{what}</dt><dd>{words}</dd></div>" for what, words in facts.items() if words]
    parts.append("</dl>")
    parts += _pictures(first)
    parts += [f'<p class="note">{escaped(note)}</p>' for note in first.notes]
    if first.trace:
        parts.append(f"<details><summary>Traceback</summary><pre>{escaped(first.trace)}</pre></details>")
    if others:
        items = "".join(f"<li><b>{escaped(other.dtype)}</b>: {escaped(_outcome(other))}</li>" for other in others)
        count = f"{len(others)} other dtype{'s' * (len(others) != 1)}"
        parts.append(f"<details><summary>In {count} too</summary><ul>{items}</ul></details>")
    parts.append("</article>")
    return parts


def _shell(command: str) -> str:
    return f"<code>{' '.join(f'<span>{escaped(word)}</span>' for word in command.split(' '))}</code>"


def _outcome(record: Record) -> str:
    return record.message if record.verdict == "fail" else f"{record.verdict}: {record.message}"


def _pictures(record: Record) -> list[str]:
    """The pictures of a failure that has kept what it was judged on, of a call of attention."""
    if record.evidence is None:
        return ['<p class="small">No pictures of this case were kept.</p>'] if record.called else []
    drawn, sentence = pictures_of(record.evidence, _slug(record.case))
    parts = [f'<p class="small">{escaped(sentence)}</p>']
    if drawn:
        parts.append(f'<div class="pictures">{"".join(map(_figure, drawn))}</div>')
    return parts


def _figure(picture: Picture) -> str:
    note = f"<br><small>{escaped(picture.note)}</small>" if picture.note else ""
    return f"<figure>\n<figcaption>{escaped(picture.heading)}{note}</figcaption>\n{picture.svg}\n</figure>"


def _not_judged(report: Report) -> list[str]:
    """What says nothing for or against the target, with the reasons."""
    parts = []
    if lines := unsupported_lines(report):
        items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
        parts += ['<h2 id="unsupported">Unsupported, so not judged</h2>', f"<ul>{items}</ul>"]
    judgeless = [record for record in report.records if record.verdict == "not judgeable"]
    if judgeless:
        items = "".join(f"<li>{escaped(f'{one.case} in {one.dtype}: {one.message}')}</li>" for one in judgeless)
        parts += ['<h2 id="not-judgeable">Not judgeable</h2>', f"<ul>{items}</ul>"]
    return parts


def _clauses(report: Report) -> list[str]:
    """The sentences of the clauses that this page names."""
    named = {label for record in report.records for label in (*record.clauses, record.about)}
    if not named:
        return []
    failing: dict[str, list[str]] = {}
    for record in report.broken:
        for label in {record.about, *record.clauses}:
            failing.setdefault(label, []).append(record.case)
    parts = ['<h2 id="clauses">The clauses</h2>', '<dl class="clauses">']
    for label in in_order(named):
        one = clause(label)
        note = f' <span class="small">{escaped(one.note)}</span>' if one.note else ""
        cases = [f'<a href="#{_slug(name)}">{escaped(name)}</a>' for name in dict.fromkeys(failing.get(label, ()))]
        broken = f'<br><span class="small">failing: {", ".join(cases)}</span>' if cases else ""
        parts.append(
            f'<div id="clause-{label}"><dt>{label} · {escaped(one.title)}</dt>'
            f"<dd><b>{one.level}.</b> {escaped(one.text)}{note}{broken}</dd></div>"
        )
    parts.append("</dl>")
    return parts


def _link_to_clause(label: str) -> str:
    return f'<a href="#clause-{label}">{label}</a>'


def _slug(name: str) -> str:
    """An id for a case, whose name may hold what came from a file; different names have different ids."""
    return "case-" + re.sub("[^A-Za-z0-9_.]", lambda found: f"-{ord(found[0]):x}-", name)
