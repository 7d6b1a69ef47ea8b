"""The kinds of masks: which pairs each shows, and what it answers for a tile (chapter M).

Positional kinds add the starts to the indices (M3); documents, lengths, padding, dense and blocks go by index. True
means visible (M1).
"""

from __future__ import annotations

from typing import Any

from .arrays import Array, Shape, broadcasts_to, describe, is_host, library_of
from .errors import BatchError, MaskArgumentError, MaskShapeError
from .frames import FAR, Frame, check_index, pair_readings, start_range
from .visibility import ALL, MIXED, NONE, Mask, Span


class Window(Mask):
    """query - left <= key <= query + right, in positions  # M6"""

    positional = True

    def __init__(self, left: int | None, right: int | None) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return "causal()" if (self.left, self.right) == (None, 0) else f"window({self.left}, {self.right})"

    def evaluate(self, frame: Frame) -> Array:
        keys, rows = frame.keys_from_rows, frame.rows
        behind = None if self.left is None else keys >= rows - min(self.left, FAR)
        ahead = None if self.right is None else keys <= rows + min(self.right, FAR)
        if behind is None and ahead is None:
            return frame.xp.ones_like(keys, dtype=frame.xp.bool)
        return ahead if behind is None else behind if ahead is None else behind & ahead

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        if q_start is None or k_start is None:
            return ALL if (self.left, self.right) == (None, None) else MIXED
        least = keys[0] + k_start[0] - rows[-1] - q_start[1]
        greatest = keys[-1] + k_start[1] - rows[0] - q_start[0]
        left, right = (FAR if side is None else side for side in (self.left, self.right))
        return _interval(least, greatest, -left, right)


class Prefix(Mask):
    """key position < n  # M8"""

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"prefix({self.n})"

    def evaluate(self, frame: Frame) -> Array:
        return frame.key_positions < min(self.n, FAR)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        if k_start is None:
            return MIXED
        return _interval(keys[0] + k_start[0], keys[-1] + k_start[1], -FAR, self.n - 1)


class Chunks(Mask):
    """floor(query position / size) == floor(key position / size)  # M7"""

    positional = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"chunks({self.size})"

    def evaluate(self, frame: Frame) -> Array:
        size = min(self.size, FAR)
        return frame.query_positions // size == frame.key_positions // size

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        if q_start is None or k_start is None:
            return MIXED
        queries = (rows[0] + q_start[0]) // self.size, (rows[-1] + q_start[1]) // self.size
        chunk = (keys[0] + k_start[0]) // self.size, (keys[-1] + k_start[1]) // self.size
        if chunk[1] < queries[0] or queries[1] < chunk[0]:
            return NONE
        return ALL if queries == chunk and queries[0] == queries[1] else MIXED


class Lengths(Mask):
    """key index < n of the batch entry; rows are not masked  # M10"""

    def __init__(self, n: Any) -> None:
        self.n, self.span = n, start_range(n)

    def __repr__(self) -> str:
        return f"lengths({self.n})"

    def arrays(self) -> dict[str, Array]:
        return {} if isinstance(self.n, int) else {"lengths(n)": self.n}

    def leads(self) -> list[Shape]:
        return [] if isinstance(self.n, int) else [(*self.n.shape, 1)]

    def check(self, lead: Shape | None, q_len: int, k_len: int) -> None:
        if not isinstance(self.n, int):
            _check_entries(self.n, lead, "lengths(n)")
        if self.span is not None and self.span[1] > k_len:
            raise MaskArgumentError("lengths(n)", f"counts of at most Lk = {k_len}", self.n, "M10")

    def evaluate(self, frame: Frame) -> Array:
        return frame.keys < (min(self.n, FAR) if isinstance(self.n, int) else frame.per_entry(self.n, "lengths(n)"))

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        if self.span is None:
            return MIXED
        return NONE if keys[0] >= self.span[1] else ALL if keys[-1] < self.span[0] else MIXED


