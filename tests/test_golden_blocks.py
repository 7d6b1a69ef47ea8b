"""Golden values and bounds over many blocks of rows and keys: what one block gives, in the memory of one."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from refattn import bounds, goldens, masks
from refattn.arrays import Array
from refattn.goldens import Golden, golden, golden_visible
from test_goldens import combinations, draw

LOWER_LEFT = np.tril(np.ones((5, 7), dtype=bool), 1)
Shrink = Callable[[], None]


@pytest.fixture(params=[(1, 1), (2, 3)], ids=str)
def shrink(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shrink:
    """Makes blocks so small that small calls have many, ragged ones at the ends."""

    def to_the_size() -> None:
        monkeypatch.setattr(goldens, "ROWS", request.param[0])
        monkeypatch.setattr(goldens, "KEYS", request.param[1])
        monkeypatch.setattr(bounds, "DISTANCES", 4)

    return to_the_size


def values(exact: Golden) -> dict[str, Array]:
    return {"output": exact.output, "lse": exact.lse, "weights": exact.weights}


def limits(exact: Golden) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for model in (("float32",), ("bfloat16", "unfused", True)):
        # Before and after `bound`, which leaves sums for the others.
        found |= {f"{model} lse": exact.lse_bound(*model), f"{model} output": exact.bound(*model)}
        found |= {f"{model} weights": exact.weights_bound(*model), f"{model} lse again": exact.lse_bound(*model)}
    return found


def assert_blocks_agree(make: Callable[[], Golden], shrink: Shrink) -> Golden:
    whole = make()
    wanted = values(whole), limits(whole)
    shrink()
    parts = make()
    for name, x in values(parts).items():
        np.testing.assert_allclose(x, wanted[0][name], rtol=1e-14, atol=1e-15, err_msg=name)
    for name, x in limits(parts).items():
        np.testing.assert_allclose(x, wanted[1][name], rtol=1e-11, err_msg=name)
    return parts


@pytest.mark.parametrize("options", [ours for ours, _ in combinations()], ids=lambda x: "-".join(x) or "plain")
def test_blocks_change_nothing(shrink: Shrink, options: dict[str, Any]) -> None:
    """Rows and keys in many ragged blocks give the values and the bounds that one block gives, whatever the options."""
    data = draw(11)
    assert_blocks_agree(lambda: golden(**data, weights=True, rows=[4, 0, 2, 2, -2], **options), shrink)


def test_errors_of_the_inputs(shrink: Shrink) -> None:
    """The errors of q, k and v are those of the rows and keys of each block."""
    data = draw(12)
    options: dict[str, Any] = {"errors": tuple(1e-3 * np.abs(x) for x in data.values()), "rows": [3, 1, 0]}
    assert_blocks_agree(lambda: golden_visible(**data, visible=LOWER_LEFT, weights=True, **options), shrink)


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": np.asarray([0.5, np.inf, np.nan, -np.inf])}, {"bias": np.where(np.arange(7) == 3, np.inf, 0.0)}],
    ids=["plain", "sinks", "bias"],
)
def test_non_finite_data(shrink: Shrink, options: dict[str, Any]) -> None:
    """NaN and infinities that rows see in one block or in two give what they give in one."""
    data = draw(13)
    data["q"][0, 1, 2, 3] = np.nan
    data["k"][0, 0, 4, 1], data["k"][1, 1, 6, 0] = -np.inf, np.nan
    data["v"][1, 0, 1, 0], data["v"][1, 0, 4, 0], data["v"][0, 1, 2, 2] = np.inf, -np.inf, np.nan
    parts = assert_blocks_agree(lambda: golden_visible(**data, visible=LOWER_LEFT, weights=True, **options), shrink)
    assert np.any(np.isnan(parts.output)) and np.any(np.isinf(parts.output))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e300])
def test_poison_in_hidden_keys(shrink: Shrink, poison: float) -> None:
    """What hidden keys and values hold changes no bit of a value or bound, in blocks hidden wholly or in part."""
    data, keep = draw(14), np.asarray([False] * 3 + [True, False, True, True])
    options: dict[str, Any] = {"mask": masks.padding(keep), "causal": True, "q_start": 2, "weights": True}
    shrink()
    clean = golden(**data, **options)
    data["k"][..., ~keep, :], data["v"][..., ~keep, :] = poison, poison
    poisoned = golden(**data, **options)
    for found in (values, limits):
        for name, x in found(poisoned).items():
            np.testing.assert_array_equal(x, found(clean)[name], err_msg=name)


@pytest.mark.parametrize("step", [-3.0, -0.3, 0.0, 0.3, 3.0, 500.0])
def test_hidden_blocks_before_very_negative_logits(shrink: Shrink, step: float) -> None:
    """Neither hidden first blocks nor logits near -1000 that rise or fall from block to block lose a key."""
    q, v = np.full((1, 3, 1), -30.0), np.linspace(1.0, 2.0, 7).reshape(1, 7, 1)
    k = (1000.0 + step * np.arange(7)).reshape(1, 7, 1) / 30
    parts = assert_blocks_agree(lambda: golden_visible(q, k, v, np.arange(7) >= 4, weights=True), shrink)
    np.testing.assert_allclose(parts.output, parts.weights @ v, rtol=1e-14)
    np.testing.assert_allclose(np.sum(parts.weights, axis=-1), 1.0, rtol=1e-14)


def test_many_blocks_are_as_exact_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over 5,000 blocks of one key each, with logits that rise, are right to a few roundings."""
    monkeypatch.setattr(goldens, "ROWS", 1)
    monkeypatch.setattr(goldens, "KEYS", 1)
    v = np.random.default_rng(15).random((5000, 1))
    q, k = np.ones((1, 1)), np.linspace(0.0, 5.0, 5000)[:, None]
    exact = golden_visible(q, k, v, np.ones((1, 1), dtype=bool))
    weights = [math.exp(x) for x in k[:, 0]]
    total = math.fsum(weights)
    wanted = math.fsum(w * x for w, x in zip(weights, v[:, 0], strict=True)) / total
    np.testing.assert_allclose(exact.output[0, 0], wanted, rtol=1e-15)
    np.testing.assert_allclose(exact.lse[0], math.log(total), rtol=1e-15)


