"""The multi-head attention layer as a module of PyTorch: parameters and a state_dict around refattn's own layer.

    from refattn_backends.torch_layer import MultiHeadAttention
    layer = MultiHeadAttention(64, heads=4, causal=True)
    output, weights = layer(x)

Rules of this file:
- The module holds parameters; what it computes is `refattn.multi_head_attention` (chapter L), gradients included.
- Parameters are those of four `nn.Linear`: q_proj, k_proj, v_proj and out_proj, each with `weight` and perhaps `bias`.
  A weight is the transpose of the matrix in `AttentionWeights`, since nn.Linear computes x @ weight.T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refattn import AttentionWeights, LayerResult, Rotary, multi_head_attention
from refattn.arrays import as_int, describe
from refattn.errors import LayerError
from refattn.heads import check_heads

__all__ = ["MultiHeadAttention"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class MultiHeadAttention(nn.Module):  # type: ignore[misc]  # untyped where torch is absent
    """Multi-head attention with trainable parameters (chapter L), tokens second: x is (batch, S, width).

    Parameters
    ----------
    width
        Components of x, and of the output.
    heads, kv_heads
        Query heads, and key/value heads (L2), as many by default.
    d_k, d_v
        Widths of one head's keys and values: width // heads, and d_k, by default.
    context_width
        Components of the context in cross-attention (L3), width by default.
    out_width
        Components of the output, width by default.
    bias
        Whether all four projections have one, 0 at first.
    project
        Whether there is an output projection; without it the heads stay concatenated (L6).
    rope
        A Rotary(style, base, width), with which queries and keys are turned (L4).
    causal
        Whether a call without a cache is causal unless it says otherwise.
    device, dtype
        Those of the parameters.

    Raises LayerError or HeadCountError for sizes that do not fit each other.

    The state_dict has q_proj.weight (heads * d_k, width), k_proj.weight (kv_heads * d_k, context_width), v_proj.weight
    (kv_heads * d_v, context_width), out_proj.weight (out_width, heads * d_v), and `bias` beside each of them.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        context_width: int | None = None,
        out_width: int | None = None,
        bias: bool = False,
        project: bool = True,
        rope: Rotary | None = None,
        causal: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "d_k": d_k, "d_v": d_v}
        for name, size in {**sizes, "context_width": context_width, "out_width": out_width}.items():
            if size is not None and (as_int(size) is None or size < 1):
                raise LayerError(name, "an int >= 1", describe(size))
        check_heads(heads, kv_heads)
        if d_k is None and width % heads:
            raise LayerError("width", f"a multiple of heads = {heads}, or d_k beside it", width)
        if rope is not None and not isinstance(rope, Rotary):
            raise LayerError("rope", "a Rotary(style, base, width)", describe(rope))
        self.heads, self.kv_heads, self.rope, self.causal = heads, kv_heads, rope, causal
        self.d_k = width // heads if d_k is None else d_k
        self.d_v = self.d_k if d_v is None else d_v
        source = width if context_width is None else context_width
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(width, heads * self.d_k, **made)
        self.k_proj = nn.Linear(source, kv_heads * self.d_k, **made)
        self.v_proj = nn.Linear(source, kv_heads * self.d_v, **made)
        self.out_proj = nn.Linear(heads * self.d_v, out_width or width, **made) if project else None
        self.reset_parameters()

    @classmethod
    def from_weights(
        cls,
        weights: AttentionWeights,
        *,
        heads: int,
        kv_heads: int | None = None,
        rope: Rotary | None = None,
        causal: bool = False,
    ) -> MultiHeadAttention:
        """A layer with copies of these parameters, tensors of PyTorch; sizes, device and dtype are theirs.

        Raises what `refattn.multi_head_attention` raises for parameters that do not fit each other.
        """
        if not isinstance(weights, AttentionWeights):
            raise LayerError("weights", "AttentionWeights", describe(weights))
        w_q, w_k, w_v, w_o = weights[:4]
        nothing = [w_q.new_zeros((0, w.shape[0])) for w in (w_q, w_k)]  # no token, on which the core checks
        multi_head_attention(nothing[0], weights, heads=heads, kv_heads=kv_heads, context=nothing[1], rope=rope)
        kv_heads = heads if kv_heads is None else kv_heads
        layer = cls(
            w_q.shape[0],
            heads,
            kv_heads=kv_heads,
            d_k=w_q.shape[1] // heads,
            d_v=w_v.shape[1] // kv_heads,
            context_width=w_k.shape[0],
            out_width=None if w_o is None else w_o.shape[1],
            project=w_o is not None,
            rope=rope,
            causal=causal,
            device=w_q.device,
            dtype=w_q.dtype,
        )
        for name, w, b in zip(PROJECTIONS, weights[:4], weights[4:], strict=True):
            if w is not None:
                linear = getattr(layer, name)
                linear.weight = nn.Parameter(w.detach().T.clone(memory_format=torch.contiguous_format))
                linear.bias = None if b is None else nn.Parameter(b.detach().clone())
        return layer

    @classmethod
    def from_torch(cls, module: Any, *, rope: Rotary | None = None, causal: bool = False) -> MultiHeadAttention:
        """A layer that computes what a torch.nn.MultiheadAttention computes, with copies of its parameters.

        Tokens are second here, whatever its batch_first says. Raises LayerError for what this layer does not have:
        bias_k and bias_v, add_zero_attn, keys and values of different sources, and dropout while it trains.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise LayerError("module", "a torch.nn.MultiheadAttention", describe(module))
        settings = {
            "add_bias_kv": (module.bias_k is not None, False),
            "add_zero_attn": (module.add_zero_attn, False),
            "kdim": (module.kdim, module.vdim),
            "dropout, while it trains": (module.dropout if module.training else 0.0, 0.0),
        }
        for name, (value, wanted) in settings.items():
            if value != wanted:
                raise LayerError(f"module.{name}", str(wanted), value)
        if module.in_proj_weight is not None:
            matrices = module.in_proj_weight.chunk(3)
        else:
            matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        matrices, biases = (*matrices, module.out_proj.weight), (*biases, module.out_proj.bias)
        weights = AttentionWeights(*(w.T for w in matrices), *biases)
        layer = cls.from_weights(weights, heads=module.num_heads, rope=rope, causal=causal)
        layer.train(module.training)
        return layer

    def reset_parameters(self) -> None:
        """Matrices uniform after Glorot and Bengio (2010), biases 0."""
        for name in PROJECTIONS:
            if (linear := getattr(self, name)) is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def as_weights(self) -> AttentionWeights:
        """The parameters as `refattn.multi_head_attention` takes them: views, through which gradients flow."""
        found = [getattr(self, name) for name in PROJECTIONS]
        return AttentionWeights(
            *(None if linear is None else linear.weight.T for linear in found),
            *(None if linear is None else linear.bias for linear in found),
        )

    def pooled(self, kv_heads: int) -> MultiHeadAttention:
        """A new layer whose key/value heads are the means of this one's, in groups: the start of GQA (G4).

        Raises HeadSplitError (G4) unless kv_heads divides their number.
        """
        weights = self.as_weights().pooled(self.kv_heads, kv_heads)
        layer = self.from_weights(weights, heads=self.heads, kv_heads=kv_heads, rope=self.rope, causal=self.causal)
        layer.train(self.training)
        return layer

    def forward(
        self,
        x: Any,
        context: Any = None,
        *,
        causal: bool | None = None,
        cache: Any = None,
        return_weights: bool = True,
        **options: Any,
    ) -> tuple[Any, Any] | LayerResult:
        """Output (batch, S, out_width) and weights (batch, heads, S, Lk) or None; with a cache also the cache.

        mask, positions, counts and the other options are those of `refattn.multi_head_attention`, which raises for
        what does not fit. With a cache, what comes back is a LayerResult(output, weights, cache).
        Under autocast x, the context and the parameters are cast as nn.Linear casts them, and the output is in 16 bits;
        products and softmax are taken in float32 nevertheless (N1).
        """
        parameters = self.as_weights()
        if isinstance(x, torch.Tensor) and _casts_on(x.device):
            x, context, *cast = (_cast(each, x.device) for each in (x, context, *parameters))
            parameters = AttentionWeights(*cast)
        if causal is None and cache is None:
            causal = self.causal
        result = multi_head_attention(
            x,
            parameters,
            heads=self.heads,
            kv_heads=self.kv_heads,
            context=context,
            causal=causal,
            rope=self.rope,
            cache=cache,
            return_weights=return_weights,
            **options,
        )
        return result[:2] if cache is None else result

    def extra_repr(self) -> str:
        """What the projections below it do not say."""
        shown = f"heads={self.heads}, kv_heads={self.kv_heads}, d_k={self.d_k}, d_v={self.d_v}, causal={self.causal}"
        return shown if self.rope is None else f"{shown}, rope={self.rope}"


def _casts_on(device: torch.device) -> bool:
    return bool(torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type))


def _cast(x: Any, device: torch.device) -> Any:
    """What autocast makes of an argument of nn.Linear on this device; float64 stays."""
    if not isinstance(x, torch.Tensor) or x.device != device or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device.type))
