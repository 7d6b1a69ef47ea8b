"""Faults planted into refattn's masks (chapter M)."""

from __future__ import annotations

from typing import Any

from refattn import frames, mask_kinds, visibility
from refattn.arrays import Array
from refattn.conformance.faults.fault import ONE, Fault, Patch


def _window(by_left: int, by_right: int) -> Any:
    def evaluate(self: Any, frame: Any) -> Array:
        keys, rows = frame.keys_from_rows, frame.rows
        if (self.left, self.right) == (None, 0):  # causal() is right
            return keys <= rows
        left = frames.FAR if self.left is None else self.left + by_left
        right = frames.FAR if self.right is None else self.right + by_right
        return (keys >= rows - left) & (keys <= rows + right)

    return evaluate


def _symmetric(self: Any, frame: Any) -> Array:
    keys, rows = frame.keys_from_rows, frame.rows
    sides = [frames.FAR if side is None else side for side in (self.left, self.right)]
    reach = sides[1] if sides[0] is None else max(sides) if frames.FAR not in sides else min(sides)
    return (keys >= rows - reach) & (keys <= rows + reach)


def _window_by_index(self: Any, frame: Any) -> Array:
    left, right = (frames.FAR if side is None else side for side in (self.left, self.right))
    return (frame.keys >= frame.rows - left) & (frame.keys <= frame.rows + right)


