"""Functions of refattn's convention and their backward functions, for `refattn check --gradients` to judge."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import library_of
from refattn.conformance.faults import named
from refattn.conformance.faults.backward import Backward
from refattn.conformance.faults.fault import Fault

Array = Any
_RIGHT = Fault(name="right", clause="D1", kind="", base=Backward, backward=True)
attend = _RIGHT.attention()
backward = _RIGHT.gradients()
no_slope = named("no slope of the cap").gradients()
no_row_sum = named("row sum missing").gradients()


def causal_softmax(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> Array:
    """Attention in a few lines that any library of tensors differentiates; the rest it does not know."""
    if q.shape[:-2] != k.shape[:-2]:
        raise NotImplementedError("heads in groups")
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = scores.shape[-2:]
        scores = scores + library_of(q, "q").xp.asarray(np.triu(np.full((rows, keys), -1e30), 1), dtype=q.dtype)
    weights = (scores - scores.max(-1)[0][..., None]).exp()
    return weights / weights.sum(-1, keepdims=True) @ v


def detached(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> Array:
    """The same, but no gradient reaches the keys."""
    return causal_softmax(q, k.detach(), v, causal=causal, scale=scale)


def three(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v alone."""
    found = backward(q, k, v, grad_output, **options)
    return found["q"], found["k"], found["v"]


def swapped(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> tuple[Array, Array, Array]:
    """Those of k and v in the wrong order."""
    found = backward(q, k, v, grad_output, **options)
    return found["q"], found["v"], found["k"]


def knows_no_sinks(q: Array, k: Array, v: Array, grad_output: Array, *, causal: bool = False) -> Any:
    """A backward function with fewer options than the function has."""
    return backward(q, k, v, grad_output, causal=causal)


def returns_nothing(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> None:
    """A backward function that stores its results elsewhere."""
