"""`python -m refattn.conformance.alarms TARGET...`: random problems, other ones each time, on right implementations.

None may be accused. The figures of each target are kept in a JSON file until it is asked again, and drawn as a page.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.departures import excused
from refattn.conformance.drawn import drawn_problem
from refattn.conformance.judge import Judgement, judge
from refattn.conformance.targets import find_target
from refattn.dtypes import COMPUTED

Problems = Iterable[tuple[int, Problem]]
MANY = 400


@dataclass
class Tally:
    """Verdicts on random problems by their kind, what the judge holds against the target, and known departures."""

    verdicts: Counter[str] = field(default_factory=Counter)
    accused: list[str] = field(default_factory=list)
    departures: Counter[str] = field(default_factory=Counter)


def judge_all(target: Any, dtype: str, problems: Problems) -> Tally:
    """The tally of a target on problems of one dtype, each with its seed."""
    tally = Tally()
    for seed, drawn in problems:
        problem = fitted(drawn, target)
        if target.unsupported(problem.needs, dtype):
            tally.verdicts["unsupported"] += 1
            continue
        result = None
        try:
            result = target.call(problem)
            judged = judge(problem, result)
        except Unsupported:
            tally.verdicts["unsupported"] += 1
            continue
        except Exception as fault:  # noqa: BLE001  # whatever a target raises speaks against it
            judged = Judgement(verdict="fail", message=f"{type(fault).__name__}: {fault}")
        known = excused(target.name, problem, result) if judged.verdict == "fail" else ()
        tally.departures.update(known)
        tally.verdicts["departure" if known else judged.verdict] += 1
        if judged.verdict == "fail" and not known:
            tally.accused.append(f"drawn_problem({dtype!r}, {seed}): {judged.message}")
    return tally


def fitted(problem: Problem, target: Any) -> Problem:
    """The problem with rank and widths that the target can express, its data cut or repeated."""
    step = getattr(target, "width_step", None)  # of targets that take rank 4 alone
    if step is None:
        return problem
    width = -(-problem.q.shape[-1] // step) * step
    widths = {"q": width, "k": width, "v": problem.v.shape[-1] if target.own_value_width else width}
    return replace(problem, **{name: _shaped(getattr(problem, name), size) for name, size in widths.items()})


def _shaped(x: Array, width: int) -> Array:
    """x with four axes, several batch axes made one, and a width."""
    whole = x.reshape(-1, *x.shape[-3:])
    return whole[..., np.arange(width) % x.shape[-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges the targets, and writes what is asked for; exit code 1 if a right one is accused."""
    parser = argparse.ArgumentParser(prog="python -m refattn.conformance.alarms", description=__doc__)
    parser.add_argument("targets", metavar="TARGET", nargs="+", help="as `refattn check` takes them")
    parser.add_argument("--problems", metavar="N", type=int, default=MANY, help="in each dtype (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the first problem, the others follow (a fresh one)")
    parser.add_argument("--json", type=Path, help="file for the figures; those of other targets stay")
    parser.add_argument("--page", type=Path, help="file for the page in Markdown, of all figures in the JSON file")
    chosen = parser.parse_args(arguments)
    if chosen.page and not chosen.json:
        parser.error("--page draws what --json keeps, so name a file for that too")
    seed = secrets.randbelow(10**9) if chosen.seed is None else chosen.seed
    figures = {name: figures_of(name, range(seed, seed + chosen.problems)) for name in chosen.targets}
    if chosen.json:
        old = json.loads(chosen.json.read_text(encoding="utf-8")) if chosen.json.exists() else {}
        everything = dict(sorted({**old, **figures}.items()))
        chosen.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        if chosen.page:
            chosen.page.write_text(page_of(everything), encoding="utf-8")
    accused = [complaint for one in figures.values() for complaint in one["accused"]]
    print("\n".join([*accused, f"{len(accused)} accused from seed {seed}"]))
    return 1 if accused else 0


def figures_of(name: str, seeds: range) -> dict[str, Any]:
    """The figures of one target in all its dtypes, as they are written to JSON."""
    target = find_target(name)
    dtypes = [dtype for dtype in COMPUTED if dtype in target.dtypes]
    shown = Console(stderr=True)
    tallies = {}
    for dtype in dtypes:
        watched = track(seeds, f"{name} {dtype}", console=shown, transient=True, disable=not shown.is_terminal)
        tallies[dtype] = judge_all(target, dtype, ((one, drawn_problem(dtype, one)) for one in watched))
    return {
        "versions": target.versions(),
        "first_seed": seeds.start,
        "problems": len(seeds),
        "verdicts": {dtype: dict(sorted(tally.verdicts.items())) for dtype, tally in tallies.items()},
        "departures": sorted({says for tally in tallies.values() for says in tally.departures}),
        "accused": [complaint for tally in tallies.values() for complaint in tally.accused],
    }


def page_of(figures: dict[str, Any]) -> str:
    """The page in Markdown."""
    rows, total, accused = [], 0, 0
    for name, one in figures.items():
        counts = sum((Counter(verdicts) for verdicts in one["verdicts"].values()), Counter[str]())
        judged = counts["pass"] + counts["departure"] + counts["fail"]
        total, accused = total + judged, accused + len(one["accused"])
        versions = ", ".join(f"{library} {version}" for library, version in one["versions"].items())
        cells = (name, versions, ", ".join(one["verdicts"]), judged, counts["not judgeable"], counts["unsupported"])
        rows.append(f"| {' | '.join(map(str, cells))} | {counts['departure']} | {len(one['accused'])} |")
    known = dict.fromkeys(says for one in figures.values() for says in one["departures"])
    return "\n".join(
        [
            "# Is a right implementation ever accused?",
            "",
            "Random problems, drawn anew for each target: sizes, options, memory layout and data. An option that a",
            "target cannot express makes a problem unsupported. Not judgeable is one on which rounding alone may move",
            f"a logit by 1. Of {total} results {accused} were called wrong without being so. Written by",
            "`nox -s alarms`; [alarms.json](alarms.json) has the seeds and the figures of each dtype.",
            "",
            "| target | versions | dtypes | judged | not judgeable | unsupported | known departures | accused |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
            "A known departure excuses no more than it says: the result is judged again without what it changes.",
            "",
            *(f"- Known departure: {says}." for says in known),
            "",
        ]
    ).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    raise SystemExit(main())
