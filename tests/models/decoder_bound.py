"""How far the logits of a decoder can move by rounding alone: a first-order error analysis of every operation.

The decoder runs once in float64, and every function of torch that it calls is seen. Each commits a local error, which
is bounded from its own operands, in the worst case over all orders of summation; attention's is the bound that
refattn derives for it, so that an attention function may round as it likes within that. The exact run's derivatives
carry the local errors to the logits:

    |logit - exact|  <=  sum over elements of |d logit / d element| * local bound        (first order)

A function that is neither exact nor bounded here is an error: nothing passes unseen.

Models of transformers convert to float32 for norms, angles and softmax, whatever their dtype. In a run under
`Watched` in float64 they stay in float64, so that such a run has one roundoff.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models.attention_functions import Attention, register
from models.error_bound import UNIT_ROUNDOFF
from refattn.goldens import Golden, golden_visible

NAMES = {torch.float32: "float32", torch.float64: "float64"}

# Functions whose results hold elements of their operands, or zeros.
EXACT = {
    *("__getitem__", "cat", "chunk", "clamp", "contiguous", "dropout"),
    *("embedding", "expand", "float", "neg", "reshape", "to", "topk"),
    *("transpose", "type_as", "unbind", "unsqueeze", "view", "zeros_like"),
}


class Step(NamedTuple):
    """One rounding operation of the exact run: its result, and what it may be wrong by in a dtype."""

    result: Tensor
    bound: Callable[[torch.dtype], Tensor]


# Local bounds in units of the roundoff, of a function's result and operands. A constant operand rounds once as well.


def _arithmetic(result: Tensor, *_: Any, **__: Any) -> Tensor:
    return 2 * result.abs()


def _power(result: Tensor, x: Tensor, exponent: float) -> Tensor:
    assert exponent == 2
    return result.abs()


def _mean(result: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return (x.shape[-1] + 1) * x.abs().mean(-1, keepdim=True)


def _root(result: Tensor, x: Tensor) -> Tensor:
    return 3 * result.abs()


def _matmul(result: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x.shape[-1] * (x.abs() @ y.abs())


def _linear(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    size = x.abs() @ weight.abs().mT + (0 if bias is None else bias.abs())
    return (x.shape[-1] + 1) * size


def _tanh(result: Tensor, x: Tensor) -> Tensor:
    return 4 * result.abs()


def _sigmoid(result: Tensor, x: Tensor) -> Tensor:
    return 5 * result.abs()


def _silu(result: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return 6 * result.abs()


def _gelu(result: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """x / 2 (1 + tanh(inner)): 6 for inner, whose two terms have one sign, 4 for tanh, 4 for sum and products."""
    assert approximate == "tanh"
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    capped = inner.tanh()
    return x.abs() / 2 * (6 * inner.abs() * (1 - capped**2) + 4 * capped.abs()) + 4 * result.abs()


def _softmax(result: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The softmax of a router: 1 for each distance from the maximum, 2 for exp, n for the sum, 1 for the division."""
    below = (x - x.amax(-1, keepdim=True)).abs()
    return result * (below + (result * below).sum(-1, keepdim=True) + x.shape[-1] + 5)


def _of_angle(result: Tensor, angle: Tensor) -> Tensor:
    """An angle is a product that rounds once, and moves its sine and cosine by as much at most."""
    return angle.abs() + 2


LOCAL: dict[str, Callable[..., Tensor]] = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "index_add_": _arithmetic,
    "mul": _arithmetic,
    "div": _arithmetic,
    "pow": _power,
    "mean": _mean,
    "rsqrt": _root,
    "matmul": _matmul,
    "linear": _linear,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "softmax": _softmax,
    "cos": _of_angle,
    "sin": _of_angle,
}
# Where the graph of the derivatives begins: parameters and positions need none.
SOURCES = {"embedding", "cos", "sin"}

See = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Tensor], None]


class Watched(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy
    """While open, float64 stays float64, and what functions of torch return in floating point is shown to `see`."""

    def __init__(self, see: See | None = None) -> None:
        super().__init__()
        self.see, self.paused = see, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if args and torch.is_tensor(args[0]) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
        result = func(*args, **kwargs)
        for part in result if isinstance(result, tuple | list) else (result,):
            if self.see is not None and torch.is_tensor(part) and part.is_floating_point():
                self.see(func, args, kwargs, part)
        return result

    def unseen(self, attention: Attention) -> Attention:
        """The attention function, whose inside is not shown."""

        def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            self.paused = True
            try:
                return attention(*args, **kwargs)
            finally:
                self.paused = False

        return attend


def plain_attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in a few lines of torch, differentiable: what the exact run uses. An empty row is 0 (P2)."""
    group = q.shape[1] // k.shape[1]
    scores = scaling * (q @ k.repeat_interleave(group, 1).mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -1e300)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : mask.shape[-1]] * mask
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def eager_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """The model's own attention function, with the additive mask that it wants."""
    lowest = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    output, weights = sys.modules[type(module).__module__].eager_attention_forward(module, q, k, v, lowest, **options)
    return output, weights


def exact_run(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, list[Step]]:
    """Return the logits (batch, L, words) of a float64 model, differentiable, and its steps."""
    steps: list[Step] = []

    def see(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        name = func.__name__
        if name in SOURCES:
            result.requires_grad_()
        if name in EXACT or not result.requires_grad:
            return
        assert result.dtype == torch.float64, f"{name} of the exact run is not in float64"
        with torch.no_grad():
            units = LOCAL[name](result, *args, **kwargs)
        steps.append(Step(result, lambda dtype: UNIT_ROUNDOFF[dtype] * units))

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, None]:
        output, _ = plain_attention(module, q, k, v, mask, **options)
        exact = golden(module, q, k, v, mask, **options)
        steps.append(Step(output, lambda dtype: worst(exact, dtype)))
        return output, None

    watched = Watched(see)
    register("exact", watched.unseen(attend))
    model.set_attn_implementation("exact")
    with watched:
        logits = model(**inputs, use_cache=False).logits
    return logits, steps


def golden(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float,
    weights: bool = False,
    **options: Any,
) -> Golden:
    """The golden value of one call of a layer's attention."""
    sinks = options.get("s_aux")
    q, k, v, mask = (x.detach() for x in (q, k, v, mask))
    return golden_visible(q, k, v, mask, scale=scaling, softcap=options.get("softcap"), sinks=sinks, weights=weights)


def worst(exact: Golden, dtype: torch.dtype) -> Tensor:
    """The bound of each output element for any order of summation, tokens before heads."""
    return torch.from_numpy(exact.bound(NAMES[dtype], coherent=True)).transpose(1, 2)


def propagate(
    logits: Tensor, places: Sequence[tuple[int, int, int]], steps: Sequence[Step]
) -> dict[torch.dtype, Tensor]:
    """Bounds of the chosen logits (batch, position, word), in each dtype: the local bounds, carried by derivatives."""
    seeds = torch.zeros(len(places), *logits.shape, dtype=logits.dtype)
    for seed, place in zip(seeds, places, strict=True):
        seed[place] = 1
    results = [step.result for step in steps]
    derivatives = torch.autograd.grad(logits, results, seeds, is_grads_batched=True)
    bounds = {}
    for dtype in UNIT_ROUNDOFF:
        terms = [
            (derivative.abs() * step.bound(dtype)).flatten(1).sum(-1)
            for step, derivative in zip(steps, derivatives, strict=True)
        ]
        bounds[dtype] = torch.stack(terms).sum(0)
    return bounds
