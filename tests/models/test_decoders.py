"""Small decoders with random weights, one for each thing that models of transformers ask of an attention function.

Greedy tokens are compared: they are equal or they are not, and a feature that were ignored would change them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    T5Config,
)

from refattn_backends.transformers import attention_forward, explicit_mask
from refattn_backends.transformers import register as register_refattn

NEW_TOKENS = 12
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 97,
    "initializer_factor": 2.0,
}
TOKENS = {"pad_token_id": 0, "decoder_start_token_id": 5, "eos_token_id": None}
EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

# The option that carries what the model is here for, and the model's configuration.
MODELS = {
    "grouped heads, left padding": ("attention_mask", LlamaConfig(**COMMON)),
    "sliding window": ("attention_mask", MistralConfig(**COMMON, sliding_window=3)),
    "soft cap": (
        "softcap",
        Gemma2Config(**COMMON, sliding_window=3, attn_logit_softcapping=1.0, query_pre_attn_scalar=8),
    ),
    "sinks": ("s_aux", GptOssConfig(**COMMON, **EXPERTS, sliding_window=3)),
    "position bias": ("position_bias", T5Config(**T5, **TOKENS, tie_word_embeddings=False)),
}


def build(config: Any) -> Any:
    """A model with random weights, the same on every call; what starts at zero is drawn as well."""
    torch.manual_seed(7)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith(("sinks", "relative_attention_bias.weight")):
            weight.normal_(std=3.0)
    return model


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

    AttentionInterface.register("ignoring", ignoring)
    AttentionMaskInterface.register("ignoring", explicit_mask)
    assert not torch.equal(generate(model, "ignoring"), expected)