def test_memory_is_independent_of_the_keys() -> None:
    """Sampled values and bounds make no array of float64 keys, nor of rows by keys, but those of one block."""
    rng, peaks = np.random.default_rng(0), []
    for k_len in (50_000, 200_000):
        q, k, v = (rng.standard_normal((length, 16), dtype=np.float32) for length in (64, k_len, k_len))
        tracemalloc.start()
        try:
            exact = golden(q, k, v, causal=True, q_start=k_len - 64, rows=range(0, 64, 2))
            bound, lse_bound = exact.bound("float32"), exact.lse_bound("float32")
            peaks.append(tracemalloc.get_traced_memory()[1] - k.nbytes - v.nbytes)  # less the copies that it keeps
        finally:
            tracemalloc.stop()
        assert np.all((bound > 0) & (bound < 1e-3))
        assert np.all(lse_bound > 0)
    assert peaks[1] < 1.1 * peaks[0] < 25e6


def test_later_changes_of_the_arrays_change_no_bound() -> None:
    """A golden value keeps its bounds when the arrays it came from, or those it gave, are written to."""
    data, bias = draw(16), np.zeros((5, 7))
    exact = golden_visible(**data, visible=np.ones((1, 1), dtype=bool), bias=bias, weights=True)
    kept = limits(exact)
    for x in (*data.values(), bias, exact.output, exact.lse, exact.weights):
        x[...] = 1e3
    for name, x in limits(exact).items():
        np.testing.assert_array_equal(x, kept[name], err_msg=name)
