"""What a run leaves: the verdict on each case in each dtype, and the report on a target."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# The call gave no answer at all.
CRASHED = ("crashed", "timed out", "out of memory")
# "missing": what was asked for came back without a result, see `refattn compare`.
VERDICTS = ("pass", "declared", "fail", *CRASHED, "missing", "not judgeable", "unsupported")
# All that speaks against a target.
BROKEN = ("fail", *CRASHED)
# Of the data of all cases, unless another is asked for.
DEFAULT_SEED = 20
# How the names of cases begin that a user captured, and of those that are certified vectors.
CAPTURED, CERTIFIED = "inputs.", "vectors."
# Of the JSON that a report becomes; another number for each change that a reader would notice.
FORMAT = 1
# What a check of refattn's own functions is listed under where a target has none of them.
OWN_FUNCTIONS = "refattn's own functions"


class Pictured(NamedTuple):
    """What a failure is drawn from: a Problem and the target's Result, None where the call raised an error."""

    problem: Any
    result: Any

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        arrays = (*vars(self.problem).values(), *(vars(self.result).values() if self.result else ()))
        return sum(int(x.size) for x in arrays if hasattr(x, "size"))


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
    # The clause that a failure is about, where it is another than the case's: a wrong dtype, inputs written to.
    fault: str = ""
    # The call, so that it can be repeated, and the options and features that it used.
    called: str = ""
    needs: tuple[str, ...] = ()
    # The less the plainer, see `Problem.plainness`.
    plainness: tuple[int, int] = (0, 0)
    # What an unsupported case lacks: options and features, or its dtype.
    missing: tuple[str, ...] = ()
    # The departures, declared by a profile, that explain a result which fails: faults of the catalogue by name.
    declared: tuple[str, ...] = ()
    # Where the target's own code raised, as file:line, and its traceback.
    place: str = ""
    trace: str = ""
    # For pictures; kept for some failures alone, see `run_suite`.
    evidence: Pictured | None = field(default=None, repr=False, compare=False)
    # What is wrong, of a failure: a sentence, the hypotheses behind it, and where; see refattn.conformance.diagnosis.
    diagnosis: dict[str, Any] | None = None
    # The call and its answer as a `diagnosis.Evidence`, right or wrong, until all are explained together.
    answer: Any = field(default=None, repr=False, compare=False)

    @property
    def about(self) -> str:
        """The label of the clause that the verdict is about first of all."""
        return self.fault or self.clauses[0]

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
            "about": self.about,
            "called": self.called,
            "missing": list(self.missing),
            "declared": list(self.declared),
            "place": self.place,
            "diagnosis": self.diagnosis,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All verdicts on one target, and notes on it."""

    target: str
    versions: dict[str, str]
    seed: int
    records: tuple[Record, ...]
    complete: bool = True
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    # How it reads causal where the specification asks for q_start (M5); "" if it was not asked.
    alignment: str = ""
    # Whether the target ran in a process of its own, and whether refattn gave its answers; None if nobody looked.
    isolated: bool = False
    built_on_refattn: bool | None = None
    # The profile whose departures were accepted as declared; "" for none.
    profile: str = ""
    # What explains the failures together; None where nothing failed.
    diagnosis: dict[str, Any] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of records of each verdict, in the order of VERDICTS."""
        found = Counter(record.verdict for record in self.records)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def declared(self) -> Counter[str]:
        """For each declared departure that was met, the number of results that it explains."""
        return Counter(name for record in self.records for name in record.declared)

    @property
    def conforms(self) -> bool:
        """Whether something was judged, and nothing failed, crashed or is missing."""
        return self.complete and self.counts["pass"] > 0 and not self.broken and not self.counts["missing"]

    @property
    def broken(self) -> tuple[Record, ...]:
        """The records that speak against the target, in order."""
        return tuple(record for record in self.records if record.verdict in BROKEN)

    @property
    def lacking(self) -> Counter[str]:
        """For each option, feature or dtype the number of cases that lack it, most first."""
        found = Counter(need for record in self.records for need in record.missing)
        return Counter(dict(found.most_common()))

    @property
    def models(self) -> dict[str, str]:
        """For each dtype the rounding model that every judged result met; none where a result met neither."""
        met: dict[str, str] = {}
        for record in self.records:
            if record.verdict == "pass" and record.model is not None:
                met[record.dtype] = "unfused" if "unfused" in (record.model, met.get(record.dtype)) else "fused"
        beyond = {record.dtype for record in self.broken if record.error_over_bound is not None}
        return {dtype: model for dtype, model in met.items() if dtype not in beyond}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "target": self.target,
            "versions": self.versions,
            "seed": self.seed,
            "conforms": self.conforms,
            "complete": self.complete,
            "seconds": round(self.seconds, 2),
            "counts": self.counts,
            "models": self.models,
            "profile": self.profile or None,
            "declared": dict(self.declared),
            "notes": list(self.notes),
            "isolated": self.isolated,
            "built_on_refattn": self.built_on_refattn,
            "causal_without_q_start": self.alignment or None,
            "diagnosis": self.diagnosis,
            "records": [record.as_dict() for record in self.records],
        }
