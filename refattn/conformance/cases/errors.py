"""Chapter E: errors as a whole; each clause's own errors stand in its chapter."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.conformance.case import Api, Chapter
from refattn.conformance.expect import expect, expect_equal, expect_error

CASES = Chapter("errors")

Array = Any


def _malformed(api: Api) -> list[tuple[str, str, Callable[[], Any]]]:
    """Class, argument and call of malformed arguments, one or more per check of attention."""
    from refattn import attention

    x, flat = api.array(np.ones((2, 2, 4, 8))), api.array(np.ones(8))
    return [
        ("RankError", "q", lambda: attention(flat, flat, flat)),
        ("RankError", "k", lambda: attention(x, x[0, ...], x)),
        ("ShapeError", "k", lambda: attention(x, api.array(np.ones((2, 2, 4, 7))), x)),
        ("ShapeError", "v", lambda: attention(x, x, api.array(np.ones((2, 2, 5, 8))))),
        ("BatchError", "q", lambda: attention(x, api.array(np.ones((3, 2, 4, 8))), api.array(np.ones((3, 2, 4, 8))))),
        ("HeadCountError", "q", lambda: attention(x, api.array(np.ones((2, 3, 4, 8))), api.array(np.ones((2, 3, 4, 8))))),
        ("ScaleError", "scale", lambda: attention(x, x, x, scale=float("nan"))),
        ("SoftcapError", "softcap", lambda: attention(x, x, x, softcap=-1.0)),
        ("SinkError", "sinks", lambda: attention(x, x, x, sinks=api.array(np.ones(3)))),
        ("BiasError", "bias", lambda: attention(x, x, x, bias=api.array(np.ones((4, 4), dtype=np.int32)))),
        ("MaskKindError", "mask", lambda: attention(x, x, x, mask=api.array(np.ones((4, 4), dtype=np.int32)))),
        ("MaskShapeError", "mask", lambda: attention(x, x, x, mask=api.array(np.ones((3, 4), dtype=bool)))),
        ("CausalError", "causal", lambda: attention(x, x, x, causal=1)),
        ("StartError", "q_start", lambda: attention(x, x, x, causal=True, q_start=1.5)),
        ("StartError", "k_start", lambda: attention(x, x, x, causal=True, q_start=0, k_start="0")),
        ("BatchError", "q_start", lambda: attention(x, x, x, causal=True, q_start=[0, 1, 2])),
        ("PositionError", "q_start", lambda: attention(x, x[:, :, :3, :], x[:, :, :3, :], causal=True)),
        ("PathError", "path", lambda: attention(x, x, x, path="magic")),
    ]


@CASES.check("E1", "E2", "A1", "A2", "A3", "M3", area="errors")
def one_class_per_rule(api: Api) -> None:
    """Each malformed argument raises the class of its rule, naming the argument, what was expected, what came, the clause."""
    from refattn import errors

    for name, argument, call in _malformed(api):
        expect_error(getattr(errors, name), argument, call)


@CASES.check("E1", area="errors")
def every_class(api: Api) -> None:
    """Every error class is a RefattnError and a ValueError or TypeError, names a clause, and survives pickling."""
    from refattn import clause, errors

    expect(api.name != "", "the library has a name")
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.RefattnError)]
    expect(len(classes) > 20, f"only {len(classes)} error classes were found")
    for cls in classes:
        clause(cls.clause)
        if cls is errors.RefattnError:
            continue
        expect(issubclass(cls, (ValueError, TypeError)), f"{cls.__name__} is neither ValueError nor TypeError")
        error = cls("argument", "something", "something else")
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own object, made in the line above
        expect_equal(f"{cls.__name__} after pickling", str(again), str(error))


@CASES.check("E2", area="errors")
def shapes_in_messages(api: Api) -> None:
    """The message gives shape and dtype of what came."""
    from refattn import attention
    from refattn.errors import RefattnError

    q, k = api.array(np.ones((2, 4, 8))), api.array(np.ones((2, 4, 7)))
    try:
        attention(q, k, k)
    except RefattnError as error:
        for word in ("k", "8", "(2, 4, 7)", "float32", error.clause):
            expect(word in str(error), f"the message lacks {word!r}: {error}")
    else:
        raise AssertionError("keys of another width than the queries must be refused")


@CASES.check("E3", area="errors")
def nothing_is_changed(api: Api) -> None:
    """Refused calls leave every argument as it was, and a cache that a refused layer call was given."""
    from refattn import AttentionWeights, KVCache, attention, multi_head_attention
    from refattn.errors import RefattnError

    values = api.draw.normal(2, 2, 4, 8)
    x = api.array(values)
    for options in ({"scale": float("inf")}, {"softcap": 0.0}, {"path": "magic"}, {"sinks": api.array(np.ones(3))}):
        try:
            attention(x, x, x, **options)
        except RefattnError:
            expect_equal("q after a refused call", api.host(x), values)
        else:
            raise AssertionError(f"{options} must be refused")
    square = api.array(api.draw.normal(8, 8))
    weights, tokens = AttentionWeights(square, square, square), api.array(api.draw.normal(2, 3, 8))
    cache = KVCache.allocate(tokens, 2, 2, 8, 4)
    cache = multi_head_attention(tokens, weights, heads=2, cache=cache).cache
    try:
        multi_head_attention(tokens, weights, heads=2, cache=cache, softcap=-1.0)
    except RefattnError:
        expect_equal("length after a refused layer call", cache.length, 3)
        after = multi_head_attention(tokens, weights, heads=2, cache=cache)
        expect_equal("length after the next", after.cache.length, 6)
    else:
        raise AssertionError("a negative soft cap must be refused")


@CASES.check("E4", area="errors")
def paths(api: Api) -> None:
    """"dense" is the specification itself; anything that is not installed is an error that lists what is."""
    from refattn import attention
    from refattn.errors import PathError

    x = api.array(api.draw.normal(2, 4, 8))
    expect_equal("output", api.host(attention(x, x, x, path="dense")), api.host(attention(x, x, x)))
    for path in ("", "Dense", None, 1):
        expect_error(PathError, "path", lambda path=path: attention(x, x, x, path=path))
    try:
        attention(x, x, x, path="magic")
    except PathError as error:
        expect("dense" in str(error), f"the message must list the paths: {error}")
