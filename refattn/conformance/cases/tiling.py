"""Chapter T: online softmax over tiles, and merging partial results."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import Partial, attention, attention_vjp, attention_with_lse, masks, merge
from refattn.conformance.case import Api, Chapter, Problem, Unsupported
from refattn.conformance.expect import expect, expect_equal, expect_error, expect_within
from refattn.conformance.gradients import golden_gradients_of
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw, precision
from refattn.dtypes import FULL
from refattn.errors import PartialError, PathError

CASES = Chapter("tiling")


@CASES.problem("T1")
def last_tile_is_ragged(draw: Draw) -> Problem:
    """129 keys: one more than a common tile, and the last one weighs most."""
    data = draw.qkv(3, 129, batch=(1,), spread=0.5)
    data["k"][..., -1, :] = draw.exact(4 * data["q"][..., 0, :])
    return Problem(**data)


@CASES.problem("T1")
def rising_maximum(draw: Draw) -> Problem:
    """Logits that rise from tile to tile: what came before is rescaled each time."""
    data = draw.qkv(2, 192, batch=(1,), spread=0.25)
    data["q"], data["k"] = np.ones_like(data["q"]), data["k"] + np.floor(np.arange(192) / 64)[:, None]
    return Problem(**data | {"k": draw.exact(data["k"])}, coherent=True)


@CASES.problem("T1", "P2")
def first_tile_hidden(draw: Draw) -> Problem:
    """The first 128 keys are hidden and all logits are far below zero: no stale or finite maximum may remain."""
    data = draw.qkv(2, 160, batch=(1,), d_k=4)
    data["q"], data["k"] = np.full_like(data["q"], -8.0), np.full_like(data["k"], 6.5)
    data["k"][..., 0] += np.arange(160) % 4
    data["v"] = draw.exact(8.0 + 0.25 * data["v"])
    shown = np.broadcast_to(np.arange(160) >= 128, (2, 160))
    return Problem(**data, shown=shown, coherent=True)


@CASES.problem("T1", "P6", dtypes=FULL)
def far_below_zero(draw: Draw) -> Problem:
    """All logits are near -1024, in two tiles: no running maximum may start at a finite number."""
    data = draw.qkv(2, 96, batch=(1,), d_k=1)
    data["q"], data["k"] = np.full_like(data["q"], -32.0), np.full_like(data["k"], 32.0)
    data["k"][..., 0] += np.arange(96) % 4 / 32
    return Problem(**data, scale=1.0, coherent=True)


@CASES.problem("T1")
def halves_that_differ(draw: Draw) -> Problem:
    """Half of the keys score 2 less than the others and have other values: the output is the share of each half."""
    data = draw.qkv(1, 64, batch=(1,), d_k=1, d_v=1)
    first = np.arange(64)[:, None] < 32
    data["q"], data["k"] = np.full_like(data["q"], 2.0), np.broadcast_to(np.where(first, 0.0, -1.0), data["k"].shape)
    data["v"] = np.broadcast_to(np.where(first, 0.0, 2.0), data["v"].shape)
    return Problem(**data, scale=1.0, coherent=True)


@CASES.problem("T1")
def last_tile_is_full(draw: Draw) -> Problem:
    """128 keys, the last of which weighs most: no tile is missing where the length is a multiple of common ones."""
    data = draw.qkv(3, 128, batch=(1,), spread=0.5)
    data["k"][..., -1, :] = draw.exact(4 * data["q"][..., 0, :])
    return Problem(**data)


@CASES.check("T2", "T3", dtypes=FULL)
def splits_merge_to_the_whole(api: Api) -> None:
    """Any split of the keys, in any order, merges to the whole; sinks enter once, in merge."""
    problem = Problem(**api.draw.qkv(3, 8, batch=(1,)), sinks=np.asarray([0.5, -1.0]))
    q, k, v = (api.array(x) for x in (problem.q, problem.k, problem.v))
    sinks, golden = api.array(problem.sinks), golden_of(problem)
    parts = [Partial(*attention_with_lse(q, k[:, :, a:b, :], v[:, :, a:b, :])) for a, b in ((0, 3), (3, 3), (3, 8))]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        output, lse = merge([parts[i] for i in order], sinks=sinks)
        # One rounding more for each merge than in a pass over all keys at once, all of them counted by the bound.
        expect_within("merged output", api.host(output), golden.output, golden.bound(api.dtype))
        expect_within("merged log-sum-exp", api.host(lse), golden.lse, golden.lse_bound(api.dtype))


@CASES.check("T2")
def nothing_is_the_identity(api: Api) -> None:
    """(0, -inf) merges with anything to that, and with itself to itself."""
    output, lse = api.draw.normal(1, 2, 3), api.draw.normal(1, 2)
    some = Partial(api.array(output), api.array(lse))
    nothing = Partial(api.array(np.zeros((1, 2, 3))), api.array(np.full((1, 2), -np.inf)))
    for pair in ((some, nothing), (nothing, some)):
        expect_equal("merged output", api.host(merge(pair).output), output)
    empty = merge((nothing, nothing))
    expect_equal("merged output of nothing", api.host(empty.output), np.zeros((1, 2, 3)))
    expect_equal("merged log-sum-exp of nothing", api.host(empty.lse), np.full((1, 2), -np.inf))


@CASES.check("T2", dtypes=FULL)
def merge_by_hand(api: Api) -> None:
    """Parts of weight 8 and 2 with outputs 1 and 0 merge to 0.8 and ln 10; read in base 2 they would give 0.72."""
    one, zero = np.ones((1, 1, 1)), np.zeros((1, 1, 1))
    first, second = (api.array(np.full((1, 1), np.log(weight))) for weight in (8.0, 2.0))
    output, lse = merge((Partial(api.array(one), first), Partial(api.array(zero), second)))
    bound = 16 * precision(api.dtype)
    expect_within("merged output", api.host(output), 0.8 * one, bound)
    expect_within("merged log-sum-exp", api.host(lse), np.full((1, 1), np.log(10.0)), 2 * bound)


@CASES.check("T3", "E4")
def nothing_to_merge(api: Api) -> None:
    """Merging no partials is an error, and so is a path that nobody offers."""
    expect_error(PartialError, "partials", merge, [])
    q = api.array(np.ones((1, 2, 2)))
    expect_error(PathError, "path", attention, q, q, q, path="fast")


@CASES.check("T1", "T4", dtypes=FULL)
def tiled_path_equals_dense(api: Api) -> None:
    """path="tiled" gives the dense path's result within both bounds, masks and grouped heads included."""
    data = api.draw.qkv(5, 7, batch=(1,), heads=4, kv_heads=2)
    problem = Problem(**data, causal=True, q_start=2)
    golden = golden_of(problem)
    q, k, v = (api.array(data[name]) for name in "qkv")
    output, lse = attention_with_lse(q, k, v, mask=masks.causal(), q_start=2, path="tiled")
    expect_within("tiled output", api.host(output), golden.output, golden.bound(api.dtype))
    expect_within("tiled log-sum-exp", api.host(lse), golden.lse, golden.lse_bound(api.dtype))
    expect(api.dtype_of(output) == api.dtype, f"the tiled output has dtype {api.dtype_of(output)}")


