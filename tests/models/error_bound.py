"""How far a sentence embedding can move by rounding alone: a first-order running error analysis of the encoder.

The encoder runs once in float64 with the trained weights: the *exact* run. Each of its operations, done in a
precision with unit roundoff u, would commit a local error in every element of its result. This module bounds those
local errors from the operation's own inputs and carries them to the embedding with the exact run's derivatives:

    |embedding - exact|  <=  sum over elements of |d embedding / d element| * local bound        (first order in u)

Two such bounds are kept apart, because they answer different questions.

certain   A sum of n terms errs by g(n) = n roundings, and all errors conspire. No correct run exceeds this, in
          whatever order it sums: what exceeds it is a fault for certain.
likely    Rounding errors are independent with mean zero (the model of Higham and Mary, 2019). Then g(n) = sqrt(n),
          errors that share no rounding add up as the root of their squares, and by Hoeffding's inequality LAMBDA
          times that is exceeded with probability 2 exp(-LAMBDA^2 / 2), which is 3e-8 per component. Errors that may
          share a rounding (of one row's normaliser, say) form a group and add up in absolute value inside it; errors
          that are no roundings (of an approximate erf) do so everywhere.

All bounds are in units of u, so that one analysis serves float32 and float64. Two runs that each keep to the bound
of the exact run keep to twice that bound of each other.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LAMBDA = 6.0

Growth = Callable[[int], float]


class Step(NamedTuple):
    """One rounding operation of the exact run: its result, and local bounds of every element in units of u."""

    result: Tensor
    certain: Tensor
    likely: Tensor
    shared: int | None  # so many trailing axes may share roundings; None: the error is a function of the input


class Bounds(NamedTuple):
    """Bounds of |embedding - exact| in units of u, (components, batch)."""

    certain: Tensor
    likely: Tensor


def propagate(embedding: Tensor, components: Sequence[int], steps: Sequence[Step]) -> Bounds:
    """Carry the local bounds of all steps to the chosen components of the embedding (batch, width).

    A sentence's embedding depends on its own rows only, so one backward pass per component serves the whole batch.
    """
    seeds = torch.zeros(len(components), *embedding.shape, dtype=embedding.dtype)
    seeds[torch.arange(len(components)), :, list(components)] = 1
    results = [step.result for step in steps]
    derivatives = torch.autograd.grad(embedding, results, seeds, is_grads_batched=True)  # (components, batch, ...)
    shape = derivatives[0].shape[:2]
    certain, fixed, squares = (torch.zeros(shape, dtype=embedding.dtype) for _ in range(3))
    for step, derivative in zip(steps, derivatives, strict=True):
        certain += (derivative.abs() * step.certain).reshape(*shape, -1).sum(-1)
        likely = derivative.abs() * step.likely
        if step.shared is None:
            fixed += likely.reshape(*shape, -1).sum(-1)
        else:
            groups = likely.sum(tuple(range(-step.shared, 0))) if step.shared else likely
            squares += (groups**2).reshape(*shape, -1).sum(-1)
    return Bounds(certain, fixed + LAMBDA * squares.sqrt())


def every(terms: int) -> float:
    """g(n) = n, for the certain bound."""
    return float(terms)


def root(terms: int) -> float:
    """g(n) = sqrt(n), for the likely bound."""
    return math.sqrt(terms)


# Local bounds, each in units of u and of the shape of the operation's result.


def linear_bound(growth: Growth, x: Tensor, layer: nn.Linear) -> Tensor:
    """x W^T + b: g(n) for the sum of n products, 1 for the products, 1 for adding b."""
    return (growth(x.shape[-1]) + 2) * (x.abs() @ layer.weight.abs().T + layer.bias.abs())


def layer_norm_bound(growth: Growth, x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gamma + beta over the last axis, n wide.

    The mean errs by (g(n) + 1) mean |x|. The variance errs by a relative (g(n) + 3) kappa, kappa^2 = mean(x^2) / var,
    computed by running updates or in two passes (Chan, Golub and LeVeque, 1983). Adding eps, root and division add 3;
    the root halves what came in. The normalised z is formed as (x - mean) r or as x r + (-mean r): one rounding of
    |x| r, two of |mean| r, one of z. The product with gamma and the sum with beta round once each.
    """
    n = x.shape[-1]
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, correction=0, keepdim=True)
    scale = (variance + layer.eps).rsqrt()
    z = (x - mean) * scale
    kappa = ((x * x).mean(-1, keepdim=True) / variance).sqrt()
    mean_error = (growth(n) + 1) * x.abs().mean(-1, keepdim=True)
    scale_error = (growth(n) + 3) * kappa / 2 + 3
    z_error = scale * (mean_error + x.abs() + 2 * mean.abs()) + z.abs() * (scale_error + 1)
    scaled = z * layer.weight
    return layer.weight.abs() * z_error + scaled.abs() + (scaled + layer.bias).abs()


def gelu_bound(x: Tensor) -> Tensor:
    """x / 2 * (1 + erf(x / sqrt 2)): an absolute 16 for erf, 2 for its argument, 4 for sum, products and result.

    The fast erf inside vectorised kernels comes with no stated accuracy: a scan of torch's found 11 near |x| = 2.8.
    """
    argument = x / math.sqrt(2)
    slope = 2 / math.sqrt(math.pi) * torch.exp(-(argument**2))
    return x.abs() / 2 * (16 + 2 * argument.abs() * slope + 4 * (1 + torch.erf(argument)))


def attention_bound(growth: Growth, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v, (B, H, L, d), storage type = accumulation type, one tile.

    A logit errs by (g(d_k) + 2) |scale| |q|.|k| and twice its distance from the row's maximum, which moves the output
    by its weight times |v - output|; both sums over keys, the exponential and the division err by 2 g(L_k) + 8 of the
    weighted |v|; the result rounds once.
    """
    scores = (scale * (q @ k.mT)).masked_fill(~visible, -math.inf)  # (B, H, Lq, Lk)
    weights = scores.softmax(-1)
    below = (scores.amax(-1, keepdim=True) - scores).masked_fill(~visible, 0.0)
    logit_error = (growth(q.shape[-1]) + 2) * abs(scale) * (q.abs() @ k.abs().mT) + 2 * below
    output = weights @ v
    distance = (v.unsqueeze(-3) - output.unsqueeze(-2)).abs()  # (B, H, Lq, Lk, d)
    moved = torch.einsum("bhqk,bhqkd->bhqd", weights * logit_error, distance)
    return moved + (2 * growth(k.shape[-2]) + 8) * (weights @ v.abs()) + output.abs()


def mean_bound(growth: Growth, hidden: Tensor, keep: Tensor) -> Tensor:
    """The mean over kept tokens, (B, L, width) -> (B, width): a sum of L terms and the division, one to spare."""
    share = keep / keep.sum(-1, keepdim=True)
    return (growth(hidden.shape[1]) + 2) * torch.einsum("bl,blw->bw", share, hidden.abs())


def unit_bound(growth: Growth, embedding: Tensor) -> Tensor:
    """Division by the Euclidean norm: half of what n squares and their sum err by, the root, the division."""
    return (growth(embedding.shape[-1]) / 2 + 3) * embedding.abs()
