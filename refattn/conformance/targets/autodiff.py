"""The gradients that a library's own differentiation takes of a function: torch's autograd, jax.vjp and mlx's vjp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refattn.arrays import Array

# Libraries that differentiate.
LIBRARIES = ("torch", "jax", "mlx")


def differentiated(
    library: str, function: Callable[[dict[str, Array]], Array], arrays: dict[str, Array], gradient: Array
) -> tuple[Array, dict[str, Array]]:
    """function(arrays), and the gradients of sum(gradient * function(arrays)) by each of the arrays, by name.

    That of an array that the result does not depend on is 0.
    """
    if library == "jax":
        import jax

        output, pull = jax.vjp(function, arrays)
        return output, pull(gradient)[0]
    if library == "mlx":
        import mlx.core as mx

        (output,), pulled = mx.vjp(lambda *given: function(dict(zip(arrays, given))), [*arrays.values()], [gradient])
        return output, dict(zip(arrays, pulled))
    import torch

    leaves = {name: x.detach().requires_grad_() for name, x in arrays.items()}
    with torch.enable_grad():
        output = function(leaves)
        found: Any = torch.autograd.grad(output, list(leaves.values()), gradient, allow_unused=True)
    zeros = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(leaves.values(), found)]
    return output.detach(), dict(zip(leaves, zeros))
