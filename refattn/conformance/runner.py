"""Every case in every dtype on one target: the loop behind `refattn check` and the pytest suite."""

from __future__ import annotations

import bisect
import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from refattn import __version__
from refattn.conformance.capture import captured
from refattn.conformance.records import BROKEN, CAPTURED, OWN_FUNCTIONS, Pictured, Record, Report
from refattn.dtypes import COMPUTED

# One dtype after the other, float32 first: its failures are the easiest to read.
DTYPE_ORDER = ("float32", "bfloat16", "float16", "float64")
# What an assertion without words is quoted as.
NO_WORDS = "an assertion failed"
# Takes the notes of one call, and adds what is printed or warned of inside.
Capture = Callable[[list[str]], AbstractContextManager[None]]
# Failing cases whose data a report keeps for its pictures, and the most elements of all of them together.
PICTURED, PICTURED_ELEMENTS = 60, 2**24


def run_case(
    case: Any,
    target: Any,
    dtype: str,
    seed: int,
    *,
    capture: Capture = captured,
    declared: Any = None,
) -> Record:
    """The verdict on one case in one dtype; what the target prints or warns of becomes a note.

    declared is a `profiles.Declared`, whose departures explain a failure, or None.
    """
    from refattn.conformance.diagnosis.gradients import told
    from refattn.conformance.judge import judge

    about: dict[str, Any] = {"case": case.name, "clauses": case.clauses, "says": case.says, "dtype": dtype}
    if case.build is None:
        return _checked(case, target, dtype, seed, about, capture)
    problem = case.problem(dtype, seed)
    about |= {"needs": problem.needs, "called": problem_in_words(problem, seed), "plainness": problem.plainness}
    if reason := target.unsupported(problem.needs, dtype):
        return Record(**about, verdict="unsupported", message=reason, missing=target.missing(problem.needs, dtype))
    result, ended = _attempted(lambda: target.call(problem), target, capture)
    if result is None:
        evidence = Pictured(problem, None) if ended["verdict"] in BROKEN else None
        return Record(**about, **ended, evidence=evidence)
    judged, of_gradient = told(problem, result, judge(problem, result))
    return record_of({**about, **ended, "message": judged.message}, problem, result, judged, of_gradient, declared)


def _checked(case: Any, target: Any, dtype: str, seed: int, about: dict[str, Any], capture: Capture) -> Record:
    """The verdict on a check of refattn's own functions."""
    reason, missing = target.unsupported((), dtype), target.missing((), dtype)
    api = None if reason else target.api(case.draw(dtype, seed))
    if not (reason or api):
        reason = "a check of refattn's own functions, which a foreign implementation lacks"
        missing = (OWN_FUNCTIONS,)
    if reason:
        return Record(**about, verdict="unsupported", message=reason, missing=missing)

    def message() -> str:
        try:
            case.check(api)
        except AssertionError as fault:
            return str(fault) or NO_WORDS
        return ""

    found, ended = _attempted(message, target, capture)
    return Record(**{**about, "verdict": "fail" if found else "pass", "message": found or "", **ended})


def _attempted(call: Callable[[], Any], target: Any, capture: Capture) -> tuple[Any, dict[str, Any]]:
    """What a call gave, and its notes; else None, and beside the notes what a record says of such an end."""
    from refattn.conformance.case import Unsupported
    from refattn.conformance.targets.base import WorkerError

    notes: list[str] = []
    result: Any = None
    ended: dict[str, Any] = {}
    try:
        with capture(notes):
            result = call()
    except Unsupported as refusal:
        ended = {"verdict": "unsupported", "message": str(refusal), "missing": refusal.missing}
    except WorkerError as fault:
        ended = {"verdict": fault.verdict, "message": str(fault), "place": fault.place, "trace": fault.trace}
    except (Exception, SystemExit) as fault:  # noqa: BLE001  # whatever a target raises is its verdict, exit included
        ended = {"verdict": "crashed", **crash_of(fault, target)}
    return result, {**ended, "notes": tuple(notes)}


