"""jax.nn.dot_product_attention, (batch, tokens, heads, width), on its implementation xla."""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.targets.base import Answer, library_backend
from refattn.conformance.targets.rank4 import Rank4Target
from refattn.dtypes import LOW


class JaxTarget(Rank4Target):
    """It has no soft cap and no sinks; mask, bias and is_causal combine."""

    features = frozenset({"causal", "mask", "bias", "scale", "gqa", "q_start", "k_start", "lse"})
    corner = "top-left"
    own_value_width = False
    causal_with_mask = mask_with_bias = True
    windows = "both"

    def __init__(self, name: str = "jax") -> None:
        super().__init__(library_backend("jax"))
        self.name = name

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call, with the log-sum-exp that it calls the residual."""
        import jax

        self.refuse(problem)
        own = self.own_causal(problem)
        options: dict[str, Any] = {"scale": problem.scale, "is_causal": own}
        if problem.literal and problem.window is not None:
            options["local_window_size"] = problem.window
        elif problem.shown is not None or (problem.causal and not own):
            options["mask"] = self.boolean(problem, causal=not own)
        if problem.bias is not None:
            options["bias"] = self.argument("bias", problem, lambda bias: self.pairs(bias, problem))
        tokens = [x.swapaxes(1, 2) for x in (q, k, v)]
        options["implementation"] = "xla"
        # In 16 bits the residual has 16 bits too, which would be all that is ever said: asked for where it matters.
        if problem.dtype in LOW and "lse" not in problem.asks:
            return Answer(jax.nn.dot_product_attention(*tokens, **options).swapaxes(1, 2))
        output, lse = jax.nn.dot_product_attention(*tokens, **options, return_residual=True)
        return Answer(output.swapaxes(1, 2), lse.swapaxes(1, 2))
