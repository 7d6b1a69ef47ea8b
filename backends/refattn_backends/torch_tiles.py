"""Tiled attention on PyTorch: its fused kernels where they satisfy the clauses asked for, the generic tiles elsewhere.

What `refattn check torch` finds decides. The kernels let hidden non-finite keys leak (M19, M20), take scales below 0
for broken (S2), lose overflowed rows (P7), misread strides along the width, and know no softcap, sinks or offsets. So
they get finite data that cannot overflow, all keys, keys up to the row, or a mask that leaves no row empty; sinks and
offsets are put around them by merging partials. Data that may not be looked at takes the generic tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.heads import stack_groups
from refattn.mask_kinds import Window
from refattn.partials import Partial, merge_two
from refattn_backends.tiles import cut, finished, identity, spans
from refattn_backends.tiles import tiled as generic

EDGE = 128  # of masked tiles: short, so that little of a band's edge is computed in vain
_aten = torch.ops.aten


def tiled(call: Call) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq), in the compute dtype, sinks included."""
    whole = by_kernel(call)
    return generic(call) if whole is None else finished(call.library, whole, None, call.sinks)


def by_kernel(call: Call) -> Partial | None:
    """The call by fused kernels, without sinks; None where they do not satisfy what is asked."""
    if not _has_sizes(call):
        return None
    if call.answer(*call.tile) == "none":
        return _unreached(call)
    return computed(call) if fits(call) else None


def computed(call: Call) -> Partial:
    """A call that `fits` and shows something, by fused kernels, without sinks."""
    offset = offset_of(call)
    return _masked(call) if offset is None else _shifted(call, offset)


def fits(call: Call) -> bool:
    """Whether the kernels know what is asked, of values that may be looked at and harm none of them."""
    return (
        _has_sizes(call)
        and not torch.compiler.is_compiling()
        and all(may_look(x) and _cuda_can(x) for x in (call.q, call.k, call.v))
        and _harmless(call)
        and (offset_of(call) is not None or (_one_mask(call) and call.q.device.type == "cpu"))
    )


def _has_sizes(call: Call) -> bool:
    return 0 not in call.scores_shape and call.q.shape[-1] > 0 and call.v.shape[-1] > 0


def offset_of(call: Call) -> int | None:
    """The number n such that row i sees the keys up to i + n; None where visibility is no such thing."""
    if call.answer(*call.tile) == "all":
        return len(call.tile[1])
    causal = isinstance(call.mask, Window) and (call.mask.left, call.mask.right) == (None, 0)
    return call.q_start - call.k_start if causal and _is_int(call.q_start) and _is_int(call.k_start) else None


def _is_int(x: Any) -> bool:
    return isinstance(x, int)


def may_look(x: Array) -> bool:
    """Whether the values are there to be looked at: no tracing, no transform, no graph being captured."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type in ("cpu", "cuda")
        and not torch.jit.is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and _python_dispatch._get_current_dispatch_mode() is None
        and forward_ad._current_level < 0
    )


def _cuda_can(x: Array) -> bool:
    """CUDA's kernel takes float32 that it can load several at once; its derivative is not used."""
    if x.device.type == "cpu":
        return True
    fits = x.dtype == torch.float32 and loads_at_once(x) and not torch.is_grad_enabled()
    return bool(fits) and not torch.cuda.is_current_stream_capturing()


