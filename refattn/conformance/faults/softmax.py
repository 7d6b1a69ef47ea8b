"""Faults of the softmax, of empty rows, sinks and the log-sum-exp (chapter P), and of heads in groups (chapter G)."""

from __future__ import annotations

import math
from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import INF, Plain
from refattn.dtypes import FULL, LOW

LN2 = math.log(2)


def _over(axis: int) -> Any:
    """The softmax over another axis of the logits than the keys."""

    def softmax(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
        xp, (_, lse) = run.xp, Plain.softmax(run, x, seen, sink)
        if not x.shape[axis]:
            return Plain.softmax(run, x, seen, sink)
        peak = xp.max(x, axis=axis, keepdims=True)
        weights = xp.exp(x - run.level(peak))
        total = xp.sum(weights, axis=axis, keepdims=True)
        return weights / xp.where(total == 0.0, 1.0, total), lse

    return softmax


def _mean_if_empty(run: Any, output: Array, seen: Array) -> Array:
    some = run.xp.any(seen, axis=-1)[..., None]
    mean = run.xp.mean(run.finite(run.v), axis=-2, keepdims=True)
    return Plain.output(run, run.xp.where(some, output, mean), seen)


def _stale_if_empty(run: Any, output: Array, seen: Array) -> Array:
    """Rows that see nothing are skipped, and keep what the buffer held."""
    some = run.xp.any(seen, axis=-1)[..., None] if run.k_len else run.full((1, 1), 0.0) > 0.0
    return Plain.output(run, run.xp.where(some, output, 3.0), seen)


def _sentinel(value: float) -> Any:
    return lambda run, x, seen: run.xp.where(seen, x, value)


def _zero_below(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
    """A guard against empty rows that zeroes rows of very negative logits too."""
    weights, lse = Plain.softmax(run, x, seen, sink)
    return run.xp.where(run.peak(x, sink) < -60.0, 0.0, weights), lse


def _sink_in_numerator(run: Any, output: Array, seen: Array) -> Array:
    if run.sinks is not None and run.k_len:
        output = output + run.missing * run.xp.mean(run.finite(run.v), axis=-2, keepdims=True)
    return Plain.output(run, output, seen)


def _remember_missing(run: Any, weights: Array, v: Array) -> Array:
    run.missing = 1.0 - run.xp.sum(weights, axis=-1, keepdims=True)
    return Plain.weighted(run, weights, v)


def _capped_sink(run: Any) -> Array:
    sink = Plain.sink(run)
    return sink if run.softcap is None else Plain.capped(run, sink)


def _sink_of_first_head(run: Any) -> Array:
    return Plain.sink(run)[:1, ...] + run.xp.zeros_like(Plain.sink(run))


def _sink_as_sigmoid(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
    """The softmax without the sink, times sigmoid(sink - lse): the sign is wrong."""
    weights, lse = Plain.softmax(run, x, seen, None)
    if sink is None:
        return weights, lse
    gate = 1 / (1 + run.xp.exp(lse[..., None] - sink))
    return weights * gate, lse


def _without_sink_in_lse(run: Any, x: Array, seen: Array, sink: Array | None) -> tuple[Array, Array]:
    return Plain.softmax(run, x, seen, sink)[0], Plain.softmax(run, x, seen, None)[1]


def _clamped(run: Any, seen: Array) -> Array:
    x = Plain.logits(run, seen)
    return run.xp.where(x > 1e4, 1e4, x)


def _shifted(run: Any, seen: Array) -> Array:
    """A constant of its own for each row, which the output does not show."""
    return Plain.logits(run, seen) + 0.5 * run.xp.astype(run.integers(range(run.q_len)), run.wide)[:, None]


def _not_summed(run: Any, total: Array, peak: Array) -> Array:
    return peak + 0.0 * total


FAULTS = (
    Fault(name="softmax over queries", clause="P1", kind="", steps={"softmax": _over(-2)}),
    Fault(name="softmax over heads", clause="P1", kind="", steps={"softmax": _over(-3)}),
    Fault(
        name="no maximum is subtracted",
        clause="P1",
        kind="overflow",
        dtypes=FULL,
        steps={"level": lambda run, peak: run.xp.zeros_like(peak)},
    ),
    Fault(
        name="weights are not divided",
        clause="P1",
        kind="",
        steps={
            "softmax": lambda run, x, seen, sink: (
                run.xp.exp(x - run.level(run.peak(x, sink))),
                Plain.softmax(run, x, seen, sink)[1],
            )
        },
    ),
    Fault(
        name="empty row is NaN",
        clause="P2",
        kind="all-masked row",
        steps={"empty_total": lambda run: 0.0},
    ),
    Fault(name="empty row is the mean", clause="P2", kind="all-masked row", steps={"output": _mean_if_empty}),
    Fault(name="empty row keeps the buffer", clause="P2", kind="empty dims", steps={"output": _stale_if_empty}),
    Fault(name="hidden logits are -1e4", clause="P2", kind="all-masked row", steps={"hidden": _sentinel(-1e4)}),
    Fault(
        name="mask is scaled with the scores",
        clause="P2",
        kind="scaling",
        steps={"hidden": lambda run, x, seen: run.xp.where(seen, x, -1e4 * abs(run.factor()))},
    ),
    Fault(
        name="hidden logits are the least number",
        clause="P2",
        kind="all-masked row",
        steps={"hidden": _sentinel(-3.4028234663852886e38)},
    ),
    Fault(
        name="sinks are scaled",
        clause="P3",
        kind="LSE merge",
        steps={"sink": lambda run: Plain.sink(run) * run.factor()},
    ),
    Fault(name="sinks are capped", clause="P3", kind="LSE merge", steps={"sink": _capped_sink}),
    Fault(name="sinks are ignored", clause="P3", kind="LSE merge", steps={"sink_share": lambda run, sink, peak: 0.0}),
    Fault(
        name="sink is not shifted",
        clause="P3",
        kind="LSE merge",
        steps={"sink_share": lambda run, sink, peak: run.xp.exp(sink)},
    ),
    Fault(
        name="sink in the numerator",
        clause="P3",
        kind="LSE merge",
        steps={"weighted": _remember_missing, "output": _sink_in_numerator},
    ),
    Fault(name="sink of the first head for all", clause="P3", kind="LSE merge", steps={"sink": _sink_of_first_head}),
    Fault(name="sink as a sigmoid", clause="P3", kind="LSE merge", steps={"softmax": _sink_as_sigmoid}),
    Fault(
        name="sink is missing from the log-sum-exp",
        clause="P4",
        lse=True,
        kind="LSE merge",
        steps={"softmax": _without_sink_in_lse},
    ),
    Fault(
        name="log-sum-exp in base 2", clause="P4", lse=True, kind="LSE merge", steps={"lse": lambda run, lse: lse / LN2}
    ),
    Fault(
        name="log-sum-exp of an empty row is 0",
        clause="P4",
        lse=True,
        kind="LSE merge",
        steps={"lse": lambda run, lse: run.xp.where(lse == -INF, 0.0, lse)},
    ),
    Fault(
        name="log-sum-exp of an empty row is +inf",
        clause="P4",
        lse=True,
        kind="LSE merge",
        steps={"lse": lambda run, lse: run.xp.where(lse == -INF, INF, lse)},
    ),
    Fault(name="log-sum-exp is the maximum", clause="P4", lse=True, kind="LSE merge", steps={"log_sum": _not_summed}),
    Fault(
        name="log-sum-exp in the dtype of q",
        clause="P4",
        lse=True,
        kind="dtype-precision",
        dtypes=LOW,
        steps={"lse": lambda run, lse: run.xp.astype(lse, run.result)},
    ),
    Fault(name="rows are shifted", clause="P4", lse=True, kind="mask alignment", steps={"logits": _shifted}),
    Fault(
        name="maximum starts at 0",
        clause="P6",
        kind="overflow",
        steps={"level": lambda run, peak: run.xp.where(peak < 0.0, 0.0, peak)},
    ),
    Fault(name="rows of low logits count as empty", clause="P6", kind="overflow", steps={"softmax": _zero_below}),
    Fault(name="infinite logits are clamped", clause="P7", kind="overflow", steps={"logits": _clamped}),
    Fault(
        name="heads are interleaved",
        clause="G1",
        kind="GQA mapping",
        steps={"kv_head": lambda run, h: h % run.kv_heads},
    ),
    Fault(name="first key head for all", clause="G1", kind="GQA mapping", steps={"kv_head": lambda run, h: 0}),
    Fault(
        name="groups in reverse",
        clause="G1",
        kind="GQA mapping",
        steps={"kv_head": lambda run, h: run.kv_heads - 1 - Plain.kv_head(run, h)},
    ),
)
