"""refattn check --gradients: gradients that a library takes of a function, and those that a backward function gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convention_kernels
import gradient_kernels
import refattn
from libraries import EAGER, Library
from refattn import cli, registry
from refattn.conformance.case import Case, Problem
from refattn.conformance.cases import all_cases
from refattn.conformance.cases.gradients import with_gradient
from refattn.conformance.diagnosis.gradients import likeness
from refattn.conformance.faults import named
from refattn.conformance.gradients import golden_gradients_of
from refattn.conformance.isolation.target import IsolatedTarget
from refattn.conformance.judge import Result
from refattn.conformance.plain import Draw
from refattn.conformance.records import Report
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets import TargetError, find_target
from refattn.conformance.targets.function import FunctionTarget
from refattn.conformance.targets.names import NAMES
from refattn.errors import PathError

CASES = [case for case in all_cases() if case.name.startswith("gradients.") and case.build is not None]
PAIRS = chosen_pairs(CASES, dtypes=("float32",))


def judged(name: str, library: str, gradients: str | None, isolated: bool = False) -> Report:
    """The report on a function in this process, or in one of its own."""
    make = IsolatedTarget if isolated else find_target
    return run_suite(make(f"gradient_kernels:{name}", library, None, gradients), PAIRS, 20)


@pytest.mark.library("torch")
def test_autograd_of_a_function_is_judged(library: object) -> None:
    """What a right function can express passes, and a gradient that does not arrive is a failure, named by argument."""
    right, wrong = (judged(name, "torch", "") for name in ("causal_softmax", "detached"))
    passed = {record.case for record in right.records if record.verdict == "pass"}
    assert len(passed) >= 6
    assert right.counts["fail"] == right.counts["crashed"] == 0
    # One query over one key has no gradient of k that could be missing.
    assert {record.case for record in wrong.broken} == passed - {"gradients.one_query_one_key"}
    assert all("gradient of k" in record.message for record in wrong.records if record.verdict == "fail")


@pytest.mark.library("numpy")
@pytest.mark.parametrize("isolated", [False, True], ids=["here", "apart"])
def test_a_backward_function_is_judged(isolated: bool) -> None:
    """A right one of all arguments passes every case, in a process of its own too."""
    report = judged("attend", "numpy", "gradient_kernels:backward", isolated)
    assert {record.verdict for record in report.records} == {"pass"}
    assert report.conforms


@pytest.mark.library("numpy")
def test_what_a_backward_function_leaves_out_is_not_passed() -> None:
    """Cases about a gradient that does not come are unsupported, as are options that the function does not take."""
    report = judged("attend", "numpy", "gradient_kernels:three")
    lacking = {record.case: record.missing for record in report.records if record.verdict == "unsupported"}
    assert report.counts["fail"] == report.counts["crashed"] == 0
    assert lacking["gradients.sinks"] == ("sinks gradient",)
    assert lacking["gradients.bias"] == ("bias gradient",)
    assert "gradients.plain" not in lacking
    report = judged("attend", "numpy", "gradient_kernels:knows_no_sinks")
    lacking = {record.case: record.missing for record in report.records if record.verdict == "unsupported"}
    assert lacking["gradients.sinks"] == ("sinks",)
    assert "gradients.causal" not in lacking


@pytest.mark.library("numpy")
@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("swapped", "fail", "the gradient of k has shape (2, 2, 7, 6), expected that of k, (2, 2, 7, 4)"),
        ("returns_nothing", "crashed", "returned None, expected a tuple or a dict"),
    ],
)
def test_wrong_gradients_are_told(name: str, verdict: str, words: str) -> None:
    """The shape that came, and what came instead of gradients, in words."""
    report = judged("attend", "numpy", f"gradient_kernels:{name}")
    assert not report.conforms
    found = {record.case: record for record in report.records}["gradients.other_widths"]
    assert found.verdict == verdict
    assert words in found.message
    assert found.diagnosis is not None


@pytest.mark.library("numpy")
def test_without_being_asked_for_gradients_are_unsupported() -> None:
    """A function is not judged on what it was not asked for; refattn's own paths offer gradients anyway."""
    assert judged("attend", "numpy", None).counts == {
        **dict.fromkeys(judged("attend", "numpy", None).counts, 0),
        "unsupported": len(PAIRS),
    }
    for name in ("refattn-numpy", "refattn-numpy-tiled"):
        assert find_target(name).unsupported(("gradients", "bias gradient", "sinks gradient"), "float32") == ""


