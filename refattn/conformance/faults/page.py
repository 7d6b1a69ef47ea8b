"""The figures of the fault matrix as a page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from refattn.clauses import CHAPTERS
from refattn.dtypes import COMPUTED


def page_of(figures: dict[str, Any]) -> str:
    """The page in Markdown."""
    s, versions = figures["summary"], figures["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    reached = f"{s['ordinary_pairs']} of the {s['pairs']} pairs"
    lines = [
        "# Can the suite tell wrong from right?",
        "",
        f"{s['faults']} wrong implementations, each with one small error, on {software}, seed {figures['seed']}.",
        "Each is judged by the cases of the clause that it breaks, and by no others, in every dtype in which the error",
        "can show. The log-sum-exp, whose bound is the narrower one, is offered only where a fault shows in nothing",
        "else. A cell is the largest error over its derived bound in the first case that fails by",
        f"{figures['enough']:g} times or more; *inf* is a wrong NaN, infinity, shape, dtype or side effect, or what a",
        "check says. Written by `nox -s faults`.",
        "",
        f"- Caught: {s['caught']} of {s['pairs']} pairs of fault and dtype. The least finite ratio is",
        f"  {s['least_ratio']:g}, the median {s['median_ratio']:g}.",
        f"- False alarms: {s['accused']} among {s['right_results']} results of {len(figures['controls'])} right",
        "  implementations, some of which look wrong (below).",
        "- An ordinary test draws normal data for each option, in the sizes of a common example. It reaches",
        f"  {reached}: in the others it changes no bit. Of those that it reaches",
        f"  it misses {s['ordinary_missed_by_assert_close']} with the default tolerances of",
        "  `torch.testing.assert_close`,",
        f"  {s['ordinary_missed_by_one_percent']} with atol = rtol = 0.01, and",
        f"  {s['ordinary_missed_by_the_bound']} with the derived bound on the same data: the cases matter most.",
        f"- Of {s['right_results_of_fixed_tolerances']} right results on the suite's own cases, scores stored low or",
        f"  not, the default tolerances call {s['accused_by_assert_close']} wrong, atol = rtol = 0.01",
        f"  {s['accused_by_one_percent']}.",
        "",
    ]
    for letter, title in CHAPTERS.items():
        faults = [fault for fault in figures["faults"] if fault["clause"][0] == letter]
        if faults:
            lines += [f"## {letter}: {title}", "", *_table(faults), ""]
    lines += [
        "## Right implementations",
        "",
        "| implementation | results judged | accused |",
        "| --- | ---: | ---: |",
        *(f"| {one['name']} | {one['judged']} | {len(one['accused'])} |" for one in figures["controls"]),
        "",
        "A constant of each row cancels in the output, and so it is right where neither the log-sum-exp nor sinks are",
        "offered; with either of them it is the fault *rows are shifted*. ALiBi by the key's position differs from",
        "ALiBi by a constant of each row under causal visibility, and is a fault without it.",
        "",
        "## What the faults stand for",
        "",
        "| kind of public report | faults |",
        "| --- | ---: |",
        *(f"| {kind or 'none known'} | {count} |" for kind, count in _kinds(figures["faults"])),
        "",
    ]
    return "\n".join(lines)


def _table(faults: list[dict[str, Any]]) -> list[str]:
    lines = [f"| clause | fault | {' | '.join(COMPUTED)} | case in float32, or the first | ordinary test misses |"]
    lines.append(f"| --- | --- | {'---: | ' * len(COMPUTED)}--- | --- |")
    for fault in faults:
        rows = fault["dtypes"]
        cells = [_cell(rows.get(dtype)) for dtype in COMPUTED]
        case = (rows.get("float32") or next(iter(rows.values())))["case"]
        missed = [dtype for dtype, row in rows.items() if row["default"] is False]
        unknown = all(row["default"] is None for row in rows.values())
        words = "not reached" if unknown else ", ".join(missed)
        lines.append(f"| {fault['clause']} | {fault['name']} | {' | '.join(cells)} | {case} | {words} |")
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    ratio = row["ratio"] if isinstance(row["ratio"], str) else f"{row['ratio']:.2g}"
    return ratio if row["caught"] else f"**{ratio}**"


def _kinds(faults: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return Counter(fault["kind"] for fault in faults).most_common()
