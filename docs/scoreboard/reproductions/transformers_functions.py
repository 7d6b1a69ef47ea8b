"""What the attention functions of transformers do otherwise, in transformers and torch alone."""

from types import SimpleNamespace

import torch
from transformers import AttentionInterface
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
from transformers.models.llama.modeling_llama import eager_attention_forward as llama

sdpa = AttentionInterface()["sdpa"]
LAYER = SimpleNamespace(num_key_value_groups=1, training=False, is_causal=False, head_dim=8)
ONES = torch.ones(1, 1, 2, 8)
V = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1) * ONES
LOWEST = torch.finfo(torch.float32).min


def _attend(function, q, k, v, mask=None, layer=LAYER):
    return function(layer, q, k, v, mask, scaling=8**-0.5)[0].transpose(1, 2)


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20.
    Implementations: transformers-eager, transformers-gemma2, transformers-sdpa.
    """
    v = ONES.clone()
    v[..., 1, :] = torch.nan
    for function in (llama, gemma2):
        assert _attend(function, ONES, ONES, v, torch.tensor([0.0, LOWEST]).expand(1, 1, 2, 2)).isnan().all()
    assert _attend(sdpa, ONES, ONES, v, torch.tensor([True, False]).expand(1, 1, 2, 2)).isnan().all()


def empty_row() -> None:
    """A row whose every key is hidden by the lowest number is the mean of all values instead of 0.

    Clauses: K7, M3, M5, M9, M10, M11, M12, M13, M15, M16, M17, M21, P2, T1, T2.
    Implementations: transformers-eager, transformers-gemma2.
    """
    for function in (llama, gemma2):
        assert (_attend(function, ONES, ONES, V, torch.full((1, 1, 2, 2), LOWEST)) == 2).all()


def empty_row_with_a_sink_of_minus_infinity() -> None:
    """A row whose every key is hidden by the lowest number, and whose sink is none, is not 0.

    Clauses: P3. Implementations: transformers-gpt-oss.
    """
    layer = SimpleNamespace(**vars(LAYER), sinks=torch.tensor([-torch.inf]))
    assert (_attend(gpt_oss, ONES, ONES, V, torch.full((1, 1, 2, 2), LOWEST), layer) == 2).all()


def empty_row_of_a_nan_query() -> None:
    """A row that sees no key is NaN instead of 0 if its query is NaN.

    Clauses: M21. Implementations: transformers-sdpa.
    """
    q = torch.full_like(ONES, torch.nan)
    assert _attend(sdpa, q, ONES, V, torch.zeros(1, 1, 2, 2, dtype=torch.bool)).isnan().all()


def scores_overflow() -> None:
    """In float16 the scores overflow before the scale could make them small.

    Clauses: N1. Implementations: transformers-eager, transformers-gemma2.
    """
    big = 200 * torch.ones(1, 1, 2, 8, dtype=torch.float16)
    for function in (llama, gemma2):
        assert _attend(function, big, big, big).isnan().all()


def float64() -> None:
    """Softmax is computed in float32 also where everything else is float64.

    Clauses: N1. Implementations: transformers-eager, transformers-gemma2.
    """
    q = torch.eye(2, 8, dtype=torch.float64)[None, None]
    exact = (q @ q.mT * 8**-0.5).softmax(dim=-1) @ q
    for function in (llama, gemma2):
        assert 1e-10 < (_attend(function, q, q, q) - exact).abs().max() < 1e-6


def scale_of_zero() -> None:
    """With a scale of 0 and is_causal torch's tiled kernel gives NaN.

    Clauses: S2. Implementations: transformers-sdpa.
    """
    layer = SimpleNamespace(**{**vars(LAYER), "is_causal": True})
    assert sdpa(layer, ONES, ONES, V, None, scaling=0.0)[0].isnan().any()


def softmax_in_16_bits() -> None:
    """gpt-oss subtracts the maximum in the dtype of the queries: in bfloat16 3.015625 - 20 is -17.

    Clauses: P3. Implementations: transformers-gpt-oss.
    """
    q, k, v = (torch.full((1, 1, 1, 1), x, dtype=torch.bfloat16) for x in (3.015625, 1.0, 1.0))
    layer = SimpleNamespace(**vars(LAYER), sinks=torch.tensor([20.0], dtype=torch.bfloat16))
    output = gpt_oss(layer, q, k, v, None, scaling=1.0)[0].item()
    assert output == torch.tensor(-17.0).exp().bfloat16().item() != torch.tensor(-16.984375).exp().bfloat16().item()


def sizes_of_zero() -> None:
    """Sizes of zero are refused, since it reshapes to an axis of unknown size.

    Clauses: A6. Implementations: transformers-sdpa.
    """
    try:
        _attend(sdpa, ONES[:0], ONES[:0], ONES[:0])
    except RuntimeError as refusal:
        assert "reshape" in str(refusal)
        return
    raise AssertionError("accepted")
