"""Chapter E: errors as a whole; each clause's own errors stand in its chapter."""

from __future__ import annotations

import inspect
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from refattn import AttentionWeights, KVCache, attention, clause, errors, multi_head_attention, registry, vectors
from refattn.conformance.case import Api, Chapter
from refattn.conformance.expect import expect, expect_equal, expect_error
from refattn.conformance.targets import TargetError, find_target
from refattn.errors import BackendError, PathError, RefattnError, VectorError

CASES = Chapter("errors")


@CASES.check("E1", "E2", "A1", "A2", "A3")
def arrays_that_do_not_fit(api: Api) -> None:
    """Each misfit of q, k and v raises the class of its rule: argument, expectation, what came, clause."""
    ones = {rank: api.array(np.ones((2, 2, 4, 8)[4 - rank :])) for rank in (1, 2, 3, 4)}
    x = ones[4]
    narrow, long, wide = (api.array(np.ones(shape)) for shape in ((2, 2, 4, 7), (2, 2, 5, 8), (3, 2, 4, 8)))
    three = api.array(np.ones((2, 3, 4, 8)))
    for error, about, arrays in (
        (errors.RankError, "q", (ones[1], ones[1], ones[1])),
        (errors.RankError, "k", (x, ones[3], x)),
        (errors.RankError, "v", (ones[2], ones[2], x)),
        (errors.ShapeError, "k", (x, narrow, x)),
        (errors.ShapeError, "v", (x, x, long)),
        (errors.BatchError, "q", (x, wide, wide)),
        (errors.HeadCountError, "q", (x, three, three)),
    ):
        expect_error(error, about, attention, *arrays)


@CASES.check("E1", "E2", "M3")
def options_that_do_not_fit(api: Api) -> None:
    """Each misfit of an option raises the class of its rule: argument, expectation, what came, clause."""
    x, whole = api.array(np.ones((2, 2, 4, 8))), api.array(np.ones((4, 4), dtype=np.int32))
    misfits: list[tuple[type[errors.RefattnError], str, dict[str, Any]]] = [
        (errors.ScaleError, "scale", {"scale": float("nan")}),
        (errors.SoftcapError, "softcap", {"softcap": -1.0}),
        (errors.SinkError, "sinks", {"sinks": api.array(np.ones(3))}),
        (errors.BiasError, "bias", {"bias": whole}),
        (errors.MaskKindError, "mask", {"mask": whole}),
        (errors.MaskShapeError, "mask", {"mask": api.array(np.ones((3, 4), dtype=bool))}),
        (errors.CausalError, "causal", {"causal": 1}),
        (errors.StartError, "q_start", {"causal": True, "q_start": 1.5}),
        (errors.StartError, "k_start", {"causal": True, "q_start": 0, "k_start": "0"}),
        (errors.BatchError, "q_start", {"causal": True, "q_start": [0, 1, 2]}),
        (errors.PositionError, "q_start", {"causal": True, "k_start": 1}),
        (errors.PathError, "path", {"path": "magic"}),
    ]
    for error, about, options in misfits:
        expect_error(error, about, attention, x, x, x, **options)


@CASES.check("E1")
def every_class(_api: Api) -> None:
    """Every error class is a RefattnError and a ValueError or TypeError, names a clause, and survives pickling."""
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


@CASES.check("E2")
def shapes_in_messages(api: Api) -> None:
    """The message gives shape and dtype of what came."""
    q, k = api.array(np.ones((2, 4, 8))), api.array(np.ones((2, 4, 7)))
    try:
        attention(q, k, k)
    except RefattnError as error:
        for word in ("k", "8", "(2, 4, 7)", "float32", error.clause):
            expect(word in str(error), f"the message lacks {word!r}: {error}")
    else:
        raise AssertionError("keys of another width than the queries must be refused")


@CASES.check("E3")
def nothing_is_changed(api: Api) -> None:
    """Refused calls leave every argument as it was, and a cache that a refused layer call was given."""
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
    cache: Any = KVCache.allocate(tokens, 2, 2, 8, 4)
    cache = multi_head_attention(tokens, weights, heads=2, cache=cache).cache
    try:
        multi_head_attention(tokens, weights, heads=2, cache=cache, softcap=-1.0)
    except RefattnError:
        expect_equal("length after a refused layer call", cache.length, 3)
        after = multi_head_attention(tokens, weights, heads=2, cache=cache)
        expect_equal("length after the next", after.cache and after.cache.length, 6)
    else:
        raise AssertionError("a negative soft cap must be refused")


@CASES.check("E4")
def paths(api: Api) -> None:
    """ "dense" is the specification itself; anything that is not installed is an error that lists what is."""
    x = api.array(api.draw.normal(2, 4, 8))
    expect_equal("output", api.host(attention(x, x, x, path="dense")), api.host(attention(x, x, x)))
    for path in ("", "Dense", None, 1):
        expect_error(PathError, "path", attention, x, x, x, path=path)
    try:
        attention(x, x, x, path="magic")
    except PathError as error:
        expect("dense" in str(error), f"the message must list the paths: {error}")


@CASES.check("E4")
def names_of_backends_and_targets(api: Api) -> None:
    """A backend or target that is not installed is an error that lists those that are."""
    expect_error(BackendError, "backend", registry.get, "magic")
    for call in (lambda: registry.get("magic"), lambda: find_target("magic")):
        try:
            call()
        except (BackendError, TargetError) as error:
            expect(api.name in str(error), f"the message must list {api.name}: {error}")
        else:
            raise AssertionError("a name that is not installed must be refused")


@CASES.check("E5")
def stored_vectors(api: Api) -> None:
    """A chapter of certified vectors that is altered, truncated or missing is refused by its name."""
    del api  # files belong to no library
    name, files = "S.json", (vectors.MANIFEST, vectors.SCHEMA, "S.json")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for file in files:
            (folder / file).write_bytes((vectors.FOLDER / file).read_bytes())
        expect(bool(vectors.load(folder, "S")), "an exact copy must be read")
        whole = (folder / name).read_bytes()
        for broken in (whole.replace(b"0", b"1", 1), whole[:-1], b""):
            (folder / name).write_bytes(broken)
            expect_error(VectorError, name, vectors.load, folder, "S")
        (folder / name).unlink()
        expect_error(VectorError, name, vectors.load, folder, "S")
