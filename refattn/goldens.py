"""Golden values: attention in float64 on the host, for any inputs, each with a derived error bound (N6).

A second formulation that shares no line with the pipeline: one head at a time, in blocks of query rows, non-finite
values set aside and put back by rule, the products accumulated before the division. Nothing under test produces an
expected value. Of refattn `golden` asks the check of its arguments (`check_call`), and masks and biases, evaluated on
the positions of a Frame; `golden_visible` does without all three.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from refattn import bounds
from refattn.arguments import check_call
from refattn.arrays import Array, library_of
from refattn.biases import Bias, Plain, Relative
from refattn.errors import BackendError
from refattn.frames import Frame
from refattn.masks import Mask

# Elements of the largest temporary array of one block of rows.
BLOCK_ELEMENTS = 2**20


def golden(
    q: Array,
    k: Array,
    v: Array,
    *,
    rows: Sequence[int] | None = None,
    weights: bool = False,
    causal: bool = False,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    q_start: Any = None,
    k_start: Any = 0,
) -> Golden:
    """Attention over host copies of q, k and v, which may be arrays of any library; options as in `attention`.

    rows picks query rows by index, their positions unchanged; weights=True keeps the weights, (..., H, R, Lk).
    Raises what `attention` raises for masks, biases and positions that do not fit.
    """
    call = check_call(
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_start=q_start,
        k_start=k_start,
    )
    q_at, k_at = (start if isinstance(start, int) else host(start) for start in (call.q_start, call.k_start))
    starts, k_len, summands = (q_at, k_at), k.shape[-2], call.bias
    return Golden(
        host(q),
        host(k),
        host(v),
        visible=lambda at: _evaluate_mask(call.mask, at, k_len, starts),
        bias=None if summands is None else lambda at: _evaluate_bias(summands, at, k_len, starts),
        scale=None if scale is None else float(host(scale)),
        softcap=softcap,
        sinks=None if sinks is None else host(sinks),
        rows=rows,
        weights=weights,
    )


def golden_visible(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    rows: Sequence[int] | None = None,
    weights: bool = False,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    errors: tuple[Array, Array, Array] | None = None,
) -> Golden:
    """The same from plain arrays: visible (bool) and bias broadcast, right-aligned, to (..., H, Lq, Lk).

    A bias of -inf hides its pair. errors are bounds on q, k and v themselves, of their shapes, that the results'
    bounds then include.
    """
    q, k, v = host(q), host(k), host(v)
    plain, plain_bias = host(visible), None if bias is None else host(bias)
    return Golden(
        q,
        k,
        v,
        visible=lambda at: _take_rows(plain, at),
        bias=None if plain_bias is None else lambda at: _take_rows(plain_bias, at),
        scale=scale,
        softcap=softcap,
        sinks=None if sinks is None else host(sinks),
        rows=rows,
        weights=weights,
        errors=errors,
    )


class Golden:
    """Exact results and their bounds, host NumPy float64, R rows being all or the picked ones.

    output (..., H, R, d_v), lse (..., H, R), weights (..., H, R, Lk) or None; rank 2 inputs have no head axis.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        visible: Callable[[Array], Array],
        bias: Callable[[Array], Array] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        rows: Sequence[int] | None = None,
        weights: bool = False,
        errors: tuple[Array, Array, Array] | None = None,
    ) -> None:
        import numpy as np

        self._single = q.ndim == 2
        self._batch, self._heads, q_len, self._k_len = _pair_shape(q, k, v)
        lifted = [x[None] if self._single else x for x in (q, k, v, *(errors or ()))]
        self._q, self._k, self._v = (np.broadcast_to(x, (*self._batch, *x.shape[-3:])) for x in lifted[:3])
        self._errors = [np.broadcast_to(x, (*self._batch, *x.shape[-3:])) for x in lifted[3:]]
        self._visible, self._bias = visible, bias
        self._d_k = q.shape[-1]
        self._scale = scale if scale is not None else (1 / math.sqrt(self._d_k) if self._d_k else 1.0)
        self._softcap = softcap
        self._sinks = None if sinks is None else np.broadcast_to(sinks, (self._heads,))
        self._rows = np.arange(q_len)[np.asarray(rows, dtype=int)] if rows is not None else np.arange(q_len)

        lead = (*self._batch, self._heads, len(self._rows))
        output, lse = np.zeros((*lead, v.shape[-1])), np.zeros(lead)
        kept = np.zeros((*lead, self._k_len)) if weights else None
        for at, part, nan, poison in self._blocks(BLOCK_ELEMENTS // max(1, self._k_len)):
            output[at] = np.where(nan[:, None], np.nan, part.output) + poison
            lse[at] = np.where(nan, np.nan, part.lse)
            if kept is not None:
                kept[at] = np.where(nan[:, None], np.nan, part.weights)
        self.output, self.lse = self._trim(output), self._trim(lse)
        self.weights: Array = None if kept is None else self._trim(kept)

    def bound(self, dtype: str, model: str = "fused", coherent: bool = False) -> Array:
        """The largest error of each output element that the model allows; see `refattn.bounds`. Same shape."""
        return self._bound(bounds.output_bound, (self._v.shape[-1],), dtype, model, coherent)

    def lse_bound(self, dtype: str, model: str = "fused", coherent: bool = False) -> Array:
        """The same for the log-sum-exp."""
        return self._bound(bounds.lse_bound, (), dtype, model, coherent)

    def weights_bound(self, dtype: str, model: str = "fused", coherent: bool = False) -> Array:
        """The same for the weights."""
        return self._bound(bounds.weights_bound, (self._k_len,), dtype, model, coherent)

    def _bound(self, rule: Any, tail: tuple[int, ...], dtype: str, model: str, coherent: bool) -> Array:
        import numpy as np

        chosen = bounds.rounding_model(dtype, model, coherent)
        bound = np.zeros((*self._batch, self._heads, len(self._rows), *tail))
        width = self._v.shape[-1] if rule is bounds.output_bound else 1
        for at, part, _, _ in self._blocks(BLOCK_ELEMENTS // max(1, self._k_len * width)):
            bound[at] = rule(part, chosen)
        return self._trim(bound)

    def _trim(self, x: Array) -> Array:
        return x[0] if self._single else x

    def _blocks(self, step: int) -> Iterator[tuple[tuple[Any, ...], bounds.Rows, Array, Array]]:
        """Index, exact values, NaN rows (R,) and non-finite additions (R, d_v) of every block of every head."""
        import numpy as np

        step = max(1, step)
        for start in range(0, len(self._rows), step):
            rows = self._rows[start : start + step]
            shape = (*self._batch, self._heads, len(rows), self._k_len)
            visible = np.broadcast_to(self._visible(rows), shape)
            bias = None if self._bias is None else np.broadcast_to(self._bias(rows), shape)
            for index in np.ndindex(*shape[:-2]):
                at = (*index, slice(start, start + len(rows)))
                yield at, *self._evaluate(index, rows, visible[index], None if bias is None else bias[index])

    def _evaluate(
        self, index: tuple[int, ...], rows: Array, visible: Array, bias: Array | None
    ) -> tuple[bounds.Rows, Array, Array]:
        """One block of rows of one head: the finite problem, and what non-finite data make of it."""
        import numpy as np

        kv = (*index[:-1], index[-1] // (self._heads // self._k.shape[-3]))
        q, k, v = self._q[index][rows], self._k[kv], self._v[kv]
        if bias is not None:
            visible = visible & ~np.isneginf(bias)
            bias = np.where(visible, bias, 0.0)
        # Non-finite numbers take no part in the arithmetic; what they do to visible pairs is a rule (M20, M21).
        bad = np.any(~np.isfinite(k), axis=-1)[None, :] & visible
        if bias is not None:
            bad = bad | (visible & ~np.isfinite(bias))
            bias = bounds.finite(bias)
        nan_row = np.any(~np.isfinite(q), axis=-1) & np.any(visible, axis=-1)
        finite_q, finite_k, finite_v = bounds.finite(q), bounds.finite(k), bounds.finite(v)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            scaled = self._scale * (finite_q @ finite_k.T)
            size = abs(self._scale) * (np.abs(finite_q) @ np.abs(finite_k).T)
            capped = scaled if self._softcap is None else self._softcap * np.tanh(scaled / self._softcap)
            logits = np.where(visible, capped if bias is None else capped + bias, -np.inf)
        nan_row = nan_row | np.any(bad, axis=-1)
        nan_row = nan_row | np.any(visible & (np.isposinf(logits) | np.isnan(logits)), axis=-1)
        sink = None if self._sinks is None else float(self._sinks[index[-1]])
        if sink is not None and (math.isnan(sink) or sink == math.inf):
            nan_row, sink = np.ones_like(nan_row), None
        if sink is None or sink == -math.inf:  # nothing to divide by (P7)
            nan_row = nan_row | (np.any(visible, axis=-1) & ~np.any(visible & np.isfinite(logits), axis=-1))
        logits = np.where(nan_row[:, None] & visible, 0.0, logits)

        start = np.max(logits, axis=-1, initial=-np.inf if sink is None else sink)
        start = np.where(np.isneginf(start), 0.0, start)
        grown = np.exp(logits - start[:, None])
        total = np.sum(grown, axis=-1) + (0.0 if sink is None else np.exp(sink - start))
        divisor = np.where(total == 0, 1.0, total)[:, None]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            lse = start + np.log(total)
            output = (grown @ finite_v) / divisor

        incoming: Array | float = 0.0
        v_error = None
        if self._errors:
            q_error, k_error, v_error = self._errors[0][index][rows], self._errors[1][kv], self._errors[2][kv]
            incoming = q_error @ (np.abs(finite_k) + k_error).T + np.abs(finite_q) @ k_error.T
            incoming = abs(self._scale) * incoming
        part = bounds.Rows(
            visible=visible,
            size=bounds.finite(np.where(visible, size, 0.0)),
            scaled=bounds.finite(np.where(visible, scaled, 0.0)),
            capped=bounds.finite(np.where(visible, capped, 0.0)),
            bias=bias,
            logits=logits,
            sink=sink,
            lse=lse,
            weights=grown / divisor,
            v=finite_v,
            output=output,
            d_k=self._d_k,
            softcap=self._softcap,
            incoming=incoming,
            v_error=v_error,
        )
        return part, nan_row, _poison(visible, v)


def host(x: Any) -> Array:
    """A NumPy copy of any library's array: floats as float64, exactly; booleans and integers as they are.

    A library is found by its plugin; what has none is handed to NumPy.
    """
    import numpy as np

    copy = np.asarray(_plugin_host(x))
    if copy.dtype.kind in "biu":
        return copy
    return copy.astype(np.float64)


def _plugin_host(x: Any) -> Any:
    import numpy as np

    from refattn import registry

    if isinstance(x, (np.ndarray, np.generic, bool, int, float, list, tuple)):
        return x
    root = type(x).__module__.partition(".")[0]
    if root.startswith("jax"):  # jaxlib's arrays belong to jax
        root = "jax"
    for name in registry.names():
        with contextlib.suppress(BackendError):  # a broken plugin of another library is no concern here
            backend = registry.get(name)
            if backend.library.partition(".")[0] == root:
                return backend.host(x)
    return x


def _pair_shape(q: Array, k: Array, v: Array) -> tuple[tuple[int, ...], int, int, int]:
    """Batch shape, H, Lq and Lk."""
    import numpy as np

    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return batch, (q.shape[-3] if q.ndim > 2 else 1), q.shape[-2], k.shape[-2]


def _poison(visible: Array, v: Array) -> Array:
    """What visible non-finite values add to an output element: their own infinity, or NaN; (R, d_v) (M20)."""
    import numpy as np

    if np.all(np.isfinite(v)):
        return np.zeros((visible.shape[0], v.shape[1]))
    seen = visible.astype(np.float64)
    up, down, nan = (seen @ kind.astype(np.float64) > 0 for kind in (np.isposinf(v), np.isneginf(v), np.isnan(v)))
    return np.where(nan | (up & down), np.nan, np.where(up, np.inf, np.where(down, -np.inf, 0.0)))


def _take_rows(x: Array, rows: Array) -> Array:
    """The rows of an array that broadcasts to (..., Lq, Lk)."""
    return x if x.ndim < 2 or x.shape[-2] == 1 else x[..., rows, :]


def _evaluate_mask(mask: Mask | None, rows: Array, k_len: int, starts: tuple[Any, Any]) -> Array:
    """The mask on the given rows, (..., R, Lk), host."""
    import numpy as np

    if mask is None:
        return np.ones((1, 1), dtype=bool)
    return host(mask.visible(rows.tolist(), range(k_len), *starts))


def _evaluate_bias(bias: Bias, rows: Array, k_len: int, starts: tuple[Any, Any]) -> Array:
    """The sum of a bias's terms on the given rows, (..., R, Lk), host float64; -inf wherever one term is (M17)."""
    import numpy as np

    frame = Frame(library_of(rows, "rows"), None, pairs=(rows[:, None], np.arange(k_len)[None, :]))
    frame.q_start, frame.k_start = (
        start if isinstance(start, int) else start[..., None, None, None] for start in starts
    )
    total: Array = 0.0
    hidden: Array = False
    for term in bias.terms():
        if isinstance(term, Plain):
            value = _take_rows(host(term.array), rows)
        elif isinstance(term, Relative):
            value = Relative(host(term.table)).evaluate(frame, np.float64)
        else:
            value = term.evaluate(frame, np.float64)
        hidden = hidden | np.isneginf(value)
        total = total + np.where(np.isneginf(value), 0.0, value)
    return np.where(hidden, -np.inf, total)
