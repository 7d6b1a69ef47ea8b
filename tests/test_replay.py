"""`refattn check --save-failures DIR`: a failing case as a small file, and a script of five lines that repeats it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refattn import cli
from refattn.conformance.captured import problem_of, read_groups, tensors_of
from refattn.conformance.cases import all_cases
from refattn.conformance.exchange.files import write_npz
from refattn.conformance.exchange.replay import load

KERNEL = """\
import numpy as np

def attend(q, k, v, *, causal=False, q_start=0, scale=None):
    wide = [x.astype(np.promote_types(x.dtype, np.float32)) for x in (q, k, v)]
    scores = wide[0] @ np.swapaxes(wide[1], -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], {start}, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output = (weights / weights.sum(axis=-1, keepdims=True) @ wide[2]).astype(q.dtype)
    {more}
    return output
"""


def run(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parents[1])


def kernel(tmp_path: Path, start: str, more: str = "pass") -> str:
    (tmp_path / "mine.py").write_text(KERNEL.format(start=start, more=more))
    return f"{tmp_path / 'mine.py'}:attend"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_failure_is_repeated_by_its_script(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script fails with the diagnosis, and passes once the kernel is right."""
    folder = tmp_path / "failures"
    target = kernel(tmp_path, "0")
    case = ("--case", "masks.aligned_bottom_right", "--dtype", dtype)
    assert cli.main(["check", target, *case, "--save-failures", str(folder)]) == 1
    script = folder / f"masks.aligned_bottom_right.{dtype}.py"
    assert {path.name for path in folder.iterdir()} == {script.name, script.with_suffix(".npz").name}
    assert len([line for line in script.read_text().splitlines() if line]) == 5
    stored = np.load(script.with_suffix(".npz"))
    assert {"q", "k", "v", "output", "expected", "bound"} <= set(stored)
    assert np.any(np.abs(stored["output"] - stored["expected"]) > stored["bound"])
    failed = run(script)
    assert failed.returncode == 1
    assert "causal aligned top-left, q_start=0 instead of" in failed.stderr
    kernel(tmp_path, "q_start")
    repeated = run(script)
    assert repeated.returncode == 0, repeated.stderr


def test_a_script_runs_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel is found where `refattn check` found it, whichever folder the script is called in."""
    kernel(tmp_path, "0")
    monkeypatch.chdir(tmp_path)
    case = ("--case", "masks.aligned_bottom_right", "--quick", "--save-failures", "failures")
    for target, name in (("mine:attend", "module"), ("mine.py:attend", "file")):
        assert cli.main(["check", target, *case, "--in-process"]) == 1, name
        script = tmp_path / "failures" / "masks.aligned_bottom_right.float32.py"
        command = [sys.executable, str(script)]
        failed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parent)
        assert "causal aligned top-left, q_start=0 instead of" in failed.stderr


def test_side_effects_and_crashes_are_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs written to, a wrong dtype and an error come again when the script is run."""
    folder = tmp_path / "failures"
    for more, words in (
        ("q *= 2", "the call wrote to q"),
        ("output = output.astype(np.float64)", "the output has dtype float64"),
        ("raise RuntimeError('no kernel image')", "no kernel image"),
    ):
        target = kernel(tmp_path, "q_start", more)
        arguments = ("--case", "scores.worked_example", "--quick", "--save-failures", str(folder))
        assert cli.main(["check", target, *arguments]) == 1
        again = run(folder / "scores.worked_example.float32.py")
        assert again.returncode == 1
        assert words in again.stderr


def test_only_failures_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What passes leaves no file; a folder that cannot be written is one sentence."""
    assert cli.main(["check", "numpy", "--quick", "--clauses", "S1", "--save-failures", str(tmp_path / "x")]) == 0
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    target = kernel(tmp_path, "0")
    case = ("--case", "masks.aligned_bottom_right", "--quick", "--save-failures", str(tmp_path / "file"))
    assert cli.main(["check", target, *case]) == 2
    assert "--save-failures" in capsys.readouterr().err


def test_every_problem_survives_its_file(tmp_path: Path) -> None:
    """Inputs, options, memory layout and dtype of every case come back from a file exactly."""
    path = tmp_path / "problem.npz"
    for case in all_cases():
        if case.build is None or case.name.startswith("vectors."):
            continue
        problem = case.problem(case.dtypes[0], 20)
        write_npz(path, tensors_of(problem))
        back = problem_of(read_groups(path)[0])
        for name in ("q", "k", "v", "shown", "bias", "sinks", "q_start", "k_start", "scale", "softcap"):
            mine, its = getattr(problem, name), getattr(back, name)
            assert (mine is None) == (its is None), (case.name, name)
            np.testing.assert_array_equal(mine, its, err_msg=f"{case.name} {name}")
        for name in ("dtype", "causal", "layout", "coherent", "visible", "among_others"):
            assert np.array_equal(getattr(problem, name), getattr(back, name)), (case.name, name)
    assert load(path).options["dtype"] == problem.dtype
