"""Failures are explained: by the fault that was planted, by fitted numbers, and by one fault for a whole report."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.cases import all_cases
from refattn.conformance.diagnosis import Evidence, diagnose, ratio_against, summarise
from refattn.conformance.diagnosis.fitting import fitted
from refattn.conformance.diagnosis.hypotheses import catalogue, of_fault, together
from refattn.conformance.diagnosis.measure import SAME, measure
from refattn.conformance.diagnosis.where import indices_in_words
from refattn.conformance.diagnosis.words import MEANING, meaning
from refattn.conformance.faults import FAULTS, Fault, named
from refattn.conformance.faults.pipeline import Tiled
from refattn.conformance.headline import explains_much, most_telling
from refattn.conformance.judge import Judgement, Result, golden_of, judge
from refattn.conformance.plain import Draw, indices
from refattn.conformance.reports.terminal import print_report
from refattn.conformance.runner import run_suite
from refattn.conformance.targets.function import FunctionTarget

CASES = {case.name: case for case in all_cases() if case.build is not None}
# Without the certified vectors, which ask much the same.
CHAPTERS = ("scores", "masks", "softmax", "heads", "empty_rows", "non_influence", "arrays", "tiling")
PLAIN = [(case, "float32") for case in CASES.values() if case.name.partition(".")[0] in CHAPTERS]
PLAIN = [pair for pair in PLAIN if "float32" in pair[0].dtypes]
FUNCTIONS = [fault for fault in FAULTS if not (fault.patches or fault.backward)]
# A seeded slice; python -m refattn.conformance.diagnosis.measure asks all.
SLICE = np.random.default_rng(7).permutation(len(FUNCTIONS))[:3]
PAIRS = [
    ("no scale", "causal shows the next"),
    ("heads are interleaved", "poison leaks from v"),
    ("causal from the top left", "empty row is NaN"),
    ("cap before scale", "mask polarity"),
    ("sinks are ignored", "bias is subtracted"),
    ("halves are averaged", "scale is squared"),
]


def data(q_len: int = 6, k_len: int = 6, **sizes: Any) -> dict[str, Any]:
    """Float32 data of two batch entries."""
    return Draw("float32", np.random.default_rng(3)).qkv(q_len, k_len, **sizes)


def answered(problem: Problem, **changes: Any) -> Result:
    """The right answer to the problem with other arguments, rounded to float32."""
    golden = golden_of(replace(problem, **changes))
    output, lse = (np.asarray(x, dtype=np.float32).astype(np.float64) for x in (golden.output, golden.lse))
    return Result(output=output, dtype="float32", lse=lse, lse_dtype="float32")


def said(problem: Problem, result: Result) -> Any:
    """The diagnosis of a result that is wrong."""
    judged = judge(problem, result)
    assert judged.verdict == "fail"
    return diagnose(problem, result, judged)


def band(left: int, right: int, size: int = 6) -> Array:
    """A sliding window as an array."""
    rows, keys = indices(size, size)
    return (keys >= rows - left) & (keys <= rows + right)


def test_each_fault_has_its_words() -> None:
    """All functions of the catalogue, and no others, are put in words, which every call can fill in."""
    functions = {fault.name for fault in FUNCTIONS}
    assert MEANING.keys() == functions, "say what each means in refattn/conformance/diagnosis/words.py"
    problem = CASES["masks.causal"].problem("float32", 20)
    assert all("{" not in meaning(name, problem) for name in MEANING)
    for names in SAME:
        assert names <= MEANING.keys()


@pytest.mark.parametrize("fault", [FUNCTIONS[place] for place in SLICE], ids=lambda fault: fault.identifier)
def test_the_planted_fault_is_named_first(fault: Fault) -> None:
    """The report on a wrong function names its fault and its clause in the first sentence."""
    dtypes = [dtype for dtype in ("float32", "float64", "float16") if dtype in fault.dtypes][:1]
    figures = measure([fault], "numpy", dtypes)
    assert (figures["right"], figures["wrong"]) == (1, [])


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_faults_are_named_together(names: tuple[str, str]) -> None:
    """Where one fault alone explains too little, the report names both of two."""
    wrong = replace(together(*(replace(named(name), lse=False) for name in names)), lse=False)
    report = run_suite(FunctionTarget("wrong", "numpy", wrong.attention()), PLAIN, 20)
    assert report.diagnosis is not None
    assert set(report.diagnosis["hypotheses"][0]["name"].split(" and ")) == set(names)
    assert all(f'"{name}"' in report.diagnosis["sentence"] for name in names)


WINDOW = Problem(**data(), shown=band(3, 0))
CAUSAL = Problem(**data(2, 5), causal=True, q_start=3)
GROUPED = Problem(**data(heads=4, kv_heads=2))
PLAIN_CALL = Problem(**data(), softcap=2.0)
READINGS: dict[str, tuple[Problem, dict[str, Any], dict[str, Any]]] = {
    '"causal from the top left" [M5]: causal aligned top-left, q_start=0 instead of 3 (Lq=2, Lk=5)': (
        CAUSAL,
        {"q_start": 0},
        {},
    ),
    "the causal rule shows two keys too few, q_start=1 instead of 3, Lq=2, Lk=5": (
        CAUSAL,
        {"q_start": 1},
        {"causal_moved_by": -2},
    ),
    "your window is one key too wide: rows see keys up to 4 to the left where the window has left=3": (
        WINDOW,
        {"shown": band(4, 0)},
        {"window_left_by": 1, "window_right_by": 0},
    ),
    "the soft cap acts as 3 instead of 2": (PLAIN_CALL, {"softcap": 3.0}, {"softcap": 3.0}),
    "the effective scale is 0.4, 1.1314 times the expected 0.353553": (PLAIN_CALL, {"scale": 0.4}, {"scale": 0.4}),
    "v is read with its tokens in reverse": (WINDOW, {"v": WINDOW.v[..., ::-1, :]}, {}),
    "the last 2 keys are not read": (PLAIN_CALL, {"shown": np.arange(6)[None, :] < 4}, {"keys_dropped": 2}),
    "query heads 0, 1, ... read key/value heads 0, 1, 1, 0 instead of 0, 0, 1, 1": (
        GROUPED,
        {name: getattr(GROUPED, name)[..., [0, 1, 1, 0], :, :] for name in "kv"},
        {"heads": [0, 1, 1, 0]},
    ),
}


@pytest.mark.parametrize("words", READINGS)
def test_numbers_are_fitted(words: str) -> None:
    """Scale, soft cap, alignment, window, mapping of heads and keys are read off the answer and told."""
    problem, changes, fitted = READINGS[words]
    found = said(problem, answered(problem, **changes))
    assert words in found.sentence
    assert {name: pytest.approx(value, rel=1e-5) for name, value in fitted.items()} == found.fitted
    assert found.hypotheses[0].ratio <= 1
    json.dumps(found.as_dict(), allow_nan=False)


def test_outputs_and_sums_are_fitted() -> None:
    """Factors and constants of the output, the order of its rows, base and offset of the log-sum-exp are told."""
    right = answered(GROUPED)
    assert "the output is 3 times" in said(GROUPED, replace(right, output=3 * right.output)).sentence
    assert "the output is 0.5 too large" in said(GROUPED, replace(right, output=right.output + 0.5)).sentence
    turned = said(GROUPED, replace(right, output=right.output[..., [1, 0, 2, 3, 4, 5], :]))
    assert "the output's rows are those of rows 1, 0, 2, 3, 4, 5 in this order" in turned.sentence
    assert "rows 0, 1" in turned.where
    assert right.lse is not None
    ten = said(GROUPED, replace(right, lse=right.lse / np.log(10)))
    assert "as one in base 10 is" in ten.sentence
    assert '"log-sum-exp in base 2" [P4]' in said(GROUPED, replace(right, lse=right.lse / np.log(2))).sentence
    assert "0.25 too large everywhere" in said(GROUPED, replace(right, lse=right.lse + 0.25)).sentence


def test_what_nothing_explains_is_located() -> None:
    """An answer that no hypothesis gives is told by where it is wrong; one of wrong form by its own message."""
    right = answered(GROUPED)
    right.output[1, 2, 3, 4] += 0.37
    found = said(GROUPED, right)
    assert found.sentence.startswith("no known fault gives this answer")
    assert found.sentence.endswith("1 of 384 elements are wrong, rows 3, heads 2, batch entries 1, columns 4")
    narrow = said(GROUPED, replace(answered(GROUPED), dtype="int32"))
    assert narrow.sentence.startswith("the output has dtype int32, expected that of q, float32")


def test_wrong_keys_are_named() -> None:
    """Where the values tell keys apart, the keys that a row sees and should not see are named."""
    problem = Problem(**{**data(d_v=8), "v": np.broadcast_to(np.eye(6, 8), (2, 2, 6, 8))}, causal=True)
    found = said(problem, answered(problem, causal=False))
    assert "row 0 of head 0 sees key 1 to the last, hidden from it" in found.where


def test_indices_are_told_as_ranges_and_periods() -> None:
    """Runs, periods and tiles of indices are named as such."""
    assert indices_in_words(np.arange(64, 128), 128) == "64 to the last (tiles of 64 from tile 1 on)"
    assert indices_in_words(np.arange(1, 12, 4), 12) == "1, 5, ... (every 4 from 1)"
    assert indices_in_words(np.asarray([0, 5]), 9) == "0, 5"


def test_ratio_against_a_fault() -> None:
    """The ratio is below 1 for the fault that was planted, far above for others, and infinite for another form."""
    problem = CASES["masks.causal"].problem("float32", 20)
    result = FunctionTarget("wrong", "numpy", named("causal shows the next").attention()).call(problem)
    assert ratio_against("causal shows the next", problem, result) <= 1
    assert ratio_against(named("causal is ignored"), problem, result) > 100
    assert ratio_against(["causal shows the next", "no scale"], problem, result) > 100
    assert ratio_against("no scale", problem, replace(result, dtype="float64")) == np.inf
    with pytest.raises(KeyError):
        ratio_against("no such fault", problem, result)
    with pytest.raises(ValueError):
        ratio_against(["causal shows the next", "causal is ignored"], problem, result)


def evidence_of(fault: str, *cases: str) -> list[Evidence]:
    """What a fault makes of some cases."""
    target = FunctionTarget("wrong", "numpy", named(fault).attention())
    found = []
    for name in cases:
        problem = CASES[name].problem("float32", 20)
        result = target.call(problem)
        found.append(Evidence(problem, result, judge(problem, result), case=name, clauses=CASES[name].clauses))
    return found


def test_cases_that_passed_speak_too() -> None:
    """A fault that would have failed a case that passed is not named, though it explains the failure as well."""
    least = "hidden logits are the least number"
    alone = summarise(evidence_of(least, "empty_rows.by_dense"))
    assert least in (alone.name, *alone.alike)
    assert "hidden logits are -1e4" in (alone.name, *alone.alike)
    both = summarise(evidence_of(least, "empty_rows.by_dense", "levels.far_below_a_hidden_number"))
    assert least in (both.name, *both.alike)
    assert "hidden logits are -1e4" not in (both.name, *both.alike)
    assert both.sentence.endswith("this explains the failure")


def test_right_answers_need_no_diagnosis() -> None:
    """Without failures there is no sentence, and a hypothesis never fits a right answer."""
    problem = CASES["masks.causal"].problem("float32", 20)
    right = FunctionTarget("right", "numpy", named("plain").attention()).call(problem)
    evidence = Evidence(problem, right, judge(problem, right))
    assert summarise([evidence]).as_dict()["sentence"] == ""
    for one in catalogue():
        predicted = one.predict(problem)
        assert predicted is None or not Evidence(problem, right, Judgement(verdict="fail")).fits(predicted), one.name


def test_fits_to_infinities_are_silent() -> None:
    """Numbers are fitted to an answer of zeros where infinities belong, without a warning."""
    values = data()
    values["v"][..., 0, 0] = np.inf
    problem = Problem(**values)
    result = replace(answered(problem), output=np.zeros((2, 2, 6, 8)))
    found = [*fitted(Evidence(problem, result, judge(problem, result)))]
    assert "output times a factor" in {one.name for one in found}
    assert all(one.predict(problem) is None or one.says(problem) for one in found)


def test_faults_of_one_step_are_no_pair() -> None:
    """Two faults that replace the same step cannot be planted together."""
    for first, second in itertools.combinations((named("no scale"), named("scale of d_model")), 2):
        with pytest.raises(ValueError, match="default_scale"):
            of_fault(first, second)


def test_the_report_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows it under the first failure and at the end, JSON at the top and per record."""
    target = FunctionTarget("wrong", "numpy", named("causal shows the next").attention())
    report = run_suite(target, [pair for pair in PLAIN if pair[0].name.startswith("masks.")], 20)
    print_report(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert 'diagnosis: matches "causal shows the next" [M4]: the causal diagonal is off by one' in shown
    assert 'most likely: "causal shows the next" [M4]' in shown
    written = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert written["diagnosis"]["hypotheses"][0]["clause"] == "M4"
    for record in written["records"]:
        assert (record["diagnosis"] is not None) == (record["verdict"] in ("fail", "crashed"))


@pytest.mark.parametrize("size", [1, 16])
def test_faults_of_tiles_of_any_size(size: int) -> None:
    """A kernel that forgets to rescale is told so, and how many keys it takes at a time, key by key included."""
    kernel = type("Kernel", (Tiled,), {"tile": size, "output_shrink": lambda run, shrink: run.xp.ones_like(shrink)})

    def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: Any = None) -> Any:
        return kernel(q, k, v, causal=causal, scale=scale).run()[0]

    pairs = [pair for pair in PLAIN if pair[0].name.startswith("scores.") or pair[0].clauses[0] == "T1"]
    report = run_suite(FunctionTarget("wrong", "numpy", attention), pairs, 20)
    assert report.diagnosis is not None
    assert report.diagnosis["hypotheses"][0]["name"] == "output is not rescaled"
    assert f"(tiles of {size} key{'s' * (size > 1)})" in report.diagnosis["sentence"]
    assert explains_much(report.diagnosis)


