"""The gradients of path="tiled": those of the dense path, for every option and tile size, in linear memory (T1, T4)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refattn
from drawn_calls import Call, Floats, calls
from libraries import EAGER, Library
from refattn import biases, masks, registry
from refattn_backends import tiles_backward
from refattn_backends.tiles_backward import tiled_vjp
from test_gradients import POISONED, in_float64, output_gradient, vjp

NUMPY = pytest.mark.library("numpy")
# What arrays are called in the registry.
ROOTS = {"strict": "array_api_strict"}


def generic(
    monkeypatch: pytest.MonkeyPatch, library: Library, rows: int = tiles_backward.ROWS, keys: int = tiles_backward.KEYS
) -> None:
    """Lets the generic tiles take the place of what the library's plugin offers."""
    name = ROOTS.get(library.name, library.name)
    monkeypatch.setitem(
        registry._FOUND["tiled_vjp"], name, lambda call, gradient: tiled_vjp(call, gradient, rows, keys)
    )


@pytest.fixture(params=[(1, 1), (2, 3), (5, 2), None], ids=["1x1", "2x3", "5x2", "own"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library: Library) -> Any:
    """Generic tiles of a few sizes that small calls have many of, and what the plugin itself does."""
    if request.param is not None:
        generic(monkeypatch, library, *request.param)
    return request.param


def agree(library: Library, call: Call, gradient: np.ndarray, dtype: str = "float64", within: float = 1e-10) -> None:
    """Both paths give gradients of the same shapes, NaN in the same places, and elsewhere the same numbers."""
    dense, tiled = (vjp(library, call, gradient, dtype, path=path) for path in ("dense", "tiled"))
    assert dense.keys() == tiled.keys()
    for name, x in dense.items():
        size = max(1.0, float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x))))
        np.testing.assert_allclose(tiled[name], x, rtol=within, atol=within * size, err_msg=name)


