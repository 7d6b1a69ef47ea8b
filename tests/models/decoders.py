"""Small decoders with random weights, one for each thing that models of transformers ask of an attention function."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    T5Config,
)

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
# Both experts are always chosen: a choice would be a jump, which no error bound crosses.
EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
WINDOW = 3
DECODERS = {
    "Llama": LlamaConfig(**COMMON),
    "Mistral": MistralConfig(**COMMON, sliding_window=WINDOW),
    "Gemma2": Gemma2Config(**COMMON, sliding_window=WINDOW, attn_logit_softcapping=1.0, query_pre_attn_scalar=8),
    "gpt-oss": GptOssConfig(**COMMON, **EXPERTS, sliding_window=WINDOW),
}
ENCODER_DECODER = T5Config(**T5, **TOKENS, tie_word_embeddings=False)


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, the same on every call; what starts at zero is drawn as well."""
    torch.manual_seed(7)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith(("sinks", "relative_attention_bias.weight")):
            weight.normal_(std=3.0)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.to(dtype)


class Batch(NamedTuple):
    """Token ids (B, L), which of them are no padding, and the position of each in its own sequence."""

    ids: Tensor
    keep: Tensor
    positions: Tensor


def batch(padding: str, length: int) -> Batch:
    """Three sequences, of which two are padded on the side "left" or "right" by 3 and 1; none is with ""."""
    ids = torch.randint(3, 97, (3, length), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    for row, count in enumerate((3, 1)):
        padded = {"": slice(0), "left": slice(count), "right": slice(length - count, length)}[padding]
        ids[row, padded], keep[row, padded] = 0, 0
    return Batch(ids, keep, (keep.cumsum(-1) - 1).clamp(min=0))
