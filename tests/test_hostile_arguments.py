"""Each argument of each public callable x each kind of wrong value: an error of refattn, or a legal call (E1, E2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import refattn
from hostile_values import VALUES
from libraries import LIBRARIES, Library
from refattn import biases, bounds, cost, errors, masks, testing
from refusals import Maker

BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, D_K, D_V = 2, 4, 2, 3, 5, 8, 6


def weights(make: Maker) -> refattn.AttentionWeights:
    shapes: list[tuple[int, ...]] = [(8, 8), (8, 4), (8, 4), (8, 6), (8,), (4,), (4,), (6,)]
    return refattn.AttentionWeights(*(make(*shape) for shape in shapes))


def layer(make: Maker, **changed: Any) -> Any:
    return refattn.multi_head_attention(make(2, 3, 8), weights(make)._replace(**changed), heads=4, kv_heads=2)


def cache(make: Maker, kind: Any) -> Any:
    sizes = {"batch": BATCH, "kv_heads": KV_HEADS, "d_k": D_K, "d_v": D_V}
    room = {refattn.KVCache: {"capacity": 8}, refattn.PagedKVCache: {"pages": 8, "page_size": 2}}
    return kind.allocate(make(1), **sizes, **room.get(kind, {"window": 4}))


def filled(make: Maker, kind: Any) -> Any:
    return cache(make, kind).append(make(BATCH, KV_HEADS, 4, D_K), make(BATCH, KV_HEADS, 4, D_V))


def partial(make: Maker) -> refattn.Partial:
    return refattn.Partial(make(HEADS, Q_LEN, D_V), make(HEADS, Q_LEN))


def seen(mask: Callable[[], Any]) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    starts = {"q_start": 0, "k_start": 0}
    lengths = {"q_len": Q_LEN, "k_len": K_LEN, **starts}
    return {
        f"{mask()!r:.30}.visible": (lambda make, **o: mask().visible(**o), {"rows": [0, 1], "keys": [0, 1], **starts}),
        f"{mask()!r:.30}.tile": (lambda make, **o: mask().tile(**o), {"rows": range(2), "keys": range(2), **starts}),
        f"{mask()!r:.30}.to_array": (lambda make, **o: mask().to_array(**o), {**lengths, "like": None}),
        f"{mask()!r:.30}.to_text": (lambda make, **o: mask().to_text(**o), lengths),
    }


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that needs no arrays of the library."""
    return lambda make, **options: function(**options)