@EAGER
@given(data=st.data())
# The tile size is the same for all examples.
@settings(settings.get_profile("few"), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tile_size_gives_the_dense_gradients(tile: Any, library: Library, data: st.DataObject) -> None:
    """Random shapes and options, of zero size too, give the dense path's gradients of all arguments."""
    call = in_float64(data.draw(calls()))
    agree(library, call, output_gradient(call, data.draw(st.integers(0, 2**32 - 1))))


@EAGER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_dtypes(library: Library, dtype: str) -> None:
    """Gradients are rounded to the dtypes of their arguments at the end alone, as the dense ones are."""
    if dtype not in library.dtypes:
        pytest.skip(f"arrays of {library.name} have no {dtype} here")
    rng = np.random.default_rng(0)
    call = Call.of([rng.standard_normal((2, 2, 9, 4)) for _ in range(3)], {"causal": True})
    agree(library, call, output_gradient(call, 1), dtype, {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype])


HIDDEN = POISONED | {
    "empty rows with sinks": POISONED["empty rows"] | {"sinks": Floats(np.asarray([0.0, 1.0, -np.inf, 2.0]), None)}
}


@EAGER
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e308], ids=["nan", "inf", "1e308"])
@pytest.mark.parametrize("name", HIDDEN)
def test_invisible_data_influence_no_gradient(tile: Any, library: Library, name: str, poison: float) -> None:
    """What invisible keys hold, and the gradient of empty rows, changes nothing, and has gradients of exactly 0."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 5, 3)) for heads in (4, 2, 2))
    gradient = output_gradient(Call(q, k, v, HIDDEN[name]), 1)
    clean = vjp(library, Call(q, k, v, HIDDEN[name]), gradient)
    k[..., 3:, :], v[..., 3:, :] = poison * np.asarray([1, -1, 1]), poison
    empty = slice(None) if name == "nothing" else slice(0, 2 if "empty rows" in name else 0)
    gradient[..., empty, :] = q[..., empty, :] = poison
    found = vjp(library, Call(q, k, v, HIDDEN[name]), gradient, path="tiled")
    for part, x in clean.items():
        np.testing.assert_allclose(found[part], x, rtol=1e-12, atol=1e-12, err_msg=part)
    for part, hidden in {"k": slice(3, 5), "v": slice(3, 5), "q": empty}.items():
        assert not found[part][..., hidden, :].any()


VISIBLE: dict[str, tuple[str, Any]] = {
    "a value of nan": ("v", np.nan),
    "an infinite value": ("v", -np.inf),
    "a key of nan": ("k", np.nan),
    "an infinite key": ("k", np.inf),
    "a query of nan": ("q", np.nan),
    "an infinite query": ("q", -np.inf),
    "a gradient of nan": ("gradient", np.nan),
    "an infinite gradient": ("gradient", np.inf),
    "a sink of nan": ("sinks", np.nan),
    "an infinite sink": ("sinks", np.inf),
    "logits of minus infinity alone": ("bias", -1e308),
}


@EAGER
@pytest.mark.parametrize("name", VISIBLE)
def test_visible_data_that_are_not_finite(tile: Any, library: Library, name: str) -> None:
    """They make the same gradients NaN as on the dense path, and no others."""
    rng = np.random.default_rng(2)
    arrays = {part: rng.standard_normal((4, 6, 3)) for part in ("q", "gradient")}
    arrays |= {part: rng.standard_normal((2, 6, 3)) for part in "kv"}
    arrays |= {"sinks": rng.standard_normal(4), "bias": rng.standard_normal((4, 6, 6))}
    which, value = VISIBLE[name]
    arrays[which][(0,) if which == "sinks" else (1, slice(3)) if which == "bias" else (1, 2, 1)] = value
    if which == "bias":  # twice, which overflows
        arrays["sinks"][:] = -np.inf
    q, k, v, gradient, sinks, bias = (
        library.array(arrays[part]) for part in ("q", "k", "v", "gradient", "sinks", "bias")
    )
    options: dict[str, Any] = {"mask": masks.causal() & ~masks.prefix(1), "sinks": sinks}
    options["bias"] = biases.as_bias(bias) + bias
    dense, tiled = (refattn.attention_vjp(q, k, v, gradient, **options, path=path) for path in ("dense", "tiled"))
    pairs = dict(zip(dense._fields, zip(dense, tiled)))
    first, second = zip(*pairs.pop("bias"))
    for part, (x, y) in {"first bias": first, "second bias": second, **pairs}.items():
        np.testing.assert_allclose(library.host(y), library.host(x), rtol=1e-10, atol=1e-10, err_msg=part)
    assert np.isnan(library.host(dense.q)).any() == (which != "v")


@pytest.mark.parametrize("kind", ["one", "per entry"])
@EAGER
def test_gradients_through_a_cache(tile: Any, library: Library, kind: str) -> None:
    """Gradients by the keys of a cache are those by the keys that were appended, and 0 in slots that are not used."""
    rng = np.random.default_rng(3)
    q, k, v = (library.array(rng.standard_normal((2, heads, 5, 4))) for heads in (4, 2, 2))
    counts = None if kind == "one" else np.asarray([5, 3])
    cache = refattn.KVCache.allocate(q, batch=2, kv_heads=2, capacity=9, d_k=4)
    cache = cache.append(k[:, :, :5, :], v[:, :, :5, :], counts)
    gradient = library.array(rng.standard_normal((2, 4, 2, 4)))
    newest = q[:, :, :2, :]
    options: dict[str, Any] = {"causal": True, "q_start": 3 if counts is None else counts - 2}
    found = refattn.attention_vjp(
        newest, cache.k, cache.v, gradient, mask=masks.lengths(cache.length), **options, path="tiled"
    )
    shown: dict[str, Any] = {} if counts is None else {"mask": masks.lengths(counts)}
    expected = refattn.attention_vjp(newest, k, v, gradient, **options, **shown)
    np.testing.assert_allclose(library.host(found.q), library.host(expected.q), rtol=1e-12, atol=1e-12)
    for part in "kv":
        whole, appended = (library.host(getattr(x, part)) for x in (found, expected))
        np.testing.assert_allclose(whole[:, :, :5], appended, rtol=1e-12, atol=1e-12)
        assert not whole[:, :, 5:].any()


@NUMPY
@pytest.mark.parametrize("name", ["all keys", "window", "biases"])
def test_memory_is_linear_in_the_length(library: Library, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A long call needs some tiles beyond its arguments and gradients, also where biases are summed over."""
    length = 4096
    long: dict[str, dict[str, Any]] = {
        "all keys": {},
        "window": {"mask": masks.window(600, 0) & ~masks.prefix(5)},
        "biases": {
            "bias": biases.relative(np.ones((1, 9), np.float32)) + np.ones(length, np.float32),
            "mask": masks.window(600, 0),
        },
    }
    generic(monkeypatch, library)
    q = np.random.default_rng(4).standard_normal((1, length, 8)).astype(np.float32)
    tracemalloc.start()
    found = refattn.attention_vjp(q, q, q, q, **long[name], path="tiled")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.isfinite(found.q).all()
    assert peak < 12 * 2**20 < 4 * length * length // 4


@NUMPY
def test_hidden_tiles_are_skipped(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that a window shows nothing of are not computed."""
    computed: list[tuple[int, int]] = []
    of_tile = tiles_backward.of_tile

    def watched(call: Any, *given: Any) -> Any:
        computed.append((call.tile[0].start // 16, call.tile[1].start // 16))
        return of_tile(call, *given)

    monkeypatch.setattr(tiles_backward, "of_tile", watched)
    generic(monkeypatch, library, 16, 16)
    q, mask = np.ones((2, 128, 4)), masks.window(40, 0)
    refattn.attention_vjp(q, q, q, q, mask=mask, path="tiled")
    some = mask.to_array(128, 128).reshape(8, 16, 8, 16).any(axis=(1, 3))
    assert sorted(computed) == sorted(zip(*np.nonzero(some), strict=True))


@NUMPY
@pytest.mark.parametrize("start", [0, 3, -9])
@pytest.mark.parametrize("reach", [0, 2, 40])
def test_tables_over_many_tiles(library: Library, monkeypatch: pytest.MonkeyPatch, start: int, reach: int) -> None:
    """Each entry of a table gets its distance's pairs from every tile, tiles that are not square included."""
    generic(monkeypatch, library, 4, 7)
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, n, 3)) for n in (22, 31, 31))
    table, gradient = rng.standard_normal((2, 2 * reach + 1)), rng.standard_normal((2, 22, 3))
    options: dict[str, Any] = {"bias": biases.relative(table), "q_start": start, "causal": True}
    dense, tiled = (refattn.attention_vjp(q, k, v, gradient, **options, path=path).bias for path in ("dense", "tiled"))
    np.testing.assert_allclose(tiled, dense, rtol=1e-11, atol=1e-11)
    assert tiled.any()
