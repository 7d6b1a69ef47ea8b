"""What keras.ops.dot_product_attention does otherwise on its backend torch, in Keras and torch alone."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

ONES = torch.ones(1, 2, 1, 8)  # (batch, tokens, heads, width)
V = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1) * ONES
_attend = keras.ops.dot_product_attention


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: keras-torch.
    """
    v = ONES.clone()
    v[:, 1] = torch.nan
    assert _attend(ONES, ONES, v, mask=torch.tensor([[True, False]] * 2)[None, None]).isnan().all()


def empty_row() -> None:
    """A row that the mask leaves without a key is the mean of all values instead of 0.

    Clauses: M3, M5, M9, M10, M11, M12, M13, M15, M16, P2, T1, T2. Implementations: keras-torch.
    """
    assert (_attend(ONES, ONES, V, mask=torch.zeros(1, 1, 2, 2, dtype=torch.bool)) == 2).all()


def empty_row_of_a_nan_query() -> None:
    """A row that sees no key is NaN instead of 0 if its query is NaN.

    Clauses: M21. Implementations: keras-torch.
    """
    hidden = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    assert _attend(torch.full_like(ONES, torch.nan), ONES, V, mask=hidden).isnan().all()


def scale_of_zero() -> None:
    """With a scale of 0 and is_causal torch's tiled kernel gives NaN.

    Clauses: S2. Implementations: keras-torch.
    """
    assert _attend(ONES, ONES, V, scale=0.0, is_causal=True).isnan().any()


def float64() -> None:
    """float64 becomes float32, the default of Keras.

    Clauses: A4. Implementations: keras-torch.
    """
    q = ONES.double()
    assert _attend(q, q, q).dtype == torch.float32
