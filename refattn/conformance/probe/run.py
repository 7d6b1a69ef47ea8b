"""All probes on one target, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from refattn.conformance.probe import heads, poison, precision, repeat, rows, scores, shapes, sums, visibility
from refattn.conformance.probe.caller import Caller
from refattn.conformance.probe.card import Card, Finding
from refattn.conformance.probe.probes import Probe

# In the order of a card. What calls wrote to is known only after all others, so repeat comes last.
PROBES: tuple[Probe, ...] = tuple(
    one
    for module in (scores, visibility, rows, sums, heads, poison, shapes, precision, repeat)
    for one in module.PROBES.all
)


def probe(target: Any, *, dtype: str | None = None, advance: Callable[[Finding], None] = lambda finding: None) -> Card:
    """The convention card of a target; `advance` is shown each finding. dtype is float32 where the target has it."""
    caller = Caller(target, dtype)
    findings = []
    for one in PROBES:
        findings.append(one.ask(caller))
        advance(findings[-1])
    return Card(
        target=target.name,
        versions=target.versions(),
        dtype=caller.dtype,
        findings=tuple(findings),
        notes=tuple(target.notes),
    )


@cache
def vocabulary() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of a probe -> its clause, and all that it may find."""
    return {one.name: (one.clause, one.vocabulary) for one in PROBES}
