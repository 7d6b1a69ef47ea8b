"""What keras.ops.dot_product_attention does otherwise on its backend jax, in Keras and JAX alone."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras

jax.config.update("jax_enable_x64", True)
ONES = jnp.ones((1, 2, 1, 8), dtype=jnp.float32)  # (batch, tokens, heads, width)
V = jnp.asarray([1.0, 3.0], dtype=jnp.float32).reshape(1, 2, 1, 1) * ONES
_attend = keras.ops.dot_product_attention


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: keras-jax.
    """
    mask = jnp.asarray([[True, False]] * 2)[None, None]
    assert jnp.isnan(_attend(ONES, ONES, ONES.at[:, 1].set(jnp.nan), mask=mask)).all()


def empty_row() -> None:
    """A row that sees no key is the mean of all values instead of 0.

    Clauses: M3, M5, M9, M10, M11, M12, M13, M15, M16, M17, M21, P2, T1, T2. Implementations: keras-jax.
    """
    assert (_attend(ONES, ONES, V, mask=jnp.zeros((1, 1, 2, 2), dtype=bool)) == 2).all()


def infinite_key() -> None:
    """A visible key with an infinite component counts as hidden where its logit is -inf, instead of making it NaN.

    Clauses: M20. Implementations: keras-jax.
    """
    assert (_attend(ONES, ONES.at[:, 1, :, 0].set(-jnp.inf), V) == 1).all()


def float64() -> None:
    """float64 becomes float32, the default of Keras.

    Clauses: A4. Implementations: keras-jax.
    """
    q = ONES.astype(jnp.float64)
    assert _attend(q, q, q).dtype == jnp.float32


def no_heads() -> None:
    """Without heads it raises an error.

    Clauses: A6. Implementations: keras-jax.
    """
    try:
        _attend(ONES[:, :, :0], ONES[:, :, :0], ONES[:, :, :0])
    except ZeroDivisionError:
        return
    raise AssertionError("accepted")
