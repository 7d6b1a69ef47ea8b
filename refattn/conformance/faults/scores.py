"""Faults of scores, scale, soft cap, and the order of the stages (chapter S), and of biases as arrays (chapter B)."""

from __future__ import annotations

import math
from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import INF, Plain


def _given_or_default(run: Any) -> float:
    return float(run.scale or run.default_scale())


def _cap_before_scale(run: Any, _seen: Array) -> Array:
    x = run.scores()
    x = run.scaled(x if run.softcap is None else run.capped(x))
    return x if run.bias is None else run.biased(x, _seen)


def _bias_before_cap(run: Any, seen: Array) -> Array:
    x = run.scaled(run.scores())
    x = x if run.bias is None else run.biased(x, seen)
    return x if run.softcap is None else run.capped(x)


def _mask_before_cap(run: Any, seen: Array) -> Array:
    x = run.xp.where(seen, run.scaled(run.scores()), -INF)
    x = x if run.softcap is None else run.capped(x)
    return x if run.bias is None else run.biased(x, seen)


def _hidden_unless_capped(run: Any, x: Array, seen: Array) -> Array:
    return x if run.softcap is not None else Plain.hidden(run, x, seen)


def _clipped(run: Any, x: Array) -> Array:
    return run.xp.where(x > run.softcap, run.softcap, run.xp.where(x < -run.softcap, -run.softcap, x))


FAULTS = (
    Fault(
        name="scale of d_model",
        clause="S1",
        kind="scaling",
        steps={"default_scale": lambda run: 1 / math.sqrt(run.d_k * run.heads or 1)},
    ),
    Fault(name="no scale", clause="S1", kind="scaling", steps={"default_scale": lambda run: 1.0}),
    Fault(name="scale without the root", clause="S1", kind="scaling", steps={"default_scale": lambda run: 1 / run.d_k}),
    Fault(
        name="scale of the values' width",
        clause="S1",
        kind="scaling",
        steps={"default_scale": lambda run: 1 / math.sqrt(run.v.shape[-1] or 1)},
    ),
    Fault(name="scale is squared", clause="S2", kind="scaling", steps={"factor": lambda run: Plain.factor(run) ** 2}),
    Fault(
        name="sign of the scale is lost", clause="S2", kind="scaling", steps={"factor": lambda r: abs(Plain.factor(r))}
    ),
    Fault(name="scale is ignored", clause="S2", kind="scaling", steps={"factor": Plain.default_scale}),
    Fault(name="scale of zero means default", clause="S2", kind="scaling", steps={"factor": _given_or_default}),
    Fault(
        name="scale 2 percent too large",
        clause="S1",
        kind="scaling",
        steps={"default_scale": lambda run: 1.02 * Plain.default_scale(run)},
    ),
    Fault(name="cap is ignored", clause="S3", kind="softcap order", steps={"capped": lambda run, x: x}),
    Fault(
        name="cap is not divided by",
        clause="S3",
        kind="softcap order",
        steps={"capped": lambda run, x: run.xp.tanh(x) * run.softcap},
    ),
    Fault(
        name="cap is not multiplied by",
        clause="S3",
        kind="softcap order",
        steps={"capped": lambda run, x: run.xp.tanh(x / run.softcap)},
    ),
    Fault(name="cap clips", clause="S3", kind="softcap order", steps={"capped": _clipped}),
    Fault(name="cap before scale", clause="S5", kind="softcap order", steps={"logits": _cap_before_scale}),
    Fault(name="bias before cap", clause="S5", kind="softcap order", steps={"logits": _bias_before_cap}),
    Fault(
        name="mask before cap",
        clause="S5",
        kind="softcap order",
        steps={"logits": _mask_before_cap, "hidden": _hidden_unless_capped},
    ),
    Fault(
        name="bias is scaled",
        clause="S5",
        kind="scaling",
        steps={"summand": lambda run: Plain.summand(run) * run.factor()},
    ),
    Fault(name="bias is ignored", clause="B4", kind="mask alignment", steps={"biased": lambda run, x, seen: x}),
    Fault(
        name="bias of the first head for all",
        clause="B4",
        kind="mask alignment",
        steps={"summand": lambda run: Plain.summand(run)[..., :1, :, :] if run.bias.ndim > 2 else Plain.summand(run)},
    ),
    Fault(
        name="bias is subtracted",
        clause="B4",
        kind="mask polarity",
        steps={"summand": lambda run: -Plain.summand(run)},
    ),
)
