"""Golden values: attention in float64 on the host, for any inputs, each with a derived error bound (N6).

A second formulation that shares no line with the pipeline: one head at a time, in blocks of query rows and keys, which
alone are converted to float64, non-finite values set aside and put back by rule, the products accumulated before the
division. Nothing under test produces an expected value. Of refattn `golden` asks the check of its arguments
(`check_call`), and masks and biases, evaluated on the positions of a Frame; `golden_visible` does without all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from refattn import bounds
from refattn.arguments import check_call
from refattn.arrays import Array, describe, from_list, is_host
from refattn.dtypes import is_integer
from refattn.errors import InputsError
from refattn.exact_sums import ExactSum
from refattn.on_host import bias_at, bias_on_host, host, mask_at, take, wide
from refattn.rounding import Model, Rounding, rounding_model

# Query rows and keys of one block, whose temporary arrays stay near a core's cache.
ROWS, KEYS = 128, 1024


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
    Beyond the copies memory is linear in the rows and independent of the keys.
    Raises what `attention` raises for masks, biases and positions that do not fit, InputsError (E4) for such rows.

    >>> import numpy as np, refattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8), dtype=np.float32)  # (H, L, d)
    >>> exact = refattn.golden(q, k, v, causal=True)
    >>> output = refattn.attention(q, k, v, causal=True)
    >>> bool(np.all(np.abs(output - exact.output) <= exact.bound("float32")))
    True
    """
    if not isinstance(weights, bool):
        raise InputsError("weights", "Python's True or False", describe(weights))
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
    starts = tuple(start if isinstance(start, int) else host(start) for start in (call.q_start, call.k_start))
    shown, terms = call.mask, None if call.bias is None else [bias_on_host(term) for term in call.bias.terms()]
    del call  # with the copies of q, k and v that it may hold
    return Golden(
        host(q, "q"),
        host(k, "k"),
        host(v, "v"),
        visible=lambda rows, keys: mask_at(shown, rows, keys, starts),
        bias=None if terms is None else lambda rows, keys: bias_at(terms, rows, keys, starts),
        scale=None if scale is None else float(host(scale)),
        softcap=None if softcap is None else float(softcap),
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
    plain, plain_bias = host(visible), None if bias is None else host(bias).copy()
    return Golden(
        host(q),
        host(k),
        host(v),
        visible=lambda rows, keys: take(plain, rows, keys),
        bias=None if plain_bias is None else lambda rows, keys: take(plain_bias, rows, keys),
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
    k_len is Lk.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        visible: Callable[[Array, slice], Array],
        bias: Callable[[Array, slice], Array] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        rows: Sequence[int] | None = None,
        weights: bool = False,
        errors: tuple[Array, Array, Array] | None = None,
    ) -> None:
        import numpy as np

        self._single = q.ndim == 2
        self._batch, self._heads, q_len, self.k_len = _pair_shape(q, k, v)
        picked = slice(None) if rows is None else _row_indices(rows, q_len)
        self._rows = np.arange(q_len)[picked]
        # Copies in their own dtype, of q only the picked rows: what is done to the inputs later changes no bound.
        copies = [np.array(x) for x in (q[..., picked, :], k, v)]
        given = [errors[0][..., picked, :], *errors[1:]] if errors else []
        lifted = [x[None] if self._single else x for x in (*copies, *given)]
        self._q, self._k, self._v, *self._errors = (np.broadcast_to(x, (*self._batch, *x.shape[-3:])) for x in lifted)
        self._visible, self._bias = visible, bias
        self._d_k, self._d_v = q.shape[-1], v.shape[-1]
        self._scale = scale if scale is not None else (1 / math.sqrt(self._d_k) if self._d_k else 1.0)
        self._softcap = softcap
        self._lead = (*self._batch, self._heads, len(self._rows))
        sinks = np.full(1, -np.inf) if sinks is None else wide(sinks).reshape(-1, 1)
        self._sinks = np.broadcast_to(sinks, self._lead)
        self._weight_sums: dict[Rounding, tuple[Array, Array]] = {}
        self._sum_up(weights)

    def bound(self, dtype: str, model: str | Model = "fused", coherent: bool = False) -> Array:
        """The largest error of each output element that the model allows; see `refattn.bounds`. Same shape.

        dtype is the one that results are stored in, model a name out of `refattn.bounds.MODELS` or a Model; coherent
        says that rounding errors may all go the same way. 0 in rows that are NaN, infinite where nothing can be
        judged. Raises ModelError (N6) for a dtype or a name that there is no bound for.
        """
        import numpy as np

        chosen, per_value = rounding_model(dtype, model, coherent), (self._d_v,)
        sums = bounds.Sums(*self._sums(bounds.output_sums, [(), (), *4 * [per_value]], chosen))
        self._weight_sums[chosen] = sums.grown, sums.lost
        bound = bounds.output_bound(self.results(...), sums, chosen)
        bound[self._beyond] = np.inf
        return self._finish(bound, chosen)

    def lse_bound(self, dtype: str, model: str | Model = "fused", coherent: bool = False) -> Array:
        """The same for the log-sum-exp."""
        chosen = rounding_model(dtype, model, coherent)
        grown, lost = self._sums_of_weights(chosen)
        return self._finish(bounds.lse_bound(self.results(...), grown, lost, chosen), chosen)

    def weights_bound(self, dtype: str, model: str | Model = "fused", coherent: bool = False) -> Array:
        """The same for the weights."""
        import numpy as np

        chosen = rounding_model(dtype, model, coherent)
        grown, lost = self._sums_of_weights(chosen)
        bound = np.zeros((*self._lead, self.k_len))
        for at, keys, block in self.blocks():
            bound[(*at, keys)] = bounds.weights_bound(self.results(at), block, grown[at], lost[at], chosen)
        bound[~bounds.judgeable(self.results(...), grown, chosen)] = np.inf
        return self._finish(bound, chosen)

    def _sum_up(self, weights: bool) -> None:
        """Softmax over one block of keys after the other, each row relative to a level near its largest logit."""
        import numpy as np

        lead = self._lead
        self._nan = np.isnan(self._sinks) | np.isposinf(self._sinks)
        self._sinks = np.where(self._nan, -np.inf, self._sinks)
        self._some, self._largest = np.zeros(lead, dtype=bool), np.full(lead, -np.inf)
        self._reach = np.zeros(lead)
        self._level = np.maximum(self._sinks, np.finfo(np.float64).min)
        total, output = ExactSum(lead), ExactSum((*lead, self._d_v))
        total.add(..., 0.0, np.exp(self._sinks - self._level))
        up, down = (np.zeros((*lead, self._d_v), dtype=bool) for _ in range(2))
        kept = np.full((*lead, self.k_len), -np.inf) if weights else None
        for at, keys, block in self.blocks():
            v = bounds.finite(block.v)
            with np.errstate(over="ignore", invalid="ignore"):
                top, level = np.max(block.logits, axis=-1), self._level[at]
                # The level follows steps of more than 1 alone: what was shifted n times lies n - 1 or more below it,
                # and exp() of such a distance, taken at once, rounds as often.
                raised = np.where(top > level + 1, top, level)
                shift, grown = np.exp(level - raised), block.logits - raised[:, None]
                np.exp(grown, out=grown)
                total.add(at, shift, np.sum(grown, axis=-1))
                output.add(at, shift[:, None], grown @ v)
            self._reach[at] = np.maximum(self._reach[at], bounds.reach(block, self._scale))
            self._some[at], self._level[at] = True, raised
            self._largest[at] = np.maximum(self._largest[at], top)
            if v is not block.v:
                seen = block.visible.astype(np.float64)
                up[at] |= seen @ (np.isnan(block.v) | np.isposinf(block.v)) > 0
                down[at] |= seen @ (np.isnan(block.v) | np.isneginf(block.v)) > 0
            if kept is not None:
                kept[(*at, keys)] = block.logits

        self._nan = self._nan | self._broken()
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            lse = self._level + np.log(total.value)
            self._total = np.where(self._nan | (total.value == 0), 1.0, total.value)
            quotient = output.value / self._total[..., None]
        self._lse, self._output = np.where(self._nan, 0.0, lse), bounds.finite(quotient)
        poison = np.where(up & down, np.nan, np.where(up, np.inf, np.where(down, -np.inf, 0.0)))
        self._beyond = ~np.isfinite(quotient) & (poison == 0) & ~self._nan[..., None]  # float64 itself overflowed
        shown = np.where(poison == 0, quotient, poison)  # whatever the weight (M20)
        self.output = self._trim(np.where(self._nan[..., None], np.nan, shown))
        self.lse = self._trim(np.where(self._nan, np.nan, lse))
        self.weights: Array = None if kept is None else self._trim(self._normalised(kept))

    def _broken(self) -> Array:
        """Which rows a NaN, an infinity, or logits of -inf alone make NaN (M20, M21, P7)."""
        import numpy as np

        nothing = np.isneginf(self._largest) & np.isneginf(self._sinks)  # to divide by
        return (self._some & nothing) | np.isnan(self._largest) | np.isposinf(self._largest)

    def _normalised(self, logits: Array) -> Array:
        """The weights of logits (..., H, R, Lk), in their place."""
        import numpy as np

        logits[self._nan] = np.nan
        logits -= self._level[..., None]
        np.exp(logits, out=logits)
        logits /= self._total[..., None]
        return logits

    @property
    def is_nan(self) -> Array:
        """Which rows are NaN, (..., H, R)."""
        return self._nan

    def visible_pairs(self) -> Array:
        """Boolean, (..., H, R, Lk), whether or not a row is NaN."""
        import numpy as np

        keys = slice(0, self.k_len)
        visible = self._visible(self._rows, keys)
        if self._bias is not None:
            visible = visible & ~np.isneginf(self._bias(self._rows, keys))
        return np.broadcast_to(visible, (*self._lead, self.k_len))

    def _trim(self, x: Array) -> Array:
        return x[0] if self._single else x

    def _finish(self, bound: Array, model: Rounding) -> Array:
        import numpy as np

        bound[self._nan] = 0.0
        bound[self._reach >= model.largest] = np.inf
        if 0 < abs(self._scale) < model.smallest:  # 0 there, and infinity times 0 is NaN
            bound[np.any(np.isinf(self._q), axis=-1)] = np.inf
        return self._trim(bound)

    def results(self, at: Any) -> bounds.Rows:
        """What the bounds read of the rows at an index."""
        return bounds.Rows(
            k_len=self.k_len,
            d_k=self._d_k,
            scale=self._scale,
            softcap=self._softcap,
            some=self._some[at],
            sink=self._sinks[at],
            largest=self._largest[at],
            level=self._level[at],
            total=self._total[at],
            lse=self._lse[at],
            output=self._output[at],
        )

    def _sums_of_weights(self, model: Rounding) -> tuple[Array, Array]:
        """What `bounds.weight_sums` comes to over all keys; `bound` may have summed it up already."""
        if model not in self._weight_sums:
            grown, lost = self._sums(bounds.weight_sums, [(), ()], model)
            self._weight_sums[model] = grown, lost
        return self._weight_sums[model]

    def _sums(self, part: Callable[..., Any], tails: list[tuple[int, ...]], model: Rounding) -> list[Array]:
        """Sums over all keys of what `part` makes of each block: one array (..., H, R, *tail) per tail."""
        import numpy as np

        sums = [np.zeros((*self._lead, *tail)) for tail in tails]
        for at, _, block in self.blocks():
            with np.errstate(over="ignore", invalid="ignore"):
                for whole, x in zip(sums, part(self.results(at), block, model)):
                    whole[at] += x
        return sums

    def blocks(self) -> Iterator[tuple[tuple[Any, ...], slice, bounds.Block]]:
        """Of each block: its rows that see one of its keys and are not NaN, as an index; its keys; exact values."""
        import numpy as np

        if len(self._rows) * self.k_len > ROWS * KEYS:
            np.empty(2**21)  # once freed, makes malloc keep the memory of blocks, which would be mapped anew for each
        row_step = max(ROWS, ROWS * KEYS // max(1, self.k_len))
        for start in range(0, len(self._rows), row_step):
            rows = self._rows[start : start + row_step]
            key_step = max(KEYS, ROWS * KEYS // max(len(rows), self._d_k, self._d_v))
            for first in range(0, self.k_len, key_step):
                keys = slice(first, min(first + key_step, self.k_len))
                shape = (*self._lead[:-1], len(rows), keys.stop - first)
                visible, bias = self._visible(rows, keys), None
                if not np.any(visible):
                    continue
                if self._bias is not None:
                    bias = wide(self._bias(rows, keys))
                    visible = visible & ~np.isneginf(bias)
                    bias = np.broadcast_to(bias, shape)
                visible = np.broadcast_to(visible, shape)
                for index in np.ndindex(*shape[:-2]):
                    nan = self._nan[index][start : start + len(rows)]
                    seen = np.flatnonzero(np.any(visible[index], axis=-1))
                    if not np.all(nan[seen]):
                        at = (*index, start + seen)
                        pairs = [None if x is None else x[index][seen] for x in (visible, bias)]
                        # NaN rows too: of fewer rows a product may round otherwise than it did before they were known.
                        block = self._evaluate(at, keys, *pairs)
                        yield (*index, start + seen[~nan[seen]]), keys, _some_rows(block, ~nan[seen])

    def _evaluate(self, at: tuple[Any, ...], keys: slice, visible: Array, bias: Array | None) -> bounds.Block:
        """One block of rows and keys of one head. Logits are NaN where the key is not finite (M20)."""
        import numpy as np

        kv = (*at[:-2], at[-2] // (self._heads // self._k.shape[-3]))
        q, k, v = wide(self._q[at]), wide(self._k[kv][keys]), wide(self._v[kv][keys])
        finite_q, finite_k = bounds.finite(q), bounds.finite(k)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            scaled = finite_q @ finite_k.T
            if finite_q is not q:  # an infinite query is no key: plain arithmetic says what follows (P7)
                broken = ~np.all(np.isfinite(q), axis=-1)
                scaled[broken] = q[broken] @ finite_k.T
            scaled *= self._scale
            if finite_k is not k:
                scaled[:, ~np.all(np.isfinite(k), axis=-1)] = np.nan
            capped = scaled if self._softcap is None else self._softcap * np.tanh(scaled / self._softcap)
            logits = capped if bias is None else capped + bias
            if not np.all(visible):
                logits = np.where(visible, logits, -np.inf)
        errors = [self._errors[0][at], *(x[kv][keys] for x in self._errors[1:])] if self._errors else None
        return bounds.Block(finite_q, finite_k, v, errors, visible, scaled, capped, bias, logits)


def _some_rows(block: bounds.Block, kept: Array) -> bounds.Block:
    """The block without the other rows."""
    if kept.all():
        return block
    by_row = {name: getattr(block, name) for name in ("q", "visible", "scaled", "capped", "bias", "logits")}
    errors = None if block.errors is None else [block.errors[0][kept], *block.errors[1:]]
    return block._replace(errors=errors, **{name: None if x is None else x[kept] for name, x in by_row.items()})


def _pair_shape(q: Array, k: Array, v: Array) -> tuple[tuple[int, ...], int, int, int]:
    """Batch shape, H, Lq and Lk."""
    import numpy as np

    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return batch, (q.shape[-3] if q.ndim > 2 else 1), q.shape[-2], k.shape[-2]


def _row_indices(rows: Sequence[int], q_len: int) -> Array:
    """rows as an index array. Raises InputsError."""
    import numpy as np

    given = from_list(rows)
    whole = is_host(given) and given.ndim == 1 and (is_integer(given.dtype) or not given.size)
    if not whole or np.any((given < -q_len) | (given >= q_len)):
        raise InputsError("rows", f"indices of query rows, ints from {-q_len} to {q_len - 1}", describe(rows))
    return given.astype(int)
