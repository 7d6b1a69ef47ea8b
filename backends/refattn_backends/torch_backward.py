"""The tiled backward pass on PyTorch: its fused kernel for the CPU where `torch_tiles` takes that, else the generic.

The kernel recomputes the weights of whatever keys it is given from the log-sum-exp that it is given. So a call in
pieces, or with sinks, needs nothing around it: each piece gets the output and the log-sum-exp of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.gradients import sink_gradient, summed_to, zero_gradients
from refattn_backends.tiles import cut, finished
from refattn_backends.tiles_backward import tiled_vjp as generic
from refattn_backends.torch_tiles import (
    computed,
    fits,
    laid_out,
    largest,
    masked_part,
    masked_rows,
    may_look,
    offset_of,
    rows_laid_out,
    summand_of_group,
)


def tiled_vjp(call: Call, gradient: Array) -> dict[str, Any]:
    """All gradients in the compute dtype, for that of the output, as `tiles_backward.tiled_vjp` gives them."""
    if not _derivative_fits(call, gradient):
        return generic(call, gradient)
    if call.answer(*call.tile) == "none":
        return zero_gradients(call)
    whole = finished(call.library, computed(call), None, call.sinks)
    found: dict[str, Any] = {name: torch.zeros_like(getattr(call, name)) for name in "qkv"}
    for piece in _pieces(call):
        rows, keys = (slice(part.start, part.stop) for part in piece.call.tile)
        parts = _of_piece(piece, gradient[..., rows, :], whole.output[..., rows, :], whole.lse[..., rows])
        for (name, part), at in zip(parts.items(), (rows, keys, keys), strict=True):
            found[name][..., at, :] += part
    if call.sinks is not None:
        row_sum = (gradient * whole.output).sum(dim=-1, keepdim=True)
        found["sinks"] = sink_gradient(call, call.sinks, whole.lse[..., None], row_sum)
    return {**found, "bias": []}


def _derivative_fits(call: Call, gradient: Array) -> bool:
    """Whether the kernel may: nobody differentiates this in turn, and nothing is infinite or overflows on the way."""
    given = (call.q, call.k, call.v, gradient, *(() if call.sinks is None else (call.sinks,)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    if call.q.device.type != "cpu" or not may_look(gradient) or not fits(call):
        return False
    if call.sinks is not None and not bool((call.sinks < math.inf).all()):
        return False  # its rows are NaN, which the kernel would spread to keys that they do not see
    q, k, v, g = (largest(x) for x in (call.q, call.k, call.v, gradient))
    product = 2 * g * v * call.v.shape[-1] * max(1.0, abs(call.scale) * max(q, k))
    rows = call.scores_shape[-2] * call.group
    return bool(max(product, g) * rows <= float(torch.finfo(call.compute).max) / 2)  # False for NaN


class _Piece(NamedTuple):
    """A part of a call that one kernel computes."""

    call: Call
    causal: bool
    summand: Array | None = None  # (R, K)
    some: Array | None = None  # (R, 1): which rows see a key, None for all


def _pieces(call: Call) -> Iterator[_Piece]:
    """All that is visible, each pair once."""
    rows, keys = call.tile
    offset = offset_of(call)
    if offset is None:
        for part in masked_rows(call):
            if (found := masked_part(call, part)) is not None:
                yield _Piece(found[0], False, *found[1:])
        return
    rows = rows[max(0, -offset) :]  # earlier ones see nothing
    before = keys if offset >= len(keys) - 1 else keys[: max(0, offset)]
    for part, causal in ((before, False), (keys[len(before) :], True)):
        if part and rows:
            yield _Piece(cut(call, rows, part, masked=False), causal)


def _of_piece(piece: _Piece, gradient: Array, output: Array, lse: Array) -> dict[str, Array]:
    """The gradients of q, k and v of a piece; gradient, output and lse are those of its rows over all keys."""
    call, causal, some = piece.call, piece.causal, piece.some
    if some is not None:  # a log-sum-exp with which others have weight 0
        lse = torch.where(some[:, 0], lse, torch.finfo(lse.dtype).max)
    q, k, v, scale = laid_out(call, causal)
    rows = (rows_laid_out(call, x, causal) for x in (gradient, output))
    level = lse.reshape(q.shape[:-1])
    grad_output, whole = (x.contiguous() for x in rows)
    summand = summand_of_group(call, piece.summand)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, of_k, of_v = backward(grad_output, q, k, v, whole, level, 0.0, causal, attn_mask=summand, scale=scale)
    if causal and call.group > 1:  # a key/value head served each of its group
        of_k, of_v = (x.sum(dim=1) for x in (of_k, of_v))
    batch = call.scores_shape[:-3]
    of_q = of_q.reshape(*batch, *call.q.shape[-3:-1], of_q.shape[-1])
    of_k, of_v = (x.reshape(*batch, *call.k.shape[-3:-1], x.shape[-1]) for x in (of_k, of_v))
    found = {"q": -of_q if call.scale < 0.0 else of_q, "k": of_k, "v": of_v}
    shapes = {name: tuple(getattr(call, name).shape) for name in found}
    return {name: summed_to(torch, x[..., : shapes[name][-1]], shapes[name]) for name, x in found.items()}
