"""Chapter C: the figures of the cost model, counted again by other means."""

import math
import re
from typing import Any

import numpy as np
import pytest

from refattn import cost
from refattn.errors import CostError


def test_one_large_matrix_has_the_known_size() -> None:
    """4096 x 4096 are 16,777,216 weights, 32 MiB in half precision, and 1 GiB for 32 heads (C1)."""
    found = cost.attention_cost(4096, 4096, heads=32, d_k=128)
    assert found.weights_per_head == 16_777_216
    assert found.weights_per_head_bytes == 32 * 2**20
    assert found.weights == 32 * 16_777_216
    assert found.weights_bytes == 2**30


def test_operations_are_those_that_a_loop_counts() -> None:
    """FLOPs are what a loop over batch, heads, pairs and components would carry out one by one (C2)."""
    batch, heads, q_len, k_len, d_k, d_v = 2, 3, 4, 5, 6, 7
    score = softmax = value = 0
    for _ in np.ndindex(batch, heads, q_len, k_len):
        score += sum(2 for _ in range(d_k))  # multiply, add
        softmax += len(("scale", "subtract", "exponential", "sum", "divide"))
        value += sum(2 for _ in range(d_v))
    found = cost.attention_cost(q_len, k_len, heads=heads, d_k=d_k, d_v=d_v, batch=batch)
    assert (found.score_flops, found.softmax_flops, found.value_flops) == (score, softmax, value)
    assert found.flops == score + softmax + value


def test_bytes_are_those_of_real_arrays() -> None:
    """Bytes moved are the bytes of q, k, v and the output; materialising adds four passes over pairs (C2)."""
    q, k, v, output, weights = (
        np.empty(shape, dtype="float32")
        for shape in ((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), (2, 6, 5, 4), (2, 6, 5, 7))
    )
    found = cost.attention_cost(5, 7, heads=6, kv_heads=3, d_k=8, d_v=4, batch=2, dtype="float32")
    assert found.bytes_moved == q.nbytes + k.nbytes + v.nbytes + output.nbytes
    assert found.bytes_materialised == found.bytes_moved + 4 * weights.nbytes
    assert found.weights_bytes == weights.nbytes
    assert found.intensity == found.flops / found.bytes_moved
    assert found.intensity_materialised == found.flops / found.bytes_materialised
    assert found.kv_cache_bytes == k.nbytes + v.nbytes


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8)])
def test_bytes_follow_the_dtype(dtype: str, item: int) -> None:
    """Each dtype counts with its own width, in the weights and in the cache (C1, C3)."""
    assert cost.attention_cost(3, 5, heads=2, d_k=4, dtype=dtype).weights_bytes == 2 * 3 * 5 * item
    assert cost.kv_cache_bytes(1, 5, 2, 4, dtype) == cost.kv_cache_elements(1, 5, 2, 4) * item


def test_cache_elements_follow_the_key_value_heads() -> None:
    """A cache has 2 B S Hkv d_h elements, so 8, 2 and 1 key/value heads compare as 8:2:1 (C3)."""
    assert cost.kv_cache_elements(3, 100, 8, 64) == 2 * 3 * 100 * 8 * 64
    one = cost.kv_cache_elements(3, 100, 1, 64)
    assert [cost.kv_cache_elements(3, 100, heads, 64) // one for heads in (8, 2, 1)] == [8, 2, 1]
    shared = [cost.attention_cost(1, 100, heads=8, kv_heads=heads, d_k=64, batch=3) for heads in (8, 2, 1)]
    assert [found.kv_cache_elements // one for found in shared] == [8, 2, 1]


def test_sharing_heads_changes_the_cache_but_not_the_pairs() -> None:
    """Fewer key/value heads leave weights and operations as they are (C2, C3)."""
    many, few = (cost.attention_cost(9, 9, heads=8, kv_heads=heads, d_k=4) for heads in (8, 2))
    assert (many.weights, many.flops) == (few.weights, few.flops)
    assert many.bytes_moved > few.bytes_moved


def test_prefill_is_quadratic_and_decode_linear() -> None:
    """Twice the length means four times the work of a prefill and twice that of a decode step (C2)."""
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "d_k": 16}
    assert cost.prefill_cost(2048, **sizes).flops == 4 * cost.prefill_cost(1024, **sizes).flops
    assert cost.decode_cost(2048, **sizes).flops == 2 * cost.decode_cost(1024, **sizes).flops


def test_every_token_decoded_is_a_prefill_of_the_causal_half() -> None:
    """Decoding n tokens one by one compares n (n + 1) / 2 pairs, a triangle with its diagonal (C2)."""
    steps = [cost.decode_cost(length, heads=1, d_k=8) for length in range(1, 11)]
    assert sum(step.weights for step in steps) == np.tril(np.ones((10, 10))).sum()


def test_sizes_may_be_zero() -> None:
    """Nothing to do costs nothing, and no figure divides by zero (C1, C2)."""
    found = cost.attention_cost(0, 0, heads=0, kv_heads=0, d_k=0)
    assert found.flops == found.bytes_moved == found.kv_cache_elements == 0
    assert found.intensity == found.intensity_materialised == 0.0
    assert [other.path for other in cost.alternatives(0, 4)] == [0, 0, 0, 0]


def test_numpy_integers_are_sizes() -> None:
    """A shape read from an array is as good as a number typed in (C1)."""
    three: Any = np.int64(3)
    assert cost.attention_cost(three, 5, heads=2, d_k=4) == cost.attention_cost(3, 5, heads=2, d_k=4)


def test_alternatives_have_the_known_work_and_state() -> None:
    """Attention grows with n^2, the others with n; a recurrent state does not grow at all (C4)."""
    short, long = (
        {other.method: other for other in cost.alternatives(n, 64, kernel=4, window=32)} for n in (512, 1024)
    )
    assert list(short) == ["full attention", "recurrent", "convolution", "local attention"]
    assert {name: long[name].work // short[name].work for name in short} == {
        "full attention": 4,
        "recurrent": 2,
        "convolution": 2,
        "local attention": 2,
    }
    assert {name: long[name].state / short[name].state for name in short} == {
        "full attention": 2,
        "recurrent": 1,
        "convolution": 1,
        "local attention": 1,
    }
    assert short["full attention"].state == cost.kv_cache_elements(1, 512, 1, 64)
    assert [other.steps for other in short.values()] == [1, 512, 1, 1]


@pytest.mark.parametrize("reach", [2, 3, 16, 40])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 33])
def test_path_length_is_what_spreading_takes(length: int, reach: int) -> None:
    """The path is the number of layers, or updates, until the last token has heard of the first (C4)."""
    distance = np.arange(length)[:, None] - np.arange(length)
    path = {other.method: other.path for other in cost.alternatives(length, 4, kernel=reach, window=reach)}
    for method, seen in (
        ("full attention", length),
        ("convolution", reach),
        ("local attention", reach),
        ("recurrent", 2),
    ):
        layer = ((distance >= 0) & (distance < seen)).astype(int)
        heard, layers = np.eye(length, dtype=int), 0
        while not heard[-1, 0]:
            heard, layers = np.minimum(layer @ heard, 1), layers + 1
        assert path[method] == layers, method


