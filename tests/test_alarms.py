"""Judging random problems accuses a wrong implementation, and keeps the figures of others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from refattn.conformance.alarms import fitted, judge_all, main, page_of
from refattn.conformance.case import Problem
from refattn.conformance.drawn import drawn_problem
from refattn.conformance.judge import Result, golden_of
from refattn.conformance.plain import Draw, rounded
from refattn.conformance.targets import find_target

WRONG, RIGHT = "refattn.conformance.faults:no_scale", "refattn.conformance.faults:plain"


def test_wrong_ones_are_accused_and_right_ones_are_not(tmp_path: Path) -> None:
    """The exit code says so, the file keeps both, and the page has a row for each."""
    where = ["--problems", "4", "--seed", "1", "--json", str(tmp_path / "a.json"), "--page", str(tmp_path / "a.md")]
    assert main([WRONG, *where]) == 1
    assert main([RIGHT, *where]) == 0
    figures = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert figures[WRONG]["accused"] and figures[RIGHT]["accused"] == []
    assert figures[RIGHT]["verdicts"]["float32"]["pass"] == 4
    assert figures[WRONG]["first_seed"] == 1
    accused = [re.match(r"drawn_problem\('(\w+)', (\d+)\)", one) for one in figures[WRONG]["accused"]]
    for dtype, seed in ((one[1], int(one[2])) for one in accused if one):
        assert seed in range(1, 5)
        again = judge_all(find_target(WRONG), dtype, [(seed, drawn_problem(dtype, seed))])
        assert len(again.accused) == 1
    page = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert f"| {WRONG} |" in page and f"| {RIGHT} |" in page


class Stub:
    """A target under the name of one whose departures are known, that gives what it is told."""

    def __init__(self, name: str, answer: Any, lacks: str = "") -> None:
        self.name, self.answer, self.lacks = name, answer, lacks

    def unsupported(self, needs: tuple[str, ...], dtype: str) -> str:
        return self.lacks

    def call(self, problem: Problem) -> Result:
        result: Result = self.answer(problem)
        return result


def with_an_empty_row() -> Problem:
    """Four rows in float32, the second of which sees nothing."""
    data = Draw("float32", np.random.default_rng(3)).qkv(4, 6, heads=2)
    return Problem(**data, shown=np.asarray([True, False, True, True])[:, None] & np.ones((4, 6), dtype=bool))


def means(problem: Problem) -> Result:
    """Right but for rows that see nothing, which are the mean of the values."""
    output = rounded(golden_of(problem).output, "float32")
    output[..., 1, :] = rounded(np.mean(problem.v, axis=-2), "float32")
    return Result(output=output, dtype="float32")


def fails(problem: Problem) -> Result:
    raise RuntimeError("no kernel image")


def test_known_departures_accuse_nobody() -> None:
    """What is known of a target is counted as its departure; of another one it is an accusation, as a crash."""
    problems = [(7, with_an_empty_row())]
    known = judge_all(Stub("jax", means), "float32", problems)
    assert (known.verdicts, known.accused) == ({"departure": 1}, [])
    assert known.departures == {"a row that sees no key is the mean of the values": 1}
    other = judge_all(Stub("torch", means), "float32", problems)
    assert other.verdicts == {"fail": 1} and not other.departures
    assert other.accused[0].startswith("drawn_problem('float32', 7): output")
    (crash,) = judge_all(Stub("jax", fails), "float32", problems).accused
    assert crash == "drawn_problem('float32', 7): RuntimeError: no kernel image"


def test_what_a_target_lacks_is_never_called() -> None:
    """A problem that a target cannot express is counted as unsupported."""
    tally = judge_all(Stub("jax", fails, lacks="no mask"), "float32", [(7, with_an_empty_row())])
    assert (tally.verdicts, tally.accused) == ({"unsupported": 1}, [])


def test_problems_are_fitted_to_widths() -> None:
    """Targets of rank 4 get it, the next multiple of their width, and values as wide as keys if they must."""
    target = SimpleNamespace(width_step=8, own_value_width=False)
    for seed in range(8):
        problem = drawn_problem("float32", seed)
        fit = fitted(problem, target)
        width = -(-problem.q.shape[-1] // 8) * 8
        assert [x.ndim for x in (fit.q, fit.k, fit.v)] == [4, 4, 4]
        assert [x.shape[-1] for x in (fit.q, fit.k, fit.v)] == [width] * 3
        assert np.array_equal(fit.q[..., : problem.q.shape[-1]].reshape(problem.q.shape), problem.q)
    assert fitted(problem, SimpleNamespace()) is problem


def test_the_page_adds_up() -> None:
    """Judged are passes, departures and failures; the sentence on top counts those that were called wrong."""
    verdicts = {"float16": {"pass": 3, "departure": 2}, "float32": {"fail": 1, "not judgeable": 4, "unsupported": 5}}
    one = {"versions": {"jax": "1"}, "verdicts": verdicts, "departures": ["so it is"], "accused": ["it"]}
    page = page_of({"jax": one})
    assert "| jax | jax 1 | float16, float32 | 6 | 4 | 5 | 2 | 1 |" in page
    assert "Of 6 results 1 were called wrong" in page
    assert "- Known departure: so it is." in page
