"""Chapter D: gradients of q, k, v, bias and sinks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from refattn import attention, attention_vjp, biases, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem, Unsupported
from refattn.conformance.cases.levels import heavy_tails
from refattn.conformance.expect import expect, expect_equal
from refattn.conformance.gradients import golden_gradients_of
from refattn.conformance.judge import error_over_bound
from refattn.conformance.plain import LARGEST, Draw, causal_pairs, indices
from refattn.conformance.targets import autodiff
from refattn.dtypes import FULL

CASES = Chapter("gradients")


def with_gradient(draw: Draw, data: dict[str, Any], **options: Any) -> Problem:
    """A problem with a normal gradient of its output, about as large as the other data."""
    q, k, v = (data[name] for name in "qkv")
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    gradient = draw.normal(*batch, *q.shape[-3 if q.ndim > 2 else -2 : -1], v.shape[-1])
    return Problem(**{**data, **options, "grad_output": gradient})


@CASES.problem("D1")
def plain(draw: Draw) -> Problem:
    """The gradients of q, k and v are the derivatives of the output, scale and softmax included."""
    return with_gradient(draw, draw.qkv())


@CASES.problem("D1", "S2")
def negative_scale(draw: Draw) -> Problem:
    """A given scale, here a negative one, takes part in the gradients of q and k once."""
    return with_gradient(draw, draw.qkv(), scale=-0.75)


@CASES.problem("D1", "M4")
def causal(draw: Draw) -> Problem:
    """Under causal visibility each query's gradient comes from the keys up to its own, the last of which outweighs."""
    return with_gradient(draw, draw.ramp(step=1.0), causal=True)


@CASES.problem("D1", "M5")
def causal_over_a_cache(draw: Draw) -> Problem:
    """New queries at the end of a cache, one start for each batch entry."""
    return with_gradient(draw, draw.qkv(3, 7), causal=True, q_start=np.asarray([4, 2]))


@CASES.problem("D1", "A1")
def other_widths(draw: Draw) -> Problem:
    """Values of another width than keys, and other numbers of queries than of keys."""
    return with_gradient(draw, draw.qkv(4, 7, d_k=4, d_v=6))


@CASES.problem("D1", "A1")
def narrower_values(draw: Draw) -> Problem:
    """Values narrower than keys, and all of their gradient is there."""
    return with_gradient(draw, draw.qkv(5, 6, d_k=8, d_v=3))


@CASES.problem("D1", "A1")
def one_query_one_key(draw: Draw) -> Problem:
    """One query over one key has no choice: the gradients of both are 0, and that of the value is the output's."""
    return with_gradient(draw, draw.qkv(1, 1))


@CASES.problem("D1", "T1")
def odd_length(draw: Draw) -> Problem:
    """49 tokens, which fill no tile of a power of two."""
    return with_gradient(draw, draw.qkv(49, 49, batch=(1,)), causal=True)


@CASES.problem("D1", "T1")
def many_tiles(draw: Draw) -> Problem:
    """More queries and keys than the tiles of 128 that kernels take at a time, each of which adds its share."""
    return with_gradient(draw, draw.qkv(260, 300, batch=(1,), heads=1, d_k=4, spread=0.5), causal=True, q_start=40)


@CASES.problem("D1", "A3", "N6")
def heavy_tails_in_a_batch(draw: Draw) -> Problem:
    """Two batch entries, the keys of the second four times as large: each has the gradients that it has alone."""
    return with_gradient(draw, heavy_tails(draw), causal=True)


@CASES.problem("D1", "A2")
def one_head(draw: Draw) -> Problem:
    """Rank 2: one head without a head axis, in the gradients as well."""
    data = draw.qkv(5, 6, batch=(), heads=1)
    return with_gradient(draw, {name: x[0] if name in "qkv" else x for name, x in data.items()})


@CASES.problem("D1", "D8")
def far_from_zero(draw: Draw) -> Problem:
    """Values around 4: what a row has in common cancels in the gradients of q and k, and is all of that of v."""
    data = draw.qkv(6, 4)
    return with_gradient(draw, {**data, "v": draw.exact(data["v"] + 4.0)})


@CASES.problem("D2", "G1")
def grouped_heads(draw: Draw) -> Problem:
    """The gradients of a key/value head sum over the query heads that read it."""
    return with_gradient(draw, draw.qkv(heads=4, kv_heads=2))


