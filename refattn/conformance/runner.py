"""Every case in every dtype on one target: the loop behind `refattn check` and the pytest suite."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from refattn import __version__
from refattn.conformance.capture import captured
from refattn.conformance.recording import (
    NO_WORDS,
    crash_of,
    diagnosed,
    problem_in_words,
    record_of,
    with_bounded_evidence,
)
from refattn.conformance.records import BROKEN, OWN_FUNCTIONS, Pictured, Record, Report
from refattn.dtypes import COMPUTED

# One dtype after the other, float32 first: its failures are the easiest to read.
DTYPE_ORDER = ("float32", "bfloat16", "float16", "float64")
# Takes the notes of one call, and adds what is printed or warned of inside.
Capture = Callable[[list[str]], AbstractContextManager[None]]


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
    from refattn.conformance.diagnosis.gradients import explain_gradients
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
    judged, of_gradient = explain_gradients(problem, result, judge(problem, result))
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
    Evidence is kept for the first failure of each case, of as many as `recording` allows.
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


def chosen_pairs(
    cases: Iterable[Any], labels: frozenset[str] | None = None, dtypes: tuple[str, ...] = COMPUTED
) -> list[tuple[Any, str]]:
    """The cases of those clauses in each of their dtypes, one dtype after the other."""
    chosen = [case for case in cases if labels is None or labels & set(case.clauses)]
    return [(case, dtype) for dtype in DTYPE_ORDER if dtype in dtypes for case in chosen if dtype in case.dtypes]
