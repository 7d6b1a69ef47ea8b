"""Non-influence: what an invisible key holds never shows, and what a visible one holds follows the rule."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import oracle
import refattn
from drawn_calls import Call, Floats, Ints
from libraries import Library, eager

BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, D_K, D_V = 2, 4, 2, 3, 5, 3, 2
HUGE = float(np.finfo(np.float32).max)
POISONS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e30": 1e30, "huge": HUGE}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Reproducible normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def booleans(*shape: int) -> Ints:
    """A library array of random booleans."""
    return Ints(draw(*shape, seed=5) > 0, "library")


MINUS_INF_BIAS = np.where(draw(HEADS, Q_LEN, K_LEN, seed=4) > 0, -np.inf, draw(Q_LEN, K_LEN))
SHOWN: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"mask": ("window", 1, 0)},
    "lengths": {"mask": ("lengths", Ints(np.asarray([2, 4]), "library"))},
    "padding": {"mask": ("padding", booleans(BATCH, K_LEN))},
    "documents": {
        "mask": (
            "documents",
            Ints(np.asarray([[0, 1, 1]]), "library"),
            Ints(np.asarray([[0, 0, 1, 2, 1]]), "library"),
        )
    },
    "prefix": {"mask": ("prefix", 4)},
    "chunks": {"mask": ("chunks", 2)},
    "dense": {"mask": ("dense", booleans(HEADS, Q_LEN, K_LEN))},
    "raw array": {"mask": ("raw", booleans(BATCH, 1, Q_LEN, K_LEN))},
    "blocks": {"mask": ("blocks", booleans(HEADS, 2, 3), 2)},
    "combined": {"mask": ("or", ("not", ("window", 1, 1)), ("and", ("causal",), ("prefix", 1)))},
    "minus infinity bias": {"bias": [("array", Floats(MINUS_INF_BIAS, None))]},
    "minus infinity table": {"bias": [("relative", Floats(np.asarray([[0.5, 1.0, -np.inf]] * HEADS), None))]},
    "nothing": {"mask": ("lengths", 0)},
    "extras": {
        "causal": True,
        "softcap": 2.0,
        "bias": [("alibi", HEADS)],
        "sinks": Floats(draw(HEADS), None),
    },
}


def make_call(options: dict[str, Any]) -> Call:
    """A grouped call with queries at positions 1, 2, 3 before keys 0 to 4."""
    q, k, v = (
        draw(BATCH, HEADS, Q_LEN, D_K),
        draw(BATCH, KV_HEADS, K_LEN, D_K),
        draw(BATCH, KV_HEADS, K_LEN, D_V),
    )
    return Call(q, k, v, {"q_start": 1, **options})


def results(library: Library, call: Call, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE on the host."""
    arrays, options = call.arguments(library, dtype)
    output, lse = refattn.attention_with_lse(*arrays, **options)
    return library.host(output), library.host(lse)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the last bit, signs of zero apart."""
    np.testing.assert_array_equal(actual, expected, strict=True)


@contextmanager
def non_finite_arithmetic() -> Iterator[None]:
    """NumPy may warn of NaN and infinities that the call can see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def assert_follows_the_rule(library: Library, call: Call) -> None:
    """The oracle's output and LSE, NaN and infinities in the same places."""
    with non_finite_arithmetic():
        output, lse = results(library, call)
    expected = call.expected("float64")
    np.testing.assert_allclose(output, expected.output, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("poison", [name if name in ("nan", "huge") else eager(name) for name in POISONS])
@pytest.mark.parametrize("kind", SHOWN)
def test_invisible_keys_and_values_change_no_bit(library: Library, kind: str, poison: str) -> None:
    """A row that does not see a key gives the same bits, without a warning, whatever k and v hold there."""
    call = make_call(SHOWN[kind])
    visible = call.expected("float64").visible
    output, lse = results(library, call)
    tried = 0
    for key in (2, 4):
        seen = visible[..., key]
        k, v = call.k.copy(), call.v.copy()
        k[..., key, 0], v[..., key, 0] = POISONS[poison], POISONS[poison]
        with warnings.catch_warnings():
            # NumPy may warn of what other rows see; where no row sees the key, a warning is an error.
            if seen.any():
                warnings.simplefilter("ignore", RuntimeWarning)
            got, got_lse = results(library, Call(call.q, k, v, call.options))
        assert_same_bits(got[~seen], output[~seen])
        assert_same_bits(got_lse[~seen], lse[~seen])
        tried += int((~seen).sum())
    assert tried > 0


@pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 1)], ids=["overflows", "cancels"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_invisible_products_may_overflow(
    library: Library, signs: tuple[int, ...], softcap: float | None, storage_dtype: str
) -> None:
    """Unseen keys whose products would overflow, or be inf - inf, change no bit and raise no warning."""
    largest = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": HUGE}[storage_dtype]
    call = make_call({"mask": ("prefix", 3), "softcap": softcap})
    call = Call(np.abs(call.q) + 10, call.k, call.v, call.options)
    k, v = call.k.copy(), call.v.copy()
    k[..., 3:, :], v[..., 3:, :] = largest * np.asarray(signs), largest
    output, lse = results(library, call, storage_dtype)
    with warnings.catch_warnings():
        if library.name == "dask":  # it computes later, under the settings of whoever computes (N5)
            warnings.simplefilter("ignore", RuntimeWarning)
        got, got_lse = results(library, Call(call.q, k, v, call.options), storage_dtype)
    assert_same_bits(got, output)
    assert_same_bits(got_lse, lse)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_invisible_bias_changes_no_bit(library: Library, poison: float) -> None:
    """What a bias holds at a masked pair is never read."""
    clean, poisoned = draw(Q_LEN, K_LEN), draw(Q_LEN, K_LEN)
    poisoned[0, 2:], poisoned[1, 3:], poisoned[2, 4:] = poison, poison, poison
    with_bias = [make_call({"causal": True, "bias": [("array", Floats(x, None))]}) for x in (clean, poisoned)]
    for expected, got in zip(*(results(library, call) for call in with_bias), strict=True):
        assert_same_bits(got, expected)


def test_lower_precisions_do_not_leak(library: Library, storage_dtype: str) -> None:
    """Non-influence holds in bits in every storage dtype."""
    call = make_call({"mask": ("prefix", 3), "bias": [("alibi", HEADS)]})
    k, v = call.k.copy(), call.v.copy()
    k[..., 3, :], k[..., 4, :], v[..., 3, :], v[..., 4, :] = np.nan, np.inf, -np.inf, np.nan
    clean = results(library, call, storage_dtype)
    poisoned = results(library, Call(call.q, k, v, call.options), storage_dtype)
    for expected, got in zip(clean, poisoned, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("poison", ["nan", "inf", eager("-inf")])
@pytest.mark.parametrize("kind", SHOWN)
def test_visible_keys_make_nan_rows(library: Library, kind: str, poison: str) -> None:
    """A visible key with a non-finite component makes its logit, and so its row, NaN: infinities too."""
    call = make_call(SHOWN[kind])
    k = call.k.copy()
    k[:, 1, 2, 1] = POISONS[poison]
    assert_follows_the_rule(library, Call(call.q, k, call.v, call.options))


@pytest.mark.parametrize("q_len", [1, 80])
@pytest.mark.parametrize("poison", [np.inf, -np.inf])
def test_visible_infinite_keys_make_nan_rows_on_tiles(library: Library, q_len: int, poison: float) -> None:
    """Where plain arithmetic gives a logit of -inf, and so no weight, the row is NaN on the tiled path too."""
    q, k, v = (np.random.default_rng(4).uniform(0.5, 1.0, (2, n, 4)) for n in (q_len, 80, 80))
    k[:, 40, 1] = poison
    options: dict[str, Any] = {"causal": True, "q_start": 80 - q_len}
    expected = refattn.golden(q, k, v, **options)
    output = library.host(refattn.attention(*map(library.array, (q, k, v)), **options, path="tiled"))
    assert np.array_equal(np.isnan(output), np.isnan(expected.output)) and np.isnan(output[:, -1]).all()
    some = ~np.isnan(expected.output)
    assert np.all(np.abs(output - expected.output)[some] <= expected.bound("float64")[some])


@pytest.mark.parametrize("kind", SHOWN)
def test_visible_values_decide_their_element(library: Library, kind: str) -> None:
    """A visible NaN gives NaN, an infinity itself, both infinities NaN, in that element alone."""
    call = make_call(SHOWN[kind])
    v = call.v.copy()
    v[:, 0, 1, 0], v[:, 0, 2, 1], v[:, 1, 1, 0], v[:, 1, 3, 0] = np.nan, np.inf, -np.inf, np.inf
    assert_follows_the_rule(library, Call(call.q, call.k, v, call.options))


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf"])
def test_values_count_whatever_their_weight(library: Library, poison: str) -> None:
    """A visible non-finite value decides its element even where its weight underflows to zero."""
    q, k, v = np.full((2, 1), 100.0), np.asarray([[100.0], [-100.0], [99.0]]), draw(3, 2)
    v[1, 0] = POISONS[poison]
    call = Call(q, k, v)
    assert call.expected("float64").weights[0, 1] == 0.0
    assert_follows_the_rule(library, call)


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf"])
def test_poisoned_query_rows_keep_to_themselves(library: Library, poison: str) -> None:
    """A non-finite query row follows the rule and changes no bit of another row."""
    call = make_call({"causal": True})
    q = call.q.copy()
    q[:, 1, 1, 0] = POISONS[poison]
    poisoned = Call(q, call.k, call.v, call.options)
    clean = results(library, call)
    with non_finite_arithmetic():
        got = results(library, poisoned)
    others = np.ones((BATCH, HEADS, Q_LEN), dtype=bool)
    others[:, 1, 1] = False
    for expected, actual in zip(clean, got, strict=True):
        assert_same_bits(actual[others], expected[others])
    if poison == "nan":
        assert np.isnan(got[0][~others]).all()
    np.testing.assert_allclose(got[0], poisoned.expected("float64").output, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("entry", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["causal", "nothing", "no keys"])
def test_non_finite_sinks(library: Library, kind: str, entry: float) -> None:
    """A sink of -inf is no sink; NaN and +inf make their head's rows NaN, empty ones too, and no other head's."""
    sinks = np.asarray([0.5, entry, -1.0, 2.0])
    call = make_call({**SHOWN.get(kind, {}), "sinks": Floats(sinks, None)})
    if kind == "no keys":
        call = Call(call.q, call.k[..., :0, :], call.v[..., :0, :], call.options)
    assert_follows_the_rule(library, call)


@pytest.mark.parametrize("entry", [np.nan, np.inf])
def test_visible_non_finite_bias(library: Library, entry: float) -> None:
    """A visible NaN or +inf logit makes its row NaN."""
    bias = draw(Q_LEN, K_LEN)
    bias[1, 1] = entry
    call = make_call({"causal": True, "bias": [("array", Floats(bias, None))]})
    with non_finite_arithmetic():
        output, _ = results(library, call)
    assert np.isnan(output[:, :, 1]).all()
    np.testing.assert_allclose(output, call.expected("float64").output, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("poison", POISONS)
def test_unused_cache_slots_change_nothing(library: Library, poison: str) -> None:
    """Beyond an entry's length a cache may hold anything, and so may the tail of a ragged append."""
    capacity, counts = 7, np.asarray([2, 5])
    q, k, v = draw(BATCH, HEADS, 1, D_K), draw(BATCH, KV_HEADS, K_LEN, D_K), draw(BATCH, KV_HEADS, K_LEN, D_V)
    poisoned_k, poisoned_v = k.copy(), v.copy()
    for entry, count in enumerate(counts):
        poisoned_k[entry, :, count:] = POISONS[poison]
        poisoned_v[entry, :, count:] = POISONS[poison]
    outputs = []
    for keys, values in ((k, v), (poisoned_k, poisoned_v)):
        cache = refattn.KVCache.allocate(library.array(k), BATCH, KV_HEADS, capacity, D_K, D_V)
        cache = cache.append(library.array(keys), library.array(values), counts=library.array(counts))
        outputs.append(library.host(refattn.attend(library.array(q), cache)))
    rule = oracle.lengths(counts)
    expected = oracle.attention(q, k, v, mask=rule, causal_too=True, q_start=counts - 1).output
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-11, atol=1e-12)
    assert_same_bits(outputs[1], outputs[0])
