"""Gradients in files and in other people's tests: exported cases, dumps, saved failures, assert_gradients_close."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import exchanged
import refattn
from refattn import cli, errors
from refattn.arrays import Array
from refattn.conformance.cases.gradients import with_gradient
from refattn.conformance.drawn import drawn_problem
from refattn.conformance.exchange.words import options_of
from refattn.conformance.faults import named
from refattn.conformance.plain import Draw
from refattn.testing import assert_gradients_close


def backward(tensors: dict[str, Array], about: dict[str, Any]) -> dict[str, Array]:
    """refattn's own gradients of one exported case."""
    options: dict[str, Any] = {name: tensors[name] for name in ("mask", "bias", "sinks") if name in tensors}
    options |= {name: about[name] for name in ("causal", "scale", "softcap")}
    options |= {name: np.asarray(x) if isinstance(x := about[name], list) else x for name in ("q_start", "k_start")}
    found = refattn.attention_vjp(*(tensors[name] for name in ("q", "k", "v", "grad_output")), **options)
    return {f"grad_{name}": x for name, x in found._asdict().items() if x is not None}


def without_row_sum(tensors: dict[str, Array], about: dict[str, Any]) -> dict[str, Array]:
    """The same, but for the sum of the row that the softmax takes away."""
    options = {name: tensors[name] for name in ("mask", "bias", "sinks") if name in tensors}
    given = {
        name: about[name] for name in ("causal", "scale", "softcap", "q_start") if about[name] not in (None, False)
    }
    found = named("row sum missing").gradients()(
        *(tensors[name] for name in ("q", "k", "v", "grad_output")), **options, **given
    )
    return {f"grad_{name}": x for name, x in found.items()}


