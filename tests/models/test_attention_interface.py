"""The attention function for transformers: every option arrives in refattn.attention, and nothing else happens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import refattn
from refattn_backends.transformers import attention_forward

BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, WIDTH = 2, 4, 2, 5, 7, 8


def draw(*shape: int) -> Tensor:
    """Standard normal numbers, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def problem(q_len: int = Q_LEN, k_len: int = K_LEN) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, Lq, d), k and v (B, Hkv, Lk, d)."""
    k, v = draw(BATCH, KV_HEADS, k_len, WIDTH), draw(BATCH, KV_HEADS, k_len, WIDTH) ** 2
    return draw(BATCH, HEADS, q_len, WIDTH), k, v


VISIBLE = draw(BATCH, 1, Q_LEN, K_LEN) > -1
BIAS = draw(BATCH, 1, Q_LEN, K_LEN)
POSITION_BIAS = draw(1, HEADS, Q_LEN, K_LEN)
SINKS = draw(HEADS)

# What transformers passes, and what refattn.attention must be called with.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "boolean mask": ({"attention_mask": VISIBLE}, {"mask": VISIBLE}),
    "boolean mask settles causality": ({"attention_mask": VISIBLE, "is_causal": True}, {"mask": VISIBLE}),
    "boolean mask settles the window": ({"attention_mask": VISIBLE, "sliding_window": 2}, {"mask": VISIBLE}),
    "floating mask": ({"attention_mask": BIAS}, {"bias": BIAS}),
    "position bias": (
        {"attention_mask": VISIBLE, "position_bias": POSITION_BIAS},
        {"mask": VISIBLE, "bias": POSITION_BIAS},
    ),
    "both biases": ({"attention_mask": BIAS, "position_bias": POSITION_BIAS}, {"bias": BIAS + POSITION_BIAS}),
    "scale": ({"attention_mask": VISIBLE, "scaling": 0.5}, {"mask": VISIBLE, "scale": 0.5}),
    "soft cap": ({"attention_mask": VISIBLE, "softcap": 1.5}, {"mask": VISIBLE, "softcap": 1.5}),
    "sinks": ({"attention_mask": VISIBLE, "s_aux": SINKS}, {"mask": VISIBLE, "sinks": SINKS}),
    "no mask": ({"is_causal": False}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_reaches_attention(name: str) -> None:
    """The output is refattn's, bit for bit, with tokens before heads, and differs from the output without options."""
    given, expected = OPTIONS[name]
    q, k, v = problem()
    actual, weights = attention_forward(SimpleNamespace(is_causal=True), q, k, v, **given)
    assert actual.shape == (BATCH, Q_LEN, HEADS, WIDTH) and actual.is_contiguous() and weights is None
    assert torch.equal(actual.transpose(1, 2), refattn.attention(q, k, v, **expected))
    assert torch.equal(actual.transpose(1, 2), refattn.attention(q, k, v)) == (not expected)


@pytest.mark.parametrize(
    ("declared", "argument", "causal"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_without_a_mask_the_argument_or_the_layer_says_causal(
    declared: bool, argument: bool | None, causal: bool
) -> None:
    """`is_causal` decides where it is given, the layer's own attribute where it is not."""
    q, k, v = problem(q_len=K_LEN)
    actual, _ = attention_forward(SimpleNamespace(is_causal=declared), q, k, v, None, is_causal=argument)
    assert torch.equal(actual.transpose(1, 2), refattn.attention(q, k, v, causal=causal))


def test_a_single_query_without_a_mask_sees_every_key() -> None:
    """A decoded token is the newest: causality hides nothing from it."""
    q, k, v = problem(q_len=1)
    actual, _ = attention_forward(SimpleNamespace(is_causal=True), q, k, v, None)
    assert torch.equal(actual.transpose(1, 2), refattn.attention(q, k, v))


def test_without_a_mask_a_window_counts_the_query_itself() -> None:
    """`sliding_window` W shows a causal query the W newest keys, its own among them."""
    q, k, v = problem(q_len=K_LEN)
    actual, _ = attention_forward(SimpleNamespace(is_causal=True), q, k, v, None, sliding_window=3)
    visible = torch.ones(K_LEN, K_LEN).tril().triu(-2) == 1
    assert torch.equal(actual.transpose(1, 2), refattn.attention(q, k, v, mask=visible))


@pytest.mark.parametrize("window", [1, 4, K_LEN - 1, K_LEN])
def test_a_single_query_without_a_mask_sees_its_window(window: int) -> None:
    """A decoded token sees the `sliding_window` newest keys; it is the last of them."""
    q, k, v = problem(q_len=1)
    actual, _ = attention_forward(SimpleNamespace(is_causal=True), q, k, v, None, sliding_window=window)
    visible = torch.arange(K_LEN)[None] >= K_LEN - window
    assert torch.equal(actual.transpose(1, 2), refattn.attention(q, k, v, mask=visible))


def test_weights_come_on_request() -> None:
    """With output_attentions the weights (B, H, Lq, Lk) come along, and the output stays the same."""
    q, k, v = problem()
    output, weights = attention_forward(SimpleNamespace(), q, k, v, VISIBLE, output_attentions=True)
    assert weights is not None
    assert weights.shape == (BATCH, HEADS, Q_LEN, K_LEN)
    assert torch.equal(weights, refattn.attention_stages(q, k, v, mask=VISIBLE).weights)
    assert torch.equal(output, attention_forward(SimpleNamespace(), q, k, v, VISIBLE)[0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention_mask": VISIBLE, "dropout": 0.1}, "dropout"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "attention_mask"),
        ({"sliding_window": 3, "is_causal": False}, "sliding_window"),
        ({"is_causal": True}, "q_start"),
        ({"attention_mask": VISIBLE.int()}, "mask"),
    ],
    ids=["dropout", "packed without a mask", "two-sided window", "unaligned causality", "integer mask"],
)
def test_what_has_no_single_meaning_is_refused(options: dict[str, Any], named: str) -> None:
    """No guess is made: an error names the argument that is wrong or missing."""
    with pytest.raises((ValueError, refattn.errors.RefattnError), match=named):
        attention_forward(SimpleNamespace(), *problem(), **options)
