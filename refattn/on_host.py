"""Arrays, masks and biases of any library as NumPy arrays on the host: what the golden values are computed from.

Masks and biases are evaluated on given query rows and keys, at the positions that the two starts give them.
"""

from __future__ import annotations

from typing import Any

from refattn import registry
from refattn.arrays import Array, describe, is_array, is_host, library_of
from refattn.biases import Bias, Plain, Relative, as_bias
from refattn.errors import NotAnArrayError
from refattn.frames import Frame
from refattn.masks import Mask, as_mask


def host(x: Any, argument: str = "array") -> Array:
    """Any library's array as a NumPy array of the same values, by the library's plugin, else by NumPy itself.

    Raises NotAnArrayError (A7) for one that has none to read, such as a sparse tensor.
    """
    import numpy as np

    root = type(x).__module__.partition(".")[0]
    foreign = is_array(x) and not is_host(x)
    plugin = registry.plugin_of("jax" if root.startswith("jax") else root) if foreign else None  # jaxlib's are jax's
    try:
        return np.asarray(x if plugin is None else plugin.host(x))
    except Exception as fault:  # what a foreign library raises is about its own array
        got = f"{describe(x)}, {type(fault).__name__}: {fault}"
        raise NotAnArrayError(argument, "an array whose values can be read", got) from fault


def wide(x: Array) -> Array:
    """Numbers as float64, exactly."""
    import numpy as np

    return x.astype(np.float64, copy=False)


def take(x: Array, rows: Array, keys: slice) -> Array:
    """The rows and keys of an array that broadcasts to (..., Lq, Lk)."""
    x = x if x.ndim < 1 or x.shape[-1] == 1 else x[..., keys]
    return x if x.ndim < 2 or x.shape[-2] == 1 else x[..., rows, :]


def mask_at(mask: Mask | None, rows: Array, keys: slice, starts: tuple[Any, ...]) -> Array:
    """The mask on the given rows and keys, (..., R, K), host."""
    import numpy as np

    if mask is None:
        return np.ones((1, 1), dtype=bool)
    return host(mask.visible(rows, np.arange(keys.start, keys.stop), *starts))


def bias_on_host(term: Bias) -> Bias:
    """A term of a bias with its arrays on the host."""
    if isinstance(term, Plain):
        return Plain(host(term.array))
    return Relative(wide(host(term.table))) if isinstance(term, Relative) else term


def bias_at(terms: list[Bias], rows: Array, keys: slice, starts: tuple[Any, ...]) -> Array:
    """The sum of a bias's terms on the given rows and keys, (..., R, K), float64; -inf wherever one term is (M17)."""
    import numpy as np

    frame = Frame(library_of(rows, "rows"), None, pairs=(rows[:, None], np.arange(keys.start, keys.stop)[None, :]))
    frame.q_start, frame.k_start = (
        start if isinstance(start, int) else start[..., None, None, None] for start in starts
    )
    total: Array = 0.0
    hidden: Array = False
    for term in terms:
        if isinstance(term, Plain):
            value = wide(take(term.array, rows, keys))
        else:
            value = term.evaluate(frame, np.float64)
        hidden = hidden | np.isneginf(value)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows has no bound
            total = total + np.where(np.isneginf(value), 0.0, value)
    return np.where(hidden, -np.inf, total)


def plain_options(mask: Any, bias: Any, q_len: int, k_len: int, q_start: Any, k_start: Any) -> tuple[Array, Array]:
    """A mask and a bias as host arrays that broadcast to (..., H, Lq, Lk), None where there is none; starts as host."""
    import numpy as np

    rows, keys, starts = np.arange(q_len), slice(0, k_len), (q_start, k_start)
    shown = None if mask is None else mask_at(as_mask(mask), rows, keys, starts)
    terms = () if bias is None else as_bias(bias).terms()
    return shown, bias_at([bias_on_host(term) for term in terms], rows, keys, starts) if terms else None