def record_of(
    about: dict[str, Any],
    problem: Any,
    result: Any,
    judged: Any,
    of_gradient: dict[str, Any] | None,
    declared: Any = None,
) -> Record:
    """The record of a call that gave a result: `about` beside what follows from its judgement.

    of_gradient is the diagnosis where the judgement is about a gradient, see `diagnosis.gradients.told`.
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


def run_suite(
    target: Any,
    pairs: Iterable[tuple[Any, str]],
    seed: int,
    *,
    fail_fast: bool = False,
    advance: Callable[[Record], None] = lambda record: None,
    capture: Capture = captured,
    notes: tuple[str, ...] = (),
    declared: Any = None,
    explained: bool = True,
) -> Report:
    """The report on all pairs of case and dtype; an interrupt ends it early and leaves what there is.

    declared is a `profiles.Declared`, or None; explained says whether failures are diagnosed.
    Evidence is kept for the first failure of each case, of PICTURED cases and PICTURED_ELEMENTS numbers at most.
    """
    records: list[Record] = []
    began: list[float] = []
    started, complete = time.monotonic(), True
    try:
        for case, dtype in pairs:
            now = time.time()
            record = run_case(case, target, dtype, seed, capture=capture, declared=declared)
            records.append(with_bounded_evidence(record, records))
            began.append(now)
            advance(record)
            if fail_fast and record.verdict in BROKEN:
                break
    except KeyboardInterrupt:
        complete = False
    records, diagnosis = with_leftovers(records, began, target.close()), None
    # An interrupt here costs the diagnosis alone.
    with contextlib.suppress(KeyboardInterrupt):
        records, diagnosis = diagnosed(records) if complete and explained else (records, None)
    return Report(
        target=target.name,
        versions={"refattn": __version__, **target.versions()},
        seed=seed,
        records=tuple(records),
        complete=complete,
        seconds=time.monotonic() - started,
        notes=(*target.notes, *notes),
        profile="" if declared is None else declared.profile.name,
        isolated=target.isolated,
        built_on_refattn=target.built_on_refattn,
        diagnosis=diagnosis,
    )


def with_leftovers(records: list[Record], began: list[float], left: list[float]) -> list[Record]:
    """The records, those of cases that left processes running being failures; `left` is when these began."""
    found, called = list(records), [place for place, one in enumerate(records) if one.verdict != "unsupported"]
    moments = [began[place] for place in called]
    # A process tells its beginning in hundredths of a second.
    blamed = Counter(max(0, bisect.bisect_right(moments, moment + 0.02) - 1) for moment in left)
    for number, count in blamed.items() if called else ():
        place, those = called[number], "1 process" if count == 1 else f"{count} processes"
        message = f"this call, or one right before it, left {those} running after the target's own had ended"
        if found[place].verdict not in BROKEN:
            found[place] = replace(found[place], verdict="fail", fault="A7", message=message)
        else:
            found[place] = replace(found[place], notes=(*found[place].notes, message))
    return found


def crash_of(fault: BaseException, target: Any) -> dict[str, Any]:
    """What a record says of an error that the target raised: message, place and traceback."""
    try:
        message = f"{type(fault).__name__}: {fault}{target.hint(fault)}"
        if isinstance(fault, AssertionError):
            message = str(fault) or NO_WORDS
    except Exception:  # noqa: BLE001  # an error of a foreign class may refuse even to be printed
        message = f"{type(fault).__name__}, which cannot be printed"
    return {"message": message, "place": "", "trace": "", **_where(fault)}


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


def chosen_pairs(
    cases: Iterable[Any], labels: frozenset[str] | None = None, dtypes: tuple[str, ...] = COMPUTED
) -> list[tuple[Any, str]]:
    """The cases of those clauses in each of their dtypes, one dtype after the other."""
    chosen = [case for case in cases if labels is None or labels & set(case.clauses)]
    return [(case, dtype) for dtype in DTYPE_ORDER if dtype in dtypes for case in chosen if dtype in case.dtypes]


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
    room = (len(kept) < PICTURED or record.case.startswith(CAPTURED)) and sum(
        kept.values()
    ) + record.evidence.elements <= PICTURED_ELEMENTS
    return record if room and record.case not in kept else replace(record, evidence=None)


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
