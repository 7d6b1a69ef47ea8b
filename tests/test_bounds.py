"""Every rounding model: an honest implementation of it keeps its bound, and one that rounds more exceeds it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn import bounds, errors, golden, testing
from refattn.arrays import Array
from refattn.bounds import MODELS, Model, rounding_model
from refattn.conformance.judge import error_over_bound
from refattn.conformance.plain import rounded

pytest.importorskip("ml_dtypes", reason="bfloat16 and the 8-bit formats on NumPy need ml_dtypes")
import rounded_attention  # after the question whether it can be imported

FEATURES = ("causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "gqa", "d_v", "empty")
# A model of one's own: several fields at once.
OWN = Model(stored=True, products="bfloat16", weights="float8_e4m3", flush=True, tile=4)
DTYPES = ("bfloat16", "float16", "float32", "float64")


def ratios(call: tuple[Array, Array, Array], claimed: tuple[Any, ...], did: Model, **options: Any) -> dict[str, float]:
    """Error over bound of output, log-sum-exp and weights of an implementation that rounds as `did`."""
    plain = {name: x for name, x in options.items() if name != "spoil"}
    exact = golden(*call, weights=True, **plain)
    output, lse, weights = rounded_attention.attend(*call, dtype=claimed[0], model=did, **options)
    return {
        "output": error_over_bound(output, exact.output, exact.bound(*claimed)),
        "lse": error_over_bound(lse, exact.lse, exact.lse_bound(*claimed)),
        "weights": error_over_bound(weights, exact.weights, exact.weights_bound(*claimed)),
    }


@pytest.mark.parametrize("name", [*MODELS, "own"])
@settings(settings.get_profile("few"))
@given(data=st.data())
def test_honest_implementations_keep_their_bound(name: str, data: st.DataObject) -> None:
    """Whatever the call, rounding each step as the model says stays within its bound; coherent data as a worst case."""
    model = MODELS.get(name, OWN)
    dtype = data.draw(st.sampled_from(DTYPES))
    call = data.draw(testing.inputs(dtypes=(dtype,), features=FEATURES, longest=66, widths=(1, 3, 16)))
    v, constant = call.v, data.draw(st.booleans())
    if constant:
        v = np.full_like(v, data.draw(st.sampled_from([1.575, 1.99, 1.01, 1e-3])))
    coherent = constant or not np.any(call.q)
    found = ratios((call.q, call.k, v), (dtype, model, coherent), model, **call.options)
    assert not [what for what, ratio in found.items() if ratio > 1], found


def normal(dtype: str, q_len: int = 4, k_len: int = 16, spread: float = 1.0, d_k: int = 16) -> tuple[Array, ...]:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((length, d_k)) for length in (q_len, k_len, k_len))
    return tuple(rounded(x, dtype).astype(rounded_attention.TYPES[dtype]) for x in (spread * q, spread * k, v))


def equal(dtype: str, k_len: int, value: float) -> tuple[Array, ...]:
    """Zero queries and one value: a mean of equal terms."""
    kind = rounded_attention.TYPES[dtype]
    return np.zeros((1, 4), dtype=kind), np.zeros((k_len, 4), dtype=kind), np.full((k_len, 1), value).astype(kind)


def weighted(dtype: str, weight: float, value: float) -> tuple[Array, ...]:
    """Two keys, of which the first weighs 1 and has the value 0, the second weighs less and has the value."""
    logit = rounded(np.asarray(math.log(weight)), dtype)
    q, k, v = np.ones((1, 1)), np.asarray([[0.0], [logit]]), np.asarray([[0.0], [value]])
    return tuple(x.astype(rounded_attention.TYPES[dtype]) for x in (q, k, v))


def orthogonal(dtype: str) -> tuple[Array, ...]:
    """Large queries and keys whose products cancel to exactly 0, but not once each is multiplied and rounded."""
    x, v = np.rint(30 * np.random.default_rng(5).standard_normal((1, 8))) / 8, np.asarray([[5.0], *[[-1.0]] * 5])
    k = np.concatenate([np.concatenate([x[:, 4:], -x[:, :4]], axis=-1) * 3, np.zeros((5, 8))])
    return tuple(rounded(y, dtype).astype(rounded_attention.TYPES[dtype]) for y in (x, k, v))


def without_small(x: Array) -> Array:
    """Weights below 1 / 256 become zero."""
    return np.where(x < 2.0**-8, 0.0, x)


def of_two_bits(x: Array) -> Array:
    """Weights cut off after two bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.floor(mantissa * 4) / 4, exponent)