@pytest.mark.parametrize(
    ("form", "dtype"), [("raw", "float32"), ("npz", "float64"), ("safetensors", "bfloat16"), ("npz", "bfloat16")]
)
def test_right_gradients_beside_exported_cases_conform(form: str, dtype: str, tmp_path: Path) -> None:
    """All cases about gradients go out with grad_output, and gradients that come back are judged, an output or none."""
    folder, path = tmp_path / "cases", tmp_path / "report.json"
    asked = ["--gradients", "--format", form, "--dtype", dtype, "--clauses", "D"]
    assert cli.main(["cases", "export", str(folder), *asked]) == 0
    count = exchanged.run_all(folder, form, backward)
    assert cli.main(["compare", str(folder), "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert {record["verdict"] for record in records} == {"pass"}
    assert len(records) == count > 30
    assert max(record["error_over_bound"] for record in records) > 0
    assert {"gradients.bias_for_all_rows", "gradients.sinks"} <= {record["case"] for record in records}


def test_wrong_gradients_beside_exported_cases_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which fault it is, which gradient is wrong and where: in the terminal, JSON, JUnit and HTML; missing ones too."""
    folder = tmp_path / "cases"
    asked = ["--gradients", "--dtype", "float32", "--clauses", "D", "--features", "causal", "--limit", "9"]
    assert cli.main(["cases", "export", str(folder), *asked]) == 0
    exchanged.run_all(folder, "raw", without_row_sum)
    reports = {form: tmp_path / f"report.{form}" for form in ("json", "junit", "html")}
    assert cli.main(["compare", str(folder), *(x for form in reports for x in (f"--{form}", str(reports[form])))]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    for text in (printed, *(" ".join(path.read_text().replace("&quot;", '"').split()) for path in reports.values())):
        plain = text.replace('\\"', '"')
        assert 'the gradients match "row sum missing" [D1]' in plain
        assert "gradient of q: " in plain
        assert "elements are wrong" in plain
        assert "the gradient of v is right" in plain
    (folder / "0001" / "grad_k.bin").unlink()
    assert cli.main(["compare", str(folder), "--case", "gradients.*"]) == 1
    assert "there is no gradient of k" in capsys.readouterr().out
    for path in (folder / "0001").glob("grad_[qv].bin"):
        path.unlink()
    assert cli.main(["compare", str(folder), "--case", "gradients.*"]) == 1
    assert "0001" in capsys.readouterr().out


def dumped(dtype: Any = np.float32) -> dict[str, Array]:
    """A right dump of a causal call over a cache, with sinks and a bias."""
    rng = np.random.default_rng(0)
    q, k, v, grad_output = (rng.standard_normal((1, 2, length, 8)).astype(dtype) for length in (3, 7, 7, 3))
    options: dict[str, Any] = {
        "sinks": rng.standard_normal(2).astype(dtype),
        "bias": rng.standard_normal((2, 1, 7)).astype(dtype),
    }
    output = refattn.attention(q, k, v, causal=True, q_start=4, **options)
    found = refattn.attention_vjp(q, k, v, grad_output, causal=True, q_start=4, **options)
    gradients = {f"grad_{name}": x for name, x in found._asdict().items()}
    return {"q": q, "k": k, "v": v, "output": output, "grad_output": grad_output, **options, **gradients}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dumped_gradients_are_judged(dtype: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """grad_q, grad_k, ... of a .safetensors file; a wrong one is named with its place, one that lacks is refused."""
    path, tensors = tmp_path / "dump.safetensors", dumped(dtype)
    command = ["compare", str(path), "--causal", "--q-start", "4"]

    def asked(change: dict[str, Array | None], code: int) -> str:
        kept = {name: np.ascontiguousarray(x) for name, x in (tensors | change).items() if x is not None}
        safetensors.numpy.save_file(kept, path)
        assert cli.main(command) == code
        said = capsys.readouterr()
        return " ".join((said.out + said.err).split())

    assert "1 pass" in asked({}, 0)
    said = asked({"grad_sinks": -tensors["grad_sinks"]}, 1)
    assert "gradient of sinks: 2 of 2 elements are wrong" in said
    assert "the gradients of q, k, v and bias are right" in said
    other = tensors["grad_k"].copy()
    other[0, 1, 2] *= 2
    said = asked({"grad_k": other}, 1)
    assert "gradient of k: 8 of 112 elements are wrong, key/value heads 1, keys 2" in said
    assert "lacks grad_v, which goes with grad_output" in asked({"grad_v": None}, 2)
    assert "but no grad_output" in asked({"grad_output": None}, 2)
    assert "grad_output has shape (1, 2, 3, 4)" in asked({"grad_output": tensors["grad_output"][..., :4]}, 2)


def test_dumps_with_tokens_before_heads(tmp_path: Path) -> None:
    """--layout is that of grad_output and of the gradients of q, k and v too."""
    tensors = dumped()
    turned = {name: np.swapaxes(x, -2, -3) if x.ndim == 4 else x for name, x in tensors.items()}
    np.savez(tmp_path / "dump.npz", **turned)
    command = ["compare", str(tmp_path / "dump.npz"), "--causal", "--q-start", "4", "--layout"]
    assert cli.main([*command, "BSHD"]) == 0
    assert cli.main([*command, "BHSD"]) != 0


def test_captured_inputs_bring_their_gradient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """grad_output of --inputs is what a backward function gets; without --gradients it is left aside."""
    np.savez(tmp_path / "dump.npz", **dumped(), causal=True, q_start=4)
    inputs = ["--inputs", str(tmp_path / "dump.npz"), "--only-inputs"]
    assert cli.main(["check", "gradient_kernels:attend", *inputs]) == 0
    assert cli.main(["check", "gradient_kernels:attend", *inputs, "--gradients", "gradient_kernels:backward"]) == 0
    capsys.readouterr()
    wrong = ["--gradients", "gradient_kernels:no_row_sum"]
    assert cli.main(["check", "gradient_kernels:attend", *inputs, *wrong]) == 1
    assert 'match "row sum missing" [D1]' in " ".join(capsys.readouterr().out.split())
    saved = tmp_path / "saved.npz"
    case = ["check", "numpy", "--case", "gradients.sinks", "--dtype", "float32", "--save-inputs", str(saved)]
    assert cli.main(case) == 0
    assert cli.main(["check", "numpy", "--inputs", str(saved), "--only-inputs"]) == 0
    assert "D1" in capsys.readouterr().out


def test_a_wrong_gradient_is_repeated_by_its_script(tmp_path: Path) -> None:
    """The script fails with the fault that gradients look like; the file holds them, what was expected and bounds."""
    folder = tmp_path / "failures"
    case = ["--case", "gradients.plain", "--dtype", "float32", "--save-failures", str(folder)]
    wrong = ["--gradients", "gradient_kernels:no_row_sum"]
    assert cli.main(["check", "gradient_kernels:attend", *case, *wrong]) == 1
    script = folder / "gradients.plain.float32.py"
    with np.load(script.with_suffix(".npz"), allow_pickle=False) as stored:
        for name in ("grad_q", "grad_k"):
            assert np.any(np.abs(stored[name] - stored[f"expected_{name}"]) > stored[f"bound_{name}"])
        assert not np.any(np.abs(stored["grad_v"] - stored["expected_grad_v"]) > stored["bound_grad_v"])
    command, env = [sys.executable, str(script)], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    failed = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert failed.returncode == 1
    assert 'AssertionError: the gradients match "row sum missing" [D1]: gradient of ' in failed.stderr
    script.write_text(script.read_text().replace("no_row_sum", "backward"))
    repeated = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (repeated.returncode, repeated.stderr) == (0, "")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients_of_random_calls_are_close(dtype: str) -> None:
    """attention_vjp passes the assertion on whatever is drawn, and with one element moved it fails and names that."""
    cast = exchanged.DTYPES[dtype]
    judged = 0
    for seed in range(10):
        draw = Draw(dtype, np.random.default_rng([seed, 1]))
        problem = with_gradient(draw, vars(drawn_problem(dtype, seed)) | {"layout": "contiguous"})
        floats = ("bias", "sinks")
        options = {name: x.astype(cast) if name in floats else x for name, x in options_of(problem).items()}
        q, k, v, gradient = (np.asarray(x).astype(cast) for x in (problem.q, problem.k, problem.v, problem.grad_output))
        with np.errstate(all="ignore"):
            found = refattn.attention_vjp(q, k, v, gradient, **options)
        named = {name: x for name, x in found._asdict().items() if x is not None}
        claim: dict[str, Any] = {"coherent": problem.coherent, "model": "unfused" if dtype == "bfloat16" else "fused"}
        assert_gradients_close(found, q, k, v, gradient, **claim, **options)
        if not (np.size(found.v) and np.isfinite(found.v.astype(np.float64)).all()):
            continue
        moved = found.v.copy()
        moved[(0,) * moved.ndim] += cast(8)
        with pytest.raises(AssertionError, match=r"gradient of v\[0") as failure:
            assert_gradients_close(named | {"v": moved}, q, k, v, gradient, **claim, **options)
        assert "gradient of v: 1 of " in str(failure.value)
        judged += 1
    assert judged >= 5


def test_what_is_no_gradient_is_said_in_a_sentence() -> None:
    """Types, shapes, dtypes and names that do not fit, and a grad_output of another shape."""
    rng = np.random.default_rng(0)
    q, k, v, gradient = (rng.standard_normal((2, 5, 8)).astype(np.float32) for _ in range(4))

    def said(kind: type[Exception], gradients: Any, given: Array = gradient, **options: Any) -> str:
        with pytest.raises(kind) as failure:
            assert_gradients_close(gradients, q, k, v, given, **options)
        return str(failure.value)

    assert "the gradient of q has shape (5, 8), expected that of q, (2, 5, 8) [D1]" in said(AssertionError, {"q": q[0]})
    assert "dtype float16, expected that of v, float32 [D1]; say dtype='float16'" in said(
        AssertionError, {"v": v.astype(np.float16)}
    )
    assert "the gradient of k is a str, expected an array" in said(AssertionError, (None, "k"))
    assert "names out of q, k, v" in said(errors.InputsError, {"sinks": q})
    assert "of one argument at least" in said(errors.InputsError, {"q": None})
    assert "a tuple of the gradients" in said(errors.InputsError, 5)
    assert "(2, 5, 8)" in said(errors.GradientError, (q, k, v), gradient[0])
    assert "an array, where gradients are judged" in said(
        errors.InputsError, (q, k, v), bias=refattn.biases.alibi(2), q_start=0
    )
