"""What mlx.core.fast.scaled_dot_product_attention does otherwise on the CPU, in MLX alone."""

import math

import mlx.core as mx

mx.set_default_device(mx.cpu)
ONES = mx.ones((1, 1, 2, 8))
V = mx.array([1.0, 3.0]).reshape(1, 1, 2, 1) * ONES


def _attend(q, k, v, **options):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=8**-0.5, **options)


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: mlx.
    """
    v = mx.concatenate([ONES[:, :, :1], mx.full((1, 1, 1, 8), mx.nan)], axis=2)
    assert mx.isnan(_attend(ONES, ONES, v, mask=mx.array([[True, False]] * 2))).all()


def empty_row() -> None:
    """A row that a boolean mask leaves without a key is the mean of all values instead of 0.

    Clauses: M3, M5, M9, M10, M11, M12, M13, M15, M16, M21, P2, P3, T1, T2. Implementations: mlx.
    """
    output = _attend(ONES, ONES, V, mask=mx.zeros((2, 2), dtype=mx.bool_))
    assert (output == 2).all()


def empty_row_by_minus_infinity() -> None:
    """A row whose floating mask is -inf throughout is NaN instead of 0.

    Clauses: M16, M17, P2. Implementations: mlx.
    """
    assert mx.isnan(_attend(ONES, ONES, V, mask=mx.full((2, 2), -mx.inf))).all()


def no_heads_ends_the_process() -> None:
    """Without heads an integer is divided by zero, which ends the process.

    Clauses: A6. Implementations: mlx.
    """
    mx.eval(_attend(ONES[:, :0], ONES[:, :0], ONES[:, :0]))


def infinite_key() -> None:
    """A visible key with an infinite component counts as hidden where its logit is -inf, instead of making it NaN.

    Clauses: M20. Implementations: mlx.
    """
    k = mx.concatenate([ONES[:, :, :1], mx.full((1, 1, 1, 8), -mx.inf)], axis=2)
    assert (_attend(ONES, k, V) == 1).all()


def float64() -> None:
    """Softmax is computed in float32, as documented, also where everything else is float64.

    Clauses: N1. Implementations: mlx.
    """
    q = mx.eye(8, dtype=mx.float64)[None, None, :2]
    weight = math.exp(8**-0.5) / (math.exp(8**-0.5) + 1)
    assert 1e-10 < abs(_attend(q, q, q)[0, 0, 0, 0].item() - weight) < 1e-6