@CASES.check("T1", "D1", dtypes=FULL)
def tiled_gradients_equal_dense(api: Api) -> None:
    """The gradients of path="tiled" keep the dense path's bounds: masks, groups, sinks, a bias that is shared."""
    draw = api.draw
    data = draw.qkv(5, 7, batch=(1,), heads=4, kv_heads=2)
    given = {"bias": draw.normal(4, 1, 7), "sinks": draw.normal(4), "grad_output": draw.normal(1, 4, 5, 8)}
    exact = golden_gradients_of(Problem(**data, **given, causal=True, q_start=2, softcap=2.0))
    q, k, v, bias, sinks, gradient = (api.array(x) for x in (*(data[name] for name in "qkv"), *given.values()))
    options = {"bias": bias, "sinks": sinks, "q_start": 2, "softcap": 2.0}
    found = attention_vjp(q, k, v, gradient, mask=masks.causal(), **options, path="tiled")._asdict()
    for name, bound in exact.bounds(api.dtype).items():
        expect_within(f"tiled gradient of {name}", api.host(found[name]), exact.values[name], bound)


@CASES.check("T4")
def memory_of_the_tiled_path(api: Api) -> None:
    """On NumPy, whose memory can be traced, path="tiled" never holds as much as half of an Lq x Lk array."""
    q, k, v = _long(api, 2048)
    _expect_no_pairs("the tiled path", lambda: attention(q, k, v, causal=True, path="tiled"), q.shape[-2])


@CASES.check("T4")
def memory_of_the_tiled_gradients(api: Api) -> None:
    """On NumPy, the gradients of path="tiled", that of a bias per key included, never hold half of an Lq x Lk array."""
    q, k, v = _long(api, 4096)
    bias = api.array(api.draw.normal(q.shape[-2]))
    _expect_no_pairs(
        "the tiled gradients", lambda: attention_vjp(q, k, v, q, bias=bias, causal=True, path="tiled"), q.shape[-2]
    )


def _long(api: Api, length: int) -> tuple[Any, ...]:
    if api.name != "numpy":
        raise Unsupported(f"what {api.name} allocates is not traced")
    return tuple(api.array(x) for x in api.draw.normal(3, 1, length, 4))


def _expect_no_pairs(what: str, call: Callable[[], Any], length: int) -> None:
    tracemalloc.start()
    try:
        call()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expect(most < 2 * length**2, f"{what} held {most / 2**20:.1f} MiB, all pairs are {length**2 / 2**18:.0f} MiB")
