"""What torch.nn.functional.scaled_dot_product_attention does otherwise, in torch alone."""

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

attend = torch.nn.functional.scaled_dot_product_attention
ONES = torch.ones(1, 1, 2, 8)
NAN_LAST = torch.cat([torch.ones(1, 1, 1, 8), torch.full((1, 1, 1, 8), torch.nan)], dim=2)
FIRST_ALONE = torch.tensor([[True, False], [True, False]])


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: torch, torch-math, torch-flash.
    """
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kernel):
            assert attend(ONES, ONES, NAN_LAST, attn_mask=FIRST_ALONE).isnan().all()


def empty_row_of_a_nan_query() -> None:
    """A row that sees no key is NaN instead of 0 if its query is NaN.

    Clauses: M21. Implementations: torch, torch-math, torch-flash.
    """
    hidden = torch.zeros(2, 2, dtype=torch.bool)
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kernel):
            assert attend(NAN_LAST, ONES, ONES, attn_mask=hidden)[0, 0, 1].isnan().all()
            assert (attend(ONES, ONES, ONES, attn_mask=hidden) == 0).all()


def scale_of_zero() -> None:
    """The tiled kernel multiplies hidden logits of -inf by the scale, so that a scale of 0 with is_causal gives NaN.

    Clauses: S2. Implementations: torch, torch-flash.
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attend(ONES, ONES, ONES, is_causal=True, scale=0.0).isnan().any()


def log_sum_exp_of_an_empty_row() -> None:
    """The log-sum-exp of a row that sees no key is 0 instead of -inf.

    Clauses: P4. Implementations: torch-flash.
    """
    hidden = torch.full((2, 2), -torch.inf)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(ONES, ONES, ONES, attn_mask=hidden)
    assert (lse == 0).all()


def log_sum_exp_in_16_bits() -> None:
    """In bfloat16 and float16 the tiled kernel's exponential has about 20 bits, which the log-sum-exp shows: -5e-5.

    Clauses: P4. Implementations: torch-flash.
    """
    for dtype in (torch.bfloat16, torch.float16):
        q, k = torch.zeros(1, 1, 1, 4, dtype=dtype), torch.zeros(1, 1, 80, 4, dtype=dtype)
        _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
        error = lse.item() - math.log(80)
        assert lse.dtype == torch.float32 and -1e-4 < error < -2e-5