@pytest.mark.library("numpy")
def test_tiles_without_derivatives_are_not_judged_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with tiles of its own but no backward pass has no gradients, nor can NumPy take them."""

    def refuses(library: str) -> Any:
        raise PathError("path", "'dense'", "'tiled'")

    monkeypatch.setattr(registry, "tiled_vjp", refuses)
    assert find_target("refattn-numpy-tiled").unsupported(("gradients",), "float32") != ""
    assert find_target("refattn-numpy").unsupported(("gradients",), "float32") == ""
    with pytest.raises(TargetError, match="numpy, which does not differentiate"):
        find_target("refattn-numpy-tiled", gradients="")


@pytest.mark.library("numpy")
def test_targets_that_do_not_differentiate_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence says what to name instead; the command's exit code is 2."""
    with pytest.raises(TargetError, match="numpy, which does not differentiate; name the function"):
        find_target("gradient_kernels:attend", gradients="")
    with pytest.raises(TargetError, match="has no 'nothing'"):
        find_target("gradient_kernels:attend", gradients="gradient_kernels:nothing")
    with pytest.raises(TargetError, match="is for a function of refattn's convention"):
        find_target("refattn-numpy", gradients="gradient_kernels:backward")
    assert cli.main(["check", "gradient_kernels:attend", "--gradients", "--clauses", "D1"]) == 2
    assert "which does not differentiate" in capsys.readouterr().err