@CASES.problem("D2", "G1")
def groups_of_three(draw: Draw) -> Problem:
    """Six query heads over two key/value heads: a group is not as large as there are groups."""
    return with_gradient(draw, draw.qkv(heads=6, kv_heads=2))


@CASES.problem("D2", "G1")
def one_head_for_all(draw: Draw) -> Problem:
    """Six query heads on one key/value head, causal."""
    return with_gradient(draw, draw.qkv(heads=6, kv_heads=1), causal=True)


@CASES.problem("D2", "A3")
def shared_batch_entry(draw: Draw) -> Problem:
    """Keys and values that all batch entries share sum over them."""
    data, shared = draw.qkv(batch=(3,)), draw.qkv(batch=(1,))
    return with_gradient(draw, {**data, "k": shared["k"], "v": shared["v"]})


@CASES.problem("D2", "D7")
def bias_for_all_rows(draw: Draw) -> Problem:
    """A bias of one number per key sums over batch entries, heads and queries."""
    return with_gradient(draw, draw.qkv(5, 6), bias=draw.normal(6), asks=("bias gradient",))


@CASES.problem("D2", "D7")
def bias_per_head(draw: Draw) -> Problem:
    """A bias (heads, queries, 1) sums over batch entries and keys, but in the keys it cancels: that leaves 0."""
    return with_gradient(draw, draw.qkv(5, 6), bias=draw.normal(2, 5, 1), asks=("bias gradient",))


@CASES.problem("D3", "P2")
def empty_rows(draw: Draw) -> Problem:
    """A row that a mask leaves without a key has a gradient of 0, and adds none to keys and values."""
    shown = np.ones((5, 6), dtype=bool)
    shown[1] = shown[4] = False
    return with_gradient(draw, draw.qkv(5, 6), shown=shown)


@CASES.problem("D3", "P2")
def empty_rows_before_the_keys(draw: Draw) -> Problem:
    """More queries than keys, aligned bottom-right: the first queries see nothing."""
    return with_gradient(draw, draw.qkv(6, 4, heads=4, kv_heads=2), causal=True, q_start=-2)


@CASES.problem("D3", "M21")
def empty_rows_of_nan(draw: Draw) -> Problem:
    """The query of an empty row may be NaN, as that of a pad token: the gradients of keys do not show it."""
    shown = np.ones((5, 6), dtype=bool)
    shown[3] = False
    data = draw.qkv(5, 6, heads=4, kv_heads=2)
    data["q"][..., 3, :] = np.nan
    return with_gradient(draw, data, shown=shown)


@CASES.problem("D3", "D6")
def empty_rows_with_sinks(draw: Draw) -> Problem:
    """An empty row adds nothing to the gradient of its sink either."""
    shown = np.ones((5, 6), dtype=bool)
    shown[2] = False
    return with_gradient(draw, draw.qkv(5, 6), shown=shown, sinks=draw.normal(2), asks=("sinks gradient",))


@CASES.problem("D3", "P2")
def nothing_but_empty_rows(draw: Draw) -> Problem:
    """Where one batch entry sees no key at all its gradients are 0; the other's are as ever."""
    counts = np.asarray([0, 5])
    shown = np.arange(6) < counts[:, None, None, None]
    return with_gradient(
        draw, draw.qkv(4, 6), mask=lambda array: masks.lengths(array(counts)), shown=shown, softcap=3.0, counts=counts
    )


def _poisoned(draw: Draw, data: dict[str, Any], hidden: Array) -> dict[str, Any]:
    """Keys that no query sees hold NaN, infinities and the largest number."""
    for name in "kv":
        for number, at in enumerate(np.argwhere(np.broadcast_to(hidden, data[name].shape[:-1]))):
            data[name][tuple(at)] = (np.nan, np.inf, -np.inf, LARGEST[draw.dtype])[number % 4]
    return data


@CASES.problem("D4", "M19")
def poison_behind_a_mask(draw: Draw) -> Problem:
    """Hidden keys and values have gradients of 0, and whatever they hold influences none."""
    keep = np.asarray([True, False, True, True, False, True])
    return with_gradient(draw, _poisoned(draw, draw.qkv(5, 6), ~keep), shown=np.broadcast_to(keep, (5, 6)))


@CASES.problem("D4", "M19")
def poison_after_the_causal_rule(draw: Draw) -> Problem:
    """Slots of a cache that no query has reached yet hold what they will."""
    hidden = np.arange(7) > 4
    return with_gradient(draw, _poisoned(draw, draw.qkv(3, 7, heads=4, kv_heads=2), hidden), causal=True, q_start=2)


