"""Greedy tokens of small decoders with random weights, on refattn and on eager attention.

They are equal or they are not, and a feature that were ignored would change them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention_functions import register
from models.decoders import DECODERS, ENCODER_DECODER, build
from refattn_backends.transformers import attention_forward
from refattn_backends.transformers import register as register_refattn

NEW_TOKENS = 12

# The option that carries what the model is here for, and the model's configuration.
MODELS = {
    "grouped heads, left padding": ("attention_mask", DECODERS["Llama"]),
    "sliding window": ("attention_mask", DECODERS["Mistral"]),
    "soft cap": ("softcap", DECODERS["Gemma2"]),
    "sinks": ("s_aux", DECODERS["gpt-oss"]),
    "position bias": ("position_bias", ENCODER_DECODER),
}


def generate(model: Any, attention: str, *, cached: bool = True) -> Tensor:
    """Greedy tokens (2, ...) after two prompts, the first of which is padded on the left."""
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    ids[0, :3], keep[0, :3] = 0, 0
    model.set_attn_implementation(attention)
    return model.generate(ids, attention_mask=keep, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=cached)


@pytest.mark.parametrize("feature", MODELS)
def test_greedy_tokens_equal_those_of_eager_attention(feature: str) -> None:
    """Prefill and cached decoding on refattn, and full passes without a cache, give the tokens of eager attention."""
    register_refattn()
    option, config = MODELS[feature]
    model = build(config)
    expected = generate(model, "eager")
    assert torch.equal(generate(model, "refattn"), expected)
    assert torch.equal(generate(model, "refattn", cached=False), expected)

    def ignoring(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any) -> Any:
        options["attention_mask"] = attention_mask
        assert options[option] is not None
        return attention_forward(module, q, k, v, **{**options, option: None, "sliding_window": None})

    register("ignoring", ignoring)
    assert not torch.equal(generate(model, "ignoring"), expected)
