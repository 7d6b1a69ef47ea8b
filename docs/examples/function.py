"""A torch.autograd.Function, whose backward is what `refattn check function.py:attend --gradients` judges."""

import torch


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        scores = (q @ k.mT).float() * scale
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return (weights @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        q, k, v, weights = ctx.saved_tensors
        grad_weights = grad_output.float() @ v.float().mT
        row_sum = (weights * grad_weights).sum(dim=-1, keepdim=True)
        grad_scores = weights * (grad_weights - row_sum) * ctx.scale
        grad_q, grad_k = grad_scores @ k.float(), grad_scores.mT @ q.float()
        grad_v = weights.mT @ grad_output.float()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def attend(q, k, v, *, scale=None):
    if q.dtype == torch.float64 or q.shape[:-2] != k.shape[:-2] or k.shape[:-2] != v.shape[:-2]:
        raise NotImplementedError("float64, grouped heads and batches that broadcast")
    return Attention.apply(q, k, v, (q.shape[-1] or 1) ** -0.5 if scale is None else scale)
