"""Faults planted into refattn's head functions (chapter G)."""

from __future__ import annotations

from typing import Any

from refattn import heads, layer
from refattn.arrays import Array, library_of
from refattn.conformance.faults.fault import ONE, Fault, Patch


def _reshaped(x: Array, count: Any) -> Array:
    if not isinstance(count, int) or count < 1 or x.shape[-1] % count:
        return _SPLIT(x, count)
    return library_of(x, "x").xp.reshape(x, (*x.shape[:-2], count, x.shape[-2], x.shape[-1] // count))


def _merged_by_reshape(x: Array) -> Array:
    if x.ndim < 3:
        return _MERGE(x)
    return library_of(x, "x").xp.reshape(x, (*x.shape[:-3], x.shape[-2], x.shape[-3] * x.shape[-1]))


_SPLIT = heads.split_heads
_MERGE = heads.merge_heads
_POOL = heads.pool_kv_heads


def _pool_by(combine: Any) -> Any:
    """Another mean over the heads of a group; refusals stay as they are."""

    def pool(w: Array, kv_heads: int) -> Array:
        pooled = _POOL(w, kv_heads)
        return combine(library_of(w, "w").xp, w, kv_heads, pooled)

    return pool


def _strided_pool(xp: Any, w: Array, kv_heads: int, pooled: Array) -> Array:
    groups = xp.reshape(w, (*w.shape[:-3], w.shape[-3] // kv_heads, kv_heads, *w.shape[-2:]))
    return xp.astype(xp.mean(xp.astype(groups, xp.float64), axis=-4), w.dtype)


def _without_biases(w: Array, count: int, kv_heads: int) -> Array:
    return _POOLED(w, count, kv_heads) * float(w.ndim > 1)


_POOLED = layer._pooled


def _one_head(x: Array, count: int) -> Array:
    return _SPLIT(x, 1)


def _repeat_as_new(xp: Any, x: Array, group: int) -> Array:
    """Query heads h, h + Hkv, ... under each other, as if key heads were repeated one after the other."""
    if group == 1:
        return x
    *batch, count, length, width = x.shape
    parts = xp.moveaxis(xp.reshape(x, (*batch, group, count // group, length, width)), -4, -3)
    return xp.reshape(parts, (*batch, count // group, group * length, width))


def _unrepeat(xp: Any, x: Array, group: int) -> Array:
    if group == 1:
        return x
    *batch, kv_heads, rows, width = x.shape
    parts = xp.moveaxis(xp.reshape(x, (*batch, kv_heads, group, rows // group, width)), -3, -4)
    return xp.reshape(parts, (*batch, kv_heads * group, rows // group, width))


def _first_of_group(xp: Any, w: Array, kv_heads: int, pooled: Array) -> Array:
    return w[..., :: w.shape[-3] // kv_heads, :, :]


def _heads(name: str, clause: str, kind: str, attribute: str, wrong: Any) -> Fault:
    return Fault(name=name, clause=clause, kind=kind, patches=(Patch(heads, attribute, wrong),))


FAULTS = (
    _heads("heads split by reshape", "G3", "layout-strides", "split_heads", _reshaped),
    _heads("heads merged by reshape", "G3", "layout-strides", "merge_heads", _merged_by_reshape),
    _heads("pooling takes the first head", "G4", "GQA mapping", "pool_kv_heads", _pool_by(_first_of_group)),
    _heads("pooling adds", "G4", "GQA mapping", "pool_kv_heads", _pool_by(lambda xp, w, n, x: x * (w.shape[-3] // n))),
    _heads("pooling by stride", "G4", "GQA mapping", "pool_kv_heads", _pool_by(_strided_pool)),
    Fault(
        name="pooled layers lose their biases",
        clause="G4",
        kind="GQA mapping",
        dtypes=ONE,
        patches=(Patch(layer, "_pooled", _without_biases),),
    ),
    Fault(
        name="layer has one head",
        clause="G5",
        kind="scaling",
        dtypes=ONE,
        patches=(Patch(layer, "split_heads", _one_head),),
    ),
    Fault(
        name="key heads are repeated as new ones",
        clause="G2",
        kind="GQA mapping",
        patches=(Patch(heads, "stack_groups", _repeat_as_new), Patch(heads, "unstack_groups", _unrepeat)),
    ),
)
