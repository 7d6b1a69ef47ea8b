"""Attention functions as models of transformers call them: how one is registered, and faults that any model shows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from refattn_backends.transformers import attention_forward, explicit_mask

Attention = Callable[..., tuple[Tensor, Any]]


def register(name: str, attention: Attention) -> None:
    """Make an attention function available to the models, with explicit masks."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, explicit_mask)


def scaled_by_model_width(module: Any, *tensors: Tensor, **options: Any) -> Any:
    """A fault: 1 / sqrt(d_model) in place of 1 / sqrt(d_k) (S1)."""
    return attention_forward(module, *tensors, **options | {"scaling": module.config.hidden_size**-0.5})


def scaled_one_percent_off(module: Any, *tensors: Tensor, **options: Any) -> Any:
    """A fault: the scale is 1 % too large."""
    return attention_forward(module, *tensors, **options | {"scaling": 1.01 * options["scaling"]})
