"""Public reports: each leads to cases of its clauses, and its published numbers are refattn's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planted_faults
import public_faults
from refattn import (
    CLAUSES,
    Partial,
    RollingKVCache,
    attend,
    attention,
    attention_stages,
    attention_with_lse,
    cli,
    masks,
    merge,
)
from refattn.arrays import Array
from refattn.commands.reports import markdown
from refattn.conformance.cases import all_cases
from refattn.conformance.plain import published
from refattn.conformance.public_reports import REPORTS, STANDINGS

ROOT = Path(__file__).parents[1]
CASES = {case.name: case for case in all_cases()}
PATHS = ("dense", "tiled")


# ---- reports, clauses and cases ---------------------------------------------------------------------------


def test_every_report_leads_to_cases_of_its_clauses() -> None:
    """Each report names clauses, and cases that exist: every case is of one of the clauses, every clause has a case."""
    labels = {clause.label for clause in CLAUSES}
    for report in REPORTS:
        assert report.cases
        assert set(report.clauses) <= labels
        assert set(report.cases) <= set(CASES), report.id
        assert len(set(report.cases)) == len(report.cases)
        tested = [set(CASES[name].clauses) for name in report.cases]
        assert all(clauses & set(report.clauses) for clauses in tested), report.id
        assert set(report.clauses) <= set.union(*tested), report.id


def test_reports_can_be_told_apart() -> None:
    """Each has an identifier and an address of its own; that a report is not covered has its reason."""
    assert len({report.id for report in REPORTS}) == len({report.url for report in REPORTS}) == len(REPORTS) >= 59
    for report in REPORTS:
        assert report.wrong.endswith(".")
        assert report.standing in STANDINGS
        assert bool(report.reason) == (report.standing != "covered")


def test_the_page_of_reports_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reports.md is what `refattn reports --markdown` prints."""
    assert cli.main(["reports", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text == markdown()
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    assert text == page, "write it anew: refattn reports --markdown > docs/reports.md"


def test_reports_of_a_kind_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`refattn reports KIND` prints that kind alone, with clauses, cases and reasons; an unknown kind is refused."""
    assert cli.main(["reports", "nan leak", "Dropout"]) == 0
    out = capsys.readouterr().out
    for words in ("pytorch/pytorch 101967", "M19", "non_influence.published_poison", "has no dropout"):
        assert words in out
    assert "onnx/onnx" not in out
    assert cli.main(["reports", "--json", "rope"]) == 0
    assert '"url": "https://github.com/Blaizzy/mlx-vlm/issues/1983"' in capsys.readouterr().out
    assert cli.main(["reports", "crash"]) == 2
    assert "the kinds are" in capsys.readouterr().err


# ---- published data and numbers ---------------------------------------------------------------------------


def explicit(q: Any, k: Any, v: Any) -> list[Array]:
    """One batch entry of one head, as published."""
    return [np.asarray(x, dtype=np.float64)[None, None] for x in (q, k, v)]


def same(*shape: int) -> tuple[tuple[int, ...], ...]:
    return shape, shape, shape


B43 = published(109, (2, 1, 2, 4), (2, 1, 5, 4), (2, 1, 5, 4))
B45 = published(110, (1, 1, 3, 4), (1, 1, 8, 4), (1, 1, 8, 4))
B50 = explicit([[2.0, 0, 0, 0], [2, 0, 0, 0]], [[1.0, 0, 0, 0], [0, 0, 0, 0]], [[1.0, 0, 0, 0], [0, 1, 0, 0]])
B52 = explicit([[0.0]], [[0.0], [0.0]], [[2.0], [4.0]])
B54 = published(111, (1, 1, 2, 4), (1, 1, 4, 4), (1, 1, 4, 4))
B62 = explicit([[1.0]], [[0.0], [5.0]], [[1.0], [3.0]])
B63 = explicit([[3.0, 0.0]], [[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]], [[1.0], [2.0], [4.0]])
B65 = explicit([[0.0]], [[0.0], [0.0]], [[1.0], [3.0]])
B67 = published(115, (1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
B71 = published(117, (1, 1, 2, 16), (1, 1, 3, 16), (1, 1, 3, 4))
B83 = published(120, *same(1, 1, 5, 4))
B91 = published(123, (1, 1, 2, 4), (1, 1, 5, 4), (1, 1, 5, 4))
B27 = explicit([[1.0]] * 3, [[-300.0], [-301], [-302], [-303], [-304], [-305]], [[1.0], [2], [3], [4], [5], [6]])
B28 = explicit([[-512.0] * 4], [[1024.0] * 4, [1024.0, 1024.0, 1024.0, 1023.9921875]], [[1.0], [3.0]])
B31 = published(106, *same(1, 1, 7, 8))
ROW_SEEN = np.asarray([[True, False]])
BIAS = np.asarray([[0.0, 2.0, -1.0], [1.0, 0.0, 3.0]])

# A report and what the number is, the data, the options (arrays still in float64), and the first rows of the output.
NUMBERS: dict[str, tuple[list[Array], dict[str, Any], Any]] = {
    "B06": (
        published(102, *same(1, 1, 3, 4)),
        {"causal": True, "mask": np.asarray([[False, True, True]])},
        [[0.0] * 4, [-0.242525, -2.022252, 0.876538, 1.909386], [0.394274, -1.196656, 0.771012, 0.992233]],
    ),
    "B27": (B27, {"causal": True, "scale": 1.0, "q_start": 3}, [[1.507347], [1.548058], [1.567067]]),
    "B28": (B28, {"scale": 0.5}, [[2.761594]]),
    "B31": (
        B31,
        {"causal": True, "mask": masks.padding(np.asarray([[False, True, True, False, False, True, False]]))},
        [[0.0] * 8, [0.948058, -1.527733, 1.458632, 0.814503, 0.786116, 1.247998, 0.618449, -1.461924]],
    ),
    "B36": (
        [
            np.full((1, 1, 2, 64), 64.0),
            *(np.repeat([[[[x], [y]]]], 64, axis=-1) for x, y in ((64.0, 63.0), (1.0, 2.0))),
        ],
        {"scale": 0.125},
        [[1.0] * 64] * 2,
    ),
    "B43": (
        B43,
        {"causal": True, "mask": masks.lengths([3, 5]), "q_start": [1, 3]},
        [
            [[-0.550359, -0.582759, 0.346798, -0.003541], [-0.738413, -0.801432, 0.49273, -0.013282]],
            [[0.205357, -0.2943, 0.010273, -0.902979], [0.030056, -0.426461, -0.477855, -0.600599]],
        ],
    ),
    "B43, top-left": (
        B43,
        {"causal": True, "mask": masks.lengths([3, 5]), "q_start": 0},
        [
            [[-1.028316, -1.150453, 0.379102, 0.223797], [-0.496482, -0.518767, 0.343157, -0.029168]],
            [[0.189356, -0.566756, 0.054497, -1.597213], [0.229086, -0.561725, 0.194977, -1.588083]],
        ],
    ),
    "B43, by the padded length": (
        B43,
        {"causal": True, "mask": masks.lengths([3, 5]), "q_start": 3},
        [
            [[-0.791102, -0.863805, 0.502214, 0.00737], [-0.738413, -0.801432, 0.49273, -0.013282]],
            [[0.205357, -0.2943, 0.010273, -0.902979], [0.030056, -0.426461, -0.477855, -0.600599]],
        ],
    ),
    "B45": (
        B45,
        {"causal": True, "mask": masks.window(2, None), "q_start": 5},
        [
            [1.104929, -0.006865, -0.732045, 1.141791],
            [-0.114509, -0.704122, -0.676793, -0.463217],
            [-0.104771, -0.878797, -0.393218, -0.73456],
        ],
    ),
    "B50": (B50, {}, [[0.731059, 0.268941, 0.0, 0.0]] * 2),
    "B50, unscaled": (B50, {"scale": 1.0}, [[0.880797, 0.119203, 0.0, 0.0]] * 2),
    "B50, causal": (B50, {"causal": True}, [[1.0, 0.0, 0.0, 0.0]]),
    "B52": (B52, {"scale": 1.0, "mask": ROW_SEEN}, [[2.0]]),
    "B54": (
        B54,
        {"mask": masks.padding(np.asarray([[True, True, False, False]]))},
        [[-0.4737, 0.583475, 0.003001, 0.967353], [0.872136, -0.395345, 0.119062, 0.785011]],
    ),
    "B54, the complement": (
        B54,
        {"mask": masks.padding(np.asarray([[False, False, True, True]]))},
        [[-0.721175, 0.700924, 1.334116, -0.291833], [-0.825401, 0.630731, 1.337234, -0.29335]],
    ),
    "B62": (B62, {"scale": 1.0, "softcap": 1.0, "mask": ROW_SEEN}, [[1.0]]),
    "B63": (B63, {"scale": 1.0, "softcap": 2.0}, [[1.628383]]),
    "B63, without the cap": (B63, {"scale": 1.0}, [[1.000142]]),
    "B65": (B65, {"scale": 1.0, "sinks": np.asarray([0.693147])}, [[1.0]]),
    "B65, a large sink": (B65, {"scale": 1.0, "sinks": np.asarray([25.0])}, [[5.555e-11]]),
    "B67": (
        B67,
        {"scale": -0.5},
        [[-0.091022, 0.016275, 0.02301, -0.767887], [-0.13017, 0.052717, 0.072887, -0.251823]],
    ),
    "B67, scale zero": (B67, {"scale": 0.0}, np.broadcast_to(np.mean(B67[2], axis=-2, keepdims=True), (1, 1, 2, 4))),
    "B71": (
        B71,
        {"bias": BIAS},
        [[0.692107, 0.444248, 0.426481, 1.035567], [-0.145379, -0.301663, -0.037485, 1.290045]],
    ),
    "B71, scaled": (
        B71,
        {"bias": BIAS / 4},
        [[0.048759, -0.133594, 0.447915, 0.718681], [-0.157661, -0.315184, 0.157268, 1.020459]],
    ),
    "B75": ([*published(0, (1, 1, 1, 16), (1, 1, 4096, 16)), np.ones((1, 1, 4096, 1))], {"scale": 1 / 64}, [[1.0]]),
    "B83": (
        B83,
        {"causal": True, "mask": masks.window(1, None)},
        [
            [-0.574835, -0.644339, 0.55911, -0.157325],
            [-0.186091, 0.506818, -0.024291, -0.439237],
            [0.440475, 1.064112, -0.52228, -0.926549],
            [0.621352, -0.73689, 0.508401, -1.852351],
            [-1.171821, 0.174018, 1.493475, -1.133335],
        ],
    ),
    "B83, two tokens before": (
        B83,
        {"causal": True, "mask": masks.window(2, None)},
        [
            [-0.574835, -0.644339, 0.55911, -0.157325],
            [-0.186091, 0.506818, -0.024291, -0.439237],
            [0.103772, 0.497546, -0.163663, -0.671454],
            [0.469127, -0.025961, 0.179304, -1.477459],
            [-0.806509, -0.015403, 1.282385, -1.276581],
        ],
    ),
    "B91": (
        B91,
        {"mask": masks.padding(np.asarray([[True, False, True, False, True]]))},
        [[-0.111065, -0.103926, -0.023005, -0.661785], [0.301254, 0.748641, 0.469428, -0.451118]],
    ),
    "B91, as a prefix": (
        B91,
        {"mask": masks.lengths(3)},
        [[0.828123, -0.656206, -0.148675, -0.476536], [0.903787, 0.341409, 0.396519, -0.286921]],
    ),
}


def cast(options: dict[str, Any], dtype: str) -> dict[str, Any]:
    floats = {name: x.astype(dtype) for name, x in options.items() if getattr(x, "dtype", None) == np.float64}
    return {**options, **floats}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NUMBERS)
def test_published_numbers(name: str, dtype: str, path: str) -> None:
    """Published outputs, right readings and wrong ones that other options spell, are refattn's to all their digits."""
    data, options, rows = NUMBERS[name]
    q, k, v = (x.astype(dtype) for x in data)
    output = attention(q, k, v, path=path, **cast(options, dtype))
    expected = np.asarray(rows)
    got = (
        output[:, 0]
        if expected.ndim == 3
        else output.reshape(-1, output.shape[-1])[: expected.size // output.shape[-1]]
    )
    small = float(np.max(np.abs(expected))) < 1e-6
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=2e-4 if small else 0, atol=0 if small else 2e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), [("k", np.nan), ("v", np.nan), ("k", np.inf), ("v", -np.inf)])
def test_published_poison(name: str, value: float, path: str) -> None:
    """NaN or an infinity in the third key or value, hidden from both queries, leaves the published output."""
    data = dict(zip("qkv", published(105, (1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))))
    data[name][..., 2, :] = value
    q, k, v = (data[each].astype("float32") for each in "qkv")
    output = attention(q, k, v, mask=np.asarray([[True, True, False]]), path=path)
    expected = [[-1.358437, -0.704413, 0.823605, 0.056019], [-1.316067, -0.014946, 0.926505, 0.03765]]
    np.testing.assert_allclose(output[0, 0], expected, rtol=0, atol=2e-6)


def test_published_merge() -> None:
    """Weights 8 and 2 merge to 0.8; log-sum-exps in base 2 would give 0.880797."""
    for logs, expected in (((2.079442, 0.693147), 0.8), ((3.0, 1.0), 0.880797)):
        parts = [Partial(np.full((1, 1, 1), x), np.full((1, 1), log)) for x, log in zip((1.0, 0.0), logs)]
        np.testing.assert_allclose(merge(parts).output, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_published_log_sum_exp(path: str) -> None:
    """Scores near -300 have the published log-sum-exps."""
    q, k, v = (x.astype("float64") for x in B27)
    lse = attention_with_lse(q, k, v, causal=True, scale=1.0, q_start=3, path=path)[1]
    np.testing.assert_allclose(lse[0, 0], [-299.55981, -299.548086, -299.543807], rtol=0, atol=1e-6)


def test_published_weights_and_visible_sets() -> None:
    """An empty row's weights are 0; a window of two tokens shows 1, 2, 2, 2, 2 keys, one of three 1, 2, 3, 3, 3;
    after four cached tokens the first of three new ones sees 5 of 7 keys."""
    data, options, _ = NUMBERS["B06"]
    assert np.all(attention_stages(*data, **options).weights[..., 0, :] == 0)
    for name, counts in (("B83", [1, 2, 2, 2, 2]), ("B83, two tokens before", [1, 2, 3, 3, 3])):
        data, options, _ = NUMBERS[name]
        assert np.sum(attention_stages(*data, **options).visible[0, 0], axis=-1).tolist() == counts
    q, k = np.ones((1, 3, 8)), np.ones((1, 7, 8))
    assert np.sum(attention_stages(q, k, k, causal=True, q_start=4).visible[0], axis=-1).tolist() == [5, 6, 7]


def test_published_steps() -> None:
    """Three tokens at once over a window of three are three steps of one token each."""
    data, options, rows = NUMBERS["B45"]
    q, k, v = data
    for step in range(3):
        one = {**options, "q_start": 5 + step}
        np.testing.assert_allclose(attention(q[:, :, [step]], k, v, **one)[0, 0, 0], rows[step], rtol=0, atol=2e-6)


def test_published_rolling_cache() -> None:
    """A window of 8 holds 10.0 to 10.7 after eight tokens, and 10.1 to 10.8 after nine."""
    values, query = 10 + np.arange(10).reshape(1, 1, 10, 1) / 10, np.zeros((1, 1, 1, 1))
    cache = RollingKVCache.allocate(query, 1, 1, 8, 1).append(values[:, :, :6], values[:, :, :6])
    means = []
    for start in range(6, 10):
        cache = cache.append(*[values[:, :, start : start + 1]] * 2)
        means.append(float(attend(query, cache)[0, 0, 0, 0]))
    np.testing.assert_allclose(means, [10.3, 10.35, 10.45, 10.55], rtol=1e-14)


@pytest.mark.parametrize("path", PATHS)
def test_one_query_over_one_key(path: str) -> None:
    """The smallest problem gives its value to the bit, in float16 too."""
    rng = np.random.default_rng(0)
    q, k, v = ((3 * rng.standard_normal((1, 1, 1, 16))).astype("float16") for _ in range(3))
    np.testing.assert_array_equal(attention(q, k, v, scale=0.25, path=path), v)


FAULTY: dict[str, tuple[Callable[..., Any], Any]] = {
    "B27": (public_faults.zero_left_by_a_hidden_tile, [0.0, 1.548058, 1.567067]),
    "B28": (public_faults.maximum_from_a_sentinel, [0.0]),
    "B52": (lambda *arrays, **options: planted_faults.faulty("mask after softmax")(*arrays, **options), [1.0]),
    "B62": (public_faults.cap_after_mask, [1.537883]),
}


@pytest.mark.parametrize("name", FAULTY)
def test_published_wrong_numbers_are_those_of_the_fault(name: str) -> None:
    """The wrong implementations of the tests give the wrong numbers that were published."""
    wrong, expected = FAULTY[name]
    data, options, _ = NUMBERS[name]
    output = wrong(*(x.astype("float32") for x in data), **options)
    np.testing.assert_allclose(output.reshape(-1), expected, rtol=0, atol=2e-6)
