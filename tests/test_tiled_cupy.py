"""The arithmetic of CuPy's tiled path, with NumPy in CuPy's place; a machine with a device runs the real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn
from refattn import biases, masks
from refattn.arguments import Call, check_call

DEFAULTS: dict[str, Any] = {
    "causal": False, "mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None, "q_start": None,
    "k_start": 0,
}  # fmt: skip
generator = np.random.default_rng(7)
OPTIONS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "triangle": {"causal": True, "q_start": 3, "sinks": generator.standard_normal(4)},
    "some rows empty": {"mask": masks.window(2, 0) & masks.lengths([3, 9]), "q_start": -2},
    "scores": {"bias": biases.alibi(4), "softcap": 2.0, "scale": -0.5, "q_start": 1},
    "nothing": {"mask": masks.lengths(0)},
}


def checked(poison: float, options: dict[str, Any]) -> tuple[tuple[Any, ...], Call]:
    """Arrays whose last key holds the poison, and the checked call on them."""
    draw = np.random.default_rng(8).standard_normal
    q, k, v = draw((2, 4, 9, 8)), draw((2, 2, 11, 8)), draw((2, 2, 11, 8))
    k[..., -1, :], v[..., -1, :] = poison, -poison
    return (q, k, v), check_call(q, k, v, **{**DEFAULTS, **options})


@pytest.mark.library("numpy")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("poison", [0.5, float("nan"), float("inf")])
def test_tiles_agree_with_the_specification(name: str, poison: float) -> None:
    """Output and log-sum-exp of batched tiles are the dense ones, whatever the last key holds."""
    from refattn_backends.cupy_tiles import tiled

    arrays, call = checked(poison, OPTIONS[name])
    expected = refattn.attention_with_lse(*arrays, **OPTIONS[name])
    for dense, actual in zip(expected, tiled(call, rows=4, keys=3), strict=True):
        np.testing.assert_allclose(actual, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.library("numpy")
@pytest.mark.parametrize("sinks", [None, np.asarray([-np.inf, 1.0])], ids=["no sink", "sinks"])
def test_ends_of_the_range(sinks: Any) -> None:
    """Tiles of logits that are all -inf, and values that overflow before they are divided, harm no row."""
    from refattn_backends.cupy_tiles import tiled

    q, v = np.full((2, 6, 1), 1e200), np.full((2, 12, 3), 1e308) * (-1.0) ** (np.arange(12)[:, None] < 6)
    k = np.where(np.arange(12)[:, None] < 6, -1e200, [[[1e-200]], [[-1e200]]])
    expected = refattn.attention_with_lse(q, k, v, sinks=sinks)
    call = check_call(q, k, v, **{**DEFAULTS, "sinks": sinks})
    for dense, actual in zip(expected, tiled(call, rows=4, keys=3), strict=True):
        np.testing.assert_allclose(actual, dense, rtol=1e-12, atol=1e-12)
    assert np.isnan(expected[1][1]).all() == (sinks is None)


@pytest.mark.library("numpy")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("poison", [0.5, float("nan")])
def test_gradients_agree_with_the_specification(monkeypatch: pytest.MonkeyPatch, name: str, poison: float) -> None:
    """Gradients from the outputs and log-sum-exps of these tiles are the dense ones, whatever the last key holds."""
    from refattn import registry
    from refattn_backends.cupy import BACKEND
    from refattn_backends.cupy_tiles import tiled

    (q, k, v), _ = checked(poison, OPTIONS[name])
    monkeypatch.setitem(registry._FOUND["tiled"], "numpy", lambda call: tiled(call, rows=4, keys=3))
    monkeypatch.setitem(registry._FOUND["tiled_vjp"], "numpy", BACKEND.tiled_vjp)
    gradient = np.cos(np.arange(2 * 4 * 9 * 8)).reshape(2, 4, 9, 8)
    dense, found = (refattn.attention_vjp(q, k, v, gradient, path=path, **OPTIONS[name]) for path in ("dense", "tiled"))
    for expected, actual in zip(dense, found, strict=True):
        if expected is not None:
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", ["all keys", "triangle", "nothing", "scores"])
def test_hand_over_to_torch(name: str) -> None:
    """By DLPack, torch's plugin gives the dense result; calls that it takes no fused kernel for are kept."""
    import torch

    from refattn_backends.cupy_tiles import _by_torch

    arrays, call = checked(0.5, OPTIONS[name])
    expected = refattn.attention_with_lse(*arrays, **OPTIONS[name])
    handed = _by_torch(torch, call)
    assert (handed is None) == (name == "scores")
    for dense, actual in zip(expected, handed or expected, strict=True):
        np.testing.assert_allclose(actual, dense, rtol=1e-12, atol=1e-12)