def _truncating_chunks(self: Any, frame: Any) -> Array:
    def chunk(positions: Array) -> Array:
        return frame.xp.where(positions < 0, -((-positions) // self.size), positions // self.size)

    return chunk(frame.query_positions) == chunk(frame.key_positions)


def _chunks_by_index(self: Any, frame: Any) -> Array:
    return frame.rows // self.size == frame.keys // self.size


def _documents_of_keys(self: Any, frame: Any) -> Array:
    ids = self.q_ids if self.k_ids is None else self.k_ids
    return frame.per_key(ids, "ids") == frame.per_key(ids, "ids")


def _documents_in_order(self: Any, frame: Any) -> Array:
    rows = frame.per_row(self.q_ids, "ids")
    return rows >= frame.per_key(self.q_ids if self.k_ids is None else self.k_ids, "ids")


def _counts(self: Any, frame: Any) -> Any:
    return self.n if isinstance(self.n, int) else frame.per_entry(self.n, "n")


def _first_count(self: Any, frame: Any) -> Array:
    count = _counts(self, frame)
    return frame.keys < (count if isinstance(count, int) else count[:1, ...])


def _rows_of_lengths(self: Any, frame: Any) -> Array:
    return (frame.keys < _counts(self, frame)) & (frame.rows < _counts(self, frame))


def _kept(self: Any, frame: Any) -> Array:
    return frame.per_key(self.keep, "keep")


def _padding_as_count(self: Any, frame: Any) -> Array:
    kept = frame.xp.astype(_kept(self, frame), frame.keys.dtype)
    return frame.keys < frame.xp.sum(kept, axis=-1, keepdims=True, dtype=frame.keys.dtype)


def _padding_of_first_entry(self: Any, frame: Any) -> Array:
    kept = _kept(self, frame)
    return kept[:1, ...] if kept.ndim > 2 else kept


_DENSE = mask_kinds.Dense.evaluate


def _blocks_the_other_way(self: Any, frame: Any) -> Array:
    """Rows by the columns' block size, and the other way round."""
    turned = mask_kinds.Dense(self.array, (self.size[1], self.size[0]), self.argument)
    return _DENSE(turned, frame)


def _first_entry_dense(self: Any, frame: Any) -> Array:
    pairs = _DENSE(self, frame)
    return pairs[:1, ...] if pairs.ndim > 3 else pairs


def _generous(self: Any, *tile: Any) -> str:
    """A tile answers "all" as soon as it is not "none"."""
    answer = _WINDOW_ANSWER(self, *tile)
    return visibility.ALL if answer == visibility.MIXED else answer


_WINDOW_ANSWER = mask_kinds.Window.answer


def _rows_of_padding(self: Any, frame: Any) -> Array:
    """Padding hides the rows of pad queries too."""
    kept = _kept(self, frame)
    same = frame.rows.shape[-2] == frame.keys.shape[-1]
    return kept & frame.xp.matrix_transpose(kept) if same else kept


def _mask(name: str, clause: str, kind: str, owner: Any, wrong: Any) -> Fault:
    return Fault(name=name, clause=clause, kind=kind, patches=(Patch(owner, "evaluate", wrong),))


FAULTS = (
    _mask("window one too long", "M6", "window off-by-one", mask_kinds.Window, _window(1, 0)),
    _mask("window one too short", "M6", "window off-by-one", mask_kinds.Window, _window(-1, 0)),
    _mask("window one too far ahead", "M6", "window off-by-one", mask_kinds.Window, _window(0, 1)),
    _mask("window one too near ahead", "M6", "window off-by-one", mask_kinds.Window, _window(0, -1)),
    _mask("window by index", "M6", "cache drift", mask_kinds.Window, _window_by_index),
    _mask("window is symmetric", "M6", "window off-by-one", mask_kinds.Window, _symmetric),
    _mask("chunks truncate", "M7", "mask alignment", mask_kinds.Chunks, _truncating_chunks),
    _mask("chunks by index", "M7", "mask alignment", mask_kinds.Chunks, _chunks_by_index),
    _mask("prefix one too long", "M8", "mask alignment", mask_kinds.Prefix, lambda self, f: f.key_positions <= self.n),
    _mask("prefix by index", "M8", "mask alignment", mask_kinds.Prefix, lambda self, f: f.keys < self.n),
    _mask("documents of the keys alone", "M9", "padding", mask_kinds.Documents, _documents_of_keys),
    _mask("documents see earlier ones", "M9", "padding", mask_kinds.Documents, _documents_in_order),
    _mask("length as last index", "M10", "padding", mask_kinds.Lengths, lambda self, f: f.keys <= _counts(self, f)),
    _mask("length of the first entry for all", "M10", "padding", mask_kinds.Lengths, _first_count),
    _mask("lengths hide rows", "M10", "padding", mask_kinds.Lengths, _rows_of_lengths),
    _mask("padding inverted", "M11", "mask polarity", mask_kinds.Padding, lambda self, f: ~_kept(self, f)),
    _mask("padding as a count", "M11", "padding", mask_kinds.Padding, _padding_as_count),
    _mask("padding of the first entry for all", "M11", "padding", mask_kinds.Padding, _padding_of_first_entry),
    _mask("padding hides rows", "M11", "padding", mask_kinds.Padding, _rows_of_padding),
    _mask("left padding is ignored", "M16", "padding", mask_kinds.Padding, lambda self, f: _kept(self, f) | True),
    Fault(
        name="positions forget k_start",
        clause="M16",
        kind="padding",
        patches=(Patch(frames.Frame, "keys_from_rows", property(lambda self: self.keys - self.q_start)),),
    ),
    _mask("blocks the other way round", "M12", "layout-strides", mask_kinds.Dense, _blocks_the_other_way),
    _mask("dense mask of the first entry for all", "M12", "cache drift", mask_kinds.Dense, _first_entry_dense),
    _mask("or is and", "M13", "all-masked row", visibility.Or, lambda s, f: s.first.evaluate(f) & s.second.evaluate(f)),
    _mask(
        "and is or", "M13", "all-masked row", visibility.And, lambda s, f: s.first.evaluate(f) | s.second.evaluate(f)
    ),
    _mask("not is lost", "M13", "mask polarity", visibility.Not, lambda self, f: self.mask.evaluate(f)),
    Fault(
        name="mixed tiles answer all",
        clause="M14",
        kind="mask alignment",
        dtypes=ONE,
        patches=(Patch(mask_kinds.Window, "answer", _generous),),
    ),
)
