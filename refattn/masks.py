"""Masks: which key a query may see, as lazy, composable objects (chapter M).

    mask = causal() & ~padding(keep) | prefix(4)

A mask is evaluated on row and key indices with the two starts (M14). Positional kinds add the starts to the indices
(M3); documents, lengths, padding, dense and blocks go by index. True means visible (M1).
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from .arrays import (
    Array,
    Library,
    Shape,
    as_int,
    broadcast_shapes,
    broadcasts_to,
    describe,
    device_of,
    from_list,
    into_library,
    is_array,
    is_host,
    library_of,
)
from .dtypes import is_bool, is_integer
from .errors import BatchError, MaskArgumentError, MaskKindError, MaskShapeError
from .frames import FAR, Frame, check_index, check_start, pair_readings, start_range

ALL, NONE, MIXED = "all", "none", "mixed"
Span: TypeAlias = tuple[int, int] | None  # the least and greatest value, None where they may not be looked at (N3)


# The clause of each constructor, by the name that its arguments' errors begin with.
_CLAUSES = {
    "window": "M6",
    "chunks": "M7",
    "prefix": "M8",
    "documents": "M9",
    "lengths": "M10",
    "padding": "M11",
    "dense": "M12",
    "blocks": "M12",
    "mask": "M13",
}


class Mask:
    """A rule that says for each pair of query and key whether the key is visible. Combine with &, | and ~ (M13)."""

    positional = False
    """Whether it reads query positions, so that Lq != Lk needs q_start (M5)."""
    __array_ufunc__ = None  # lets `array & mask` reach __rand__

    def parts(self) -> tuple[Mask, ...]:
        """The masks it is made of that hold no other mask."""
        return (self,)

    def arrays(self) -> dict[str, Array]:
        """The arrays it holds itself, by the name of the argument they came in."""
        return {}

    def leads(self) -> list[Shape]:
        """The axes (batch..., H) that its own arrays have."""
        return []

    def evaluate(self, frame: Frame) -> Array:
        """Boolean array over the frame's pairs, broadcastable to (..., H, R, K)."""
        raise NotImplementedError

    def check(self, lead: Shape | None, q_len: int, k_len: int) -> None:
        """Raises the error of the broken clause unless the mask fits scores of shape (*lead, q_len, k_len).

        lead is (batch..., H), or None if that is open.
        """

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        """What `tile` says of a tile that is not empty, with the least and greatest of each start, if known."""
        raise NotImplementedError

    def tile(self, rows: range, keys: range, q_start: Any = 0, k_start: Any = 0) -> str:
        """ "all", "none" or "mixed" for a tile of rows and keys, over all batch entries, in less than O(R K) (M14).

        "mixed" is always a legal answer, and the one where values may not be looked at (N3).
        """
        indices: dict[str, Any] = {"rows": rows, "keys": keys}
        for name, x in indices.items():
            if not isinstance(x, range) or x.start < 0 or x.step != 1:
                raise MaskArgumentError(name, "a range of indices >= 0 in steps of 1", describe(x))
        starts = (check_start(q_start, "q_start", None), check_start(k_start, "k_start", None))
        return self.answer(rows, keys, *map(start_range, starts)) if rows and keys else MIXED

    def visible(self, rows: Any, keys: Any, q_start: Any = 0, k_start: Any = 0) -> Array:
        """Visibility of the given pairs of indices (M14).

        rows and keys are ints, ranges, lists or integer arrays; 1-D rows with 1-D keys make a grid (..., R, K), other
        shapes broadcast together. The library is theirs if they are arrays, else that of the mask's own arrays, else
        NumPy. Where entries or heads differ, (batch..., H or 1) comes before. Raises MaskArgumentError.
        """
        like = self._like(rows, keys)
        library = library_of(like, "rows")
        device = device_of(library, like)
        rows, keys = (_indices(x, library, device, name) for name, x in (("rows", rows), ("keys", keys)))
        if rows.ndim == 1 and keys.ndim == 1:
            rows, keys = rows[:, None], keys[None, :]
        broadcast_shapes((tuple(rows.shape), tuple(keys.shape)), "rows, keys")
        rank = max(rows.ndim, keys.ndim)
        rows, keys = (library.xp.reshape(x, (*(1,) * (rank - x.ndim), *x.shape)) for x in (rows, keys))
        frame = _free_frame(self, library, device, q_start, k_start, pairs=(rows, keys))
        return _over_pairs(self.evaluate(frame), frame)

    def to_array(self, q_len: int, k_len: int, q_start: Any = 0, k_start: Any = 0, like: Any = None) -> Array:
        """The mask as a boolean array (..., Lq, Lk) of like's library and device.

        If like is None, it is that of the mask's own arrays, else NumPy.
        """
        _check_count(q_len, "q_len", 0)
        _check_count(k_len, "k_len", 0)
        like = self._like() if like is None else like
        library = library_of(like, "like")
        for part in self.parts():
            part.check(None, q_len, k_len)
        frame = _free_frame(
            self, library, device_of(library, like), q_start, k_start, tile=(range(q_len), range(k_len))
        )
        return _over_pairs(self.evaluate(frame), frame)

    def to_text(self, q_len: int, k_len: int | None = None, q_start: Any = 0, k_start: Any = 0) -> str:
        """A drawing, one mark per pair, x visible and . hidden: a line per query, a block per entry and head (M22)."""
        from .goldens import host  # which reads any library's arrays, and masks for its own ends

        array = host(self.to_array(q_len, q_len if k_len is None else k_len, q_start, k_start))
        blocks = array.reshape((math.prod(array.shape[:-2]), *array.shape[-2:]))
        return "\n\n".join("\n".join(" ".join("x" if seen else "." for seen in row) for row in b) for b in blocks)

    def _like(self, *others: Any) -> Array:
        """An array of the library that the mask is evaluated in: that of the others, else of its own arrays."""
        own = (array for part in self.parts() for array in part.arrays().values())
        return next((x for x in (*others, *own) if is_array(x) and not is_host(x)), _numpy_array())

    def __and__(self, other: Any) -> Mask:
        return And(self, as_mask(other, "mask"))

    def __rand__(self, other: Any) -> Mask:
        return And(as_mask(other, "mask"), self)

    def __or__(self, other: Any) -> Mask:
        return Or(self, as_mask(other, "mask"))

    def __ror__(self, other: Any) -> Mask:
        return Or(as_mask(other, "mask"), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskArgumentError("mask", "& | ~ between masks", "and, or, not, or a truth test", "M13")


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
            array = xp.take(array, rows[:, 0], axis=-2)
            return xp.take(array, keys[0, :], axis=-1)
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


class And(Mask):
    """Visible where both are  # M13"""

    def __init__(self, first: Mask, second: Mask) -> None:
        self.first, self.second = first, second
        self.positional = first.positional or second.positional

    def parts(self) -> tuple[Mask, ...]:
        return self.first.parts() + self.second.parts()

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"

    def evaluate(self, frame: Frame) -> Array:
        return self.first.evaluate(frame) & self.second.evaluate(frame)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        answers = {mask.answer(rows, keys, q_start, k_start) for mask in (self.first, self.second)}
        return NONE if NONE in answers else ALL if answers == {ALL} else MIXED


class Or(Mask):
    """Visible where either is  # M13"""

    def __init__(self, first: Mask, second: Mask) -> None:
        self.first, self.second = first, second
        self.positional = first.positional or second.positional

    def parts(self) -> tuple[Mask, ...]:
        return self.first.parts() + self.second.parts()

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"

    def evaluate(self, frame: Frame) -> Array:
        return self.first.evaluate(frame) | self.second.evaluate(frame)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        answers = {mask.answer(rows, keys, q_start, k_start) for mask in (self.first, self.second)}
        return ALL if ALL in answers else NONE if answers == {NONE} else MIXED


class Not(Mask):
    """Visible where the other is not  # M13"""

    def __init__(self, mask: Mask) -> None:
        self.mask, self.positional = mask, mask.positional

    def parts(self) -> tuple[Mask, ...]:
        return self.mask.parts()

    def __repr__(self) -> str:
        return f"~{self.mask!r}"

    def evaluate(self, frame: Frame) -> Array:
        return ~self.mask.evaluate(frame)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        return {ALL: NONE, NONE: ALL}.get(self.mask.answer(rows, keys, q_start, k_start), MIXED)


_CAUSAL = Window(None, 0)


def causal() -> Mask:
    """Key position <= query position (M4)."""
    return _CAUSAL


def window(left: int | None, right: int | None) -> Mask:
    """query - left <= key <= query + right, in positions, both ends included; None is unbounded (M6).

    A "window of W keys", the query's own and the W - 1 before it, is window(W - 1, 0).
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None:
            _check_count(side, f"window({name})", 0, "an int >= 0, or None for unbounded")
    return Window(left, right)


def prefix(n: int) -> Mask:
    """Key position < n, and nothing else (M8). prefix-LM is `mask=causal() | prefix(n)` with causal=False."""
    return Prefix(_check_count(n, "prefix(n)", 0))


def chunks(size: int) -> Mask:
    """Pairs whose positions have one floor(position / size) (M7)."""
    return Chunks(_check_count(size, "chunks(size)", 1))


def lengths(n: Any) -> Mask:
    """Keys with index below n, a count or one count per batch entry; query rows are not masked (M10)."""
    number = as_int(n)
    if number is not None:
        return Lengths(_check_count(number, "lengths(n)", 0))
    counts = _check_array(n, "lengths(n)", is_integer, "an int >= 0, or one per batch entry", 0)
    if is_host(counts) and bool((counts < 0).any()):
        raise MaskArgumentError("lengths(n)", "counts >= 0", counts.tolist(), "M10")
    return Lengths(counts)


def padding(keep: Any) -> Mask:
    """Keys, by index, where keep (batch..., Lk) is True (M11). Positions do not move (M16)."""
    return Padding(_check_array(keep, "padding(keep)", is_bool, "a boolean array (batch..., Lk), True = keep", 1))


def documents(q_ids: Any, k_ids: Any = None) -> Mask:
    """Pairs of row and key index with equal ids; q_ids (batch..., Lq), k_ids (batch..., Lk), None = q_ids (M9)."""
    q_ids = _check_array(q_ids, "documents(q_ids)", is_integer, "an integer array (batch..., Lq)", 1)
    if k_ids is not None:
        k_ids = _check_array(k_ids, "documents(k_ids)", is_integer, "an integer array (batch..., Lk)", 1)
        broadcast_shapes((tuple(q_ids.shape[:-1]), tuple(k_ids.shape[:-1])), "documents(k_ids)")
    return Documents(q_ids, k_ids)


def dense(array: Any) -> Mask:
    """Pairs where the array, broadcast right-aligned to (..., H, Lq, Lk), is True (M12, M15)."""
    return Dense(_check_array(array, "dense(array)", is_bool, "a boolean array, True = visible", 0))


def blocks(array: Any, size: int | tuple[int, int]) -> Mask:
    """Pairs in a block where the array (..., H, ceil(Lq / size), ceil(Lk / size)) is True (M12).

    size is the edge of a block, or a pair (rows, keys).
    """
    edges = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    checked = (_check_count(edges[0], "blocks(size)", 1), _check_count(edges[1], "blocks(size)", 1))
    array = _check_array(array, "blocks(array)", is_bool, "a boolean array, True = visible", 2)
    return Dense(array, checked, "blocks(array)")


def as_mask(mask: Any, argument: str) -> Mask:
    """A Mask as it is, a boolean array as dense. Raises MaskKindError (M1) for anything else."""
    if isinstance(mask, Mask):
        return mask
    if not hasattr(mask, "dtype") or not is_bool(mask.dtype):
        advice = "; a floating array of summands is passed as bias=" if hasattr(mask, "dtype") else ""
        raise MaskKindError(argument, f"a Mask or a boolean array, True = visible{advice}", describe(mask))
    return Dense(mask, argument=argument)


def _check_count(n: Any, argument: str, least: int, expected: str | None = None) -> int:
    number = as_int(n)
    if number is None or number < least:
        raise MaskArgumentError(argument, expected or f"an int >= {least}", describe(n), _clause(argument))
    return number


def _check_array(x: Any, argument: str, kind: Any, expected: str, rank: int) -> Array:
    array = from_list(x)
    if hasattr(array, "dtype") and is_host(array) and array.size == 0:
        array = array.astype("bool" if kind is is_bool else "int64")  # an empty list has no dtype of its own
    if not hasattr(array, "dtype") or not kind(array.dtype):
        if kind is is_bool:
            raise MaskKindError(argument, expected, describe(x))
        raise MaskArgumentError(argument, expected, describe(x), _clause(argument))
    if array.ndim < rank:
        raise MaskArgumentError(argument, expected, describe(x), _clause(argument))
    return array


def _check_entries(x: Array, lead: Shape | None, argument: str, axis: str = "", size: int = 0) -> None:
    """Raises BatchError unless x is (batch...), or (batch..., size) if the axis is named (A3)."""
    shape = tuple(x.shape)
    if axis and shape[-1] != size:
        raise BatchError(argument, f"a last axis of {axis} = {size}", describe(x))
    if lead is not None and not broadcasts_to(shape[:-1] if axis else shape, lead[:-1]):
        kind = "leading axes that broadcast" if axis else "one value, or a shape that broadcasts"
        raise BatchError(argument, f"{kind} to the batch {lead[:-1]}", describe(x))


def _indices(x: Any, library: Library, device: Any, argument: str) -> Array:
    """Row or key indices as an array of the library, in its default integer dtype."""
    number, array = as_int(x), from_list(x)
    dtype = library.xp.arange(1, device=device).dtype
    if number is not None and abs(number) < FAR:
        return library.xp.asarray(number, dtype=dtype, device=device)
    if is_host(array) and not array.size:
        array = array.astype("int64")  # an empty list has no dtype of its own
    if not is_array(array) or not is_integer(array.dtype):
        raise MaskArgumentError(argument, "integer indices: an int, a range, a list or an array", describe(x))
    return library.xp.astype(into_library(array, library, device, argument), dtype, copy=False)


def _check_span(span: range, size: int, argument: str) -> None:
    """Raises MaskArgumentError if a tile reaches beyond an axis of the argument's array (M14)."""
    if span.stop > size:
        raise MaskArgumentError("rows and keys", f"indices below {size}, the size of {argument}", span)


def _clause(argument: str) -> str:
    """The clause of the constructor that an argument belongs to; of evaluation (M14) for indices and lengths."""
    return _CLAUSES.get(argument.partition("(")[0], "M14")


def _interval(least: int, greatest: int, low: int, high: int) -> str:
    if greatest < low or least > high:
        return NONE
    return ALL if low <= least and greatest <= high else MIXED


def _values(tile: Array) -> str:
    return MIXED if not tile.size else ALL if tile.all() else MIXED if tile.any() else NONE


def _numpy_array() -> Array:
    import numpy

    return numpy.zeros(0)


def _free_frame(mask: Mask, library: Library, device: Any, q_start: Any, k_start: Any, **where: Any) -> Frame:
    """A frame without a call around it: the batch is what the starts and the mask's arrays make it (A3)."""
    frame = Frame(library, device, **where)
    leads = [lead for part in mask.parts() for lead in part.leads()]
    for name, start in (("q_start", q_start), ("k_start", k_start)):
        value = check_start(start, name, None)
        setattr(frame, name, value if isinstance(value, int) else frame.per_entry(value, name))
        leads.append(() if isinstance(value, int) else (*value.shape, 1))
    broadcast_shapes(leads, "q_start, k_start and the mask's arrays")
    return frame


def _over_pairs(visible: Array, frame: Frame) -> Array:
    """Broadcast over the frame's pairs, for masks that read rows or keys alone."""
    pairs = broadcast_shapes((tuple(frame.rows.shape), tuple(frame.keys.shape)), "rows and keys")
    lead = tuple(visible.shape[: max(visible.ndim - len(pairs), 0)])
    return frame.xp.broadcast_to(visible, (*lead, *pairs))
