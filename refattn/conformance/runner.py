"""`refattn check`: every case in every dtype on one target, and a verdict with reasons."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refattn.clauses import CHAPTERS, CLAUSES
from refattn.dtypes import COMPUTED

DEFAULT_SEED = 20
DESCRIPTION_OF_TARGET = (
    "torch (scaled_dot_product_attention), numpy or refattn-LIBRARY (refattn itself), or your own function as "
    "module:function or path.py:function, called as f(q, k, v, **options)"
)
# One dtype after the other, float32 first: its failures are the easiest to read.
DTYPE_ORDER = ("float32", "bfloat16", "float16", "float64")
VERDICTS = ("pass", "fail", "crashed", "not judgeable", "unsupported")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The verdict on one case in one dtype."""

    case: str
    clauses: tuple[str, ...]
    says: str
    dtype: str
    verdict: str
    error_over_bound: float | None = None
    model: str | None = None
    message: str = ""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an error that has no number, being a NaN or an infinity in the wrong place, is a string."""
        error = self.error_over_bound
        finite = error is None or error < float("inf")
        return {
            "case": self.case,
            "clauses": list(self.clauses),
            "says": self.says,
            "dtype": self.dtype,
            "verdict": self.verdict,
            "error_over_bound": error if finite else str(error),
            "model": self.model,
            "message": self.message,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All verdicts on one target."""

    target: str
    versions: dict[str, str]
    seed: int
    records: tuple[Record, ...]
    complete: bool = True
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def conforms(self) -> bool:
        """Whether something was judged, and nothing failed or crashed."""
        return self.complete and self.counts.get("pass", 0) > 0 and not self.broken

    @property
    def broken(self) -> tuple[Record, ...]:
        """The records that speak against the target, in order."""
        return tuple(record for record in self.records if record.verdict in ("fail", "crashed"))

    @property
    def models(self) -> dict[str, str]:
        """For each dtype the rounding model that every judged result met."""
        met: dict[str, str] = {}
        for record in self.records:
            if record.verdict == "pass" and record.model is not None:
                met[record.dtype] = "unfused" if "unfused" in (record.model, met.get(record.dtype)) else "fused"
        return met

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": self.target,
            "versions": self.versions,
            "seed": self.seed,
            "conforms": self.conforms,
            "complete": self.complete,
            "seconds": round(self.seconds, 2),
            "counts": self.counts,
            "models": self.models,
            "records": [record.as_dict() for record in self.records],
        }


def run_case(case: Any, target: Any, dtype: str, seed: int) -> Record:
    """The verdict on one case in one dtype; what the target prints or warns of becomes a note."""
    from refattn.conformance.case import Unsupported
    from refattn.conformance.judge import judge

    about = {"case": case.name, "clauses": case.clauses, "says": case.says, "dtype": dtype}
    problem, api = None, None
    if case.build is not None:
        problem = case.problem(dtype, seed)
        reason = target.unsupported(problem.needs, dtype)
    else:
        reason = target.unsupported((), dtype)
        api = None if reason else target.api(case.draw(dtype, seed))
        reason = reason or ("" if api else "a check of refattn's own functions, which a foreign implementation lacks")
    if reason:
        return Record(**about, verdict="unsupported", message=reason)
    notes: list[str] = []
    try:
        with _captured(notes):
            if problem is None:
                case.check(api)
            else:
                result = target.call(problem)
    except Unsupported as refusal:
        return Record(**about, verdict="unsupported", message=str(refusal), notes=tuple(notes))
    except AssertionError as fault:
        verdict = "fail" if problem is None else "crashed"
        return Record(**about, verdict=verdict, message=str(fault) or "an assertion failed", notes=tuple(notes))
    except Exception as fault:  # noqa: BLE001 - whatever a target raises is its verdict; the run goes on
        message = f"{type(fault).__name__}: {fault}"
        return Record(**about, verdict="crashed", message=message, notes=tuple(notes))
    if problem is None:
        return Record(**about, verdict="pass", notes=tuple(notes))
    judged = judge(problem, result)
    return Record(
        **about,
        verdict=judged.verdict,
        error_over_bound=judged.error_over_bound,
        model=judged.model,
        message=judged.message,
        notes=(*notes, *judged.notes),
    )


def run_suite(
    target: Any,
    pairs: Iterable[tuple[Any, str]],
    seed: int,
    *,
    fail_fast: bool = False,
    advance: Callable[[Record], None] = lambda record: None,
) -> Report:
    """The report on all pairs of case and dtype; an interrupt ends it early and leaves what there is."""
    records: list[Record] = []
    started, complete = time.monotonic(), True
    try:
        for case, dtype in pairs:
            record = run_case(case, target, dtype, seed)
            records.append(record)
            advance(record)
            if fail_fast and record.verdict in ("fail", "crashed"):
                break
    except KeyboardInterrupt:
        complete = False
    counts = {verdict: sum(record.verdict == verdict for record in records) for verdict in VERDICTS}
    return Report(
        target=target.name,
        versions=target.versions(),
        seed=seed,
        records=tuple(records),
        complete=complete,
        seconds=time.monotonic() - started,
        counts=counts,
    )


