"""What jax.nn.dot_product_attention does otherwise on its implementation xla, in JAX alone."""

import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)
ONES = jnp.ones((1, 2, 1, 8), dtype=jnp.float32)  # (batch, tokens, heads, width)
V = jnp.asarray([1.0, 3.0], dtype=jnp.float32).reshape(1, 2, 1, 1) * ONES


def _attend(q, k, v, **options):
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20, P4. Implementations: jax.
    """
    mask = jnp.asarray([[True, False]] * 2)[None, None]
    assert jnp.isnan(_attend(ONES, ONES, ONES.at[:, 1].set(jnp.nan), mask=mask)).all()


def empty_row() -> None:
    """A row that sees no key is the mean of all values instead of 0, and its log-sum-exp a large negative number.

    Clauses: M3, M5, M9, M10, M11, M12, M13, M15, M16, M17, M21, P2, P4, T1, T2. Implementations: jax.
    """
    output, lse = _attend(ONES, ONES, V, mask=jnp.zeros((1, 1, 2, 2), dtype=bool), return_residual=True)
    assert (output == 2).all() and jnp.isfinite(lse).all()


def log_sum_exp_in_16_bits() -> None:
    """The log-sum-exp has the dtype of the queries: in bfloat16 that of 80 equal keys is 4.375 instead of 4.382.

    Clauses: P4. Implementations: jax.
    """
    k = jnp.zeros((1, 80, 1, 8), dtype=jnp.bfloat16)
    _, lse = _attend(k[:, :1], k, k, return_residual=True)
    assert lse.dtype == jnp.bfloat16 and lse.item() == 4.375


def float64() -> None:
    """Softmax is computed in float32 also where everything else is float64.

    Clauses: N1. Implementations: jax.
    """
    q = jnp.eye(2, 8, dtype=jnp.float64)[None, :, None]
    weight = 1 / (1 + jnp.exp(-(8.0**-0.5)))
    assert 1e-10 < abs(_attend(q, q, q)[0, 0, 0, 0] - weight) < 1e-6


def infinite_logit() -> None:
    """A logit of +inf makes its row NaN, but the log-sum-exp +inf.

    Clauses: P4, P7. Implementations: jax.
    """
    bias = jnp.asarray([jnp.inf, 0.0], dtype=jnp.float32) * jnp.ones((1, 1, 2, 1), dtype=jnp.float32)
    output, lse = _attend(ONES, ONES, V, bias=bias.at[..., 1].set(0), return_residual=True)
    assert jnp.isnan(output).all() and jnp.isposinf(lse).all()


def infinite_key() -> None:
    """A visible key with an infinite component counts as hidden where its logit is -inf, instead of making it NaN.

    Clauses: M20. Implementations: jax.
    """
    assert (_attend(ONES, ONES.at[:, 1, :, 0].set(-jnp.inf), V) == 1).all()


def no_heads() -> None:
    """Without heads it raises an error.

    Clauses: A6. Implementations: jax.
    """
    try:
        _attend(ONES[:, :, :0], ONES[:, :, :0], ONES[:, :, :0])
    except ZeroDivisionError:
        return
    raise AssertionError("accepted")
