"""Which failure to show first: the one that tells most about what is wrong."""

from __future__ import annotations

from collections import Counter

from refattn.conformance.runner import Record, Report

# A clause whose cases fail nearly as often as those of the worst one is as good a headline, and the plainest wins.
NEAR = 0.75


def most_telling(report: Report) -> Record:
    """The plainest case of the clause whose cases fail at the highest share; a crash of the plainest call before all.

    Cases come plainest first, so that of clauses alike the first is the plainest. The report has a broken record.
    """
    judged = [record for record in report.records if record.verdict != "unsupported"]
    plainest = next((record for record in judged if not record.needs), judged[0])
    if plainest.verdict == "crashed":
        return plainest
    shares = _shares(judged, report.broken)
    highest = max(shares.values())
    return next(record for record in report.broken if shares[record.about] >= NEAR * highest)


def is_plainest(record: Record) -> bool:
    """Whether a record is of a call with q, k and v alone."""
    return bool(record.called) and not record.needs


def _shares(judged: list[Record], broken: tuple[Record, ...]) -> dict[str, float]:
    """For each clause that failures are about, the share of its cases that fail.

    A fault of form, such as a wrong dtype, can show in any case: its share is of all.
    """
    of_form = Counter(record.fault for record in broken if record.fault)
    cases = Counter(record.clauses[0] for record in judged)
    failed = Counter(record.clauses[0] for record in broken if not record.fault)
    shares = {label: failed[label] / cases[label] for label in failed}
    # In the dtypes where it shows at all: a wrong dtype may be the right one in another.
    for label, count in of_form.items():
        dtypes = {record.dtype for record in broken if record.fault == label}
        share = count / sum(record.dtype in dtypes for record in judged)
        shares[label] = max(share, shares.get(label, 0.0))
    return shares
