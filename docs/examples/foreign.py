"""A kernel with a convention of its own: tokens before heads, windows as a pair, log-sum-exp in base 2."""

import numpy as np


def flash(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """q (B, Lq, H, D), k and v (B, Lk, H, D) -> (B, Lq, H, D) and (B, H, Lq); -1 leaves a side of the window open."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q_len, k_len, wide = q.shape[-2], k.shape[-2], np.promote_types(q.dtype, np.float32)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    distance = np.arange(k_len) - (np.arange(q_len)[:, None] + k_len - q_len)
    left, right = window_size
    seen = (distance <= 0) | (not causal)
    seen &= (distance >= -left) | (left < 0)
    seen &= (distance <= right) | (right < 0)
    scores = np.where(seen, q.astype(wide) @ k.astype(wide).swapaxes(-1, -2) * scale, -np.inf)
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), np.finfo(wide).min)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    output = weights @ v.astype(wide) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0] / np.log(2)
    return output.astype(q.dtype).swapaxes(1, 2), lse.astype(wide)
