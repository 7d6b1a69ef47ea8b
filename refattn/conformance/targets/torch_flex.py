"""torch.nn.attention.flex_attention on CPU tensors, not compiled: masks by mask_mod, bias and soft cap by score_mod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import Answer, library_backend
from refattn.conformance.targets.rank4 import Rank4Target


class TorchFlexTarget(Rank4Target):
    """It has no causal flag and no sinks, and its masks are functions.

    Scores come to score_mod scaled, so that cap and bias follow in order.
    """

    has_causal = False
    mask_with_bias = True
    features = frozenset({"causal", "mask", "bias", "scale", "softcap", "gqa", "q_start", "k_start", "lse"})

    def __init__(self, name: str = "torch-flex") -> None:
        super().__init__(library_backend("torch"))
        self.name = name

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call with a block mask of the visible pairs and a score_mod of cap and bias, where there are any."""
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        self.refuse(problem)
        if problem.literal and problem.shown is not None and problem.shown.ndim == 3:
            raise Unsupported(f"{self.name} asks a function about each pair, and takes no mask of any rank")
        options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": "gqa" in problem.needs}
        (batch, heads, q_len, _), k_len = problem.q.shape, problem.k.shape[-2]
        if (seen := self.boolean(problem, causal=True)) is not None and (problem.causal or problem.shown is not None):
            options["block_mask"] = create_block_mask(
                lambda b, h, i, j: seen[b, h, i, j], batch, heads, q_len, k_len, device="cpu"
            )
        options["score_mod"] = self._score_mod(problem)
        output, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return Answer(output, aux.lse)

    def pairs(self, values: Array, problem: Problem) -> Array:
        """In full always: the functions of indices that ask for them have all four."""
        return super().pairs(values, replace(problem, literal=False))

    def _score_mod(self, problem: Problem) -> Any:
        """Cap, then bias (S5); None for neither."""
        import torch

        cap = problem.softcap
        bias = None
        if problem.bias is not None:
            bias = self.argument("bias", problem, lambda bias: self.pairs(bias, problem))
        if cap is None and bias is None:
            return None

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            return score if bias is None else score + bias[b, h, i, j]

        return score_mod
