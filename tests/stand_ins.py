"""Functions with the signatures of other libraries, built from refattn on torch tensors; each can be built wrong.

They say nothing about the libraries themselves: they show that a target calls by the documented convention, and that
one which does not keep to it is caught.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import refattn
from refattn import masks


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    start: int,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    mask: Any = None,
    bias: Any = None,
    slopes: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """refattn's output and log-sum-exp of (..., H, tokens, width)."""
    if window != (None, None):
        pairs = masks.window(*window)
        mask = pairs if mask is None else pairs & masks.dense(mask)
    if slopes is not None:
        import torch

        rows = torch.arange(q.shape[-2])[:, None] + start
        distance = (rows - torch.arange(k.shape[-2])[None, :]).abs()
        bias = slopes[:, None, None] * -distance.to(torch.float32)
    options: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    return refattn.attention_with_lse(q, k, v, causal=causal, q_start=start, **options)


def _heads_first(*tensors: Any) -> tuple[Any, ...]:
    return tuple(x.transpose(-2, -3) for x in tensors)


def _side(size: int, extra: int) -> int | None:
    return None if size < 0 else size + extra


def flash_attn(
    *, align: str = "bottom-right", extra: int = 0, half_scale: bool = False, heads_first: bool = False
) -> types.ModuleType:
    """A module flash_attn; the arguments plant another alignment, a wider window, half the scale, another layout."""
    import torch

    def one(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        if q.dtype not in (torch.float16, torch.bfloat16) or (q.numel() and q.stride(-1) != 1):
            raise RuntimeError("only fp16 and bf16, with a contiguous last dimension")
        q, k, v = _heads_first(q, k, v)
        start = k.shape[-2] - q.shape[-2] if align == "bottom-right" else 0
        left, right = (_side(side, extra) for side in options["window_size"])
        scale = options["softmax_scale"]
        if half_scale:
            scale = (q.shape[-1] ** -0.5 if scale is None else scale) * 0.5
        output, lse = attend(
            *(q, k, v),
            start=start,
            causal=options["causal"],
            window=(left, right),
            slopes=options["alibi_slopes"],
            scale=scale,
            softcap=options["softcap"] or None,
        )
        return (output if heads_first else output.transpose(-2, -3)), lse

    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        output, lse = one(q, k, v, locals())
        return (output, lse, None) if return_attn_probs else output

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Any:
        options, parts = locals(), []
        for name, cumulative, most in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
            assert cumulative.dtype == torch.int32 and most == max(cumulative.diff().tolist(), default=0), name
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
            parts.append(one(q[q0:q1], k[k0:k1], v[k0:k1], options))
        parts = parts or [one(q, k, v, options)]
        output, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], dim=-1)
        return (output, lse, None) if return_attn_probs else output

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def flashinfer(
    *, base: float = 2.0, align: str = "bottom-right", extra: int = 0, hides: bool = False
) -> types.ModuleType:
    """A module flashinfer; the arguments plant another base, alignment, window, or polarity of masks."""

    def single_prefill_with_kv_cache(
        q: Any,
        k: Any,
        v: Any,
        scale_q: Any = None,
        scale_k: Any = None,
        scale_v: Any = None,
        o_dtype: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        kv_layout: str = "NHD",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        backend: str = "auto",
        return_lse: bool = False,
    ) -> Any:
        if q.ndim != 3 or q.shape[-1] not in (64, 128, 256) or v.shape[-1] not in (64, 128, 256):
            raise ValueError(f"unsupported shapes {tuple(q.shape)}, {tuple(v.shape)}")
        if kv_layout != "NHD":
            raise ValueError(kv_layout)
        q, k, v = _heads_first(q, k, v)
        mask = custom_mask if custom_mask is None or not hides else ~custom_mask
        output, lse = attend(
            *(q, k, v),
            start=k.shape[-2] - q.shape[-2] if align == "bottom-right" else 0,
            causal=causal and custom_mask is None,
            window=(_side(window_left, extra), None),
            mask=mask,
            scale=sm_scale,
            softcap=logits_soft_cap,
        )
        output, lse = output.transpose(-2, -3).contiguous(), lse.transpose(-1, -2) / math.log(base)
        return (output, lse) if return_lse else output

    module = types.ModuleType("flashinfer")
    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache  # type: ignore[attr-defined]
    return module


