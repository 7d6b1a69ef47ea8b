"""Attention in NumPy with its backward pass, which takes the weights from the log-sum-exp, as fused kernels do."""

import numpy as np


def scores_of(q, k, causal, scale, q_start):
    if q.ndim != 4 or not len(q) == len(k) or q.shape[1] != k.shape[1]:
        raise NotImplementedError("anything but (batch, heads, tokens, width), one key/value head per query head")
    scale = (q.shape[-1] or 1) ** -0.5 if scale is None else scale
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if causal:
        rows = np.reshape(q_start, (-1, 1, 1, 1)) + np.arange(q.shape[2])[:, None]
        scores = np.where(np.arange(k.shape[2]) <= rows, scores, -np.inf)
    return scores, scale


def attend(q, k, v, *, causal=False, scale=None, q_start=0):
    dtype, wide = q.dtype, np.promote_types(q.dtype, np.float32)
    q, k, v = (x.astype(wide) for x in (q, k, v))
    scores, _ = scores_of(q, k, causal, scale, q_start)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (weights / total @ v).astype(dtype), (np.log(total) + largest)[..., 0]


def backward(q, k, v, grad_output, *, output, lse, causal=False, scale=None, q_start=0):
    dtype, wide = q.dtype, np.promote_types(q.dtype, np.float32)
    q, k, v, grad_output, output = (x.astype(wide) for x in (q, k, v, grad_output, output))
    scores, scale = scores_of(q, k, causal, scale, q_start)
    weights = np.exp(scores - lse[..., None])
    row_sum = np.sum(grad_output * output, axis=-1, keepdims=True)
    grad_scores = weights * (grad_output @ np.swapaxes(v, -1, -2) - row_sum) * scale
    grad_q, grad_k = grad_scores @ k, np.swapaxes(grad_scores, -1, -2) @ q
    grad_v = np.swapaxes(weights, -1, -2) @ grad_output
    return grad_q.astype(dtype), grad_k.astype(dtype), grad_v.astype(dtype)