class Padding(Mask):
    """keep[..., key index]  # M11"""

    def __init__(self, keep: Array) -> None:
        self.keep = keep

    def __repr__(self) -> str:
        return f"padding({describe(self.keep)})"

    def arrays(self) -> dict[str, Array]:
        return {"padding(keep)": self.keep}

    def leads(self) -> list[Shape]:
        return [(*self.keep.shape[:-1], 1)]

    def check(self, lead: Shape | None, q_len: int, k_len: int) -> None:
        _check_entries(self.keep, lead, "padding(keep)", "Lk", k_len)

    def evaluate(self, frame: Frame) -> Array:
        return frame.per_key(self.keep, "padding(keep)")

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        _check_span(keys, self.keep.shape[-1], "padding(keep)")
        return _values(self.keep[..., keys.start : keys.stop]) if is_host(self.keep) else MIXED


class Documents(Mask):
    """q_ids[..., row index] == k_ids[..., key index]  # M9"""

    def __init__(self, q_ids: Array, k_ids: Array | None) -> None:
        self.q_ids, self.k_ids = q_ids, k_ids

    def __repr__(self) -> str:
        return f"documents({describe(self.q_ids)}{'' if self.k_ids is None else ', ' + describe(self.k_ids)})"

    def arrays(self) -> dict[str, Array]:
        k_ids = {} if self.k_ids is None else {"documents(k_ids)": self.k_ids}
        return {"documents(q_ids)": self.q_ids, **k_ids}

    def leads(self) -> list[Shape]:
        return [(*ids.shape[:-1], 1) for ids in self.arrays().values()]

    def check(self, lead: Shape | None, q_len: int, k_len: int) -> None:
        if self.k_ids is None and q_len != k_len:
            raise BatchError("documents(k_ids)", f"ids of the keys, since Lq = {q_len} and Lk = {k_len}", "None", "M9")
        _check_entries(self.q_ids, lead, "documents(q_ids)", "Lq", q_len)
        if self.k_ids is not None:
            _check_entries(self.k_ids, lead, "documents(k_ids)", "Lk", k_len)

    def evaluate(self, frame: Frame) -> Array:
        rows = frame.per_row(self.q_ids, "documents(q_ids)")
        keys = frame.per_key(self.q_ids if self.k_ids is None else self.k_ids, "documents(k_ids)")
        if keys.dtype != rows.dtype:  # which some libraries do not compare
            rows, keys = (frame.xp.astype(x, frame.rows.dtype, copy=False) for x in (rows, keys))
        return rows == keys

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        k_ids = self.q_ids if self.k_ids is None else self.k_ids
        _check_span(rows, self.q_ids.shape[-1], "documents(q_ids)")
        _check_span(keys, k_ids.shape[-1], "documents(k_ids)")
        if not (is_host(self.q_ids) and is_host(k_ids)):
            return MIXED
        q, k = self.q_ids[..., rows.start : rows.stop], k_ids[..., keys.start : keys.stop]
        if not q.size or not k.size:
            return MIXED
        least, most = q.min(axis=-1), q.max(axis=-1)  # (batch...)
        if ((most < k.min(axis=-1)) | (k.max(axis=-1) < least)).all():
            return NONE
        return ALL if ((least == most) & (most == k.min(axis=-1)) & (most == k.max(axis=-1))).all() else MIXED


