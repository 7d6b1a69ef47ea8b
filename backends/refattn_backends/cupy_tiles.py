"""Tiled attention on CuPy: batched products, and one fused elementwise kernel per step of a tile.

Where PyTorch runs on the device too, calls that its fused kernel satisfies are handed over by DLPack, without a copy.
The arithmetic is tested with NumPy in CuPy's place; no device has run it yet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

from refattn.arguments import Call
from refattn.arrays import Array, quiet
from refattn.heads import stack_groups, unstack_groups
from refattn.partials import Partial
from refattn.pipeline import visibility
from refattn_backends.tiles import cut, finished, identity, nowhere, over_keys, spans, stacked
from refattn_backends.tiles import tiled as generic

ROWS, KEYS = 1024, 2048  # a tile of float32 scores is 8 MiB a head


def tiled(call: Call, rows: int = ROWS, keys: int = KEYS, torch: Any = None) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq), in the compute dtype, sinks included.

    torch is PyTorch, if it can take arrays of this device.
    """
    xp = call.library.xp
    if 0 in call.scores_shape or not call.q.shape[-1] or not call.v.shape[-1]:
        return generic(call)
    with quiet(call.library):
        if not bool(xp.all(xp.isfinite(xp.sum(call.k)) & xp.isfinite(xp.sum(call.v)))):
            return generic(call)  # hidden ones must not leak, visible ones must be restored (M19, M20)
        if torch is not None and (handed := _by_torch(torch, call)) is not None:
            return handed
        parts = [_row_tile(call, part, keys) for part in spans(call.tile[0], rows)]
        return finished(call.library, *stacked(call, parts), call.sinks)


def _row_tile(call: Call, rows: range, width: int) -> tuple[Partial, Array]:
    """One tile of rows over all its keys, as `over_keys` gives it."""
    xp, capped, weigh = call.library.xp, _capped(call.library.xp), _weighed(call.library.xp)
    start = identity(cut(call, rows, range(0), masked=False))
    output, peak, total = start.output, start.lse[..., None], xp.zeros_like(start.lse[..., None])
    for keys in spans(call.tile[1], width):
        answer = call.answer(rows, keys)
        if answer == "none":
            continue
        part = cut(call, rows, keys, masked=answer != "all")
        scores = unstack_groups(
            xp, xp.matmul(stack_groups(xp, part.q, call.group), xp.matrix_transpose(part.k)), call.group
        )
        scores = scores * call.scale if call.softcap is None else capped(scores, call.scale, call.softcap)
        visible, summands = visibility(part)
        for summand in summands:
            scores = scores + summand
        if visible is not None:
            scores = xp.where(visible, scores, -float("inf"))
        highest = xp.maximum(peak, xp.max(scores, axis=-1, keepdims=True))
        level = xp.where(highest == -float("inf"), 0.0, highest)
        shrink, weights = xp.exp(peak - level), weigh(scores, level)
        total = total * shrink + xp.sum(weights, axis=-1, keepdims=True)
        product = xp.matmul(stack_groups(xp, weights, call.group), part.v)
        output, peak = output * shrink + unstack_groups(xp, product, call.group), highest
    # Empty, nothing but -inf, NaN, or values that overflowed before the division: the specification tells which.
    if not bool(xp.all(total > 0.0) & xp.all(xp.isfinite(output))):
        return over_keys(call, rows, width)
    return Partial(output / total, (xp.log(total) + peak)[..., 0]), nowhere(call)


def _by_torch(torch: Any, call: Call) -> Partial | None:
    """The call by PyTorch's plugin, if it is one for the fused kernel; None if not."""
    if call.bias is not None or call.softcap is not None or any(part.arrays() for part in _parts(call)):
        return None
    from array_api_compat import torch as xp

    from refattn_backends.torch_tiles import by_kernel

    arrays = {name: torch.from_dlpack(getattr(call, name)) for name in ("q", "k", "v")}
    library = call.library._replace(name="torch", xp=xp, host=False)
    q = arrays["q"]
    with torch.no_grad():
        partial = by_kernel(call._replace(library=library, device=q.device, compute=q.dtype, sinks=None, **arrays))
    if partial is None:
        return None
    whole = Partial(*(call.library.xp.from_dlpack(x.contiguous()) for x in partial))
    return finished(call.library, whole, None, call.sinks)


def _parts(call: Call) -> tuple[Any, ...]:
    return () if call.mask is None else call.mask.parts()


@cache
def torch_on_device() -> Any:
    """PyTorch if it is installed and sees a CUDA device, else None."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


@cache
def _capped(xp: Any) -> Callable[..., Array]:
    """The scaled and capped scores, in one kernel (S3)."""

    def capped(x: Array, scale: Any, cap: float) -> Array:
        return xp.tanh(x * scale / cap) * cap

    return _kernel(xp, capped)


@cache
def _weighed(xp: Any) -> Callable[..., Array]:
    """The exponentials, in one kernel."""

    def weighed(x: Array, level: Array) -> Array:
        return xp.exp(x - level)

    return _kernel(xp, weighed)


def _kernel(xp: Any, function: Callable[..., Array]) -> Callable[..., Array]:
    """The function as one CUDA kernel where the library fuses; as it is elsewhere."""
    fuse = getattr(xp, "fuse", None)
    fused: Callable[..., Array] = function if fuse is None else fuse()(function)
    return fused