@CASES.problem("D4", "M17")
def poison_behind_a_bias(draw: Draw) -> Problem:
    """A bias of -inf hides its pair from the gradients, its own being 0."""
    bias = draw.normal(2, 5, 6)
    bias[..., [1, 5]] = bias[0, 2, 3] = -np.inf
    data = _poisoned(draw, draw.qkv(5, 6), np.isin(np.arange(6), [1, 5]))
    return with_gradient(draw, data, bias=bias, softcap=4.0, asks=("bias gradient",))


@CASES.problem("D4", "M2")
def hidden_from_some(draw: Draw) -> Problem:
    """Each pair on its own: a key that some queries see has its gradient from these alone."""
    rows, keys = indices(6, 6)
    return with_gradient(draw, draw.qkv(), shown=(rows + keys) % 3 != 1)


@CASES.problem("D5", "S3")
def softcap(draw: Draw) -> Problem:
    """Scores beyond the cap have a small slope, and so small gradients of q and k."""
    return with_gradient(draw, draw.qkv(spread=1.5), softcap=1.0)


@CASES.problem("D5", "D7")
def softcap_and_bias(draw: Draw) -> Problem:
    """The cap comes before the bias, whose gradient it leaves alone."""
    return with_gradient(
        draw, draw.qkv(5, 6), softcap=1.0, bias=draw.normal(2, 5, 6), scale=1.0, asks=("bias gradient",)
    )


@CASES.problem("D6", "P3")
def sinks(draw: Draw) -> Problem:
    """A sink takes weight from the keys, and so its gradient is minus its share of what the row's output is worth."""
    data = draw.qkv(5, 6)
    return with_gradient(
        draw, {**data, "v": draw.exact(data["v"] + 2.0)}, sinks=draw.normal(2), asks=("sinks gradient",)
    )


@CASES.problem("D6", "P3")
def a_sink_of_minus_infinity(draw: Draw) -> Problem:
    """A sink of -inf is none: its gradient is 0, and those of the others are as without it."""
    given = np.asarray([-np.inf, 0.5])
    return with_gradient(draw, draw.qkv(5, 6), causal=True, q_start=1, sinks=given, asks=("sinks gradient",))


@CASES.problem("D7", "B4")
def bias(draw: Draw) -> Problem:
    """A bias of a number per pair has the gradient of the logits, without the scale."""
    return with_gradient(draw, draw.qkv(5, 6), bias=draw.normal(2, 2, 5, 6), asks=("bias gradient",))


@CASES.problem("D8")
def many_queries(draw: Draw) -> Problem:
    """Sums over 200 queries keep their precision, in 16 bits too."""
    return with_gradient(draw, draw.qkv(200, 3, batch=(1,), heads=1, d_k=4, spread=0.5), causal=False)


@CASES.problem("D8")
def values_of_one_sign(draw: Draw) -> Problem:
    """The gradient of a value that every one of 4,000 queries reads is a sum of terms of one sign."""
    data = draw.qkv(4000, 2, batch=(1,), heads=1, d_k=2)
    problem = with_gradient(draw, data)
    gradient = draw.exact(np.abs(np.asarray(problem.grad_output)) + 0.5)
    return Problem(**data, grad_output=gradient, coherent=True)


@CASES.problem("D8", "N1")
def large_scores(draw: Draw) -> Problem:
    """Scores of some tens, whose weights are nearly 0 and 1, as float32 has them."""
    return with_gradient(draw, draw.qkv(5, 6, spread=3.0), causal=True, q_start=1)


@CASES.check("D7", "B3", dtypes=FULL)
def relative_table(api: Api) -> None:
    """An entry of a relative table sums the gradients of the logits at its distance, clipped ones included."""
    draw, reach = api.draw, 2
    data, table = draw.qkv(5, 6, heads=2), draw.normal(2, 2 * reach + 1)
    rows, keys = indices(5, 6)
    column = np.clip(keys - rows - 1, -reach, reach) + reach
    problem = with_gradient(draw, data, bias=table[:, column])
    exact = golden_gradients_of(problem)
    bounds = exact.bounds(draw.dtype)["bias"]
    expected, bound = (
        np.stack([np.sum(np.where(column == c, x, 0.0), axis=(-2, -1)) for c in range(2 * reach + 1)], axis=-1)
        for x in (exact.values["bias"], bounds)
    )
    q, k, v, given, gradient = (
        api.array(x) for x in (*(data[n] for n in "qkv"), table, np.asarray(problem.grad_output))
    )
    found = attention_vjp(q, k, v, gradient, bias=biases.relative(given), q_start=1).bias
    expect_equal("shape of the table's gradient", np.asarray(found.shape), np.asarray(table.shape))
    # Ten sums more, of up to 20 terms: each is rounded as often as the bound of a term allows, and once more.
    ratio = error_over_bound(api.host(found), expected, 2 * bound)
    expect(ratio <= 1, f"the gradient of the table is {ratio:.3g} times its bound off")


