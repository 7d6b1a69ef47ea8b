"""What the attention layer refuses: each error names the argument, what fits, and what came (L1, E1)."""

from typing import Any

import numpy as np
import pytest

import refattn
from libraries import Library
from refattn import AttentionWeights, KVCache, Rotary, errors, multi_head_attention
from refusals import Maker, assert_refused

BAD: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "x rank": ("x", ("(6,)", "float32"), {"x": (6,)}),
    "x width": ("x", ("last axis of 6", "(2, 5, 5)"), {"x": (2, 5, 5)}),
    "w_q rows": ("w_q", ("6 rows", "(5, 16)"), {"w_q": (5, 16)}),
    "x width beside a context": ("x", ("last axis of 6", "(2, 5, 5)"), {"x": (2, 5, 5), "context": (2, 3, 6)}),
    "context width": ("context", ("last axis of 6", "(2, 3, 5)"), {"context": (2, 3, 5)}),
    "no context": ("context", ("(..., T, 5)", "None"), {"w_k": (5, 8), "w_v": (5, 6)}),
    "w_q rank": ("w_q", ("6 rows", "(6, 4, 4)"), {"w_q": (6, 4, 4)}),
    "w_q heads": ("w_q", ("divisible by 4", "(6, 15)"), {"w_q": (6, 15)}),
    "w_k rows": ("w_k", ("6 rows", "(5, 8)"), {"w_k": (5, 8)}),
    "w_k heads": ("w_k", ("divisible by 2", "(6, 7)"), {"w_k": (6, 7)}),
    "w_k width": ("w_k", ("2 * 4", "(6, 6)"), {"w_k": (6, 6)}),
    "w_v rows": ("w_v", ("6 rows", "(8, 6)"), {"w_v": (8, 6)}),
    "w_v heads": ("w_v", ("divisible by 2", "(6, 5)"), {"w_v": (6, 5)}),
    "w_o rows": ("w_o", ("heads * d_v = 12", "(11, 5)"), {"w_o": (11, 5)}),
    "w_o rank": ("w_o", ("12 rows", "(12,)"), {"w_o": (12,)}),
    "b_q": ("b_q", ("(16,)", "(15,)"), {"b_q": (15,)}),
    "b_k": ("b_k", ("(8,)", "(1, 8)"), {"b_k": (1, 8)}),
    "b_v": ("b_v", ("(6,)", "()"), {"b_v": ()}),
    "b_o": ("b_o", ("(5,)", "(12,)"), {"b_o": (12,)}),
    "b_o without w_o": ("b_o", ("no w_o", "(5,)"), {"w_o": None, "b_o": (5,)}),
    "context rank": ("context", ("rank 3", "(4, 6)"), {"context": (4, 6)}),
}  # fmt: skip
VALUES: dict[str, tuple[str, list[Any]]] = {
    "heads": (">= 1", [0, -1, 2.0, "4", True, None, [4]]),
    "kv_heads": (">= 1", [0, 2.0, True, [2]]),
    "weights": ("AttentionWeights", [None, (1, 2, 3), "w"]),
    "rope": ("Rotary", ["half", True, ("half", 1e4, None)]),
    "return_weights": ("True or False", [1, None, "yes"]),
    "cache": ("KVCache", [1, {}, "cache"]),
}
BAD.update({f"{key} {x!r}": (key, (word,), {key: x}) for key, (word, values) in VALUES.items() for x in values})


def call(make: Maker, changes: dict[str, Any]) -> Any:
    """A small layer call in float32 with some arguments changed; x, context and parameters are given by shape."""
    shapes: dict[str, Any] = {"x": (2, 5, 6), "w_q": (6, 16), "w_k": (6, 8), "w_v": (6, 6), "w_o": (12, 5)}
    shapes.update({key: x for key, x in changes.items() if key in ("x", "context", *AttentionWeights._fields)})
    arrays: dict[str, Any] = {key: shape if shape is None else make(*shape) for key, shape in shapes.items()}
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, **{key: x for key, x in changes.items() if key not in shapes}}
    x, context = arrays.pop("x"), arrays.pop("context", None)
    return multi_head_attention(x, options.pop("weights", AttentionWeights(**arrays)), context=context, **options)


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(library: Library, name: str) -> None:
    """Each is a LayerError that names the argument, what fits, and what came."""
    argument, words, changes = BAD[name]
    assert_refused(errors.LayerError, argument, words, call, Maker(library), changes)


