"""The worked example, small enough to follow by hand: three tokens, d_k = 2, d_v = 2, one head."""

from typing import Any

TOKENS = ("voltage", "spike", "alarm")
Q = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
K = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
V = ((10.0, 0.0), (0.0, 10.0), (5.0, 5.0))

# The result as published, to three decimals; the second row mirrors the first, the third is symmetric.
OUTPUT = ((6.017, 3.983), (3.983, 6.017), (5.0, 5.0))


def inputs() -> tuple[Any, Any, Any]:
    """q (3, 2), k (3, 2) and v (3, 2) as NumPy float64 arrays."""
    import numpy as np

    return np.asarray(Q), np.asarray(K), np.asarray(V)


def agrees(output: Any) -> bool:
    """Whether an output (3, 2) is the published one, as far as its decimals go."""
    import numpy as np

    return output.shape == (3, 2) and bool(np.all(np.abs(output - np.asarray(OUTPUT)) < 1e-3))
