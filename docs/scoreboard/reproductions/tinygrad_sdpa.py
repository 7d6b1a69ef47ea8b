"""What Tensor.scaled_dot_product_attention of tinygrad does otherwise, in tinygrad alone."""

import os
import shutil

if shutil.which("clang") is None:
    os.environ.setdefault("DEV", "PYTHON")
from tinygrad import Tensor

ONES = Tensor.ones(1, 1, 2, 8).contiguous()


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: tinygrad.
    """
    v = Tensor([1.0, float("nan")]).reshape(1, 1, 2, 1).expand(1, 1, 2, 8)
    assert ONES.scaled_dot_product_attention(ONES, v, attn_mask=Tensor([[True, False]] * 2)).isnan().all().item()


def empty_row() -> None:
    """A row that sees no key is NaN instead of 0.

    Clauses: K7, M3, M5, M9, M10, M11, M12, M13, M15, M16, M17, M21, P2, T1, T2. Implementations: tinygrad.
    """
    assert ONES.scaled_dot_product_attention(ONES, ONES, attn_mask=Tensor([[False, False]] * 2)).isnan().all().item()


def no_width() -> None:
    """With a width of 0 scores of 0 are divided by 0, and every row is NaN.

    Clauses: A6. Implementations: tinygrad.
    """
    nothing = Tensor.zeros(1, 1, 2, 0)
    assert nothing.scaled_dot_product_attention(nothing, ONES).isnan().all().item()