def test_other_kinds_of_arguments(library: Library) -> None:
    """Dtypes and libraries must be those of x; heads must be a multiple of kv_heads; a cache excludes a context."""
    make = Maker(library)
    for dtype in ("int32", "bool", "complex64"):
        x = make(5, 6, dtype=dtype)
        weights = AttentionWeights(make(6, 4), make(6, 4), make(6, 4))
        assert_refused(errors.LayerError, "x", ("(5, 6)", dtype), multi_head_attention, x, weights, heads=2)
    x, w = make(1, 5, 6), make(6, 4)
    alike = AttentionWeights(w, w, w)
    words = ("float32", "(5, 6)", "float64")  # x itself, where all matrices agree with each other
    assert_refused(errors.LayerError, "x", words, multi_head_attention, make(5, 6, dtype="float64"), alike, heads=2)
    assert_refused(errors.LibraryMismatchError, "x", (), multi_head_attention, make.other(5, 6), alike, heads=2)
    with pytest.raises(TypeError, match=r"^multi_head_attention\(\) .* 'is_causal'"):
        multi_head_attention(x, alike, heads=2, is_causal=True)
    for key in ("w_q", "w_k", "w_v", "w_o"):
        square = AttentionWeights(w, w, w, make(4, 6))
        wide = square._replace(**{key: make(6, 4, dtype="float64")})
        words = ("float32", "(6, 4)", "float64")
        assert_refused(errors.LayerError, key, words, multi_head_attention, x, wide, heads=2)
        foreign = square._replace(**{key: make.other(6, 4)})
        assert_refused(errors.LibraryMismatchError, key, (), multi_head_attention, x, foreign, heads=2)
        if key != "w_o":
            none = square._replace(**{key: None})
            assert_refused(errors.NotAnArrayError, key, ("None",), multi_head_attention, x, none, heads=2)
    weights = AttentionWeights(w, w, w)
    assert_refused(errors.NotAnArrayError, "x", ("list",), multi_head_attention, [[1.0]], weights, heads=2)
    assert_refused(errors.HeadCountError, "heads", ("Hkv = 3",), multi_head_attention, x, weights, heads=4, kv_heads=3)
    cache = KVCache.allocate(x, 1, 2, 8, 2)
    options: dict[str, Any] = {"heads": 2, "cache": cache}
    assert_refused(errors.LayerError, "context", ("cache",), multi_head_attention, x, weights, context=x, **options)
    assert_refused(errors.LayerError, "cache", ("(5, 6)",), multi_head_attention, x[0, ...], weights, **options)
    assert_refused(errors.CacheError, "k", ("(2, 2, 5, 2)",), multi_head_attention, make(2, 5, 6), weights, **options)
    for name, start in (("q_start", 1.5), ("q_start", [0, 1]), ("k_start", "0")):
        error = errors.BatchError if start == [0, 1] else errors.StartError
        for rope in (None, Rotary("half")):
            assert_refused(error, name, (), multi_head_attention, x, weights, heads=2, rope=rope, **{name: start})
    for rope, argument in (
        (Rotary("Half"), "style"),
        (Rotary("half", -1.0), "base"),
        (Rotary("half", width=3), "width"),
    ):
        assert_refused(errors.RotaryError, argument, (), multi_head_attention, x, weights, heads=2, rope=rope)
    options = {"heads": 2, "context": make(1, 3, 6), "causal": True}
    assert_refused(errors.PositionError, "q_start", ("top-left",), multi_head_attention, x, weights, **options)


def test_positions_need_a_rope(library: Library) -> None:
    """Positions that nothing would read are refused, not ignored."""
    x = library.array(np.zeros((1, 2, 4)))
    w = library.array(np.zeros((4, 4)))
    weights = refattn.AttentionWeights(w, w, w)
    with pytest.raises(refattn.errors.LayerError, match="positions"):
        refattn.multi_head_attention(x, weights, heads=2, positions=[0, 1])
