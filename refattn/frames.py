"""Where a mask or a bias is evaluated: row and key indices, the two starts, library and device (M3, M14)."""

from __future__ import annotations

from typing import Any

from .arrays import (
    LARGEST_SIZE,
    Array,
    Library,
    Shape,
    as_int,
    broadcasts_to,
    describe,
    from_list,
    into_library,
    is_host,
)
from .dtypes import is_integer
from .errors import BatchError, MaskArgumentError, StartError

FARTHEST_START = LARGEST_SIZE
FAR = 3 * 2**29  # wider than any distance between positions; sums with an index still fit an int32


class Frame:
    """Pairs of row and key indices with their positions.

    rows (..., R, 1) and keys (..., 1, K) are integer arrays that broadcast together; q_start and k_start are ints or
    integer arrays (batch..., 1, 1, 1). tile holds the ranges of rows and keys if they are contiguous, else it is None.
    """

    def __init__(
        self,
        library: Library,
        device: Any,
        *,
        tile: tuple[range, range] | None = None,
        pairs: tuple[Array, Array] | None = None,
        q_start: Any = 0,
        k_start: Any = 0,
    ) -> None:
        self.library, self.xp, self.device, self.tile = library, library.xp, device, tile
        self.q_start, self.k_start = q_start, k_start
        if pairs is not None:
            self.rows, self.keys = pairs
        elif tile is not None:
            self.rows = self.xp.arange(tile[0].start, tile[0].stop, device=device)[:, None]
            self.keys = self.xp.arange(tile[1].start, tile[1].stop, device=device)[None, :]

    @property
    def query_positions(self) -> Array:
        """q_start + row, (..., R, 1)  # M3"""
        return self.rows if _is_zero(self.q_start) else self.rows + self.q_start

    @property
    def key_positions(self) -> Array:
        """k_start + key, (..., 1, K)  # M3"""
        return self.keys if _is_zero(self.k_start) else self.keys + self.k_start

    @property
    def keys_from_rows(self) -> Array:
        """Key positions on the scale where a query's position is its row: key + k_start - q_start."""
        offset = self.k_start - self.q_start
        return self.keys if _is_zero(offset) else self.keys + offset

    def array(self, x: Array, argument: str) -> Array:
        """An option's array in this frame's library and device."""
        return into_library(x, self.library, self.device, argument)

    def per_entry(self, x: Any, argument: str) -> Array:
        """(batch...) integers as (batch..., 1, 1, 1), one axis per axis of the pairs, in the dtype of the indices."""
        x = self.xp.astype(self.array(x, argument), self.rows.dtype, copy=False)
        return self.xp.reshape(x, (*x.shape, 1, *(1,) * self.rows.ndim)) if x.shape else x

    def per_key(self, x: Array, argument: str) -> Array:
        """(batch..., Lk) values taken at the keys: (batch..., 1, 1, K)."""
        return self._gather(x, 1, argument)

    def per_row(self, x: Array, argument: str) -> Array:
        """(batch..., Lq) values taken at the rows: (batch..., 1, R, 1)."""
        return self._gather(x, 0, argument)

    def take(self, x: Array, index: Array, argument: str) -> Array:
        """x[..., index] along the last axis: (..., *index.shape)."""
        check_index(index, x.shape[-1], argument)
        return self.xp.reshape(self.xp.take(x, self.xp.reshape(index, (-1,)), axis=-1), (*x.shape[:-1], *index.shape))

    def per_pair(self, x: Array, argument: str) -> Array:
        """An array that broadcasts to (..., Lq, Lk), cut to the tile; frames of scattered pairs have none."""
        x = self.array(x, argument)
        if x.ndim < 2:  # a single value, or one per key; reductions need both axes
            x = self.xp.reshape(x, (1, 1) if x.ndim == 0 else (1, x.shape[0]))
        rows, keys = self.tile or (range(0), range(0))
        x = x if x.shape[-2] == 1 else x[..., rows.start : rows.stop, :]
        return x if x.shape[-1] == 1 else x[..., keys.start : keys.stop]

    def _gather(self, x: Array, axis: int, argument: str) -> Array:
        x = self.array(x, argument)
        index = (self.rows, self.keys)[axis]
        batch = tuple(x.shape[:-1])
        if self.tile is None:
            x = self.take(x, index, argument)
        else:
            x = x[..., self.tile[axis].start : self.tile[axis].stop]
        return self.xp.reshape(x, (*batch, *((1,) if batch else ()), *index.shape))


def check_index(index: Array, size: int, argument: str) -> None:
    """Raises MaskArgumentError if a host index lies beyond an axis of the argument's array (N3)."""
    if is_host(index) and index.size and not 0 <= index.min() <= index.max() < size:
        expected = f"indices from 0 to {size - 1}, the size of {argument} being {size}"
        raise MaskArgumentError("rows and keys", expected, f"{index.min()} to {index.max()}")


def pair_readings(rank: int, pairs: str = "Lq, Lk") -> str:
    """How an array of that rank is read and what else it may have been meant as, for an error message (M15)."""
    return {
        2: f" (rank 2 is read as ({pairs}))",
        3: f" (rank 3 is read as (H, {pairs}); one array per batch entry needs the shape (B, 1, {pairs}))",
    }.get(rank, "")


def _is_zero(start: Any) -> bool:
    return type(start) is int and start == 0


def check_start(start: Any, argument: str, batch: Shape | None) -> Any:
    """A start as an int or an integer array (M3). Raises StartError, or BatchError if it does not fit the batch."""
    number = as_int(start)
    if number is not None:
        if abs(number) > FARTHEST_START:
            raise StartError(argument, f"a position between -{FARTHEST_START} and {FARTHEST_START}", number)
        return number
    values = from_list(start)
    if not hasattr(values, "dtype") or not is_integer(values.dtype):
        expected = f"an int between -{FARTHEST_START} and {FARTHEST_START}, or one such int per batch entry"
        raise StartError(argument, expected, describe(start))
    if batch is not None and not broadcasts_to(tuple(values.shape), batch):
        raise BatchError(argument, f"one int, or a shape that broadcasts to the batch {batch}", describe(values))
    if is_host(values) and bool((abs(values) > FARTHEST_START).any()):
        raise StartError(argument, f"positions between -{FARTHEST_START} and {FARTHEST_START}", values.tolist())
    return values


def start_range(start: Any) -> tuple[int, int] | None:
    """The least and greatest start over all batch entries, or None where values may not be looked at (N3)."""
    number = as_int(start)
    if number is not None:
        return number, number
    values = from_list(start)
    return (int(values.min()), int(values.max())) if is_host(values) and values.size else None
