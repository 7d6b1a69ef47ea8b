"""What torch.nn.attention.flex_attention does otherwise where it is not compiled, in torch alone."""

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

ONES = torch.ones(1, 1, 2, 8)


def _first_alone(b, h, i, j):
    return j == 0


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: torch-flex.
    """
    v = ONES.clone()
    v[..., 1, :] = torch.nan
    mask = create_block_mask(_first_alone, 1, 1, 2, 2, device="cpu")
    assert flex_attention(ONES, ONES, v, block_mask=mask).isnan().all()


def sizes_of_zero() -> None:
    """No keys, no width and no heads raise errors.

    Clauses: A6, P2. Implementations: torch-flex.
    """
    for q, k in ((ONES, ONES[:, :, :0]), (ONES[..., :0], ONES[..., :0]), (ONES[:, :0], ONES[:, :0])):
        try:
            flex_attention(q, k, k)
        except (IndexError, ZeroDivisionError, RuntimeError, ValueError):
            continue
        raise AssertionError("accepted")


def infinite_logit() -> None:
    """A logit of +inf makes its row NaN, but the log-sum-exp +inf.

    Clauses: P4. Implementations: torch-flex.
    """

    def plus(score, batch, head, query, key):
        return score + torch.where(key == 0, torch.inf, 0.0)

    output, aux = flex_attention(ONES, ONES, ONES, score_mod=plus, return_aux=AuxRequest(lse=True))
    assert output.isnan().all() and aux.lse.isposinf().all()


def infinite_key() -> None:
    """A visible key with an infinite component counts as hidden where its logit is -inf, instead of making it NaN.

    Clauses: M20. Implementations: torch-flex.
    """
    k = ONES.clone()
    k[..., 1, 0] = -torch.inf
    assert (flex_attention(ONES, k, ONES) == 1).all()