def loads_at_once(x: Array) -> bool:
    """Whether every row has a width and a place in memory of whole multiples of eight elements."""
    steps = (x.shape[-1], *x.stride()[:-1], x.data_ptr() // x.element_size())
    return all(step % 8 == 0 for step in steps)


def _harmless(call: Call) -> bool:
    """Whether the kernel knows all the options, and q, k, v are finite and too small to overflow on the way.

    Which of the two ways is taken changes no result beyond the bound.
    """
    if call.bias is not None or call.softcap is not None or not isinstance(call.scale, float) or not call.scale:
        return False
    q, k, v = (largest(x) for x in (call.q, call.k, call.v))
    most = float(torch.finfo(call.compute).max) / 2
    logits = q * k * max(abs(call.scale), 1.0) * call.q.shape[-1]
    return logits <= most and v * call.scores_shape[-1] <= most  # False for NaN


def largest(x: Array) -> float:
    """The largest absolute value; NaN if there is any NaN."""
    low, high = torch.aminmax(x.detach())
    return max(abs(float(low)), abs(float(high)))


def _shifted(call: Call, offset: int) -> Partial:
    """Row i over the keys up to i + offset: those that all rows see, merged with a triangle from the first row on."""
    rows, keys = call.tile
    if offset >= len(keys) - 1:
        return _fused(call, causal=False)
    if offset < 0:  # the first rows see nothing
        empty = identity(cut(call, rows[:-offset], keys, masked=False))
        seeing = _fused(cut(call, rows[-offset:], keys, masked=False), causal=True)
        return Partial(torch.cat((empty.output, seeing.output), -2), torch.cat((empty.lse, seeing.lse), -1))
    if offset == 0:
        return _fused(call, causal=True)
    before = _fused(cut(call, rows, keys[:offset], masked=False), causal=False)
    return merge_two(call.library, before, _fused(cut(call, rows, keys[offset:], masked=False), causal=True))


def _one_mask(call: Call) -> bool:
    """Whether all entries and heads see the same pairs."""
    leads = [] if call.mask is None else [lead for part in call.mask.parts() for lead in part.leads()]
    return _is_int(call.q_start) and _is_int(call.k_start) and all(size == 1 for lead in leads for size in lead)


def _masked(call: Call) -> Partial:
    """Tiles of rows, each over the keys from the first to the last that the mask may show; it enters as a summand."""
    parts = []
    for rows in masked_rows(call):
        if (found := masked_part(call, rows)) is None:
            parts.append(identity(cut(call, rows, range(0), masked=False)))
            continue
        part, summand, some = found
        output, lse = _fused(part, causal=False, summand=summand)
        parts.append(Partial(torch.where(some, output, 0.0), torch.where(some[:, 0], lse, -math.inf)))
    return Partial(*(torch.cat(x, dim=axis) for x, axis in zip(zip(*parts), (-2, -1))))


def masked_rows(call: Call) -> Iterator[range]:
    """The tiles of rows of a masked call."""
    return spans(call.tile[0], max(1, EDGE // call.group))


def masked_part(call: Call, rows: range) -> tuple[Call, Array, Array] | None:
    """A tile of rows over the keys that it may see, what is added to the logits, and which rows (R, 1) see any.

    None where the mask shows nothing of it.
    """
    assert call.mask is not None
    answers = [(keys, call.answer(rows, keys)) for keys in spans(call.tile[1], EDGE)]
    shown = [keys for keys, answer in answers if answer != "none"]
    if not shown:
        return None
    part = cut(call, rows, range(shown[0].start, shown[-1].stop), masked=True)
    visible = call.mask.evaluate(part.frame())
    visible = torch.broadcast_to(visible.reshape(visible.shape[-2:]), part.scores_shape[-2:])
    some = visible.any(dim=-1, keepdim=True)
    # A row that sees nothing gets a row that the kernel can compute, and then its own result.
    return part, torch.zeros(visible.shape, dtype=call.compute).masked_fill(~visible & some, -math.inf), some


def _fused(call: Call, *, causal: bool, summand: Array | None = None) -> Partial:
    """All keys, or the triangle from the top left, by one kernel; key/value heads are never copied (G2).

    summand (Lq, Lk) is added to the logits.
    """
    batch, (heads, rows, _) = call.scores_shape[:-3], call.scores_shape[-3:]
    output, lse = fused(*laid_out(call, causal), causal, summand_of_group(call, summand))
    output = output.reshape(*batch, heads, rows, output.shape[-1])[..., : call.v.shape[-1]]
    return Partial(output, lse.reshape(*batch, heads, rows))


def laid_out(call: Call, causal: bool) -> tuple[Array, Array, Array, float]:
    """q, k and v as the kernel takes them, (B, H, L, d), and the scale, above 0."""
    batch, width, scale = call.scores_shape[:-3], max(call.q.shape[-1], call.v.shape[-1]), call.scale
    k, v = (_widened(x.expand(*batch, *x.shape[-3:]), width) for x in (call.k, call.v))
    if causal and call.group > 1:
        k, v = (x.reshape(-1, 1, *x.shape[-2:]).expand(-1, call.group, -1, -1) for x in (k, v))
    else:
        k, v = (x.reshape(-1, *x.shape[-3:]) for x in (k, v))
    return rows_laid_out(call, -call.q if scale < 0.0 else call.q, causal), k, v, abs(scale)


def rows_laid_out(call: Call, x: Array, causal: bool) -> Array:
    """What belongs to the rows, (..., H, Lq, d), likewise."""
    x = _widened(x.expand(*call.scores_shape[:-3], *x.shape[-3:]), max(call.q.shape[-1], call.v.shape[-1]))
    if causal and call.group > 1:  # a key/value head and its queries as an entry of the batch
        return x.reshape(-1, call.group, *x.shape[-2:])
    x = stack_groups(torch, x, call.group)
    return x.reshape(-1, *x.shape[-3:])


def summand_of_group(call: Call, summand: Array | None) -> Array | None:
    """(Lq, Lk) for the rows of a whole group, (1, 1, G * Lq, Lk)."""
    return None if summand is None else summand.repeat(call.group, 1)[None, None]


def _unreached(call: Call) -> Partial:
    """Nothing is visible, so all results are constant; they stay in autograd's graph, with derivatives 0 (P2)."""
    inputs = call.q.sum() + call.k.sum() + call.v.sum()
    never = torch.zeros((), dtype=torch.bool, device=call.device)
    return Partial(*(torch.where(never, inputs, x) for x in identity(call)))


def _widened(x: Array, width: int) -> Array:
    """x with zeros behind, for kernels that want one width for all, and with its last axis together in memory."""
    if x.shape[-1] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def fused(q: Array, k: Array, v: Array, scale: float, causal: bool, summand: Array | None) -> tuple[Array, Array]:
    """PyTorch's own kernel on (B, H, L, d): output (B, H, Lq, d) and log-sum-exp (B, H, Lq); scale > 0.

    summand (1, 1, Lq, Lk) is for the CPU alone.
    """
    if q.device.type == "cuda":
        made = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return made[0], made[1][..., : q.shape[-2]]
    output, lse = _Fused.apply(q, k, v, scale, causal, summand)
    return output, lse


class _Fused(torch.autograd.Function):  # type: ignore[misc]  # untyped where torch is absent
    """The kernel for the CPU, whose own derivative leaves out the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Array, k: Array, v: Array, scale: float, causal: bool, summand: Array | None
    ) -> tuple[Array, Array]:
        options = {"scale": scale, "attn_mask": summand}
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **options)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.causal, ctx.options = causal, options
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Array | None, grad_lse: Array | None) -> tuple[Array | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: the kernel's derivative has none itself
            return (*_differentiable(ctx, (q, k, v), (grad_output, grad_lse)), None, None, None)
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: list[Array | None] = [None, None, None]
        if grad_output is not None:
            grads = list(backward(grad_output, q, k, v, output, lse, 0.0, ctx.causal, **ctx.options))
        if grad_lse is not None:
            # d lse / d q = scale * weights @ k, and d lse / d k = scale * weights^T @ q: both are the kernel's again.
            weigh = ctx.options["scale"] * grad_lse[..., None]
            mean = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, ctx.causal, **ctx.options)[0]
            to_k = backward(weigh * q, q, k, k, mean, lse, 0.0, ctx.causal, **ctx.options)[2]
            for index, grad in enumerate((weigh * mean, to_k)):
                before = grads[index]
                grads[index] = grad if before is None else before + grad
        return (*grads, None, None, None)


def _differentiable(ctx: Any, inputs: tuple[Array, ...], grads: tuple[Array | None, ...]) -> list[Array | None]:
    """The gradients of q, k and v by products on all pairs, which autograd can differentiate in turn."""
    wanted = ctx.needs_input_grad[:3]
    q, k, v = (x.view_as(x) for x in inputs)  # one tensor may be all three
    scores = torch.matmul(q, k.mT) * ctx.options["scale"]
    if ctx.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if ctx.options["attn_mask"] is not None:
        scores = scores + ctx.options["attn_mask"]
    lse = torch.logsumexp(scores, -1)
    output = torch.matmul(torch.exp(scores - lse[..., None]), v)
    given = [(x, grad) for x, grad in zip((output, lse), grads, strict=True) if grad is not None]
    by = [x for x, want in zip((q, k, v), wanted, strict=True) if want]
    outputs, directions = zip(*given, strict=True)
    found = iter(torch.autograd.grad(outputs, by, directions, create_graph=True, allow_unused=True))
    return [next(found) if want else None for want in wanted]
