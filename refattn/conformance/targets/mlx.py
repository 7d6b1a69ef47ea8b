"""mlx.core.fast.scaled_dot_product_attention on the CPU."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.rank4 import Rank4Target
from refattn.dtypes import COMPUTED


class MlxArrays:
    """MLX's arrays on the CPU, for a target."""

    name = "mlx"
    dtypes = COMPUTED
    capabilities = frozenset(COMPUTED)

    def version(self) -> str:
        """The library's version."""
        return importlib.metadata.version("mlx")

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a host array; by way of float64, which MLX has on the CPU alone."""
        import mlx.core as mx

        if dtype is None:
            return mx.array(host)
        return mx.array(np.asarray(host, dtype=np.float64), dtype=mx.float64).astype(getattr(mx, dtype))

    def host(self, x: Array) -> Array:
        """The values as float64."""
        import mlx.core as mx

        return np.array(x.astype(mx.float64))


class MlxTarget(Rank4Target):
    """A mask is boolean, or floating and added; "causal" is aligned bottom-right."""

    features = frozenset({"causal", "mask", "bias", "scale", "sinks", "gqa", "q_start", "k_start"})
    corner = "bottom-right"

    def __init__(self, name: str = "mlx") -> None:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        super().__init__(MlxArrays())
        self.name = name

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call; the scale has no default."""
        import mlx.core as mx

        self.refuse(problem)
        mask: Any = None
        if problem.bias is not None:
            mask = self.additive(problem, causal=True)
        elif problem.shown is None and self.own_causal(problem):
            mask = "causal"
        elif problem.causal or problem.shown is not None:
            mask = self.boolean(problem, causal=True)
        scale = (problem.q.shape[-1] or 1) ** -0.5 if problem.scale is None else problem.scale
        sinks = None if problem.sinks is None else self.argument("sinks", problem)
        return Answer(mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks))

    def expanded(self, x: Array, shape: tuple[int, ...]) -> Array:
        """A broadcast."""
        import mlx.core as mx

        return mx.broadcast_to(x, shape)

    def flipped(self, x: Array) -> Array:
        """A slice with a negative step."""
        return x[..., ::-1, :]