def test_a_kernel_or_window_of_one_never_gets_anywhere() -> None:
    """A token that sees itself alone never hears of another, however many the layers (C4)."""
    _, _, convolution, local = cost.alternatives(10, 4, kernel=1, window=1)
    assert convolution.path is None
    assert local.path is None


def test_formulas_give_the_numbers_beside_them() -> None:
    """Every formula, evaluated as it is printed, gives the number that stands beside it (C4)."""
    names = {"n": 100, "d": 24, "k": 5, "w": 7}
    for other in cost.alternatives(100, 24, kernel=5, window=7):
        for formula, number in (
            (other.work_formula, other.work),
            (other.path_formula, other.path),
            (other.steps_formula, other.steps),
            (other.state_formula, other.state),
        ):
            assert _value(formula, names) == number, formula


def _value(formula: str, names: dict[str, int]) -> int:
    """A formula's value: a space between factors multiplies, ceil and min are functions."""
    tokens = re.findall(r"\w+|\S", formula)
    python = ""
    for before, token in zip(["+", *tokens], tokens):
        is_factor = token.isalnum() or token == "("
        after_factor = (before.isalnum() and before not in ("ceil", "min")) or before == ")"
        python += (" * " if is_factor and after_factor else " ") + token.replace("^", "**")
    return int(eval(python, {"ceil": math.ceil, "min": min, **names}))  # our own formulas


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"q_len": -1}, "q_len"),
        ({"k_len": 2.0}, "k_len"),
        ({"heads": "8"}, "heads"),
        ({"heads": True}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"kv_heads": -2}, "kv_heads"),
        ({"d_k": None}, "d_k"),
        ({"d_v": -4}, "d_v"),
        ({"batch": 1.5}, "batch"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": np.float16}, "dtype"),
    ],
)
def test_bad_sizes_are_refused(changed: dict[str, Any], argument: str) -> None:
    """A bad size is a CostError that names the argument, the expectation, what came, and the clause (E2)."""
    sizes = {"q_len": 4, "k_len": 4, "heads": 8, "d_k": 16, **changed}
    with pytest.raises(CostError, match=rf"^{argument}: expected .* got .* \[refattn C1\]$"):
        cost.attention_cost(**sizes)


def test_bad_sizes_of_caches_and_alternatives_are_refused() -> None:
    """The cache and the alternatives check their sizes too (E2)."""
    with pytest.raises(CostError, match=r"^kv_heads: expected a whole number"):
        cost.kv_cache_elements(1, 10, -1, 4)
    with pytest.raises(CostError, match=r"^dtype: expected one of bfloat16"):
        cost.kv_cache_bytes(1, 10, 1, 4, "float8")
    with pytest.raises(CostError, match=r"^window: expected a whole number of at least 1"):
        cost.alternatives(10, 4, window=0)


def test_long_distances_are_counted_exactly() -> None:
    """Layers on the way are whole numbers beyond what a float holds, too."""
    length = 3 * 2**60 + 1
    found = {one.method: one for one in cost.alternatives(length, width=1, kernel=4, window=4)}
    assert found["convolution"].path == found["local attention"].path == 2**60
