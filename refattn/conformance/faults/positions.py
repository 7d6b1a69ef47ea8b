"""Faults planted into refattn's biases and rotary embedding (chapter B)."""

from __future__ import annotations

import math
from typing import Any

from refattn import biases, rotary
from refattn.arrays import Array, library_of
from refattn.conformance.faults.fault import Fault, Patch
from refattn.conformance.faults.pipeline import shortened
from refattn.dtypes import COMPUTED, FULL, dtype_name


def _alibi(distance: Any) -> Any:
    def evaluate(self: Any, frame: Any, dtype: Any) -> Array:
        slopes = frame.xp.reshape(frame.xp.asarray(self.slopes, dtype=dtype, device=frame.device), (-1, 1, 1))
        return slopes * frame.xp.astype(distance(frame), dtype)

    return evaluate


def _relative(index_of: Any) -> Any:
    """A table looked up at another index than clip(key - query) + R."""

    def evaluate(self: Any, frame: Any, dtype: Any) -> Array:
        xp, reach = frame.xp, self.table.shape[1] // 2
        table = xp.astype(frame.array(self.table, "table"), dtype)
        index = xp.clip(index_of(frame, reach), 0, 2 * reach)
        picked = xp.reshape(xp.take(table, xp.reshape(index, (-1,)), axis=1), (table.shape[0], *index.shape))
        if index.ndim == 2:
            return picked
        return xp.moveaxis(picked[..., 0, :, :], 0, index.ndim - 3)

    return evaluate


_ROPE = rotary.rope
_OTHER = {"half": "interleaved", "interleaved": "half"}


def _other_style(x: Array, positions: Any, *, style: str, **options: Any) -> Array:
    return _ROPE(x, positions, style=_OTHER.get(style, style), **options)


def _backwards(x: Array, positions: Any, **options: Any) -> Array:
    return _ROPE(x, positions if isinstance(positions, str) else -positions, **options)


def _default_base(x: Array, positions: Any, *, base: float = 1e4, **options: Any) -> Array:
    return _ROPE(x, positions, base=base if base == 1e4 or not 0 < float(base) < math.inf else 1e4, **options)


def _slots_as_positions(x: Array, positions: Any, **options: Any) -> Array:
    xp = library_of(x, "x").xp
    if not hasattr(positions, "ndim") or positions.ndim < 2:
        return _ROPE(x, positions, **options)
    return _ROPE(x, xp.zeros_like(positions) + xp.arange(positions.shape[-1], dtype=positions.dtype), **options)


def _short(x: Array, positions: Any, **options: Any) -> Array:
    turned = _ROPE(x, positions, **options)
    return shortened(turned, 13 if dtype_name(x.dtype) == "float32" else 42)


def _quadratic(x: Array, positions: Any, **options: Any) -> Array:
    """Angles that do not grow in proportion to the position."""
    ok = hasattr(positions, "ndim") and positions.ndim and positions.shape[-1] == x.shape[-2]
    return _ROPE(x, positions * positions if ok else positions, **options)


def _bias(name: str, clause: str, owner: Any, wrong: Any) -> Fault:
    return Fault(name=name, clause=clause, kind="mask alignment", patches=(Patch(owner, "evaluate", wrong),))


def _slopes(name: str, wrong: Any) -> Fault:
    return Fault(name=name, clause="B2", kind="mask alignment", patches=(Patch(biases, "alibi_slopes", wrong),))


def _rope(name: str, clause: str, wrong: Any, dtypes: tuple[str, ...] = COMPUTED) -> Fault:
    return Fault(name=name, clause=clause, kind="rope", dtypes=dtypes, patches=(Patch(rotary, "rope", wrong),))


FAULTS = (
    _bias("alibi with the wrong sign", "B1", biases.Alibi, _alibi(lambda f: f.xp.abs(f.keys_from_rows - f.rows))),
    _bias("alibi by the key's position", "B1", biases.Alibi, _alibi(lambda f: f.keys_from_rows - 0 * f.rows)),
    _bias("alibi by index", "B1", biases.Alibi, _alibi(lambda f: -f.xp.abs(f.keys - f.rows))),
    Fault(
        name="alibi starts at 1",
        clause="B1",
        kind="mask alignment",
        lse=True,
        patches=(Patch(biases.Alibi, "evaluate", _alibi(lambda f: -f.xp.abs(f.keys_from_rows - f.rows) - 1)),),
    ),
    _slopes("alibi slopes start at 1", lambda count: [2.0 ** (-8.0 * h / count) for h in range(count)]),
    _slopes("alibi slopes by one formula", lambda count: [2.0 ** (-8.0 * (h + 1) / count) for h in range(count)]),
    _bias("relative is mirrored", "B3", biases.Relative, _relative(lambda f, r: f.rows - f.keys_from_rows + r)),
    _bias("relative is off by one", "B3", biases.Relative, _relative(lambda f, r: f.keys_from_rows - f.rows + r + 1)),
    _bias("relative by index", "B3", biases.Relative, _relative(lambda f, r: f.keys - f.rows + r)),
    Fault(
        name="only the first bias counts",
        clause="B4",
        kind="mask alignment",
        patches=(Patch(biases.Sum, "terms", lambda self: self._terms[:1]),),
    ),
    _rope("rope of the other style", "B5", _other_style),
    _rope("rope turns backwards", "B5", _backwards),
    _rope("rope ignores its base", "B5", _default_base),
    _rope("rope of 11 bits", "B6", _short, FULL),
    _rope("rope of squared positions", "B6", _quadratic, FULL),
    _rope("rope of slots", "B7", _slots_as_positions, FULL),
)
