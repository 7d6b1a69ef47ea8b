"""What is wrong with a result, in words: one function, for all that is judged from files."""

from __future__ import annotations

from typing import Any

from refattn.conformance.case import Problem
from refattn.conformance.closeness import explained
from refattn.conformance.judge import Judgement, Result, widest_model
from refattn.errors import RefattnError


def in_words(problem: Problem, result: Result, judged: Judgement, model: str | None = None) -> str:
    """The message of a judgement; of wrong numbers with where they are wrong."""
    if judged.verdict != "fail" or judged.place is None:
        return judged.message
    try:
        text = explained(
            result.output,
            problem.q,
            problem.k,
            problem.v,
            options_of(problem),
            dtype=problem.dtype,
            model=model or widest_model(problem.dtype),
            coherent=problem.coherent,
            lse=result.lse if judged.fault else None,  # a wrong output comes first
            rows=None,
            diagnosed=False,  # all results are, together
        )
    except RefattnError:  # what attention refuses has no other reading
        return judged.message
    return "; ".join(text.splitlines()) or judged.message


def options_of(problem: Problem) -> dict[str, Any]:
    """The options of `refattn.attention` for a problem, as plain arrays and numbers."""
    options = {"mask": problem.shown} | {
        name: getattr(problem, name) for name in ("bias", "scale", "softcap", "sinks", "q_start")
    }
    used = {name: value for name, value in options.items() if value is not None}
    return used | {"causal": problem.causal, "k_start": problem.k_start}
