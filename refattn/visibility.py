"""What a mask is: a rule on pairs of row and key indices, evaluated, asked for tiles, drawn and combined (chapter M).

A mask is evaluated on row and key indices with the two starts (M14). The kinds of masks are in `mask_kinds`, their
constructors in `masks`.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from .arrays import (
    LARGEST_SIZE,
    Array,
    Library,
    Shape,
    as_int,
    as_size,
    broadcast_shapes,
    describe,
    device_of,
    from_list,
    into_library,
    is_array,
    is_host,
    library_of,
)
from .dtypes import is_integer
from .errors import MaskArgumentError
from .frames import FAR, Frame, check_start, start_range

ALL, NONE, MIXED = "all", "none", "mixed"
Span: TypeAlias = tuple[int, int] | None  # the least and greatest value, None where they may not be looked at (N3)


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

        >>> from refattn import masks
        >>> masks.causal().tile(range(8), range(8, 16)), masks.causal().tile(range(8, 16), range(8))
        ('none', 'all')
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

        >>> from refattn import masks
        >>> masks.causal().visible(rows=3, keys=[2, 3, 4])
        array([ True,  True, False])
        """
        for name, x in (("rows", rows), ("keys", keys)):
            if is_array(x):
                library_of(x, name)
        like = self._like(rows, keys)
        library = library_of(like, "mask")
        device = device_of(library, like)
        rows, keys = (_indices(x, library, device, name) for name, x in (("rows", rows), ("keys", keys)))
        if rows.ndim == 1 and keys.ndim == 1:
            rows, keys = rows[:, None], keys[None, :]
        broadcast_shapes((tuple(rows.shape), tuple(keys.shape)), "rows, keys")
        rank = max(rows.ndim, keys.ndim)
        rows, keys = (library.xp.reshape(x, (*(1,) * (rank - x.ndim), *x.shape)) for x in (rows, keys))
        frame = _free_frame(self, library, device, q_start, k_start, pairs=(rows, keys))
        return _over_pairs(self.evaluate(frame), frame)

    def to_array(
        self, q_len: int, k_len: int | None = None, q_start: Any = 0, k_start: Any = 0, like: Any = None
    ) -> Array:
        """The mask as a boolean array (..., Lq, Lk) of like's library and device; k_len is q_len by default.

        If like is None, it is that of the mask's own arrays, else NumPy.

        >>> from refattn import masks
        >>> masks.causal().to_array(2)
        array([[ True, False],
               [ True,  True]])
        """
        q_len = _length(q_len, "q_len")
        k_len = q_len if k_len is None else _length(k_len, "k_len")
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
        from .on_host import host  # which reads any library's arrays, and masks for its own ends

        array = host(self.to_array(q_len, k_len, q_start, k_start))
        blocks = array.reshape((math.prod(array.shape[:-2]), *array.shape[-2:]))
        return "\n\n".join("\n".join(" ".join("x" if seen else "." for seen in row) for row in b) for b in blocks)

    def _like(self, *others: Any) -> Array:
        """An array of the library that the mask is evaluated in: that of the others, else of its own arrays."""
        own = (array for part in self.parts() for array in part.arrays().values())
        return next((x for x in (*others, *own) if is_array(x) and not is_host(x)), _numpy_array())

    def __and__(self, other: Any) -> Mask:
        return And(self, _other(other))

    def __rand__(self, other: Any) -> Mask:
        return And(_other(other), self)

    def __or__(self, other: Any) -> Mask:
        return Or(self, _other(other))

    def __ror__(self, other: Any) -> Mask:
        return Or(_other(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskArgumentError("mask", "& | ~ between masks", "and, or, not, or a truth test", "M13")


class Both(Mask):
    """Two masks, combined pair by pair  # M13"""

    mark: str

    def __init__(self, first: Mask, second: Mask) -> None:
        self.first, self.second = first, second
        self.positional = first.positional or second.positional

    def parts(self) -> tuple[Mask, ...]:
        return self.first.parts() + self.second.parts()

    def __repr__(self) -> str:
        return f"({self.first!r} {self.mark} {self.second!r})"

    def answers(self, *tile: Any) -> set[str]:
        """What the two say of a tile."""
        return {self.first.answer(*tile), self.second.answer(*tile)}


class And(Both):
    """Visible where both are  # M13"""

    mark = "&"

    def evaluate(self, frame: Frame) -> Array:
        return self.first.evaluate(frame) & self.second.evaluate(frame)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        answers = self.answers(rows, keys, q_start, k_start)
        return NONE if NONE in answers else ALL if answers == {ALL} else MIXED


class Or(Both):
    """Visible where either is  # M13"""

    mark = "|"

    def evaluate(self, frame: Frame) -> Array:
        return self.first.evaluate(frame) | self.second.evaluate(frame)

    def answer(self, rows: range, keys: range, q_start: Span, k_start: Span) -> str:
        answers = self.answers(rows, keys, q_start, k_start)
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


def _other(mask: Any) -> Mask:
    from .masks import as_mask  # which knows the kinds, and so is built on this module

    return as_mask(mask)


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
    if is_host(array) and bool(((array <= -FAR) | (array >= FAR)).any()):
        raise MaskArgumentError(argument, f"indices between -{FAR} and {FAR}", describe(x))
    return library.xp.astype(into_library(array, library, device, argument), dtype, copy=False)


def _length(x: Any, argument: str) -> int:
    """A number of rows or keys. Raises MaskArgumentError (M14)."""
    number = as_size(x)
    if number is None:
        raise MaskArgumentError(argument, f"an int >= 0, at most {LARGEST_SIZE}", describe(x))
    return number


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