# Of each callable what calls it, and its arguments; those that are functions are made of the library's arrays.
SURFACE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "golden": (
        lambda make, **o: refattn.golden(make(2, 3, 4), make(2, 5, 4), make(2, 5, 4), **o),
        {"rows": None, "weights": False, "softcap": None, "scale": None, "mask": None, "bias": None},
    ),
    "window": (plain(masks.window), {"left": 1, "right": 1}),
    "prefix": (plain(masks.prefix), {"n": 1}),
    "chunks": (plain(masks.chunks), {"size": 2}),
    "lengths": (plain(masks.lengths), {"n": 1}),
    "padding": (plain(masks.padding), {"keep": [True] * K_LEN}),
    "documents": (plain(masks.documents), {"q_ids": [1, 2, 3], "k_ids": [1, 2, 3, 4, 5]}),
    "dense": (plain(masks.dense), {"array": [[True]]}),
    "blocks": (plain(masks.blocks), {"array": [[True]], "size": 2}),
    **seen(masks.causal),
    **seen(lambda: masks.lengths([1, 2])),
    **seen(lambda: masks.blocks([[True, False, True]], 2)),
    "mask &": (lambda make, other: masks.causal() & other, {"other": masks.causal()}),
    "bias +": (lambda make, other: biases.alibi(4) + other, {"other": biases.alibi(4)}),
    "alibi": (plain(biases.alibi), {"heads": 4}),
    "alibi_slopes": (plain(biases.alibi_slopes), {"heads": 4}),
    "relative": (plain(biases.relative), {"table": lambda make: make(4, 3)}),
    "rope": (
        plain(refattn.rope),
        {"x": lambda make: make(4, 3, 8), "positions": [0, 1, 2], "style": "half", "base": 1e4, "width": 4},
    ),
    "Rotary": (
        lambda make, **o: refattn.multi_head_attention(
            make(2, 3, 8), weights(make), heads=4, kv_heads=2, rope=refattn.Rotary(**o)
        ),
        {"style": "half", "base": 1e4, "width": 2},
    ),
    "split_heads": (plain(refattn.split_heads), {"x": lambda make: make(2, 3, 8), "heads": 2}),
    "merge_heads": (plain(refattn.merge_heads), {"x": lambda make: make(2, 3, 8)}),
    "kv_head_of": (plain(refattn.kv_head_of), {"h": 1, "heads": 4, "kv_heads": 2}),
    "pool_kv_heads": (plain(refattn.pool_kv_heads), {"w": lambda make: make(4, 8, 2), "kv_heads": 2}),
    "pooled": (lambda make, **o: weights(make).pooled(**o), {"heads": 2, "kv_heads": 1}),
    **{
        f"pooled {name}": (
            lambda make, name=name, **o: weights(make)._replace(**o).pooled(2, 1),
            {name: lambda make: make(8, 4)},
        )
        for name in ("w_k", "w_v", "b_k")
    },
    "multi_head_attention": (
        plain(refattn.multi_head_attention),
        {
            "x": lambda make: make(2, 3, 8),
            "weights": weights,
            "heads": 4,
            "kv_heads": 2,
            "rope": refattn.Rotary("half"),
            **dict.fromkeys(("context", "causal", "mask", "positions", "cache", "counts", "bias", "sinks", "q_start")),
            "return_weights": False,
            "path": "dense",
        },
    ),
    **{
        f"multi_head_attention {name}": (layer, {name: lambda make, name=name: getattr(weights(make), name)})
        for name in refattn.AttentionWeights._fields
    },
    **{
        f"{kind.__name__}.allocate": (
            lambda make, kind=kind, **o: kind.allocate(make(1), **o),
            {"batch": 2, "kv_heads": 2, "d_k": 3, "d_v": 2, **sizes},
        )
        for kind, sizes in (
            (refattn.KVCache, {"capacity": 4}),
            (refattn.PagedKVCache, {"pages": 4, "page_size": 2}),
            (refattn.RollingKVCache, {"window": 4}),
        )
    },
    "KVCache": (plain(refattn.KVCache), {"k": lambda m: m(2, 2, 4, 3), "v": lambda m: m(2, 2, 4, 2), "length": 0}),
    "PagedKVCache": (
        plain(refattn.PagedKVCache),
        {"k": lambda m: m(4, 2, 2, 3), "v": lambda m: m(4, 2, 2, 2), "tables": [[0], [1]], "length": 0},
    ),
    "RollingKVCache": (
        plain(refattn.RollingKVCache),
        {"k": lambda m: m(2, 2, 4, 3), "v": lambda m: m(2, 2, 4, 2), "window": 2, "length": 0, "start": 0},
    ),
    **{
        f"{kind.__name__}.append": (
            lambda make, kind=kind, **o: cache(make, kind).append(**o),
            {"k": lambda m: m(BATCH, KV_HEADS, 2, D_K), "v": lambda m: m(BATCH, KV_HEADS, 2, D_V), "counts": [1, 2]},
        )
        for kind in (refattn.KVCache, refattn.PagedKVCache, refattn.RollingKVCache)
    },
    "attend": (
        plain(refattn.attend),
        {
            "q": lambda m: m(BATCH, HEADS, 1, D_K),
            "cache": lambda m: filled(m, refattn.KVCache),
            "causal": True,
            **dict.fromkeys(("mask", "bias", "sinks", "q_start")),
            "k_start": 0,
            "path": "dense",
        },
    ),
    "merge": (plain(refattn.merge), {"partials": lambda m: [partial(m)] * 2, "sinks": lambda m: m(HEADS)}),
    "merge one": (lambda make, one: refattn.merge([partial(make), one]), {"one": partial}),
    "merge output": (
        lambda make, output: refattn.merge([refattn.Partial(output, make(HEADS, Q_LEN))]),
        {"output": lambda m: m(HEADS, Q_LEN, D_V)},
    ),
    "attention_cost": (
        plain(cost.attention_cost),
        {"q_len": 3, "k_len": 3, "heads": 4, "kv_heads": 2, "d_k": 3, "d_v": 3, "batch": 1, "dtype": "float16"},
    ),
    "kv_cache_elements": (
        plain(cost.kv_cache_elements),
        {"batch": 3, "length": 3, "kv_heads": 4, "head_width": 2},
    ),
    "Model": (plain(bounds.Model), {"stored": False, "products": None, "coherent": False, "tile": 32}),
    "rounding_model": (plain(bounds.rounding_model), {"dtype": "float32", "model": "fused", "coherent": False}),
    "assert_attention_close": (
        lambda make, **o: testing.assert_attention_close(**{name: make(1, 2, 4) for name in "qkv"} | o),
        {
            "actual": lambda m: refattn.attention(m(1, 2, 4), m(1, 2, 4), m(1, 2, 4)),
            **dict.fromkeys(("dtype", "lse", "rows")),
            "model": "fused",
            "coherent": False,
        },
    ),
    "assert_gradients_close": (
        lambda make, **o: testing.assert_gradients_close(
            **{name: make(1, 2, 4) for name in ("q", "k", "v", "grad_output")} | o
        ),
        {
            "gradients": lambda m: refattn.attention_vjp(*(m(1, 2, 4) for _ in range(4))),
            "dtype": None,
            "model": "fused",
            "coherent": False,
        },
    ),
    "inputs": (
        plain(testing.inputs),
        {"dtypes": ("float32",), "features": ("causal",), "longest": 5, "widths": (1,)},
    ),
    "weights_svg": (
        lambda make, **o: testing.weights_svg(**{name: make(2, 3, 4) for name in "qkv"} | o),
        {"q": lambda m: m(2, 3, 4), "entry": 0, "head": 0},
    ),
    "mask_svg": (plain(testing.mask_svg), {"visible": lambda m: m(2, 2, dtype="bool")}),
}


