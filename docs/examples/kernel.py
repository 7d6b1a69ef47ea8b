"""Attention in NumPy, one query after the other, over the keys that it sees."""

import numpy as np


def attend(q, k, v, *, causal=False, scale=None, q_start=0):
    if q.ndim != 4 or not len(q) == len(k) == len(v):
        raise NotImplementedError("anything but (batch, heads, tokens, width)")
    batch, heads, q_len, width = q.shape
    scale = (width or 1) ** -0.5 if scale is None else scale
    starts = np.broadcast_to(q_start, batch)
    output = np.zeros((batch, heads, q_len, v.shape[-1]), q.dtype)
    wide = np.promote_types(q.dtype, np.float32)
    for b, h, i in np.ndindex(batch, heads, q_len):
        head = h * k.shape[1] // heads
        count = max(0, starts[b] + i + 1) if causal else k.shape[2]
        keys, values = (x[b, head, :count].astype(wide) for x in (k, v))
        if len(keys):
            logits = keys @ q[b, h, i].astype(wide) * scale
            weights = np.exp(logits - logits.max())
            output[b, h, i] = weights @ values / weights.sum()
    return output
