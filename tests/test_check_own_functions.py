"""`refattn check` on functions as newcomers write them: what it says of their signature, results and readings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refattn import cli
from refattn.conformance.cases import all_cases
from refattn.conformance.headline import most_telling
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets import find_target

# Attention as a newcomer writes it, and what can go wrong with it.
KERNELS = """\
import os
import numpy as np

def attend(q, k, v, visible=None):
    wide = np.float64 if q.dtype == np.float64 else np.float32
    heads, kv_heads = (q.shape[-3], k.shape[-3]) if q.ndim > 2 else (1, 1)
    k, v = (np.repeat(x, heads // max(kv_heads, 1), axis=-3) if heads != kv_heads else x for x in (k, v))
    s = q.astype(wide) @ np.swapaxes(k, -1, -2).astype(wide) * wide(q.shape[-1] ** -0.5)
    s = s if visible is None else np.where(visible, s, -np.inf)
    p = np.exp(s - np.max(s, axis=-1, keepdims=True, initial=-np.inf))
    return (p / np.sum(p, axis=-1, keepdims=True) @ v.astype(wide)).astype(q.dtype)

def top_left(q, k, v, *, causal=False):
    return attend(q, k, v, np.tri(q.shape[-2], k.shape[-2], dtype=bool) if causal else None)

def bottom_right(q, k, v, *, causal=False):
    shift = k.shape[-2] - q.shape[-2]
    return attend(q, k, v, np.tri(q.shape[-2], k.shape[-2], shift, dtype=bool) if causal else None)

def refusing(q, k, v, *, causal=False):
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError("which alignment?")
    return top_left(q, k, v, causal=causal)

def shifted(q, k, v, *, causal=False):
    return attend(q, k, v, np.tri(q.shape[-2], k.shape[-2], 1, dtype=bool) if causal else None)

def foreign_names(q, k, v, *, is_causal=False, attn_mask=None):
    return attend(q, k, v)

def without_lse(q, k, v):
    return attend(q, k, v), None

def with_weights(q, k, v):
    return attend(q, k, v), np.zeros((*q.shape[:-1], k.shape[-2]), q.dtype)

def passing_on(q, k, v, **options):
    return top_left(q, k, v, **options)

def wide_out(q, k, v):
    return attend(q, k, v).astype(np.float32)

def writing(q, k, v):
    output = attend(q, k, v)
    q *= 2
    return output

def broken(q, k, v):
    print("before the fault")
    raise RuntimeError("no kernel image")

def native(q, k, v):
    os.write(1, b"from native code")
    return attend(q, k, v)

class Layer:
    def __call__(self, *args, **options):
        return self.forward(*args, **options)

    def forward(self, q, k, v, causal=False):
        return top_left(q, k, v, causal=causal)

layer = Layer()
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of functions, as a target's path; the folder is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNELS)
    return "kernels.py"


def check(*arguments: str) -> int:
    return cli.main(["check", *arguments])


@pytest.mark.parametrize(
    ("function", "reading"),
    [
        ("top_left", "reads top-left"),
        ("bottom_right", "reads bottom-right"),
        ("refusing", "refuses (ValueError)"),
        ("passing_on", "reads top-left"),
    ],
)
def test_which_alignment_is_read(function: str, reading: str, kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A target without q_start is told how it reads causal with Lq != Lk, as a note and not as a verdict (M5)."""
    assert check(f"{kernels}:{function}", "--clauses", "S1,M4", "--quick", "--json", "report.json") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"causal with Lq != Lk and no q_start: {reading}; the specification asks for q_start there (M5)" in out
    noted = json.loads(Path("report.json").read_text())["causal_without_q_start"]
    assert noted == reading.removeprefix("reads ")


def test_a_partial_signature_is_named(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict says what was expressed and what was not judged, first and last; unsupported cases are summed up."""
    assert check(f"{kernels}:top_left", "--clauses", "S1,S2,M4,M5", "--quick") == 0
    lines = capsys.readouterr().out.splitlines()
    verdict = f"{kernels}:top_left conforms in what it can express: causal; not judged: q_start, scale"
    assert lines[0].startswith(verdict)
    assert sum(line.startswith(verdict) for line in lines) == 2
    assert any(re.match(r"  cannot express q_start: \d+ cases, scale: \d+", line) for line in lines)


def test_parameters_that_are_never_used(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of other conventions are listed, with ours beside them."""
    assert check(f"{kernels}:foreign_names", "--clauses", "S1", "--quick") == 0
    assert "parameters never used: is_causal, attn_mask (did you mean causal, mask?)" in capsys.readouterr().out


def test_a_second_result(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """None is no log-sum-exp; weights in its place are recognised."""
    assert check(f"{kernels}:without_lse", "--clauses", "S1,P4", "--quick") == 0
    assert "returns no log-sum-exp: " in capsys.readouterr().out
    assert check(f"{kernels}:with_weights", "--clauses", "S1", "--quick") == 1
    assert "looks like the weights" in " ".join(capsys.readouterr().out.split())


def test_signatures_that_hide(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of modules forward is read; an option that is refused in the call is unsupported, and no crash."""
    assert find_target(f"{kernels}:layer").features == frozenset({"causal", "gqa", "lse"})
    assert check(f"{kernels}:passing_on", "--clauses", "S2,M4", "--quick") == 0
    assert "cannot express scale" in capsys.readouterr().out
    assert check(f"{kernels}:Layer") == 2
    assert "is a class; name an instance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "label", "words"),
    [
        ("wide_out", "A4", "dtype float32, expected that of q, float16 [A4]"),
        ("writing", "A7", "the call wrote to q"),
        ("shifted", "M4", "expected 0"),
        ("broken", "S1", "RuntimeError: no kernel image"),
    ],
)
def test_the_first_failure_is_telling(function: str, label: str, words: str, kernels: str) -> None:
    """The failure shown is about the clause that is broken, whichever cases happen to fail by it."""
    labels = frozenset({"S1", "M4", "M5", "P1", "G1", "A1"})
    target = find_target(f"{kernels}:{function}")
    report = run_suite(target, chosen_pairs(all_cases(), labels, ("float32", "float16")), 20)
    first = most_telling(report)
    assert (first.about, words in first.message) == (label, True), first


def test_a_crash_is_located(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A crash of the plainest call is said so, with the line; --case shows the traceback and what was printed."""
    line = KERNELS[: KERNELS.index('RuntimeError("no kernel')].count("\n") + 1
    assert check(f"{kernels}:broken", "--clauses", "S1", "--quick") == 1
    out = capsys.readouterr().out
    assert "First failure: the plainest call raised an error, scores.worked_example in float32" in out
    assert f"kernels.py:{line}\n" in out
    assert f"details: refattn check {kernels}:broken --case scores.worked_example" in out
    assert check(f"{kernels}:broken", "--case", "scores.worked_example", "--quick") == 1
    out = capsys.readouterr().out
    assert out.startswith("before the fault\n")
    assert "Traceback (most recent call last)" in out
    assert f'kernels.py", line {line}, in broken' in out


def test_an_error_in_all_dtypes_is_told_once(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--case shows a traceback that is the same in every dtype in the first of them alone."""
    assert check(f"{kernels}:broken", "--case", "scores.wide_heads", "--dtype", "fp32,fp16,fp64") == 1
    out = capsys.readouterr().out
    assert out.count("Traceback (most recent call last)") == 1
    assert "Failure: scores.wide_heads in float64, the same as in float32" in out
    assert "(3 crashed)" in out


def test_a_case_can_be_repeated(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure names its call; --save-inputs writes it with the visible pairs, and --inputs runs it again."""
    names = "masks.causal,scores.worked_example"
    assert check(f"{kernels}:shifted", "--case", names, "--dtype", "float16,float32", "--save-inputs", "case.npz") == 1
    out = capsys.readouterr().out
    assert "called with q (2, 2, 6, 8), k (2, 2, 6, 8), v (2, 2, 6, 8) float16, causal=True, seed 20" in out
    assert out.count("Failure: masks.causal in") == 2
    assert check(f"{kernels}:shifted", "--inputs", "case.npz", "--only-inputs") == 1
    out = capsys.readouterr().out
    assert "inputs.masks.causal.float16: fail (float16)\n" in out
    assert "inputs.scores.worked_example.float32: pass (float32)\n" in out
    assert check(f"{kernels}:top_left", "--case", "masks.casual") == 2
    assert "did you mean masks.causal" in capsys.readouterr().err
    assert check(f"{kernels}:top_left", "--save-inputs", "case.npz") == 2
    assert "--save-inputs needs --case" in capsys.readouterr().err


def test_native_output_is_kept_away(kernels: str) -> None:
    """What is printed at import, or written to file descriptor 1, leaves JSON on standard output valid, as a note."""
    Path(kernels).write_text("import os\nprint('hello')\nos.write(1, b'native hello')\n" + KERNELS)
    command = [sys.executable, "-m", "refattn", "check", f"{kernels}:native", "--clauses", "S1", "--quick"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["notes"] == ["while it was imported it printed: hello\nnative hello"]
    assert report["records"][0]["notes"] == ["printed: from native codefrom native code"]


def test_a_misnamed_module(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that was searched is named."""
    assert check("kernel:attend") == 2
    assert f"searched {Path.cwd()} and the installed packages" in capsys.readouterr().err


def test_arrays_of_another_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that returns another library's arrays breaks A7; one that wants tensors gets the hint at --library."""
    pytest.importorskip("torch", reason="a second array library is needed")
    path = tmp_path / "tensors.py"
    path.write_text(
        "import torch\n"
        "def to_numpy(q, k, v):\n    return q.numpy()\n"
        "def sdpa(q, k, v):\n    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
    )
    assert check(f"{path}:to_numpy", "--library", "torch", "--clauses", "S1", "--quick") == 1
    assert "the output is an array of NumPy, expected PyTorch [A7]" in capsys.readouterr().out
    assert check(f"{path}:sdpa", "--clauses", "S1", "--quick") == 1
    assert "try --library torch" in " ".join(capsys.readouterr().out.split())
