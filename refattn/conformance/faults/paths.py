"""Faults planted into refattn's merge, paths and checks (chapters S, T and N)."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from refattn import arguments, arrays, mask_kinds, partials, pipeline, softmax
from refattn.arrays import Array, Library
from refattn.conformance.faults.fault import ONE, Fault, Patch
from refattn.conformance.faults.pipeline import shortened
from refattn.dtypes import FULL
from refattn.partials import Partial

# ---- merging


def _mean(library: Library, first: Partial, second: Partial) -> Partial:
    return Partial((first.output + second.output) / 2, _MERGE(library, first, second).lse)


def _base_two(library: Library, first: Partial, second: Partial) -> Partial:
    merged = _MERGE(library, *(Partial(part.output, part.lse / math.log(2)) for part in (first, second)))
    return Partial(merged.output, merged.lse * math.log(2))


def _no_guard(library: Library, first: Partial, second: Partial) -> Partial:
    """exp(-inf - (-inf)) of two empty parts."""
    xp = library.xp
    peak = xp.maximum(first.lse, second.lse)
    a, b = xp.exp(first.lse - peak), xp.exp(second.lse - peak)
    total = a + b
    return Partial(
        (first.output * a[..., None] + second.output * b[..., None]) / total[..., None], xp.log(total) + peak
    )


_MERGE = partials.merge_two


def _sinks_in_every_part(items: Any, sinks: Array | None = None) -> Partial:
    parts = [*items]
    if sinks is None or not parts:
        return _WHOLE(parts, sinks)
    return _WHOLE([_WHOLE([part], sinks) for part in parts])


_WHOLE = partials.merge


def _rounded_parts(library: Library, first: Partial, second: Partial) -> Partial:
    return _MERGE(library, *(Partial(shortened(part.output, 13), part.lse) for part in (first, second)))


# ---- checks, tracing, warnings


def _zero_is_none(softcap: Any) -> Any:
    return None if isinstance(softcap, (int, float)) and softcap == 0 else _CHECK_SOFTCAP(softcap)


_CHECK_SOFTCAP = arguments._check_softcap
_SOFTMAX = softmax.softmax


def _branching(xp: Any, logits: Array, *rest: Any) -> Any:
    """Looks at values to choose a way."""
    if float(xp.max(logits)) == -math.inf:
        return _SOFTMAX(xp, logits, *rest)
    return _SOFTMAX(xp, logits, *rest)


def _merge(name: str, clause: str, wrong: Any, dtypes: tuple[str, ...] = FULL, attribute: str = "merge_two") -> Fault:
    patches = (Patch(partials, attribute, wrong),)
    return Fault(name=name, clause=clause, kind="LSE merge", dtypes=dtypes, patches=patches)


FAULTS = (
    Fault(
        name="softcap of zero is none",
        clause="S4",
        kind="softcap order",
        patches=(Patch(arguments, "_check_softcap", _zero_is_none),),
    ),
    _merge("partials are averaged", "T2", _mean),
    _merge("partials merge in base 2", "T2", _base_two),
    _merge("two empty partials give NaN", "T2", _no_guard, ONE),
    _merge("sinks enter every partial", "T3", _sinks_in_every_part, attribute="merge"),
    _merge("partials are rounded", "T3", _rounded_parts),
    Fault(
        name="tiled path holds all pairs",
        clause="T4",
        kind="",
        dtypes=ONE,
        libraries=("numpy",),
        patches=(Patch(pipeline, "tiled", pipeline.dense),),
    ),
    Fault(
        name="softmax branches on values",
        clause="N2",
        kind="",
        dtypes=ONE,
        libraries=("torch", "jax"),
        patches=(Patch(softmax, "softmax", _branching),),
    ),
    Fault(
        name="counts are not checked",
        clause="N3",
        kind="padding",
        dtypes=ONE,
        patches=(Patch(mask_kinds.Lengths, "check", lambda self, lead, q_len, k_len: None),),
    ),
    Fault(
        name="warnings about hidden poison",
        clause="N5",
        kind="NaN leak",
        libraries=("numpy",),
        patches=(
            Patch(arrays, "quiet", lambda *_: contextlib.nullcontext()),
            Patch(pipeline, "zero_filled", lambda call, x: (x, x)),
        ),
    ),
)
