"""xformers.ops.memory_efficient_attention, whose causal rule and windows are objects, and whose grouped heads are 5-D.

It is called through its form that returns the log-sum-exp too, (B, H, tokens), whose last axis may be longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array, library_of
from refattn.conformance.conventions.express import Parts
from refattn.conformance.targets.convention import ConventionTarget

BIAS = "attn_bias"


class XformersTarget(ConventionTarget):
    """LowerTriangularMask and its kin where they say what the problem says, a tensor of all axes elsewhere."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.features = (self.features or frozenset()) | {"gqa", "lse"}

    def expressed(self, parts: Parts) -> dict[str, Any]:
        """An object of xformers for causal and windows alone."""
        options = super().expressed(parts)
        found = self._object(parts)
        return options if found is None else options | {BIAS: found}

    def tensors(self, parts: Parts, q: Array, k: Array, v: Array) -> dict[str, Any]:
        """Grouped heads on two axes, (B, tokens, groups, heads of a group, width), k and v being broadcast."""
        found = super().tensors(parts, q, k, v)
        if "gqa" not in parts.problem.needs:
            return found
        groups = int(k.shape[1])
        inside = int(q.shape[1]) // max(groups, 1)
        for name, x in found.items():
            xp = library_of(x, name).xp
            shape = (*x.shape[:2], groups, inside, x.shape[-1])
            whole = x if name == "query" else xp.broadcast_to(x[..., None, :], shape)
            found[name] = xp.reshape(whole, shape)
        return found

    def arguments(self, parts: Parts, q: Array, k: Array, v: Array) -> dict[str, Any]:
        """A tensor as bias has the groups on an axis of their own, too."""
        options, groups = super().arguments(parts, q, k, v), int(k.shape[1])
        bias: Any = options.get(BIAS)
        if "gqa" in parts.problem.needs and hasattr(bias, "shape") and len(bias.shape) == 4:
            xp, (entries, heads, *pairs) = library_of(bias, BIAS).xp, bias.shape
            options[BIAS] = xp.reshape(bias, (entries, groups, heads // groups, *pairs))
        return options

    def result(self, returned: Any, position: int) -> Any:
        """Heads on one axis again, and the log-sum-exp of the queries that there are."""
        x = super().result(returned, position)
        if position == 0 and getattr(x, "ndim", 0) == 5:
            return library_of(x, "output").xp.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4]))
        if position == 1 and getattr(x, "ndim", 0) == 4:
            x = library_of(x, "lse").xp.reshape(x, (x.shape[0], x.shape[1] * x.shape[2], x.shape[3]))
        if position == 1 and getattr(x, "ndim", 0) == 3:
            q_len = int(returned[0].shape[1])
            return x[..., :q_len]
        return x

    def _object(self, parts: Parts) -> Any:
        """The mask as an object; None where there is no such one."""
        from xformers.ops.fmha import attn_bias

        problem = parts.problem
        named = parts.shown is None or (problem.window is not None and parts.counts is None)
        if parts.bias is not None or not named or not (problem.causal or problem.window):
            return None
        bottom_right = parts.offset is not None and bool(np.all(parts.offset == parts.k_len - parts.q_len))
        top_left = parts.offset is None or bool(np.all(parts.offset == 0))
        left, right = problem.window or (None, None)
        if problem.window is None:
            if bottom_right and parts.k_len != parts.q_len:
                return attn_bias.LowerTriangularFromBottomRightMask()
            return attn_bias.LowerTriangularMask() if top_left else None
        if not bottom_right or left is None:
            return None
        if problem.causal or right == 0:  # the size counts the query's own key
            return attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
        return None if right is None else attn_bias.LocalAttentionFromBottomRightMask(left, right)
