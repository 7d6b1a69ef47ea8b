"""A readable attention beside torch's, on the same queries, keys and values."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from refattn.testing import assert_attention_close


def readable(q, k, v, causal=False):
    """Attention of q (..., Lq, d_k), k (..., Lk, d_k) and v (..., Lk, d_v); causal is top-left."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = torch.where(visible, scores, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


torch.manual_seed(0)
for q_len, causal in ((7, False), (7, True), (3, True)):
    q, k, v = (torch.randn(2, 4, tokens, 8) for tokens in (q_len, 7, 7))
    options = {"causal": True, "q_start": 0} if causal else {}
    assert_attention_close(readable(q, k, v, causal), q, k, v, **options)
    assert_attention_close(scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v, **options)

    # A boolean mask says the same: True is visible, for torch as well.
    visible = torch.ones(q_len, 7, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    assert_attention_close(scaled_dot_product_attention(q, k, v, attn_mask=visible), q, k, v, **options)
