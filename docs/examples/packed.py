"""A kernel that no convention describes: queries, keys and values come in one tensor. And its target."""

import numpy as np

from refattn.conformance.case import Unsupported
from refattn.conformance.targets.base import Answer, ArrayTarget, library_backend


def attend_packed(qkv, causal):
    """qkv (B, S, 3, H, D) -> (B, S, H, D), in the dtype of qkv."""
    q, k, v = np.moveaxis(qkv, (2, 3), (0, 2)).astype(np.promote_types(qkv.dtype, np.float32))
    scores = q @ k.swapaxes(-1, -2) * qkv.shape[-1] ** -0.5
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output = weights @ v / weights.sum(axis=-1, keepdims=True)
    return output.swapaxes(1, 2).astype(qkv.dtype)


class PackedTarget(ArrayTarget):
    """attend_packed, of which self-attention with equal widths can be asked, causal or not."""

    features = frozenset({"causal"})

    def __init__(self, name="packed"):
        super().__init__(library_backend("numpy"))
        self.name = name

    def compute(self, problem, q, k, v, again):
        if q.ndim != 4 or not q.shape == k.shape == v.shape or 0 in q.shape:
            raise Unsupported("attend_packed takes q, k and v of one shape (B, H, S, D), and no sizes of zero")
        qkv = np.stack([x.swapaxes(1, 2) for x in (q, k, v)], axis=2)
        return Answer(attend_packed(qkv, problem.causal).swapaxes(1, 2))