@EAGER  # the suite runs some of these cases on the others
def test_the_command_judges_tiled_gradients(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a tiled path, with or without being asked for."""
    command = ["check", f"refattn-{library.name}-tiled", "--clauses", "D6", "--dtype", "float32"]
    for more in ([], ["--gradients"]):
        assert cli.main([*command, *more]) == 0
        said = capsys.readouterr().out
        assert "conforms" in said and "unsupported" not in said


@pytest.mark.library("numpy")
def test_the_command_judges_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """--gradients takes a backward function, and the exit code is the verdict; how to call again says so too."""
    command = ["check", "gradient_kernels:attend", "--clauses", "D5", "--quick", "--gradients"]
    assert cli.main([*command, "gradient_kernels:backward"]) == 0
    assert cli.main([*command, "gradient_kernels:no_slope"]) == 1
    assert "--gradients gradient_kernels:no_slope" in capsys.readouterr().out


def backward_of(wrong: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """A backward function whose gradients of some arguments are a fault's, or a number times the right ones."""

    def backward(*arguments: Any, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = gradient_kernels.backward(*arguments, **options)
        for name, how in wrong.items():
            if isinstance(how, float):
                found[name] = (how * found[name]).astype(found[name].dtype)
            else:
                found[name] = named(how).gradients()(*arguments, **options)[name]
        return found

    return backward


HEAD, STRIDE, UNSCALED = "first head of a group alone", "groups summed by stride", "scale missing from dk"
TOLD = [
    ({"k": "row sum missing", "q": "row sum missing"}, 'the gradients match "row sum missing" [D1]'),
    ({"q": "scale missing from dq"}, 'the gradients match "scale missing from dq" [D1]'),
    ({"k": HEAD}, f'the gradient of k matches "{HEAD}" [D2]'),
    ({"v": HEAD}, f'the gradient of v matches "{HEAD}" [D2]'),
    ({"v": HEAD, "k": UNSCALED}, f'of k matches "{UNSCALED}" [D1], the gradient of v matches "{HEAD}" [D2]'),
    ({"q": "gradients miss the own key, by the log-sum-exp"}, 'q matches "gradients miss the own key, by the log'),
    ({"q": "dq of the last 16 keys alone"}, 'the gradients match "dq of the last 16 keys alone" [D1]'),
    ({"q": -2.0, "v": HEAD}, f'of v matches "{HEAD}" [D2], the gradient of q is -2 times the right one'),
    ({"k": STRIDE, "v": STRIDE}, f'the gradients match "{STRIDE}" [D2]'),
    ({"k": "dk without the transpose"}, 'the gradients match "dk without the transpose" [D1]'),
    ({"v": "dv without the transpose"}, 'the gradients match "dv without the transpose" [D1]'),
    ({"v": 3.0}, "the gradient of v is 3 times the right one"),
]


@pytest.mark.library("numpy")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("wrong", "words"), TOLD)
def test_wrong_gradients_are_named(wrong: dict[str, Any], words: str, dtype: str) -> None:
    """The report says which fault of the catalogue, or which factor, gives each gradient that is wrong."""
    grouped = Case(name="grouped", clauses=("D1",), says="", dtypes=(dtype,), build=grouped_and_causal)
    target = FunctionTarget("wrong", "numpy", gradient_kernels.attend, backward_of(wrong))
    (record,) = run_suite(target, [(grouped, dtype)], 20).records
    assert record.verdict == "fail" and words in record.message
    assert record.diagnosis and record.diagnosis["sentence"] == record.message


@pytest.mark.library("numpy")
def test_what_a_fault_does_not_move_it_does_not_explain() -> None:
    """A gradient of q that is little beyond its bound is named by no fault of which the gradient of q is right."""
    problem = grouped_and_causal(Draw("float32", np.random.default_rng(0)))
    exact = golden_gradients_of(problem)
    gradients = {name: np.asarray(exact.values[name], np.float64) for name in "qkv"}
    gradients["q"] = gradients["q"] + 1.5 * exact.bounds("float32")["q"]
    result = Result(output=np.zeros(0), dtype="float32", gradients=gradients)
    assert "matches" not in likeness(problem, result) and "match " not in likeness(problem, result)


def grouped_and_causal(draw: Draw) -> Problem:
    """Two groups of two heads, 20 tokens."""
    return with_gradient(draw, draw.qkv(20, heads=4, kv_heads=2), causal=True)


@pytest.mark.library("numpy")
@pytest.mark.parametrize("forward", ["", "causal is ignored"])
def test_what_explains_most_failures_may_be_a_gradient(forward: str) -> None:
    """Faults of outputs and of gradients are counted together, and the one that explains more comes first."""
    wrong, output = named("row sum missing"), named(forward).attention() if forward else refattn.attention
    report = run_suite(FunctionTarget("both", "numpy", output, wrong.gradients()), PAIRS, 20)
    assert report.diagnosis is not None
    sentences, first = report.diagnosis["sentences"], report.diagnosis["hypotheses"][0]
    assert report.diagnosis["failures"] == sum(record.verdict == "fail" for record in report.records)
    assert (first["name"], first["clause"]) == ("row sum missing", wrong.clause)
    assert first["explained"] > len(report.broken) / 2
    assert sentences[0].startswith(f'"row sum missing" [{wrong.clause}]: ')
    assert sentences[0].endswith(f"{first['explained']} of {len(report.broken)} failures" if forward else "failures")
    assert any(f'"{forward}"' in sentence for sentence in sentences[1:]) == bool(forward)


def of_convention(folder: Path, name: str, library: str, gradients: str, isolated: bool = False) -> Report:
    """The report on a function of one of the conventions of `convention_kernels`."""
    file = folder / f"{name}.toml"
    file.write_text(convention_kernels.CONVENTIONS[name])
    make = IsolatedTarget if isolated else find_target
    return run_suite(make(f"convention_kernels:{name}", library, str(file), gradients), PAIRS, 20)


def assert_passed(report: Report, name: str) -> set[str]:
    """The cases that passed; none fails, and those that the convention of that name can express are among them."""
    assert {record.verdict for record in report.records} <= {"pass", "unsupported"}
    passed = {record.case for record in report.records if record.verdict == "pass"}
    assert passed >= {"gradients.plain", "gradients.grouped_heads", "gradients.shared_batch_entry"}
    biased = {"gradients.bias", "gradients.bias_for_all_rows", "gradients.poison_behind_a_bias"}
    assert name == "thd" or passed >= biased
    assert name == "hsd" or "gradients.sinks" in passed
    return passed


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", [*convention_kernels.CONVENTIONS])
def test_autograd_reaches_through_a_convention(library: object, tmp_path: Path, name: str) -> None:
    """Whatever the layout, and bias joined to a mask or sinks beside it, the gradients of all arguments pass."""
    report = of_convention(tmp_path, name, "torch", "")
    assert_passed(report, name)


@pytest.mark.library("jax")
def test_jax_is_judged_on_the_gradient_of_a_bias(library: object) -> None:
    """jax.vjp takes the gradient of the bias as the function got it, and that is summed to what the problem has."""
    cases = [pair for pair in PAIRS if pair[0].name == "gradients.bias_for_all_rows"]
    (record,) = run_suite(find_target("jax", gradients=""), cases, 20).records
    assert record.verdict == "pass"


@pytest.mark.library("numpy")
@pytest.mark.parametrize("name", [*convention_kernels.CONVENTIONS])
def test_a_backward_function_speaks_the_convention(tmp_path: Path, name: str) -> None:
    """grad_output comes in the layout of the output, and gradients are read in the form of the arguments."""
    report = of_convention(tmp_path, name, "numpy", f"convention_kernels:{name}_backward", isolated=True)
    assert "gradients.one_head" in assert_passed(report, name)


@pytest.mark.library("numpy")
def test_a_backward_function_gets_output_and_log_sum_exp(tmp_path: Path) -> None:
    """Where it has parameters of these names it gets what the function returned, as it returned it."""
    report = of_convention(tmp_path, "bshd", "numpy", "convention_kernels:bshd_by_output")
    assert {record.verdict for record in report.records} == {"pass"}


@pytest.mark.library("numpy")
@pytest.mark.parametrize(
    ("fault", "case", "words"),
    [
        ("wrong_bias", "gradients.bias_for_all_rows", "gradient of bias["),
        ("wrong_sinks", "gradients.sinks", "gradient of sinks["),
        ("heads_first", "gradients.plain", "the gradient of q has shape (2, 2, 6, 8), expected (2, 6, 2, 8)"),
    ],
)
def test_a_wrong_gradient_of_a_convention_is_named(tmp_path: Path, fault: str, case: str, words: str) -> None:
    """Half a bias' gradient, the sign of a sink's, and axes in the wrong order are each told."""
    report = of_convention(tmp_path, "bshd", "numpy", f"convention_kernels:bshd_{fault}")
    found = {record.case: record for record in report.records}[case]
    assert found.verdict == "fail"
    assert words in found.message


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", ["torch", "torch-math", "torch-flash", "torch-mha"])
def test_public_implementations_are_judged_on_all_gradients(library: object, name: str) -> None:
    """torch's gradients of q, k, v and a bias pass where nothing hidden is poisoned, whichever kernel computes them."""
    chosen = (
        "gradients.plain",
        "gradients.causal",
        "gradients.empty_rows",
        "gradients.bias",
        "gradients.bias_per_head",
    )
    report = run_suite(find_target(name, gradients=""), [pair for pair in PAIRS if pair[0].name in chosen], 20)
    verdicts = {record.case: record.verdict for record in report.records}
    of_bias = "unsupported" if name == "torch-flash" else "pass"
    assert verdicts == dict.fromkeys(chosen[:3], "pass") | dict.fromkeys(chosen[3:], of_bias)


@pytest.mark.library("torch")
def test_a_lost_gradient_of_a_public_bias_is_caught(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel through which no gradient reaches the bias fails the cases about it, and no other."""
    import torch

    right = torch.nn.functional.scaled_dot_product_attention

    def without(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
        return right(q, k, v, attn_mask=None if attn_mask is None else attn_mask.detach(), **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without)
    chosen = ("gradients.plain", "gradients.empty_rows", "gradients.bias")
    report = run_suite(find_target("torch", gradients=""), [pair for pair in PAIRS if pair[0].name in chosen], 20)
    (broken,) = report.broken
    assert (broken.case, broken.verdict) == ("gradients.bias", "fail")
    assert broken.message.startswith("gradient of bias[")
    assert broken.diagnosis is not None
    assert "the gradients of q, k and v are right" in broken.diagnosis["where"]


@pytest.mark.library("numpy")
@pytest.mark.parametrize(("name", "case"), [("mlx", "gradients.sinks"), ("mlx", "gradients.bias"),
                                            ("transformers-gpt-oss", "gradients.sinks")])  # fmt: skip
def test_gradients_of_installed_implementations(name: str, case: str) -> None:
    """mlx's own vjp, and autograd through a model's function, give the gradients of sinks and a bias."""
    if not NAMES[name].installed:
        pytest.skip(f"{name} needs {NAMES[name].requires}")
    pairs = [pair for pair in PAIRS if pair[0].name == case]
    (record,) = run_suite(find_target(name, gradients=""), pairs, 20).records
    assert record.verdict == "pass"
