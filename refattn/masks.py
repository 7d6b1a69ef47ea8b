"""Masks: which key a query may see, as lazy, composable objects (chapter M).

    mask = causal() & ~padding(keep) | prefix(4)

A mask is evaluated on row and key indices with the two starts (M14). Positional kinds add the starts to the indices
(M3); documents, lengths, padding, dense and blocks go by index. True means visible (M1).
"""

from __future__ import annotations

from typing import Any

from .arrays import LARGEST_SIZE, Array, as_int, broadcast_shapes, describe, from_list, is_host, library_of
from .dtypes import is_bool, is_integer
from .errors import MaskArgumentError, MaskKindError
from .mask_kinds import Chunks, Dense, Documents, Lengths, Padding, Prefix, Window, narrow_ids
from .visibility import Mask

__all__ = ["Mask", "blocks", "causal", "chunks", "dense", "documents", "lengths", "padding", "prefix", "window"]

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

_CAUSAL = Window(None, 0)


def causal() -> Mask:
    """Key position <= query position (M4).

    >>> from refattn import masks
    >>> print(masks.causal().to_text(2, 4, q_start=2))
    x x x .
    x x x x
    """
    return _CAUSAL


def window(left: int | None, right: int | None) -> Mask:
    """query - left <= key <= query + right, in positions, both ends included; None is unbounded (M6).

    A "window of W keys", the query's own and the W - 1 before it, is window(W - 1, 0). Raises MaskArgumentError (M6).

    >>> from refattn import masks
    >>> print(masks.window(1, 0).to_text(4))
    x . . .
    x x . .
    . x x .
    . . x x
    """
    expected = "an int >= 0, or None for unbounded"
    sides = (
        None if side is None else _check_count(side, f"window({name})", 0, expected)
        for name, side in (("left", left), ("right", right))
    )
    return Window(*sides)


def prefix(n: int) -> Mask:
    """Key position < n, and nothing else (M8). prefix-LM is `mask=causal() | prefix(n)` with causal=False.

    >>> from refattn import masks
    >>> print((masks.causal() | masks.prefix(2)).to_text(4))
    x x . .
    x x . .
    x x x .
    x x x x
    """
    return Prefix(_check_count(n, "prefix(n)", 0))


def chunks(size: int) -> Mask:
    """Pairs whose positions have one floor(position / size) (M7).

    >>> from refattn import masks
    >>> print(masks.chunks(2).to_text(4))
    x x . .
    x x . .
    . . x x
    . . x x
    """
    return Chunks(_check_count(size, "chunks(size)", 1))


def lengths(n: Any) -> Mask:
    """Keys with index below n, a count or one count per batch entry; query rows are not masked (M10).

    n is an int or integers (batch,). Raises MaskArgumentError (M10).

    >>> from refattn import masks
    >>> masks.lengths([1, 3]).to_array(1, 3)[:, 0, 0].tolist()
    [[True, False, False], [True, True, True]]
    """
    number = as_int(n)
    if number is not None:
        return Lengths(_check_count(number, "lengths(n)", 0))
    counts = _check_array(n, "lengths(n)", is_integer, "an int >= 0, or one per batch entry", 0)
    if is_host(counts) and bool(((counts < 0) | (counts > LARGEST_SIZE)).any()):
        raise MaskArgumentError("lengths(n)", f"counts from 0 to {LARGEST_SIZE}", counts.tolist(), "M10")
    return Lengths(counts)


def padding(keep: Any) -> Mask:
    """Keys, by index, where keep (batch..., Lk) is True (M11). Positions do not move (M16).

    Raises MaskKindError (M1) unless keep is boolean.

    >>> from refattn import masks
    >>> print(masks.padding([False, True, True]).to_text(2, 3))
    . x x
    . x x
    """
    return Padding(_check_array(keep, "padding(keep)", is_bool, "a boolean array (batch..., Lk), True = keep", 1))


def documents(q_ids: Any, k_ids: Any = None) -> Mask:
    """Pairs of row and key index with equal ids; q_ids (batch..., Lq), k_ids (batch..., Lk), None = q_ids (M9).

    Raises MaskArgumentError (M9) unless they are integers.

    >>> from refattn import masks
    >>> print((masks.documents([0, 0, 1, 1]) & masks.causal()).to_text(4))
    x . . .
    x x . .
    . . x .
    . . x x
    """
    q_ids = _check_array(q_ids, "documents(q_ids)", is_integer, "an integer array (batch..., Lq)", 1)
    if k_ids is not None:
        k_ids = _check_array(k_ids, "documents(k_ids)", is_integer, "an integer array (batch..., Lk)", 1)
        broadcast_shapes((tuple(q_ids.shape[:-1]), tuple(k_ids.shape[:-1])), "documents(k_ids)")
    return Documents(*narrow_ids(q_ids, k_ids))


def dense(array: Any) -> Mask:
    """Pairs where the array, broadcast right-aligned to (..., H, Lq, Lk), is True (M12, M15).

    Raises MaskKindError (M1) unless it is boolean.

    >>> from refattn import masks
    >>> print(masks.dense([[True, False], [True, True]]).to_text(2))
    x .
    x x
    """
    return Dense(_check_array(array, "dense(array)", is_bool, "a boolean array, True = visible", 0))


def blocks(array: Any, size: int | tuple[int, int]) -> Mask:
    """Pairs in a block where the array (..., H, ceil(Lq / size), ceil(Lk / size)) is True (M12).

    size is the edge of a block, or a pair (rows, keys). Raises MaskKindError (M1) and MaskArgumentError (M12).

    >>> from refattn import masks
    >>> print(masks.blocks([[True, False], [True, True]], 2).to_text(4))
    x x . .
    x x . .
    x x x x
    x x x x
    """
    edges = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    checked = (_check_count(edges[0], "blocks(size)", 1), _check_count(edges[1], "blocks(size)", 1))
    array = _check_array(array, "blocks(array)", is_bool, "a boolean array, True = visible", 2)
    return Dense(array, checked, "blocks(array)")


def as_mask(mask: Any) -> Mask:
    """The argument `mask`: a Mask as it is, a boolean array as dense. Raises MaskKindError (M1) for anything else."""
    if isinstance(mask, Mask):
        return mask
    if not hasattr(mask, "dtype") or not is_bool(mask.dtype):
        advice = "; a floating array of summands is passed as bias=" if hasattr(mask, "dtype") else ""
        raise MaskKindError("mask", f"a Mask or a boolean array, True = visible{advice}", describe(mask))
    return Dense(mask, argument="mask")


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
    library_of(array, argument)
    if array.ndim < rank:
        raise MaskArgumentError(argument, expected, describe(x), _clause(argument))
    return array


def _clause(argument: str) -> str:
    """The clause of the constructor that an argument belongs to; of evaluation (M14) for indices and lengths."""
    return _CLAUSES.get(argument.partition("(")[0], "M14")