def test_what_explains_the_rest_may_be_fitted() -> None:
    """A window of another width is told beside a fault that explains more failures."""

    def attention(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
        if mask is not None:
            mask = mask | np.roll(np.asarray(mask), -1, axis=-1) & (np.tri(*mask.shape[-2:]) > 0)
        return named("heads are interleaved").attention()(q, k, v, mask=mask)

    pairs = [pair for pair in PLAIN if pair[0].name.startswith(("masks.window", "heads.", "long_rows."))]
    report = run_suite(FunctionTarget("wrong", "numpy", attention), pairs, 20)
    assert report.diagnosis is not None
    told = " ".join(report.diagnosis["sentences"])
    assert '"heads are interleaved" [G1]' in told
    assert "your window is one key too wide" in told


def test_axes_taken_for_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """A function of (batch, tokens, heads, width) that is judged without its convention is told so, and what to add."""

    def attention(q: Any, k: Any, v: Any, *, scale: Any = None) -> Any:
        turned = (np.swapaxes(x, -2, -3) for x in (q, k, v))
        return np.swapaxes(named("plain").attention()(*turned, scale=scale)[0], -2, -3)

    pairs = [pair for pair in PLAIN if pair[0].name.partition(".")[0] in ("scores", "softmax")]
    report = run_suite(FunctionTarget("wrong", "numpy", attention), pairs, 20)
    print_report(report)
    first = most_telling(report)
    assert first.diagnosis is not None
    assert first.diagnosis["sentence"].startswith('matches "axes of heads and tokens exchanged" [A1]')
    assert "swap these axes, or let --convention name the layout" in " ".join(capsys.readouterr().out.split())


def test_the_first_failure_is_the_plainest_of_its_fault() -> None:
    """Of the failures that one fault explains, the plainest that is about the fault's own clause is shown."""
    target = FunctionTarget("wrong", "numpy", named("causal from the top left").attention())
    report = run_suite(target, [pair for pair in PLAIN if pair[0].name.startswith("masks.")], 20)
    first = most_telling(report)
    assert (first.case, first.about) == ("masks.decode_step", "M5")
    assert first.plainness == min(record.plainness for record in report.broken if record.about == "M5")


def test_faults_at_edges_do_not_hide_another() -> None:
    """A kernel that lets NaN through and mixes its groups is told of both, and of wrong numbers first."""

    def attention(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, scale: Any = None) -> Any:
        k, v = (np.concatenate([x] * (q.shape[-3] // x.shape[-3]), axis=-3) for x in (k, v))
        scores = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        shown = np.tri(q.shape[-2], k.shape[-2], k.shape[-2] - q.shape[-2]) > 0 if causal else True
        scores = np.where(shown if mask is None else shown & mask, scores, -np.inf)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return weights / weights.sum(axis=-1, keepdims=True) @ v

    asked = ("heads.grouped", "empty_rows.by", "non_influence.published", "non_influence.behind_causal")
    pairs = [pair for pair in PLAIN if pair[0].name.startswith(asked)]
    report = run_suite(FunctionTarget("wrong", "numpy", attention), pairs, 20)
    assert report.diagnosis is not None
    told = " ".join(report.diagnosis["sentences"])
    assert '"heads are interleaved" [G1]' in told
    assert "is NaN" in told
    first = most_telling(report)
    assert first.diagnosis is not None
    assert first.diagnosis["sentence"].startswith('matches "heads are interleaved" [G1]')


def test_each_kind_of_crash_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that raises at several places is told of each, with a case for it."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        width = q.shape[-1] ** -1
        return q @ np.swapaxes(k, -1, -2) * width @ v

    asked = ("arrays.no_width", "heads.grouped_query")
    pairs = [pair for pair in PLAIN if pair[0].name in asked]
    print_report(run_suite(FunctionTarget("wrong", "numpy", attention), pairs, 20))
    shown = " ".join(capsys.readouterr().out.split())
    assert "crashed: ValueError at test_diagnosis.py:" in shown
    assert "1 case, such as heads.grouped_query; ZeroDivisionError at test_diagnosis.py:" in shown


def test_only_what_was_tried_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time was left to try faults, none is said not to be known."""
    monkeypatch.setattr("refattn.conformance.diagnosis.summary.LIMIT_S", 0.0)
    report = summarise(evidence_of("no scale", "scores.width_of_one_head"))
    assert [one.sentence.partition(":")[0] for one in report.diagnoses.values()] == [
        "what explains other failures does not give this answer"
    ]


def test_what_explains_little_is_not_called_likely(capsys: pytest.CaptureFixture[str]) -> None:
    """A fault that explains few failures of many is said to explain a part of them."""
    target = FunctionTarget("wrong", "numpy", named("causal shows the next").attention())
    report = run_suite(target, [pair for pair in PLAIN if pair[0].name == "masks.causal"], 20)
    for failures, head in ((1, "most likely: "), (280, "in part: ")):
        print_report(replace(report, diagnosis={**(report.diagnosis or {}), "failures": failures}))
        assert f'\n{head}"causal shows the next"' in capsys.readouterr().out