@dataclass(frozen=True)
class Worse:
    """An implementation that rounds more than a named model, and a call on which that must show."""

    claimed: str
    dtype: str
    call: tuple[Array, ...]
    model: Model
    spoil: Callable[[Array], Array] = lambda weights: weights
    options: dict[str, Any] = field(default_factory=dict)


WORSE = [
    Worse("fused", "bfloat16", normal("bfloat16", spread=2.0), MODELS["unfused"]),
    Worse("fused", "float16", normal("float16", q_len=64, spread=3.0), MODELS["unfused"]),
    Worse("fused", "float32", equal("float32", 3000, 1.575), MODELS["truncating"]),
    Worse("fused", "float32", normal("float32", spread=2.0), MODELS["tf32"]),
    Worse("fused", "float16", weighted("float16", 4e-5, 6e4), MODELS["flush"]),
    Worse("fused", "bfloat16", normal("bfloat16"), MODELS["e4m3-weights"]),
    Worse("fused", "float64", normal("float64"), Model(sums="float32")),
    Worse("unfused", "bfloat16", orthogonal("bfloat16"), MODELS["prescaled"], options={"scale": 0.3}),
    Worse("prescaled", "float16", normal("float16", spread=2.0), Model(products="bfloat16")),
    Worse("worst-case", "float32", normal("float32"), MODELS["float16-sums"]),
    Worse("truncating", "float16", equal("float16", 1000, 1.3), MODELS["float16-sums"]),
    Worse("tf32", "float32", normal("float32", spread=2.0), Model(products="bfloat16")),
    Worse("float16-sums", "float16", equal("float16", 180, 1.3), MODELS["bfloat16-sums"]),
    Worse("bfloat16-sums", "bfloat16", equal("bfloat16", 30, 1.3), Model(sums="float8_e4m3")),
    Worse("e4m3-weights", "bfloat16", weighted("bfloat16", 0.56, 1.0), MODELS["e5m2-weights"]),
    Worse("e5m2-weights", "bfloat16", weighted("bfloat16", 0.73, 1.0), MODELS["fused"], of_two_bits),
    Worse("flush", "float16", weighted("float16", 2e-3, 1e3), MODELS["fused"], without_small),
]


@pytest.mark.parametrize("case", WORSE, ids=lambda case: f"{case.claimed}-{case.dtype}")
def test_worse_implementations_exceed_it(case: Worse) -> None:
    """On an input that amplifies the difference the bound is no more than what the model needs."""
    claim, call = (case.dtype, case.claimed), (case.call[0], case.call[1], case.call[2])
    coherent = not np.any(call[0])
    honest = ratios(call, (*claim, coherent), MODELS[case.claimed], **case.options)
    assert max(honest.values()) <= 1
    worse = ratios(call, claim, case.model, spoil=case.spoil, **case.options)
    assert worse["output"] > 1


@pytest.mark.parametrize(
    ("name", "width", "small", "large", "scale"),
    [("flush", 1, 5e-5, 1e4, 1.0), ("float16-sums", 4, 2.0**-13, 2.0**-13, 2.0**21)],
)
def test_numbers_that_are_lost_before_the_softmax(
    name: str, width: int, small: float, large: float, scale: float
) -> None:
    """Queries that become zero, and products too small for a sum in 16 bits, are in the bounds of their models."""
    q, k, v = np.full((1, width), small), np.asarray([[large] * width, [0.0] * width]), np.asarray([[1.0], [-1.0]])
    call = (q.astype(np.float16), k.astype(np.float16), v.astype(np.float16))
    assert max(ratios(call, ("float16", name), MODELS[name], scale=scale).values()) <= 1
    assert ratios(call, ("float16", "fused"), MODELS[name], scale=scale)["output"] > 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_weight_of_a_key_that_outweighs_the_others(name: str, dtype: str) -> None:
    """What it may lose is more than what it may gain, and the bound of the weights has room for both."""
    near = 0.125 * np.arange(-8, 8)
    q = np.stack([11.0 + near, np.full(16, 10.875)], axis=-1)[:, None, :]
    k = np.stack([np.zeros((16, 2)), np.stack([10.375 - near, np.full(16, -10.8125)], axis=-1)], axis=1)
    call = tuple(rounded(x, dtype) for x in (q, k, np.ones((16, 2, 1))))
    assert max(ratios((call[0], call[1], call[2]), (dtype, name, True), MODELS[name]).values()) <= 1


