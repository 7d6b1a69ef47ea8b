"""torch.nn.MultiheadAttention whose four projections are the identity, so that the layer is its attention alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import Answer, library_backend
from refattn.conformance.targets.rank4 import Rank4Target


class TorchLayerTarget(Rank4Target):
    """Its masks hide where they are True, and its is_causal is a hint about a mask.

    `weights` asks for the weights of each head, which takes another path.
    """

    own_value_width = has_causal = False

    def __init__(self, name: str = "torch-mha", weights: bool = False) -> None:
        super().__init__(library_backend("torch"))
        self.name, self._weights = name, weights
        own = {"weights"} if weights else set()
        self.features = frozenset({"causal", "mask", "bias", "q_start", "k_start", *own})

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call of a layer in eval mode, on tokens whose width is that of all heads together."""
        self.refuse(problem)
        if not all(np.all(np.isfinite(x)) for x in (problem.q, problem.k, problem.v)):
            raise Unsupported(f"{self.name} cannot express non-finite data, which its projections would spread")
        batch, heads, q_len, width = problem.q.shape
        if not width or not heads:
            raise Unsupported(f"{self.name} cannot express a width or head count of zero")
        layer = self._layer(heads, width, q.dtype)
        tokens = [x.transpose(1, 2).reshape(x.shape[0], x.shape[2], heads * width) for x in (q, k, v)]
        mask: Any = None
        if problem.literal and problem.shown is not None:
            mask = self.array(problem.shown)
        elif problem.bias is not None:
            mask = self.additive(problem, causal=True)
        elif problem.causal or problem.shown is not None:
            mask = ~self.boolean(problem, causal=True)
        if mask is not None and not problem.literal:
            mask = mask.reshape(batch * heads, q_len, problem.k.shape[-2])
        output, weights = layer(*tokens, attn_mask=mask, need_weights=self._weights, average_attn_weights=False)
        return Answer(output.reshape(batch, q_len, heads, width).transpose(1, 2), weights=weights)

    def _layer(self, heads: int, width: int, dtype: Any) -> Any:
        import torch

        layer = torch.nn.MultiheadAttention(heads * width, heads, bias=False, batch_first=True, dtype=dtype).eval()
        one = torch.eye(heads * width, dtype=dtype)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([one, one, one]))
            layer.out_proj.weight.copy_(one)
        return layer.requires_grad_(False)
