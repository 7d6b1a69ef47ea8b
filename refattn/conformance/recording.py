"""What a report keeps of calls: a record of each, with its data for pictures and, of failures, a diagnosis."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from refattn.conformance.records import BROKEN, CAPTURED, Pictured, Record

# What an assertion without words is quoted as.
NO_WORDS = "an assertion failed"
# Failing cases whose data a report keeps for its pictures, and the most elements of all of them together.
PICTURED, PICTURED_ELEMENTS = 60, 2**24


def record_of(
    about: dict[str, Any],
    problem: Any,
    result: Any,
    judged: Any,
    of_gradient: dict[str, Any] | None,
    declared: Any = None,
) -> Record:
    """The record of a call that gave a result: `about` beside what follows from its judgement.

    of_gradient is the diagnosis where the judgement is about a gradient, see `diagnosis.gradients.explain_gradients`.
    """
    from refattn.conformance.diagnosis import Evidence

    # What is known of faults and pictures is about outputs alone.
    plain = replace(problem, grad_output=None)
    answer = Evidence(plain, result, judged, case=about["case"], clauses=about["clauses"])
    unexplained = answer.failed and of_gradient is None
    choices = declared.explains(answer) if declared is not None and unexplained else ()
    return Record(
        **about,
        verdict="declared" if choices else judged.verdict,
        declared=choices,
        error_over_bound=judged.error_over_bound,
        model=judged.model,
        fault=judged.fault,
        diagnosis=of_gradient,
        evidence=Pictured(plain, result) if unexplained and not choices else None,
        answer=None if choices or of_gradient else answer,
    )


def crash_of(fault: BaseException, target: Any) -> dict[str, Any]:
    """What a record says of an error that the target raised: message, place and traceback."""
    try:
        message = f"{type(fault).__name__}: {fault}{target.hint(fault)}"
        if isinstance(fault, AssertionError):
            message = str(fault) or NO_WORDS
    except Exception:  # noqa: BLE001  # an error of a foreign class may refuse even to be printed
        message = f"{type(fault).__name__}, which cannot be printed"
    return {"message": message, "place": "", "trace": "", **_where(fault)}


def gathered(
    found: Iterable[Record], advance: Callable[[Record], None]
) -> tuple[tuple[Record, ...], dict[str, Any] | None]:
    """The records as they come, each shown to advance, then with a diagnosis for each failure, and one of all."""
    records: list[Record] = []
    for record in found:
        records.append(with_bounded_evidence(record, records))
        advance(records[-1])
    explained, diagnosis = diagnosed(records)
    return tuple(explained), diagnosis


def diagnosed(records: list[Record]) -> tuple[list[Record], dict[str, Any] | None]:
    """The records with a diagnosis for each failure, and what explains all of them; passes speak too."""
    from refattn.conformance.diagnosis import summarise
    from refattn.conformance.diagnosis.gradients import findings

    places = [place for place, record in enumerate(records) if record.answer is not None]
    summary = summarise([records[place].answer for place in places])
    told = {places[place]: diagnosis.as_dict() for place, diagnosis in summary.diagnoses.items()}
    found = []
    for place, record in enumerate(records):
        # A crash, and what a check of refattn's own functions says, are explained by their own words.
        alone = {"sentence": record.message, "hypotheses": [], "where": "", "fitted": {}}
        diagnosis = told.get(place, record.diagnosis or alone) if record.verdict in BROKEN else None
        found.append(replace(record, diagnosis=diagnosis, answer=None))
    summary = summary.beside(*findings(records))
    return found, summary.as_dict() if summary.failures else None


def problem_in_words(problem: Any, seed: int | None) -> str:
    """The call of a problem: shapes, dtype, options and the seed of the data, if it was drawn."""
    words = [f"{name} {tuple(getattr(problem, name).shape)}" for name in ("q", "k", "v")]
    words = [f"{', '.join(words)} {problem.dtype}"]
    if problem.causal:
        words.append("causal=True")
    for name, values in (
        *(("mask", problem.shown), ("bias", problem.bias), ("sinks", problem.sinks)),
        ("grad_output", problem.grad_output),
    ):
        if values is not None:
            words.append(f"{name} {tuple(values.shape)}")
    for name in ("scale", "softcap", "q_start", "k_start"):
        if name in problem.needs:
            value = getattr(problem, name)
            words.append(f"{name}={value.tolist() if hasattr(value, 'tolist') else value}")
    if problem.layout != "contiguous":
        words.append(f"{problem.layout} in memory")
    return ", ".join(words if seed is None else [*words, f"seed {seed}"])


def with_bounded_evidence(record: Record, earlier: list[Record]) -> Record:
    """The record, without its evidence if the earlier ones hold enough."""
    if record.evidence is None:
        return record
    kept = {one.case: one.evidence.elements for one in earlier if one.evidence is not None}
    # What a user captured comes last, and is what they ask about.
    few = len(kept) < PICTURED or record.case.startswith(CAPTURED)
    small = sum(kept.values()) + record.evidence.elements <= PICTURED_ELEMENTS
    return record if few and small and record.case not in kept else replace(record, evidence=None)


def _where(fault: BaseException) -> dict[str, Any]:
    """Where the target's own code raised, and the traceback from there on."""
    frame: TracebackType | None = fault.__traceback__
    own = Path(__file__).parent
    while frame is not None and own in Path(frame.tb_frame.f_code.co_filename).parents:
        frame = frame.tb_next
    if frame is None:
        return {}
    frames = traceback.extract_tb(frame)
    # The deepest frame in the file that was called: what it calls in libraries says less about the target.
    place = [one for one in frames if one.filename == frames[0].filename][-1]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    trace = "".join([*lines, *traceback.format_exception_only(fault)]).rstrip()
    return {"place": f"{place.filename}:{place.lineno}", "trace": trace}
