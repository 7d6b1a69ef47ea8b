"""What torch.nn.MultiheadAttention does otherwise where it is asked for its weights, in torch alone."""

import torch


def _layer(width, dtype=torch.float32):
    layer = (
        torch.nn.MultiheadAttention(width, 1, bias=False, batch_first=True, dtype=dtype).eval().requires_grad_(False)
    )
    one = torch.eye(width, dtype=dtype)
    layer.in_proj_weight.copy_(torch.cat([one, one, one]))
    layer.out_proj.weight.copy_(one)
    return layer


def empty_row() -> None:
    """A row that sees no key is NaN, where without need_weights it is 0.

    Clauses: M3, M5, M9, M10, M11, M12, M13, M15, M16, M17, P2, T1, T2. Implementations: torch-mha-weights.
    """
    layer, x, hidden = _layer(8), torch.ones(1, 2, 8), torch.ones(2, 2, dtype=torch.bool)
    assert layer(x, x, x, attn_mask=hidden, need_weights=True)[0].isnan().all()
    assert (layer(x, x, x, attn_mask=hidden, need_weights=False)[0] == 0).all()


def query_is_scaled_first() -> None:
    """Queries are multiplied by the scale, and rounded to the storage dtype, before they meet the keys.

    Clauses: N6, S1. Implementations: torch-mha-weights.
    """
    x = 20 * torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, weights = _layer(3, torch.bfloat16)(x, x, x, need_weights=True)
    scaled_first = ((x * 3**-0.5) @ x.mT).softmax(dim=-1)
    assert torch.equal(weights, scaled_first) and not torch.equal(weights, ((x @ x.mT) * 3**-0.5).softmax(dim=-1))