def chosen_pairs(
    cases: Iterable[Any], labels: frozenset[str] | None = None, dtypes: tuple[str, ...] = COMPUTED
) -> list[tuple[Any, str]]:
    """The cases of those clauses in each of their dtypes, one dtype after the other."""
    chosen = [case for case in cases if labels is None or labels & set(case.clauses)]
    return [(case, dtype) for dtype in DTYPE_ORDER if dtype in dtypes for case in chosen if dtype in case.dtypes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `refattn check`."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("target", metavar="TARGET", help=DESCRIPTION_OF_TARGET)
    parser.add_argument("--json", metavar="FILE", help="write every verdict to FILE as JSON, - for standard output")
    parser.add_argument("--quick", action="store_true", help="float32 alone")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    parser.add_argument("--clauses", metavar="S1,M", type=_labels, help="only cases of these clauses or chapters")
    parser.add_argument("--dtype", metavar="float32,...", type=_dtypes, help="only these dtypes")
    parser.add_argument("--seed", metavar="N", type=int, default=DEFAULT_SEED, help="data of the cases (%(default)s)")
    parser.add_argument(
        "--library", metavar="NAME", default="numpy", help="arrays that your own function is called with (%(default)s)"
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE.npz",
        help="captured tensors q, k, v [mask, bias, scale, sinks, causal] as extra cases",
    )


def check_command(args: argparse.Namespace) -> int:
    """Runs `refattn check`: 0 the target conforms, 1 it does not, 2 it could not be asked."""
    from refattn.conformance.captured import CaptureError, captured_cases
    from refattn.conformance.cases import all_cases
    from refattn.conformance.report import print_report, progress, write_json
    from refattn.conformance.targets import TargetError, find_target

    dtypes = args.dtype or (("float32",) if args.quick else COMPUTED)
    try:
        target = find_target(args.target, args.library)
        cases = [*all_cases(), *(captured_cases(Path(args.inputs)) if args.inputs else ())]
    except (TargetError, CaptureError) as fault:
        print(f"refattn check: {fault}", file=sys.stderr)
        return 2
    pairs = chosen_pairs(cases, args.clauses, dtypes)
    with progress(len(pairs)) as advance:
        report = run_suite(target, pairs, args.seed, fail_fast=args.fail_fast, advance=advance)
    if args.json:
        try:
            write_json(report, args.json)
        except OSError as fault:
            print(f"refattn check: --json: {fault}", file=sys.stderr)
            return 2
    if args.json != "-":
        print_report(report)
    return 0 if report.conforms else 1


def _labels(text: str) -> frozenset[str]:
    """Labels of clauses, chapters spelled out."""
    wanted: set[str] = set()
    for word in text.replace(" ", "").split(","):
        found = {c.label for c in CLAUSES if word in (c.label, c.chapter)}
        if not found:
            known = ", ".join(CHAPTERS)
            raise argparse.ArgumentTypeError(f"no clause or chapter {word!r}; chapters are {known}")
        wanted |= found
    return frozenset(wanted)


def _dtypes(text: str) -> tuple[str, ...]:
    words = tuple(text.replace(" ", "").split(","))
    if unknown := [word for word in words if word not in COMPUTED]:
        raise argparse.ArgumentTypeError(f"no dtype {', '.join(unknown)}; there are {', '.join(COMPUTED)}")
    return words


@contextlib.contextmanager
def _captured(notes: list[str]) -> Iterator[None]:
    """What is printed, or warned of, inside becomes a note."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        if text := printed.getvalue().strip():
            notes.append(f"printed: {text[:200]}")
        notes.extend(sorted({f"warned: {warning.message}"[:200] for warning in warned}))


_DESCRIPTION = """\
Runs the conformance suite on an implementation of attention and says whether it conforms, and if not, what is
wrong. Results are compared with float64 values, under an error bound that is derived element by element.
"""

_EPILOG = """\
Your own function, in a file my_kernel.py:

  def attention(q, k, v, *, causal=False, mask=None, scale=None):
      ...                                  # NumPy arrays (..., heads, tokens, width) in, the output out

  refattn check my_kernel.py:attention

Each case passes only the options that it uses, and one that needs a parameter the signature lacks is listed as
unsupported. mask is boolean, True = visible, and broadcasts to (..., heads, queries, keys).

  refattn check torch --clauses M,P1       the chapter of masks, and clause P1
  refattn check torch --inputs dump.npz    tensors captured from a model: q, k, v, or layer0.q, layer0.k, layer0.v, ...

Exit codes: 0 it conforms, 1 it does not (or nothing could be judged), 2 the command line cannot be carried out.
"""
