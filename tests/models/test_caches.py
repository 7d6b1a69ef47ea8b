"""Decoders on refattn with each kind of cache that transformers has, and each way to generate with one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, StaticCache

from models.attention_functions import register
from models.decoder_bound import golden
from models.decoders import COMMON, DECODERS, batch, build
from models.judged import AT_ONCE, CHUNKS, LENGTH, PROMPT, STEPS, inputs, judged, run
from refattn_backends.transformers import attention_forward
from refattn_backends.transformers import register as register_refattn

UNUSED = 4
NEW_TOKENS = 8


def static(model: Any) -> Any:
    """A cache with slots that no token fills; layers with a window get slots for that alone."""
    return StaticCache(config=model.config, max_cache_len=LENGTH + UNUSED)


def poisoned(model: Any) -> Any:
    """The same, NaN in every slot beforehand."""
    memory, sizes = static(model), model.config
    memory.early_initialization(3, sizes.num_key_value_heads, sizes.head_dim, model.dtype, torch.device("cpu"))
    for layer in memory.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    return memory


CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda model: DynamicCache(),
    "growing, windows alone": lambda model: DynamicCache(config=model.config),
    "static": static,
    "static, poisoned": poisoned,
}
WAYS = {"at once": AT_ONCE, "prompt and steps": STEPS, "chunks": CHUNKS}


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_every_cache_keep_to_the_bound(name: str, kind: str, way: str, padding: str) -> None:
    """Whatever the cache, and however the tokens come, logits keep to the bound of the exact ones of one full pass.

    Unused slots may hold NaN (K4).
    """
    given = judged(name, padding)
    for dtype, model in given.models.items():
        actual = run(model, given.batch, attention_forward, WAYS[way], CACHES[kind](model))
        ratio = given.ratio(actual, given.exact)
        assert ratio <= (1 if dtype == torch.float32 else 2)


def test_a_cache_that_is_one_token_behind_exceeds_the_bound() -> None:
    """The comparison notices a step whose newest slot is hidden."""
    given = judged("Llama", "")

    def late(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        behind = torch.nn.functional.pad(mask[..., 1:], (0, 1)) if q.shape[-2] == 1 else mask
        return attention_forward(module, q, k, v, behind, **options)

    model = given.models[torch.float32]
    assert given.ratio(run(model, given.batch, late, STEPS, DynamicCache()), given.exact) > 10


def generate(model: Any, attention: str, **options: Any) -> Tensor:
    """Tokens after three prompts, two of them padded on the left."""
    given = batch("left", PROMPT)
    model.set_attn_implementation(attention)
    fixed = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "disable_compile": True}
    return model.generate(given.ids, attention_mask=given.keep, **fixed | options)


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_eager_attention_however_they_are_made(name: str) -> None:
    """Greedy tokens with a static cache, and beam search with either cache, give the tokens of eager attention."""
    register_refattn()
    model = build(DECODERS[name])
    beams = {"num_beams": 3, "length_penalty": 0.0}
    for options in ({}, beams):
        expected = generate(model, "eager", **options)
        for kind in ("dynamic", "static"):
            assert torch.equal(generate(model, "refattn", cache_implementation=kind, **options), expected)
    assert not torch.equal(generate(model, "eager"), generate(model, "eager", **beams))


@pytest.mark.parametrize("name", DECODERS)
def test_assisted_tokens_are_the_greedy_ones(name: str) -> None:
    """A smaller model proposes tokens, some are refused and taken out of the cache, and the tokens stay the same."""
    register_refattn()
    model, given = build(DECODERS[name]), batch("", PROMPT)
    model.set_attn_implementation("refattn")
    assistant = build(LlamaConfig(**COMMON | {"num_hidden_layers": 1}))
    assistant.set_attn_implementation("refattn")
    one = {"attention_mask": given.keep[:1], "max_new_tokens": NEW_TOKENS, "do_sample": False}
    greedy = model.generate(given.ids[:1], **one)
    assert torch.equal(model.generate(given.ids[:1], assistant_model=assistant, **one), greedy)


@pytest.mark.parametrize("name", DECODERS)
def test_weights_of_every_layer_come_on_request(name: str) -> None:
    """With output_attentions each layer's weights are within their derived bound, and so are eager's."""
    exact: list[Any] = []

    def keeping(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        exact.append(golden(module, q, k, v, mask, weights=True, **options))
        return attention_forward(module, q, k, v, mask, **options)

    register_refattn()
    register("keeping", keeping)
    model, given = build(DECODERS[name]), batch("", LENGTH)
    runs = {}
    for attention in ("keeping", "refattn", "eager"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            runs[attention] = model(**inputs(given), output_attentions=True, use_cache=False).attentions
    assert len(runs["refattn"]) == len(exact) == 2
    first = exact[0]  # the inputs of the first layer alone do not depend on the attention function
    bound = first.weights_bound("float32", coherent=True)
    for attention in ("refattn", "eager"):
        error = np.abs(runs[attention][0].double().numpy() - first.weights)
        assert bool((error <= bound).all())
    for ours, kept, expected in zip(runs["refattn"], runs["keeping"], exact, strict=True):
        assert torch.equal(ours, kept)
        error = np.abs(ours.double().numpy() - expected.weights)
        assert bool((error <= expected.weights_bound("float32", coherent=True)).all())
