"""Which failure to show first: the one that tells most about what is wrong."""

from __future__ import annotations

import math
from typing import Any

from refattn.conformance.records import CERTIFIED, CRASHED, Record, Report

# A clause whose cases fail half as often as those of the worst one is as good a headline, and the plainest wins.
NEAR = 0.5
# Of data that ordinary calls do not hold: sizes of zero, rows without a key, NaN and infinities. Plain kernels crash or
# give NaN there, and it must not hide wrong numbers elsewhere.
EDGES = frozenset({"A6", "M19", "M20", "M21", "P2", "P7"})
# The least share of the failures that what is called likely explains.
LIKELY = 0.2


def most_telling(report: Report) -> Record:
    """The plainest case of the clause whose cases fail at the highest share, or of the fault that explains it.

    Before that: a crash of the plainest call, and the plainest call at all if half of those without options fail.
    Crashes and NaN at edges come last. The report has a broken record.
    """
    judged = [record for record in report.records if record.verdict != "unsupported"]
    plainest = next((record for record in judged if not record.needs), judged[0])
    if plainest.verdict in CRASHED:
        return plainest
    broken = [record for record in report.broken if not _at_an_edge(record)] or [*report.broken]
    plain = [record for record in broken if is_plainest(record)]
    if 2 * len({record.case for record in plain}) >= len({record.case for record in judged if is_plainest(record)}) > 0:
        return plain[0]
    shares = _shares(judged, broken)
    highest = max(shares.values())
    first = next(record for record in broken if shares[record.about] >= NEAR * highest)
    name, label = _fault(first)
    alike = [record for record in broken if record.dtype == first.dtype and _fault(record)[0] == name]

    # Those that are about the fault's own clause, and were written for readers, come first.
    def plainness(one: Record) -> tuple[Any, ...]:
        return one.about != label, one.case.startswith(CERTIFIED), one.plainness

    return min(alike, key=plainness) if name else first


def explains_much(diagnosis: dict[str, Any]) -> bool:
    """Whether the first hypothesis explains enough of the failures to be called likely, or there is none."""
    explained = [one["explained"] for one in diagnosis["hypotheses"][:1]]
    return not explained or explained[0] >= LIKELY * diagnosis["failures"]


def is_plainest(record: Record) -> bool:
    """Whether a record is of a call with q, k and v alone, of ordinary sizes and values."""
    return bool(record.called) and not record.needs and not EDGES.intersection(record.clauses)


def _at_an_edge(record: Record) -> bool:
    """Whether a failure is a crash, NaN or infinity that an edge explains, or that nothing does."""
    name, label = _fault(record)
    if record.verdict not in CRASHED and math.isfinite(record.error_over_bound or 0.0):
        return False
    return not EDGES.isdisjoint((record.about, *label.split(", "))) or (record.verdict not in CRASHED and not name)


def _fault(record: Record) -> tuple[str, str]:
    """The fault that a failure is explained by, and its clause; "" if there is none."""
    hypotheses = (record.diagnosis or {}).get("hypotheses")
    return (hypotheses[0]["name"], hypotheses[0]["clause"]) if hypotheses else ("", "")


def _shares(judged: list[Record], broken: list[Record]) -> dict[str, float]:
    """For each clause that failures are about, the share of its cases that fail in some dtype.

    A clause of few cases weighs less. A fault of form, such as a wrong dtype, can show in any case: its share is of
    all, in the dtypes where it shows at all, because a wrong dtype may be the right one in another.
    """
    shares: dict[str, float] = {}
    for label in dict.fromkeys(record.about for record in broken):
        failed = {record.case for record in broken if record.about == label}
        dtypes = {record.dtype for record in broken if record.fault == label}
        cases = {record.case for record in judged if record.clauses[0] == label or record.dtype in dtypes}
        shares[label] = len(failed) / (len(cases) + 1)
    return shares
