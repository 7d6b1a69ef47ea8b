"""Faults planted into refattn that show in whole models alone: where prefill is right, and what follows is not."""

from __future__ import annotations

from typing import Any

from refattn import cached, layer, mask_kinds
from refattn.arrays import Array, device_of, into_library
from refattn.conformance.faults.fault import Fault, Patch
from refattn.dtypes import FULL

_LAYER = layer.multi_head_attention
_CALL = cached.cached_call
_POSITIONS = layer._positions
_WINDOW = mask_kinds.Window.evaluate
_PADDING = mask_kinds.Padding.evaluate


def _goes_on(cache: Any) -> bool:
    """Whether a cache holds tokens of an earlier call."""
    return cache is not None and not (isinstance(cache.length, int) and cache.length == 0)


def _slots_as_positions(x: Array, weights: Any, *, positions: Any = None, cache: Any = None, **options: Any) -> Any:
    """What follows a prefill is rotated by its slot, padding counted, whatever positions are given."""
    return _LAYER(x, weights, positions=None if _goes_on(cache) else positions, cache=cache, **options)


def _chunk_sees_itself(x: Array, weights: Any, *, cache: Any = None, causal: Any = None, **options: Any) -> Any:
    """Only the first chunk of a prompt is causal."""
    return _LAYER(x, weights, cache=cache, causal=False if _goes_on(cache) and x.shape[-2] > 1 else causal, **options)


def _context_forgotten(x: Array, weights: Any, *, context: Any = None, **options: Any) -> Any:
    """The keys and values of cross-attention are those of x, where the widths let that pass."""
    fits = context is not None and context.shape[-1] == x.shape[-1]
    mask = None if fits else options.pop("mask", None)
    return _LAYER(x, weights, context=None if fits else context, **{**options, "mask": mask})


def _chunk_from_zero(q: Array, cache: Any, options: dict[str, Any], first: Any = None) -> Any:
    """A chunk of a prompt begins at position 0; prefill at once, and decode, are right."""
    k, v, options = _CALL(q, cache, options, first)
    return k, v, options | {"q_start": options["q_start"] * 0} if q.shape[2] > 1 else options


def _one_mask_alone(q: Array, cache: Any, options: dict[str, Any], first: Any = None) -> Any:
    """What hides unused slots or the past of a window takes the place of the caller's mask."""
    asked = options.get("mask")
    k, v, options = _CALL(q, cache, {**options, "mask": None}, first)
    return k, v, {**options, "mask": asked} if options.get("mask") is None else options


def _padding_is_newest(q: Array, cache: Any, options: dict[str, Any], first: Any = None) -> Any:
    """The queries of a chunk that is padded on the right are aligned by their end, padding included."""
    return _CALL(q, cache, options | {"q_start": None}, None if first is None else cache.length - q.shape[2])


def _greatest_length(library: Any, x: Array, start: Any) -> Array:
    """All entries are rotated for the greatest length."""
    if isinstance(start, int):
        return _POSITIONS(library, x, start)
    start = into_library(start, library, device_of(library, x), "start")
    return _POSITIONS(library, x, library.xp.max(start) + 0 * start)


def _in_decode(right: Any, wrong: Any) -> Any:
    """A mask that is wrong for one query over several keys, and right for more."""

    def evaluate(self: Any, frame: Any) -> Array:
        decodes = frame.rows.shape[-2] == 1 and frame.keys.shape[-1] > 1
        return wrong(self, frame) if decodes else right(self, frame)

    return evaluate


def _longer(self: Any, frame: Any) -> Array:
    if self.left is None:
        return _WINDOW(self, frame)
    return _WINDOW(mask_kinds.Window(self.left + 1, self.right), frame)


_DECODES_FURTHER = _in_decode(_WINDOW, _longer)
_DECODES_PADDING = _in_decode(_PADDING, lambda self, frame: _PADDING(self, frame) | True)


def _fault(name: str, clause: str, kind: str, *patch: Any) -> Fault:
    return Fault(name=name, clause=clause, kind=kind, dtypes=FULL, patches=(Patch(*patch),))


def _layer(name: str, clause: str, kind: str, wrong: Any) -> Fault:
    return _fault(name, clause, kind, layer, "multi_head_attention", wrong)


def _call(name: str, clause: str, kind: str, wrong: Any) -> Fault:
    return _fault(name, clause, kind, cached, "cached_call", wrong)


FAULTS = (
    _layer("given positions are forgotten in decode", "B7", "rope", _slots_as_positions),
    _layer("a later chunk sees all of itself", "K1", "mask alignment", _chunk_sees_itself),
    _layer("context is forgotten", "L3", "", _context_forgotten),
    _call("a chunk begins at position 0", "K1", "mask alignment", _chunk_from_zero),
    _call("a mask beside that of a cache is lost", "K7", "padding", _one_mask_alone),
    _call("padded queries are taken for the newest", "L4", "padding", _padding_is_newest),
    _fault("entries go on at the greatest length", "L4", "cache drift", layer, "_positions", _greatest_length),
    _fault("window one too long in decode", "M6", "window off-by-one", mask_kinds.Window, "evaluate", _DECODES_FURTHER),
    _fault("padding is attended in decode", "M11", "padding", mask_kinds.Padding, "evaluate", _DECODES_PADDING),
)
