"""Where arrays lie: guard bands beside inputs, memory that an output shares, NaN in what was freed.

Only for libraries whose arrays can be written in place; what others do with memory is theirs alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array, library_of

# Elements of NaN on either side of an input: as many bytes as keep the alignment that libraries give.
BAND = 64
# Blocks that are freed full of NaN before a call.
BLOCKS = 4


class Guarded(NamedTuple):
    """An input as a view inside a buffer of NaN. The buffer is None where the library has no such views."""

    view: Array
    buffer: Array | None

    def written_beside(self, host: Array) -> bool:
        """Whether the bands no longer hold NaN alone; host is the buffer's values."""
        return not (np.isnan(host[:BAND]).all() and np.isnan(host[-BAND:]).all())


def guarded(target: Any, host: Array, dtype: str) -> Guarded:
    """The values as a contiguous array with a band of NaN before and after it."""
    band = np.full(BAND, np.nan)
    buffer = target.array(np.concatenate([band, np.ravel(host), band]), dtype)
    inside = buffer[BAND : BAND + host.size]
    return Guarded(library_of(inside, "x").xp.reshape(inside, host.shape), buffer)


def poison(target: Any, shapes: list[tuple[int, ...]], dtype: str) -> None:
    """Frees blocks of these shapes full of NaN, so that an output that nobody writes to is seen to be empty."""
    for shape in shapes:
        blocks = [target.array(np.full(shape, np.nan), dtype) for _ in range(BLOCKS)]
        blocks.clear()


def shares_memory(x: Any, y: Any) -> bool:
    """Whether two arrays of one library lie in the same memory; False where that cannot be told."""
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return bool(x.size and y.size and np.may_share_memory(x, y))
    places = [_storage(one) for one in (x, y)]
    return places[0] is not None and places[0] == places[1]


def _storage(x: Any) -> Any:
    """What tells the memory of a tensor from that of others; None for other libraries, and for nothing."""
    root = type(x).__module__.partition(".")[0]
    if root == "torch" and x.numel():
        return x.device, x.untyped_storage().data_ptr()
    if root == "cupy" and x.size:
        return x.device.id, x.data.mem.ptr
    return None
