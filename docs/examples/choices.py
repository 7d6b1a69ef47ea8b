"""Right attention, but for a choice: the log-sum-exp is in base 2."""

import numpy as np


def attend(q, k, v, *, causal=False, mask=True, scale=None, q_start=0):
    if q.ndim != 4 or not len(q) == len(k) == len(v):
        raise NotImplementedError("anything but (batch, heads, tokens, width)")
    batch, heads, q_len, width = q.shape
    scale = (width or 1) ** -0.5 if scale is None else scale
    positions = np.broadcast_to(q_start, batch)[:, None, None, None] + np.arange(q_len)[:, None]
    seen = np.broadcast_to(mask, (batch, heads, q_len, k.shape[2]))
    seen = seen & (np.arange(k.shape[2]) <= positions) if causal else seen
    wide = np.promote_types(q.dtype, np.float32)
    output = np.zeros((batch, heads, q_len, v.shape[-1]), q.dtype)
    lse = np.full((batch, heads, q_len), -np.inf, wide)
    for b, h, i in np.ndindex(batch, heads, q_len):
        head, row = h * k.shape[1] // heads, seen[b, h, i]
        keys, values = (x[b, head, row].astype(wide) for x in (k, v))
        if len(keys):
            logits = keys @ q[b, h, i].astype(wide) * scale
            weights = np.exp(logits - logits.max())
            output[b, h, i] = weights @ values / weights.sum()
            lse[b, h, i] = (logits.max() + np.log(weights.sum())) / np.log(2)
    return output, lse