# Attacked in test_whole_surface.py and test_errors.py, without arguments, or records of what others return.
ELSEWHERE = {
    *("attention", "attention_with_lse", "attention_stages", "attention_vjp", "backends", "causal", "clause"),
    *("AttentionWeights", "Clause", "Golden", "Gradients", "LayerResult", "Mask", "Partial", "Stages"),
}


def made(make: Maker, value: Any) -> Any:
    """An argument of the table."""
    return value(make) if callable(value) and not isinstance(value, type) else value


@pytest.mark.library("numpy")
@pytest.mark.parametrize("name", SURFACE)
def test_hostile_arguments(library: Library, name: str) -> None:
    """Nothing but an error of refattn, an AssertionError of an assertion, or a result comes of any value."""
    make, (function, arguments) = Maker(library), SURFACE[name]
    right = {argument: made(make, value) for argument, value in arguments.items()}
    judged: tuple[type[BaseException], ...] = (AssertionError,) if name.startswith("assert_") else ()
    for argument in arguments:
        for kind, value in VALUES.items():
            fresh = {key: made(make, arguments[key]) if key in ("cache", "weights") else x for key, x in right.items()}
            try:
                with warnings.catch_warnings(action="error"):
                    function(make, **{**fresh, argument: value()})
            except errors.RefattnError as error:
                said = str(error)
            except judged:
                continue
            except Exception as error:  # whatever else is raised, it fails, and says for which value
                raise AssertionError(f"{name}({argument}={kind})") from error
            else:
                continue
            assert ": expected " in said, said
            assert "; got " in said, said


def test_every_public_callable_is_attacked() -> None:
    """The table has a legal call of each, so that what is refused is refused for the one wrong value."""
    make = Maker(LIBRARIES["numpy"]())
    for function, arguments in SURFACE.values():
        function(make, **{argument: made(make, value) for argument, value in arguments.items()})
    public = {name for name in refattn.__all__ if callable(getattr(refattn, name))} | set(masks.__all__)
    attacked = {word for name in SURFACE for word in name.replace(".", " ").split()}
    assert public - attacked <= ELSEWHERE, public - attacked - ELSEWHERE
