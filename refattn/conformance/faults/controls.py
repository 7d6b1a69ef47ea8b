"""Negative controls: changes that cancel by mathematics, and so are right, which the judge must not accuse."""

from __future__ import annotations

import math
from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.fault import Attention, Fault
from refattn.conformance.faults.pipeline import Plain, Split, Tiled, Unfused


def _output_alone(attention: Attention) -> Attention:
    """Neither the log-sum-exp nor sinks are offered: only in them would the change show."""

    def output(q: Array, k: Array, v: Array, **options: Any) -> Any:
        if options.get("sinks") is not None:
            raise NotImplementedError("sinks")
        return attention(q, k, v, **options)[0]

    return output


def _shifted_rows(run: Any, x: Array, seen: Array) -> Array:
    """A constant of its own for each row, added to its final logits."""
    shift = run.xp.astype(run.integers(range(run.q_len)), run.wide)[:, None]
    return Plain.hidden(run, x, seen) + shift


def _shifted_level(run: Any, peak: Array) -> Array:
    return Plain.level(run, peak) + 2.0


def _in_base_two(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
    unit = math.log2(math.e)
    weights, lse = Plain.softmax(run, x, seen, sink)
    peak = run.level(run.peak(x, sink))
    grown = run.xp.exp((x - peak) * unit * math.log(2))
    total = run.sum(grown) + (0.0 if sink is None else run.sink_share(sink, peak))
    return run.xp.where(total > 0.0, grown / run.xp.where(total > 0.0, total, 1.0), weights), lse


def _reversed_keys(attention: Attention) -> Attention:
    """All keys in the reverse order, where nothing depends on their order."""

    def turned(q: Array, k: Array, v: Array, **options: Any) -> Any:
        if any(options.get(name) is not None for name in ("causal", "mask", "bias")):
            return attention(q, k, v, **options)
        from refattn.arrays import library_of

        xp = library_of(q, "q").xp
        return attention(q, xp.flip(k, axis=-2), xp.flip(v, axis=-2), **options)

    return turned


CONTROLS = (
    Fault(name="plain", clause="N6", kind="", lse=True),
    Fault(name="scores stored in the dtype of q", clause="N6", kind="", lse=True, base=Unfused),
    Fault(name="tile by tile", clause="T1", kind="", lse=True, base=Tiled),
    Fault(
        name="tiles in reverse",
        clause="T1",
        kind="",
        lse=True,
        base=Tiled,
        steps={"tiles": lambda run: Tiled.tiles(run)[::-1]},
    ),
    Fault(name="halves merged", clause="T2", kind="", lse=True, base=Split),
    Fault(name="keys in reverse", clause="N6", kind="", lse=True, wrap=_reversed_keys),
    Fault(
        name="constant of each row", clause="P6", kind="", lse=True, steps={"hidden": _shifted_rows}, wrap=_output_alone
    ),
    Fault(name="another level than the maximum", clause="P6", kind="", lse=True, steps={"level": _shifted_level}),
    Fault(name="exponentials in base 2", clause="N6", kind="", lse=True, steps={"softmax": _in_base_two}),
)