def test_every_model_has_a_worse_one() -> None:
    """No named model goes without an implementation that exceeds it, and a row of docs/bounds.md that describes it."""
    assert {case.claimed for case in WORSE} == set(MODELS), "add to WORSE an implementation that rounds more"
    page = (Path(__file__).parents[1] / "docs" / "bounds.md").read_text(encoding="utf-8")
    described = {
        name.strip() for names in re.findall(r"^\| ([^|]+) \| `", page, re.MULTILINE) for name in names.split(",")
    }
    assert {*MODELS} - described == {"fused"}, "docs/bounds.md lacks its row, with field and meaning"


def test_models_are_ordered() -> None:
    """Every model permits at least what "fused" does, for output, log-sum-exp and weights."""
    call = normal("float16")
    exact = golden(*call, weights=True)
    for dtype in DTYPES:
        for name in MODELS:
            for what in ("bound", "lse_bound", "weights_bound"):
                assert np.all(getattr(exact, what)(dtype, name) >= getattr(exact, what)(dtype)), (dtype, name, what)


def test_a_name_is_its_model() -> None:
    """A name, the Model it stands for, and coherent=True in place of a field give one bound."""
    exact = golden(*normal("float32"))
    for name, model in MODELS.items():
        np.testing.assert_array_equal(exact.bound("float32", name), exact.bound("float32", model))
    np.testing.assert_array_equal(exact.bound("float32", "worst-case"), exact.bound("float32", coherent=True))
    np.testing.assert_array_equal(
        exact.lse_bound("float32", Model(coherent=True)), exact.lse_bound("float32", "worst-case")
    )


def test_smaller_tiles_permit_more() -> None:
    """Each tile rescales once, so that more tiles may err more, the log-sum-exp too."""
    exact = golden(*normal("float32", k_len=256))
    for what in ("bound", "lse_bound"):
        sizes = [np.max(getattr(exact, what)("float32", Model(tile=tile))) for tile in (256, 32, 1)]
        assert sizes[0] < sizes[1] < sizes[2]


def test_sums_in_few_bits_are_not_judgeable_for_ever() -> None:
    """Where rounding alone may change a sum by a factor e, the bound is infinite."""
    exact = golden(*equal("float32", 3000, 1.0), weights=True)
    for what in ("bound", "lse_bound", "weights_bound"):
        assert np.all(np.isinf(getattr(exact, what)("bfloat16", "bfloat16-sums")))
        assert np.all(np.isfinite(getattr(exact, what)("bfloat16", "truncating")))


def test_weights_that_vanish_cost_no_more_than_they_are() -> None:
    """Weights too small for their dtype lose at most themselves, however many keys there are."""
    exact = golden(*equal("bfloat16", 5000, 1.0))
    assert np.all(exact.bound("bfloat16", "e4m3-weights") < 0.1)  # cast before the division: 1 each
    stored = exact.bound("bfloat16", Model(stored=True, weights="float8_e4m3"))  # after it: 1 / 5000 each, which is 0
    assert np.all((stored > 1) & (stored < 1.5))


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("model", lambda: rounding_model("float32", "magic")),
        ("dtype", lambda: rounding_model("int8")),
        ("dtype", lambda: rounding_model("float8_e4m3")),
        ("sums of a model", lambda: Model(sums="int32")),
        ("tile of a model", lambda: Model(tile=0)),
    ],
)
def test_unknown_models_are_refused(argument: str, make: Callable[[], Any]) -> None:
    """What has no bound is refused by name, with the choices (N6)."""
    with pytest.raises(errors.ModelError) as raised:
        make()
    assert (raised.value.argument, raised.value.clause) == (argument, "N6")
    if argument == "model":
        assert all(name in raised.value.expected for name in bounds.MODELS)
