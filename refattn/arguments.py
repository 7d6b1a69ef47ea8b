"""The one place where the arguments of attention are checked and aligned; every path and wrapper goes through it.

Nothing is computed here but small per-call facts, and nothing is changed (E3). Shape and dtype checks always run;
values are looked at only where they are Python numbers, lists or host NumPy arrays (N3).
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from .arrays import (
    Array,
    Library,
    Shape,
    as_real,
    broadcast_shapes,
    describe,
    device_of,
    has_shape,
    in_rows,
    is_host,
    library_of,
    same_device,
    same_library,
    same_place,
)
from .biases import Bias, as_bias
from .dtypes import COMPUTED, RANGES, compute_dtype, dtype_name, is_float, is_float8
from .errors import (
    CausalError,
    DTypeError,
    PositionError,
    RankError,
    ScaleError,
    ShapeError,
    SinkError,
    SoftcapError,
)
from .frames import Frame, check_start, start_range
from .heads import check_heads
from .masks import Mask, as_mask, causal
from .visibility import ALL, Span


class Call(NamedTuple):
    """One checked call. q, k and v have a head axis and the compute dtype; everything else is ready for use."""

    library: Library
    device: Any
    q: Array  # (..., H, Lq, d_k)
    k: Array  # (..., Hkv, Lk, d_k)
    v: Array  # (..., Hkv, Lk, d_v)
    group: int  # H / Hkv
    scores_shape: Shape  # (..., H, Lq, Lk)
    tile: tuple[range, range]  # the rows and keys that q, k and v hold: all, or those of a tile
    one_head: bool  # rank 2 came in, so the head axis goes again
    compute: Any  # dtype of scores and softmax
    result: Any  # dtype of the output
    scale: Any  # float, or a 0-d array of the compute dtype
    softcap: float | None
    mask: Mask | None  # causal included
    bias: Bias | None
    sinks: Array | None  # (H, 1, 1)
    q_start: Any  # int or (batch..., 1, 1, 1)
    k_start: Any

    def spans(self) -> tuple[Span, Span]:
        """The least and greatest q_start and k_start over the batch, None where values may not be looked at (N3)."""
        return start_range(self.q_start), start_range(self.k_start)

    def answer(self, rows: range, keys: range) -> str:
        """What the mask says of a tile: "all", "none" or "mixed"."""
        return ALL if self.mask is None else self.mask.answer(rows, keys, *self.spans())

    def bias_terms(self) -> tuple[Bias, ...]:
        """The summands of the bias, none without one."""
        return () if self.bias is None else self.bias.terms()

    def frame(self) -> Frame:
        """All pairs of the call, for masks and biases to be evaluated on."""
        frame = Frame(self.library, self.device, tile=self.tile)
        frame.q_start = _in_frame(frame, self.q_start, "q_start")
        frame.k_start = _in_frame(frame, self.k_start, "k_start")
        return frame


def check_call(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    q_start: Any = None,
    k_start: Any = 0,
) -> Call:
    """All argument checks of attention, in reading order, and what they found out."""
    library = library_of(q, "q")
    same_library(library, k, "k")
    same_library(library, v, "v")
    device = device_of(library, q)
    same_device(library, device, k, "k")
    same_device(library, device, v, "v")
    _check_dtypes(q, k, v)
    scores_shape, group = _check_shapes(q, k, v)
    one_head = len(scores_shape) == 2
    scale = _check_scale(scale, q, library, device)
    softcap = _check_softcap(softcap)
    sinks = None if sinks is None else _check_sinks(sinks, scores_shape, library, device)
    bias = None if bias is None else _check_bias(bias, scores_shape, library, device)
    mask = _check_mask(mask, causal, scores_shape, library, device)
    q_start, k_start = _check_starts(q_start, k_start, mask, bias, scores_shape)
    for argument, start in (("q_start", q_start), ("k_start", k_start)):
        same_place(library, device, start, argument)

    xp, result = library.xp, library.xp.float32 if is_float8(q.dtype) else q.dtype  # A4
    more = [] if sinks is None else [sinks]
    for term in () if bias is None else bias.terms():
        more.extend(term.arrays().values())
    compute = compute_dtype(xp, q.dtype, *(x.dtype for x in more))  # A5
    q, k, v = (in_rows(library, xp.astype(x, compute, copy=False)) for x in (q, k, v))
    k = in_rows(library, k, met=q)
    if one_head:
        q, k, v = (x[None, :, :] for x in (q, k, v))
        scores_shape = (1, *scores_shape)
    if sinks is not None:
        sinks = xp.reshape(xp.astype(sinks, compute, copy=False), (-1, 1, 1))
    # Numbers beyond the compute dtype stand for its nearest finite ones: inf * 0 and 0 / 0 would be NaN.
    least, most = RANGES["float64" if compute is xp.float64 else "float32"]
    if isinstance(scale, float):
        scale = min(max(scale, -most), most)
    else:
        scale = xp.astype(scale, compute, copy=False)
    if softcap is not None:
        softcap = min(max(softcap, least), most)
    return Call(
        library,
        device,
        q,
        k,
        v,
        group,
        scores_shape,
        (range(scores_shape[-2]), range(scores_shape[-1])),
        one_head,
        compute,
        result,
        scale,
        softcap,
        mask,
        bias,
        sinks,
        q_start,
        k_start,
    )


def _check_dtypes(q: Array, k: Array, v: Array) -> None:  # A4
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if dtype_name(x.dtype) not in COMPUTED and not is_float8(x.dtype):
            raise DTypeError(argument, f"a dtype out of {', '.join(COMPUTED)} or float8", describe(x))
        if dtype_name(x.dtype) != dtype_name(q.dtype):  # by name: NumPy's byte orders do not matter
            raise DTypeError(argument, f"the dtype of q, {dtype_name(q.dtype)}", describe(x))


def _check_shapes(q: Array, k: Array, v: Array) -> tuple[Shape, int]:
    """The shape of the scores and H / Hkv."""
    if q.ndim < 2:  # A2
        raise RankError("q", "rank 2 or more: (..., H, Lq, d_k), or (Lq, d_k) for one head", describe(q))
    for argument, x in (("k", k), ("v", v)):
        if x.ndim != q.ndim:
            raise RankError(argument, f"the rank of q, {q.ndim}", describe(x))
    if k.shape[-1] != q.shape[-1]:  # A1
        raise ShapeError("k", f"a last axis of d_k = {q.shape[-1]}, as q has", describe(k))
    if v.shape[-2] != k.shape[-2]:
        raise ShapeError("v", f"Lk = {k.shape[-2]} on axis -2, as k has", describe(v))
    pairs = (q.shape[-2], k.shape[-2])
    if q.ndim == 2:
        return pairs, 1
    if v.shape[-3] != k.shape[-3]:
        raise ShapeError("v", f"Hkv = {k.shape[-3]} on axis -3, as k has", describe(v))
    group = check_heads(q.shape[-3], k.shape[-3], "q")  # G1
    batch = broadcast_shapes([tuple(x.shape[:-3]) for x in (q, k, v)], "q, k, v")  # A3
    return (*batch, q.shape[-3], *pairs), group


def _check_scale(scale: Any, q: Array, library: Library, device: Any) -> Any:
    if scale is None:
        d_k = q.shape[-1]
        return 1.0 / math.sqrt(d_k) if d_k else 1.0  # S1, S6, A6
    expected = "a finite real number, or a 0-d floating array of q's library"  # S2
    if has_shape(scale) and not (is_host(scale) and isinstance(scale, numbers.Real)):
        same_library(library, scale, "scale")
        same_device(library, device, scale, "scale")
        if tuple(scale.shape) != () or not is_float(scale.dtype):
            raise ScaleError("scale", expected, describe(scale))
        return scale
    number = as_real(scale)
    if number is None or not math.isfinite(number):
        raise ScaleError("scale", expected, describe(scale))
    return number


def _check_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    number = as_real(softcap)
    if number is None or not 0 < number < math.inf:  # S4
        raise SoftcapError("softcap", "None or a finite real number > 0", describe(softcap))
    return number


def _check_sinks(sinks: Any, scores_shape: Shape, library: Library, device: Any) -> Array:
    same_library(library, sinks, "sinks")
    same_device(library, device, sinks, "sinks")
    shapes = [(), (1,)] if len(scores_shape) == 2 else [(scores_shape[-3],)]  # P3
    if not is_float(sinks.dtype) or tuple(sinks.shape) not in shapes:
        raise SinkError("sinks", f"a floating array of shape {' or '.join(map(str, shapes))}", describe(sinks))
    return sinks


def _check_bias(bias: Any, scores_shape: Shape, library: Library, device: Any) -> Bias:
    checked = as_bias(bias)
    for term in checked.terms():
        for argument, array in term.arrays().items():
            same_library(library, array, argument)
            same_device(library, device, array, argument)
    checked.check(scores_shape)
    return checked


def _check_mask(mask: Any, is_causal: Any, scores_shape: Shape, library: Library, device: Any) -> Mask | None:
    if not isinstance(is_causal, bool):
        raise CausalError("causal", "Python's True or False", describe(is_causal))
    if mask is None:
        return causal() if is_causal else None
    if not isinstance(mask, Mask) and hasattr(mask, "dtype"):
        same_library(library, mask, "mask")
        same_device(library, device, mask, "mask")
    checked = as_mask(mask)
    for part in checked.parts():
        for argument, array in part.arrays().items():
            same_place(library, device, array, argument)
        part.check(scores_shape[:-2], *scores_shape[-2:])
    return checked & causal() if is_causal else checked  # M13


def _check_starts(
    q_start: Any, k_start: Any, mask: Mask | None, bias: Bias | None, scores_shape: Shape
) -> tuple[Any, Any]:
    batch, (q_len, k_len) = scores_shape[:-3], scores_shape[-2:]
    k_start = check_start(k_start, "k_start", batch)
    if q_start is not None:
        return check_start(q_start, "q_start", batch), k_start
    if q_len == k_len and type(k_start) is int and k_start == 0:
        return 0, 0
    for option in (mask, bias):
        if option is not None and option.positional:  # M5
            expected = (
                f"a value, because {option!r} reads positions and Lq = {q_len}, Lk = {k_len}, "
                f"k_start = {k_start}: 0 aligns top-left, Lk - Lq = {k_len - q_len} bottom-right "
                "(for padded batches lengths - Lq)"
            )
            raise PositionError("q_start", expected, "None")
    return 0, k_start


def _in_frame(frame: Frame, start: Any, argument: str) -> Any:
    return start if isinstance(start, int) else frame.per_entry(start, argument)