def xformers(
    *, extra: int = 0, swaps_corners: bool = False, adds_to_scaled: bool = True
) -> dict[str, types.ModuleType]:
    """Modules of xformers; the arguments plant a wider window, swapped corners, and a bias that is scaled too."""
    import torch

    class LowerTriangularMask:
        corner, window = "top-left", (None, 0)

    class LowerTriangularFromBottomRightMask:
        corner, window = "bottom-right", (None, 0)

    class LowerTriangularFromBottomRightLocalAttentionMask:
        corner = "bottom-right"

        def __init__(self, window_size: int) -> None:
            self.window = (window_size - 1 + extra, 0)

    class LocalAttentionFromBottomRightMask:
        corner = "bottom-right"

        def __init__(self, window_left: int, window_right: int) -> None:
            self.window = (window_left + extra, window_right)

    kinds = (
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask,
        LocalAttentionFromBottomRightMask,
    )

    def memory_efficient_attention_forward_requires_grad(
        query: Any,
        key: Any,
        value: Any,
        attn_bias: Any = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: Any = None,
    ) -> Any:
        shape = query.shape
        if key.shape[2:-1] != shape[2:-1] or query.ndim not in (4, 5):
            raise ValueError("broadcasting is not supported")
        heads = math.prod(shape[2:-1])
        q, k, v = (x.reshape(*x.shape[:2], heads, x.shape[-1]).transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = {"start": 0, "scale": scale}
        if isinstance(attn_bias, kinds):
            if (attn_bias.corner == "bottom-right") != swaps_corners:
                options["start"] = k.shape[-2] - q.shape[-2]
            options["window"] = attn_bias.window
        elif attn_bias is not None:
            if tuple(attn_bias.shape) != (shape[0], *shape[2:-1], shape[1], key.shape[1]):
                raise ValueError(f"invalid shape for attention bias: {tuple(attn_bias.shape)}")
            bias = attn_bias.reshape(shape[0], heads, shape[1], key.shape[1])
            options["bias"] = bias if adds_to_scaled else bias * (scale or shape[-1] ** -0.5)
        output, lse = attend(q, k, v, **options)
        if query.ndim == 5:
            lse = lse.reshape(shape[0], *shape[2:-1], shape[1])
        padded = torch.full((*lse.shape[:-1], lse.shape[-1] + 3), float("inf"), dtype=lse.dtype)
        padded[..., : lse.shape[-1]] = lse
        return output.transpose(1, 2).reshape(*shape[:-1], value.shape[-1]), padded

    ops, fmha, bias = (types.ModuleType(f"xformers.ops{tail}") for tail in ("", ".fmha", ".fmha.attn_bias"))
    ops.memory_efficient_attention_forward_requires_grad = (  # type: ignore[attr-defined]
        memory_efficient_attention_forward_requires_grad
    )
    for kind in kinds:
        setattr(bias, kind.__name__, kind)
    fmha.attn_bias = bias  # type: ignore[attr-defined]
    return {
        "xformers": types.ModuleType("xformers"),
        "xformers.ops": ops,
        ops.__name__ + ".fmha": fmha,
        bias.__name__: bias,
    }


def cudnn(*, align: str = "top-left", extra: int = 0, lengths_are_indices: bool = False) -> Callable[..., Any]:
    """jax.nn.dot_product_attention in its cuDNN form; the arguments plant an alignment, a window, a length."""
    import jax.numpy as jnp

    def dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        *,
        scale: Any = None,
        is_causal: bool = False,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        local_window_size: Any = None,
        implementation: Any = None,
        return_residual: bool = False,
    ) -> Any:
        if implementation != "cudnn" or value.shape != key.shape:
            raise ValueError("key and value of one shape, on cudnn")
        q, k, v = (jnp.swapaxes(x, -2, -3) for x in (query, key, value))
        window: tuple[int | None, int | None] = (None, None)
        if local_window_size is not None:
            if local_window_size[1] != 0:
                raise ValueError("a right window is not supported")
            window = (local_window_size[0] + extra, 0)
        if key_value_seq_lengths is not None:
            counts = key_value_seq_lengths[:, None, None, None] + lengths_are_indices
            shown = jnp.arange(k.shape[-2]) < counts
            mask = shown if mask is None else shown & mask
        start = k.shape[-2] - q.shape[-2] if align == "bottom-right" else 0
        output, lse = attend(q, k, v, start=start, causal=is_causal, window=window, mask=mask, bias=bias, scale=scale)
        output, lse = jnp.swapaxes(output, -2, -3), jnp.swapaxes(lse, -1, -2)
        return (output, lse) if return_residual else output

    return dot_product_attention
