"""The tiled paths: any tile size gives what the specification gives (T1), within memory linear in the length (T4)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refattn
from drawn_calls import Call, calls
from libraries import Library
from refattn import mask_kinds
from refattn_backends import numpy_tiles, tiles
from test_random_options import assert_within, float64_bounds

NUMPY = pytest.mark.library("numpy")


@pytest.fixture(params=[(1, 1), (2, 3), (5, 2)], ids=str)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiles that small calls have many of."""
    for module in (tiles, numpy_tiles):
        monkeypatch.setattr(module, "ROWS", request.param[0])
        monkeypatch.setattr(module, "KEYS", request.param[1])
    return request.param


def check(library: Library, call: Call) -> None:
    arrays, options = call.arguments(library, "float64")
    expected = call.expected("float64")
    bound = float64_bounds(call, expected)
    output, lse = refattn.attention_with_lse(*arrays, **options, path="tiled")
    assert output.dtype == arrays[0].dtype
    # Merging rounds once more per tile than the dense core does.
    assert_within(library.host(output), expected.output, 4 * bound["output"], "output")
    assert_within(library.host(lse), expected.lse, 4 * bound["lse"], "lse")


@pytest.mark.library("numpy", "torch", "strict")
@given(data=st.data())
# The tile size is the same for all examples.
@settings(settings.get_profile("few"), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tile_size_agrees_with_the_oracle(tile: Any, library: Library, data: st.DataObject) -> None:
    """Random shapes and options, poison apart, computed in tiles of any size, agree with the oracle."""
    check(library, data.draw(calls()))


@pytest.mark.library("numpy", "torch", "strict")
def test_first_tile_masked_before_very_negative_logits(tile: Any, library: Library) -> None:
    """A wholly masked first tile leaves no maximum behind that very negative logits then vanish under."""
    q, k = np.full((1, 3, 1), -30.0), np.full((1, 7, 1), 30.0) + np.linspace(0, 0.01, 7)[:, None]
    v = np.linspace(1.0, 2.0, 7).reshape(1, 7, 1)
    shown = np.arange(7) >= 5
    q, k, v, shown = (library.array(x) for x in (q, k, v, shown))
    output, lse = refattn.attention_with_lse(q, k, v, mask=refattn.masks.dense(shown), path="tiled")
    expected = refattn.golden(q, k, v, mask=refattn.masks.dense(shown))
    assert float(np.max(expected.lse)) < -800
    assert np.all(np.abs(library.host(output) - expected.output) <= expected.bound("float64"))
    assert np.all(np.abs(library.host(lse) - expected.lse) <= expected.lse_bound("float64"))


@pytest.mark.library("numpy", "torch", "strict")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e300])
def test_poison_in_hidden_keys_is_harmless(tile: Any, library: Library, poison: float) -> None:
    """What hidden keys and values hold changes no element beyond the bound, in any tile."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 6, 4)) for _ in range(3))
    keep = np.asarray([True, True, False, True, False, False])
    mask = refattn.masks.padding(keep)
    expected = refattn.golden(q, k, v, mask=mask, causal=True)
    k[:, ~keep], v[:, ~keep] = poison, poison
    q, k, v = (library.array(x) for x in (q, k, v))
    output = library.host(refattn.attention(q, k, v, mask=mask, causal=True, path="tiled"))
    assert np.all(np.abs(output - expected.output) <= expected.bound("float64"))


@NUMPY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["without maximum", "with running maximum"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 5.0}], ids=str)
def test_many_rows_and_keys(dtype: str, spread: float, options: dict[str, Any]) -> None:
    """Lengths that no tile size divides, grouped heads, and logits near and far from zero keep the bound."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, heads, 1100, 16)).astype(dtype) for heads in (4, 2, 2))
    q *= spread
    output, lse = refattn.attention_with_lse(q, k, v, **options, path="tiled")
    rows = [0, 1, 255, 256, 511, 700, 1099]
    expected = refattn.golden(q, k, v, rows=rows, **options)
    assert np.all(np.abs(output[..., rows, :] - expected.output) <= expected.bound(dtype))
    assert np.all(np.abs(lse[..., rows] - expected.lse) <= expected.lse_bound(dtype))


@NUMPY
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and four give the same bits."""
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((3, 700, 24)).astype(np.float32) for _ in range(3))
    results = []
    for threads in (1, 4):
        with ThreadPoolExecutor(threads) as pool:
            monkeypatch.setattr(numpy_tiles, "_pool", lambda pool=pool: pool)
            results.append(refattn.attention(q, k, v, causal=True, path="tiled"))
    assert results[0].tobytes() == results[1].tobytes()


@NUMPY
@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_the_length(masked: bool) -> None:
    """A long call needs a few tiles beyond its arguments and output, and no dense mask of a lazy one."""
    length = 8192
    q = np.random.default_rng(4).standard_normal((1, length, 8)).astype(np.float32)
    mask = refattn.masks.window(600, 0) & ~refattn.masks.prefix(5) if masked else None
    tracemalloc.start()
    output = refattn.attention(q, q, q, mask=mask, path="tiled")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - output.nbytes < 16 * 2**20 < length * length


@NUMPY
def test_hidden_tiles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that a window hides wholly are never computed, and those it shows wholly are never masked."""
    asked: list[str] = []
    answer = mask_kinds.Window.answer

    def watched(self: Any, *args: Any) -> str:
        asked.append(answer(self, *args))
        return asked[-1]

    masked: list[range] = []
    visible = numpy_tiles._visible

    def masking(call: Any, rows: range, keys: range, at: Any) -> Any:
        masked.append(keys)
        return visible(call, rows, keys, at)

    monkeypatch.setattr(mask_kinds.Window, "answer", watched)
    monkeypatch.setattr(numpy_tiles, "_visible", masking)
    monkeypatch.setattr(numpy_tiles, "ROWS", 16)
    monkeypatch.setattr(numpy_tiles, "KEYS", 16)
    q = np.ones((1, 256, 4), np.float32)
    refattn.attention(q, q, q, mask=refattn.masks.window(40, 0), path="tiled")
    assert len(masked) == asked.count("mixed")
    assert asked.count("all") > 0
    assert asked.count("none") > 3 * len(masked)
