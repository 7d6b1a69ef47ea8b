"""One line of the benchmark's table, and its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

VERDICTS = ("goal", "pass", "miss", "not measured")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured, beside its peer, its limit and its goal.

    With a peer, limit and goal are ratios of `ours` to `theirs`; without one they are in `unit`. floor is what the
    work needs at the machine's own rates, part by part in `unit`. A row that could not be measured says why in
    `reason`.
    """

    work: str
    unit: str
    limit: float
    goal: float
    ours: float | None = None
    peer: str | None = None
    theirs: float | None = None
    floor: dict[str, float] | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over theirs; None without a peer or a measurement."""
        return None if self.ours is None or not self.theirs else self.ours / self.theirs

    @property
    def least(self) -> float | None:
        """The sum of the floor's parts."""
        return None if self.floor is None else sum(self.floor.values())

    @property
    def verdict(self) -> str:
        """One of VERDICTS: at or below the goal, at or below the limit, above it, or nothing to judge."""
        judged = self.ours if self.peer is None else self.ratio
        if judged is None:
            return "not measured"
        return "goal" if judged <= self.goal else "pass" if judged <= self.limit else "miss"

    def as_dict(self) -> dict[str, Any]:
        """The fields, the ratio and the verdict, for JSON."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}


COLUMNS = ("work", "ours", "peer", "theirs", "ratio", "limit", "goal", "floor", "verdict")


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, one cell per column."""
    bound = "{:.2f} x" if row.peer else "{:.4g} " + row.unit
    return (
        row.work,
        quantity(row.ours, row.unit),
        row.peer or "",
        quantity(row.theirs, row.unit),
        "" if row.ratio is None else f"{row.ratio:.2f} x",
        bound.format(row.limit),
        bound.format(row.goal),
        quantity(row.least, row.unit),
        f"{row.verdict}: {row.reason}" if row.reason else row.verdict,
    )


def quantity(value: float | None, unit: str) -> str:
    """A number with its unit, to three digits; nothing for None."""
    return "" if value is None else f"{value:.3g} {unit}"