class Dense(Mask):
    """array[..., row // size, key // size]; dense(array) has size (1, 1)  # M12"""

    def __init__(self, array: Array, size: tuple[int, int] = (1, 1), argument: str = "dense(array)") -> None:
        self.array, self.size, self.argument = array, size, argument

    def __repr__(self) -> str:
        shape = describe(self.array)
        return f"dense({shape})" if self.size == (1, 1) else f"blocks({shape}, {self.size})"

    def arrays(self) -> dict[str, Array]:
        return {self.argument: self.array}

    def leads(self) -> list[Shape]:
        return [tuple(self.array.shape[:-2])]

    def check(self, lead: Shape | None, q_len: int, k_len: int) -> None:
        counts = (-(-q_len // self.size[0]), -(-k_len // self.size[1]))
        names = "Lq, Lk" if self.size == (1, 1) else "ceil(Lq / size), ceil(Lk / size)"
        lead = tuple(self.array.shape[:-2]) if lead is None else lead
        if not broadcasts_to(tuple(self.array.shape), (*lead, *counts)):  # M15
            expected = f"a shape that broadcasts to (..., H, {names}) = {(*lead, *counts)}"
            rows = "; one row of keys per batch entry is masks.padding(keep)" if self.array.ndim == 2 else ""
            raise MaskShapeError(
                self.argument, expected + pair_readings(self.array.ndim, names) + rows, describe(self.array)
            )

    def evaluate(self, frame: Frame) -> Array:
        if frame.tile is not None and self.size == (1, 1):
            return frame.per_pair(self.array, self.argument)
        xp, array = frame.xp, frame.array(self.array, self.argument)
        if array.ndim < 2:  # a single value, or one per key
            array = xp.reshape(array, (1, 1) if array.ndim == 0 else (1, array.shape[0]))
        counts = tuple(array.shape[-2:])
        rows, keys = (
            index * 0 if count == 1 else index // size if size > 1 else index
            for index, size, count in zip((frame.rows, frame.keys), self.size, counts, strict=True)
        )
        check_index(rows, counts[0], self.argument)
        check_index(keys, counts[1], self.argument)
        if rows.ndim == 2 and rows.shape[1] == keys.shape[0] == 1:  # a grid
            grid = [(rows[:, 0], -2), (keys[0, :], -1)]
            grid.sort(key=lambda taken: taken[0].shape[0] / max(1, array.shape[taken[1]]))  # first what shrinks it most
            for index, axis in grid:
                array = xp.take(array, index, axis=axis)
            return array
        flat = xp.reshape(array, (*array.shape[:-2], counts[0] * counts[1]))
        return frame.take(flat, rows * counts[1] + keys, self.argument)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        if not is_host(self.array):
            return MIXED
        array = self.array.reshape((*(1,) * (2 - self.array.ndim), *self.array.shape))
        row, key = (
            slice(None) if count == 1 else slice(index[0] // size, index[-1] // size + 1)
            for index, size, count in zip((rows, keys), self.size, array.shape[-2:], strict=True)
        )
        return _values(array[..., row, key])


def narrow_ids(q_ids: Array, k_ids: Array | None) -> tuple[Array, Array | None]:
    """Host ids beyond 32 bits as their ranks: no library's default integers then make two of them equal."""
    ids = [x for x in (q_ids, k_ids) if x is not None]
    if not all(map(is_host, ids)) or all(x.size == 0 or -FAR < x.min() <= x.max() < FAR for x in ids):
        return q_ids, k_ids
    xp = library_of(q_ids, "documents(q_ids)").xp
    flat = [x.ravel() if x.dtype == ids[0].dtype else x.ravel().astype(object) for x in ids]  # not as floats
    ranks = xp.reshape(xp.unique_inverse(xp.concat(flat)).inverse_indices, (-1,))
    q, k = ranks[: q_ids.size].reshape(q_ids.shape), ranks[q_ids.size :]
    return q, None if k_ids is None else k.reshape(k_ids.shape)


def _check_entries(x: Array, lead: Shape | None, argument: str, axis: str = "", size: int = 0) -> None:
    """Raises BatchError unless x is (batch...), or (batch..., size) if the axis is named (A3)."""
    shape = tuple(x.shape)
    if axis and shape[-1] != size:
        raise BatchError(argument, f"a last axis of {axis} = {size}", describe(x))
    if lead is not None and not broadcasts_to(shape[:-1] if axis else shape, lead[:-1]):
        kind = "leading axes that broadcast" if axis else "one value, or a shape that broadcasts"
        raise BatchError(argument, f"{kind} to the batch {lead[:-1]}", describe(x))


def _check_span(span: range, size: int, argument: str) -> None:
    """Raises MaskArgumentError if a tile reaches beyond an axis of the argument's array (M14)."""
    if span.stop > size:
        raise MaskArgumentError("rows and keys", f"indices below {size}, the size of {argument}", span)


def _interval(least: int, greatest: int, low: int, high: int) -> str:
    if greatest < low or least > high:
        return NONE
    return ALL if low <= least and greatest <= high else MIXED


def _values(tile: Array) -> str:
    return MIXED if not tile.size else ALL if tile.all() else MIXED if tile.any() else NONE
