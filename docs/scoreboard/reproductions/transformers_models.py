"""What models of transformers do otherwise with padding and caches, in transformers and torch alone."""

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, StaticCache

IDS = torch.arange(1, 7)[None]
LEFT, RIGHT = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[1, 1, 1, 0, 0, 0]])
SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def _model(config, dtype=torch.float32, attention="eager"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()


@torch.no_grad()
def _run(model, keep, **options):
    positions = (keep.cumsum(-1) - 1).clamp(min=0)
    return model(IDS[:, -keep.shape[-1] :], attention_mask=keep, position_ids=positions, **options)


def left_padding() -> None:
    """In a batch with left padding the rows of padding average all tokens, the later ones included.

    Clauses: M16. Implementations: transformers-eager, transformers-gemma2.
    """
    for config in (LlamaConfig(**SIZES), Gemma2Config(**SIZES)):
        weights = _run(_model(config), LEFT, output_attentions=True).attentions[0]
        assert torch.allclose(weights[:, :, :3], torch.tensor(1 / 6))


def left_padding_in_float64() -> None:
    """In float64 left padding makes all logits of its sequence NaN, by a mask that is infinite in float32.

    Clauses: M16. Implementations: transformers-eager, transformers-gemma2.
    """
    for config in (LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=8), Gemma2Config(**SIZES)):
        assert _run(_model(config, torch.float64), LEFT).logits.isnan().all()
        assert _run(_model(config), LEFT).logits.isfinite().all()


def right_padding_behind_a_window_in_float64() -> None:
    """In float64 right padding that is longer than a sliding window makes all logits of its sequence NaN.

    Clauses: M11. Implementations: transformers-eager, transformers-gemma2.
    """
    for family in (MistralConfig, Gemma2Config):
        config = family(**SIZES, sliding_window=2)
        assert _run(_model(config, torch.float64), RIGHT).logits.isnan().all()
        assert _run(_model(config), RIGHT).logits.isfinite().all()


def unused_slot() -> None:
    """A NaN in a slot of StaticCache that no token has filled reaches all logits.

    Clauses: K4. Implementations: transformers-eager, transformers-gemma2, transformers-sdpa.
    """
    for family, attention in ((LlamaConfig, "eager"), (LlamaConfig, "sdpa"), (Gemma2Config, "eager")):
        config = family(**SIZES)
        model = _model(config, attention=attention)
        cache = StaticCache(config=config, max_cache_len=8)
        _run(model, torch.ones(1, 3, dtype=torch.int64), cache=cache)
        for layer in cache.layers:
            layer.keys[:, :, 6:] = layer.values[:, :, 6:] = torch.nan
        keep = torch.ones(1, 6, dtype=torch.int64)
        with torch.no_grad():
            logits = model(IDS[:, 3:], attention_mask=keep, cache=cache).logits
        assert logits.isnan().all()
