"""torch.nn.functional.scaled_dot_product_attention on CPU tensors, called as its documentation says."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import Answer, ArrayTarget, library_backend


class TorchTarget(ArrayTarget):
    """The function has no soft cap, no sinks, no log-sum-exp; positions enter as an explicit boolean mask."""

    features = frozenset({"causal", "mask", "bias", "scale", "gqa", "q_start", "k_start"})

    def __init__(self, name: str = "torch", kernel: str = "") -> None:
        super().__init__(library_backend("torch"))
        self.name, self._kernel = name, kernel

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call, on the kernel that the name asks for."""
        import torch

        with self.on_kernel():
            return Answer(torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.options(problem)))

    def on_kernel(self) -> AbstractContextManager[Any]:
        """Where only the named kernel may run; anywhere without a name."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kernels = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
        return sdpa_kernel(kernels[self._kernel]) if self._kernel else contextlib.nullcontext()

    def options(self, problem: Problem) -> dict[str, Any]:
        """is_causal where it says what the problem says, else attn_mask: boolean, or floating if there is a bias."""
        options: dict[str, Any] = {}
        if problem.scale is not None:
            options["scale"] = problem.scale
        if "gqa" in problem.needs:
            options["enable_gqa"] = True
        # is_causal is documented as aligned top-left, and not to be used together with attn_mask.
        top_left = "k_start" not in problem.needs and (
            problem.q_start is None or (isinstance(problem.q_start, int) and problem.q_start == 0)
        )
        if problem.literal:
            options |= self._literal(problem)
        elif problem.causal and top_left and problem.shown is None and problem.bias is None:
            options["is_causal"] = True
        elif problem.bias is not None:
            seen = problem.visible
            options["attn_mask"] = self.argument(
                "bias", problem, lambda bias: _in_full(np.where(seen, bias, -np.inf), problem)
            )
        elif problem.causal or problem.shown is not None:
            options["attn_mask"] = self.array(_in_full(problem.visible, problem))
        return options

    def _literal(self, problem: Problem) -> dict[str, Any]:
        """is_causal and attn_mask as the options of these names, each on its own, together too."""
        if problem.q_start is not None or "k_start" in problem.needs:
            raise Unsupported("torch has no positions of its own")
        if problem.shown is not None and problem.bias is not None:
            raise Unsupported("torch has one attn_mask, boolean or floating")
        if problem.window is not None:
            raise Unsupported("torch has no windows of its own")
        options: dict[str, Any] = {"is_causal": True} if problem.causal else {}
        if problem.shown is not None:
            options["attn_mask"] = self.array(problem.shown)
        if problem.bias is not None:
            options["attn_mask"] = self.argument("bias", problem)
        return options


def _in_full(pairs: Array, problem: Problem) -> Array:
    """A mask in the rank of q, so that no leading axis can be misread."""
    pairs = pairs.reshape((1,) * (problem.q.ndim - pairs.ndim) + pairs.shape)
    shape = (*pairs.shape[:-2], problem.q.shape[-2], problem.k.shape[-2])
    return np.broadcast_to(pairs, shape).copy()