@CASES.check("D7", "B4")
def biases_of_several_terms(api: Api) -> None:
    """A sum of biases has a tuple of gradients, one per term in order, None for ALiBi; one bias has its own."""
    draw = api.draw
    data = draw.qkv(5, 6)
    q, k, v, gradient = (api.array(x) for x in (*(data[name] for name in "qkv"), draw.normal(2, 2, 5, 8)))
    table, plain_bias = api.array(draw.normal(2, 3)), api.array(draw.normal(6))

    def of(bias: Any) -> Any:
        return attention_vjp(q, k, v, gradient, bias=bias, q_start=0).bias

    relative, alibi = biases.relative(table), biases.alibi(2)
    found = of(relative + alibi + plain_bias)
    expect(isinstance(found, tuple) and len(found) == 3, "a sum of three terms must have three gradients")
    expect(found[1] is None, "ALiBi has no gradient")
    expect([tuple(one.shape) for one in (found[0], found[2])] == [(2, 3), (6,)], "each has the shape of its term")
    expect(of(None) is None and of(alibi) is None, "no bias and ALiBi alone have None")
    expect(tuple(of(plain_bias).shape) == (6,), "an array alone has its gradient, and no tuple")


@CASES.check("D1", "A4", "A5", dtypes=("float32", "float16", "bfloat16"))
def dtypes_of_gradients(api: Api) -> None:
    """Each gradient has the dtype of its argument, also where bias, sinks and grad_output have others."""
    draw = api.draw
    data = draw.qkv(3, 4)
    q, k, v = (api.array(data[name]) for name in "qkv")
    bias, given = api.array(draw.normal(4), "float64"), api.array(draw.normal(2), "float32")
    gradient = api.array(draw.normal(2, 2, 3, 8), "float32")
    found = attention_vjp(q, k, v, gradient, bias=bias, sinks=given)
    names = [api.dtype_of(x) for x in found]
    expect(names == [api.dtype] * 3 + ["float64", "float32"], f"the dtypes are {names}")


def _called(arrays: dict[str, Array], **options: Any) -> Array:
    q, k, v = (arrays[name] for name in "qkv")
    return attention(q, k, v, bias=arrays.get("bias"), sinks=arrays.get("sinks"), **options)


@CASES.check("D9", dtypes=FULL)
def taken_by_the_library(api: Api) -> None:
    """What autograd or jax.vjp takes of the core keeps the bound, with poison, empty rows, groups and all options."""
    if api.name not in autodiff.LIBRARIES:
        raise Unsupported(f"{api.name} does not differentiate")
    draw = api.draw
    shown = causal_pairs(5, 6, -1)  # the first row is empty
    given, hidden = np.asarray([0.5, -np.inf, -1.0, 2.0]), np.arange(6) > 3
    bias = draw.normal(4, 1, 6)
    data = _poisoned(draw, draw.qkv(5, 6, heads=4, kv_heads=2), hidden)
    data["q"][..., 0, :] = np.nan, np.inf, -np.inf, 1.0, np.nan, np.inf, -np.inf, 0.0
    for options in ({"sinks": given}, {"softcap": 2.0}, {"bias": bias}, {"sinks": given, "softcap": 2.0, "bias": bias}):
        problem = with_gradient(draw, data, shown=shown, **options)
        arrays = {name: api.array(x) for name, x in problem.differentiable.items()}
        call = partial(_called, mask=api.array(shown), softcap=problem.softcap)
        gradient = np.array(problem.grad_output)
        gradient[..., 0, :] = np.nan  # of the empty row's output
        _, found = autodiff.differentiated(api.name, call, arrays, api.array(gradient))
        exact = golden_gradients_of(problem)
        for name, bound in exact.bounds(draw.dtype).items():
            ratio = error_over_bound(api.host(found[name]), exact.values[name], bound)
            expect(ratio <= 1, f"with {', '.join(options)}: the gradient of {name} is {ratio:.3g} times its bound off")
