"""Golden gradients: they are attention_vjp's, keep their bounds in every dtype, and the bounds are not idle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import flint
import numpy as np
import pytest
from flint import arb

import refattn
from libraries import EAGER, Library
from refattn.conformance.case import Problem
from refattn.conformance.cases import gradients
from refattn.conformance.drawn import drawn_problem
from refattn.conformance.gradients import golden_gradients_of, judge_gradients
from refattn.conformance.judge import Judgement, Result, ratios_of
from refattn.conformance.plain import Draw
from refattn.conformance.targets.function import FunctionTarget
from refattn.conformance.targets.refattn import RefattnTarget
from refattn.golden_gradients import GoldenGradients

# Of a library that is not named here, 10.
SEEDS = {"numpy": 40, "torch": 20, "cupy": 20}
# In the session `sweep`, of which each run has others.
MANY = 600
# For derivatives by differences, in bits and as a power of two.
PRECISION, STEP = 400, -100
PASS = Judgement(verdict="pass", error_over_bound=0.0, model="fused")


def drawn(dtype: str, seed: int) -> Problem:
    """A random problem with a gradient of its output."""
    problem = drawn_problem(dtype, seed)
    draw = Draw(dtype, np.random.default_rng([seed, 1]))
    return gradients.with_gradient(draw, vars(problem) | {"layout": "contiguous"})


@pytest.fixture
def seeds(library: Library, request: pytest.FixtureRequest) -> range:
    """The seeds of random problems."""
    if request.config.getoption("--hypothesis-profile") != "sweep":
        return range(SEEDS.get(library.name, 10))
    first = int(np.random.default_rng().integers(1000, 2**31))
    return range(first, first + MANY)


@EAGER
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_random_gradients_keep_their_bound(library: Library, dtype: str, seeds: range) -> None:
    """All options in every combination: no gradient is beyond the bound, in any dtype of the library."""
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype} here")
    target = RefattnTarget(library.name)
    for seed in seeds:
        problem = drawn(dtype, seed)
        judged = judge_gradients(problem, target.call(problem), PASS, "fused")
        assert judged.verdict in ("pass", "not judgeable"), (seed, judged)


@pytest.mark.library("torch")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_derivatives_taken_by_the_library_keep_the_bound(library: Library, dtype: str, seeds: range) -> None:
    """What autograd takes of the core, in the same combinations of options."""
    target = FunctionTarget("attention", library.name, refattn.attention)
    target.differentiate()
    passed = 0
    for seed in seeds:
        problem = drawn(dtype, seed)
        judged = judge_gradients(problem, target.call(problem), PASS, "fused")
        assert judged.verdict in ("pass", "not judgeable"), (seed, judged)
        passed += judged.verdict == "pass"
    assert passed > len(seeds) // 2


@pytest.mark.library("numpy")
def test_gradients_are_the_slope_to_the_bound(library: Library, seeds: range) -> None:
    """Along a random direction of all arguments, attention in 400 bits rises as the gradients say, within the bound."""
    target = RefattnTarget(library.name)
    for seed in seeds if len(seeds) > 100 else seeds[:15]:
        problem = drawn("float64", seed)
        found, bounds = target.call(problem).gradients, golden_gradients_of(problem).bounds("float64")
        rng = np.random.default_rng(seed)
        steps = {name: rng.standard_normal(x.shape) for name, x in problem.differentiable.items()}
        room = sum(float(np.sum(bounds[name] * np.abs(step))) for name, step in steps.items())
        if not math.isfinite(room):
            continue
        with flint.ctx.workprec(PRECISION):
            ahead, behind = (risen(problem, steps, sign) for sign in (1, -1))
            slope = (ahead - behind) / arb(2) ** (STEP + 1)
            terms = [arb(x) * arb(y) for n, step in steps.items() for x, y in zip(found[n].flat, step.flat)]
            error, size = (float(abs(x).upper()) for x in (sum(terms, arb(0)) - slope, sum(map(abs, terms), arb(1))))
        assert error <= room, (seed, error, room)
        assert room <= 1e-10 * size, "the bound must be far below what any fault would change"


def risen(problem: Problem, steps: dict[str, np.ndarray], sign: int) -> arb:
    """The sum of grad_output * attention in arb, one step ahead or behind, by the definition of each row."""
    moved = {
        name: np.vectorize(lambda x, y: arb(x) + sign * arb(y) * arb(2) ** STEP, otypes=[object])(x, steps[name])
        for name, x in problem.differentiable.items()
    }
    heads, total = problem.heads, arb(0)
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (problem.q, problem.k, problem.v)))
    (q_len, d_k), (k_len, d_v) = problem.q.shape[-2:], problem.v.shape[-2:]
    pairs = (*lead, heads, q_len, k_len)

    def in_full(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Broadcast, with heads repeated for their group; rank 2 has one head."""
        x = x if problem.q.ndim > 2 or x.ndim > 2 else x[None]
        return np.broadcast_to(x if x.shape[-3] in (1, heads) else np.repeat(x, heads // x.shape[-3], -3), shape)

    q, k = in_full(moved["q"], (*lead, heads, q_len, d_k)), in_full(moved["k"], (*lead, heads, k_len, d_k))
    v = in_full(moved["v"], (*lead, heads, k_len, d_v))
    gradient = np.reshape(np.asarray(problem.grad_output), (*lead, heads, q_len, d_v))
    bias = None if problem.bias is None else np.broadcast_to(moved["bias"], pairs)
    hidden = False if problem.bias is None else np.isneginf(np.broadcast_to(problem.bias, pairs))
    visible = np.broadcast_to(problem.visible, pairs) & ~np.asarray(hidden)
    scale = arb(1) / arb(max(1, d_k)).sqrt() if problem.scale is None else arb(float(problem.scale))
    for at in np.ndindex(*pairs[:-1]):
        seen, head = np.flatnonzero(visible[at]), at[:-1]
        logits = [sum((x * y for x, y in zip(q[at], k[head][j])), arb(0)) * scale for j in seen]
        if problem.softcap is not None:
            logits = [(x / problem.softcap).tanh() * problem.softcap for x in logits]
        if bias is not None:
            logits = [x + bias[at][j] for x, j in zip(logits, seen)]
        terms = [x.exp() for x in logits]
        below = sum(terms, arb(0))
        if problem.sinks is not None and np.isfinite(np.ravel(problem.sinks)[head[-1] % problem.sinks.size]):
            below += np.ravel(moved["sinks"])[head[-1] % problem.sinks.size].exp()
        for term, j in zip(terms, seen):
            total += term / below * sum((arb(float(g)) * x for g, x in zip(gradient[at], v[head][j])), arb(0))
    return total


def test_golden_gradients_are_those_of_the_core() -> None:
    """In float64 two formulations agree to rounding, whatever is shared, grouped, hidden or broadcast."""
    target, worst = RefattnTarget("numpy"), 0.0
    for seed in range(60):
        problem = drawn("float64", seed)
        found, exact = target.call(problem).gradients, golden_gradients_of(problem)
        for name, x in exact.values.items():
            size = max(1.0, float(np.max(np.abs(x), initial=0.0)))
            worst = max(worst, float(np.max(np.abs(found[name] - x), initial=0.0)) / size)
    assert worst < 1e-13


def stored_low(x: np.ndarray) -> np.ndarray:
    """x rounded to float16, as float32."""
    return x.astype(np.float16).astype(np.float32)


def fused(problem: Problem, *, output_stored: bool = True, worse: bool = False) -> dict[str, np.ndarray]:
    """Gradients in float16 as a fused kernel has them: the row's sum from the stored output, weights from the LSE.

    With worse, scores and gradients of weights are stored in float16 as well.
    """
    keep: Any = stored_low if worse else lambda x: x
    q, k, v, g = (np.asarray(x, dtype=np.float32) for x in (problem.q, problem.k, problem.v, problem.grad_output))
    scale = np.float32(q.shape[-1] ** -0.5)
    scores = keep(keep(q @ np.swapaxes(k, -1, -2)) * scale)
    lse = np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
    weights = keep(np.exp(scores - lse))
    output = stored_low(stored_low(weights) @ v) if output_stored else weights @ v
    products = keep(g @ np.swapaxes(v, -1, -2))
    logits = keep(weights * (products - np.sum(g * output, axis=-1, keepdims=True)))
    wide = {
        "q": scale * (stored_low(logits) @ k),
        "k": scale * (np.swapaxes(stored_low(logits), -1, -2) @ q),
        "v": np.swapaxes(stored_low(weights), -1, -2) @ g,
    }
    return {name: x.astype(np.float16).astype(np.float64) for name, x in wide.items()}


def test_what_a_model_permits_stays_within_its_bound() -> None:
    """A simulated fused kernel keeps "fused" on random data, one that stores scores "unfused", which it also needs."""
    most = 0.0
    for seed in range(40):
        draw = Draw("float16", np.random.default_rng(seed))
        problem = gradients.with_gradient(draw, draw.qkv(6, 17, heads=2, d_k=16, spread=2.0))
        exact = golden_gradients_of(problem)
        bounds = {model: exact.bounds("float16", model) for model in ("fused", "unfused")}
        for found, model in ((fused(problem), "fused"), (fused(problem, worse=True), "unfused")):
            for name, x in found.items():
                ratios = ratios_of(x, exact.values[name], bounds[model][name])
                assert np.nanmax(ratios) <= 1, (seed, model, name)
        low = fused(problem, worse=True)
        most = max(most, *(float(np.nanmax(ratios_of(x, exact.values[n], bounds["fused"][n]))) for n, x in low.items()))
    assert most > 1, "scores in 16 bits must show"


def test_the_row_sum_of_a_stored_output_needs_its_term() -> None:
    """Values far from 0: D from an output in 16 bits is far off, and within the bound."""
    draw = Draw("float16", np.random.default_rng(3))
    data = draw.qkv(8, 9, heads=1, d_k=8)
    problem = gradients.with_gradient(draw, {**data, "v": draw.exact(data["v"] + 64.0)})
    exact = golden_gradients_of(problem)
    bound = exact.bounds("float16")["q"]
    stored, wide = (fused(problem, output_stored=stored)["q"] for stored in (True, False))
    assert np.max(ratios_of(stored, exact.values["q"], bound)) <= 1
    apart, near = (np.max(np.abs(x - exact.values["q"])) for x in (stored, wide))
    assert apart > 5 * near


def test_missing_and_misshapen_gradients_are_named() -> None:
    """No gradient, another shape and another dtype are each said in words, under D1."""
    draw = Draw("float32", np.random.default_rng(0))
    problem = gradients.with_gradient(draw, draw.qkv(4, 4))
    values = golden_gradients_of(problem).values
    dtypes = dict.fromkeys(values, "float32")

    def said(given: dict[str, np.ndarray], dtypes: dict[str, str]) -> str:
        result = Result(output=np.zeros(0), dtype="float32", gradients=given, gradient_dtypes=dtypes)
        judged = judge_gradients(problem, result, PASS)
        assert (judged.verdict, judged.fault) == ("fail", "D1")
        return judged.message

    assert said({name: values[name] for name in "qk"}, dtypes) == "there is no gradient of v"
    assert "shape (2, 2, 8, 4), expected that of v" in said({**values, "v": np.swapaxes(values["v"], -1, -2)}, dtypes)
    assert "dtype float64, expected that of k, float32" in said(values, {**dtypes, "k": "float64"})
    result = Result(output=np.zeros(0), dtype="float32", gradients=values, gradient_dtypes=dtypes)
    assert judge_gradients(problem, result, PASS).verdict == "pass"


def test_rows_that_are_not_finite_are_not_judged() -> None:
    """A NaN query leaves its own gradient and those of the keys that it sees open, and no others."""
    draw = Draw("float32", np.random.default_rng(0))
    data = draw.qkv(4, 4, batch=(), heads=1)
    data["q"][..., 1, :] = np.nan
    bounds = golden_gradients_of(gradients.with_gradient(draw, data, causal=True)).bounds("float32")
    assert np.isinf(bounds["q"][0, 1]).all()
    assert np.isfinite(bounds["q"][0, [0, 2, 3]]).all()
    for name in "kv":
        assert np.isinf(bounds[name][0, :2]).all()
        assert np.isfinite(bounds[name][0, 2:]).all()


def test_exact_zeros_have_no_bound() -> None:
    """What only hidden pairs lead to is exactly 0, with a bound of exactly 0; -inf sinks and biases too."""
    draw = Draw("bfloat16", np.random.default_rng(0))
    bias = np.where(np.arange(6) == 2, -np.inf, 0.5)
    problem = gradients.with_gradient(
        draw, draw.qkv(4, 6), causal=True, q_start=-2, bias=bias, sinks=np.asarray([-np.inf, 1.0])
    )
    exact = golden_gradients_of(problem)
    bounds = exact.bounds("bfloat16")
    for at in (("q", np.s_[..., :2, :]), ("k", np.s_[..., 2:, :]), ("v", np.s_[..., 2:, :])):
        assert not bounds[at[0]][at[1]].any()
        assert not exact.values[at[0]][at[1]].any()
    assert [*bounds["bias"][2:], *exact.values["bias"][2:]] == [0.0] * 8
    assert bounds["sinks"][0] == exact.values["sinks"][0] == 0.0
    assert bounds["sinks"][1] > 0


def test_a_broken_sink_leaves_its_gradient_open() -> None:
    """A sink of NaN or infinity has a gradient of NaN, which no bound judges; a sink of -inf beside it has 0."""
    draw = Draw("float32", np.random.default_rng(0))
    data = draw.qkv(4, 4, batch=(), heads=3)
    problem = gradients.with_gradient(draw, data, sinks=np.asarray([np.nan, np.inf, -np.inf]))
    exact = golden_gradients_of(problem)
    assert [*np.isnan(exact.values["sinks"]), *np.isinf(exact.bounds("float32")["sinks"])] == [True, True, False] * 2
    assert exact.values["sinks"][2] == exact.bounds("float32")["sinks"][2] == 0.0


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_gradients_of_the_output_that_are_not_finite(poison: float) -> None:
    """In an empty row they change nothing; in another they leave open what that row reaches, and no more."""
    draw = Draw("float32", np.random.default_rng(0))
    problem = gradients.with_gradient(draw, draw.qkv(4, 4, batch=(), heads=1), causal=True, q_start=-1)
    clean = golden_gradients_of(problem)
    assert problem.grad_output is not None
    for row in (0, 2):
        given = problem.grad_output.copy()
        given[..., row, :] = poison
        exact = golden_gradients_of(replace(problem, grad_output=given))
        bounds, before = exact.bounds("float32"), clean.bounds("float32")
        for name, x in exact.values.items():
            open_ = np.zeros(x.shape, bool)
            if row:
                open_[..., (slice(2, 3) if name == "q" else slice(2)), :] = True
            np.testing.assert_array_equal(np.isnan(x), open_)
            np.testing.assert_array_equal(np.isinf(bounds[name]), open_)
            np.testing.assert_array_equal(x[~open_], clean.values[name][~open_])
            np.testing.assert_array_equal(bounds[name][~open_], before[name][~open_])


def test_a_weight_that_vanishes_takes_what_it_meets_along() -> None:
    """A weight of e^-90 is 0 where small numbers are flushed, and with it what a large gradient makes of it."""
    q, k, v = np.ones((1, 1)), np.asarray([[0.0], [-90.0]]), np.asarray([[0.0], [1.0]])
    exact = GoldenGradients(refattn.golden(q, k, v), np.full((1, 1), 1e30), {"q": (1, 1), "k": (2, 1), "v": (2, 1)})
    assert 1e-10 < abs(exact.values["k"][1, 0]) <= exact.bounds("float32")["k"][1, 0] < 1e-7
    assert exact.bounds("float64")["k"][1, 0] < 1e-10 * abs(exact.values["k"][1, 0])


def test_bounds_of_huge_data_raise_no_warning() -> None:
    """What may leave the range of float64 on the way to a bound has no bound, silently, and is nowhere NaN."""
    draw = Draw("bfloat16", np.random.default_rng(0))
    data = draw.qkv(4, 4, batch=(), heads=1)
    problem = gradients.with_gradient(draw, data | {name: data[name] * 1e30 for name in "qkv"})
    for bound in golden_gradients_of(problem).bounds("bfloat16").values():
        assert not np.isnan(bound).any()
