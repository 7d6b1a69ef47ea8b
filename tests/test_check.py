"""`refattn check` and the pytest plugin: what they print, write and exit with, whatever the target does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planted_faults
from refattn import cli, vectors
from refattn.arrays import Array
from refattn.conformance.captured import captured_cases
from refattn.conformance.cases import all_cases
from refattn.conformance.exchange.files import TensorFileError
from refattn.conformance.records import Record
from refattn.conformance.reports.terminal import explain, verdict_line
from refattn.conformance.runner import chosen_pairs, run_case, run_suite
from refattn.conformance.targets import TargetError, find_target

# In this process the error is what Ctrl-C raises; in a worker it is the target's own.
INTERRUPTED = ("planted_faults:interrupted_at_six_queries", "--quick", "--clauses", "S,P", "--in-process")
PROBLEMS = [case for case in all_cases() if case.build is not None]


def check(*arguments: str) -> int:
    return cli.main(["check", *arguments])


def test_check_numpy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """refattn conforms: exit code 0, a table, a verdict, and JSON with every record."""
    assert check("numpy", "--quick", "--clauses", "S1,M", "--json", str(tmp_path / "out.json")) == 0
    out = capsys.readouterr().out
    assert "refattn-numpy conforms" in out
    assert "Default scale" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["conforms"] is True
    assert report["versions"]["numpy"] == np.__version__
    assert {"case", "clauses", "verdict", "error_over_bound", "model", "message", "dtype"} <= set(report["records"][0])
    assert {r["dtype"] for r in report["records"]} == {"float32"}


def test_check_explains_the_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A fault gives exit code 1, the case, what must hold, where it is worst, and the clause's text."""
    fault = "refattn.conformance.faults:causal_shows_the_next"
    assert check(fault, "--clauses", "M4", "--dtype", "float32,float64") == 1
    out = capsys.readouterr().out
    for words in ("First failure", "must hold", "expected 0", "M4: Causal.", "does not conform"):
        assert words in out


def test_check_stops_at_the_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """--fail-fast ends the run there; - sends JSON, and nothing else, to standard output."""
    assert check("planted_faults:raises", "--fail-fast", "--quick", "--json", "-") == 1
    report = json.loads(capsys.readouterr().out)
    assert [record["verdict"] for record in report["records"]] == ["crashed"]
    assert "RuntimeError: no kernel image" in report["records"][0]["message"]


def test_check_lists_what_is_unsupported(capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter that the signature lacks makes a case unsupported, never passed; a few parameters suffice."""
    assert check("planted_faults:correct_in_its_features", "--quick") == 0
    assert "cannot express mask" in capsys.readouterr().out
    assert check("planted_faults:correct_in_its_features", "--quick", "--clauses", "P2,P4") == 0
    assert "returns no log-sum-exp" in capsys.readouterr().out


def test_nothing_judged_is_not_conforming(capsys: pytest.CaptureFixture[str]) -> None:
    """A target that refuses everything, or a choice without cases, does not conform."""
    assert check("planted_faults:takes_nothing_but_tensors", "--quick") == 1
    assert "nothing could be judged" in capsys.readouterr().out
    assert check("planted_faults:correct", "--clauses", "C1") == 1
    assert check("planted_faults:correct", "--convention", "flash-attn", "--library", "numpy", "--quick") == 1
    line = " ".join(capsys.readouterr().out.split("\n\n")[-1].split())
    assert "unsupported: the convention flash-attn has bfloat16, float16, not float32)" in line


def test_what_a_target_prints_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """Output of a target does not reach standard output; it is kept with the record."""
    assert check("planted_faults:chatty", "--clauses", "A1", "--quick", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    notes = [note for record in report["records"] for note in record["notes"]]
    assert "printed: tile (2, 2, 4, 8)\ntile (2, 2, 4, 8)" in notes


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("magic", "no target 'magic'; there are torch, "),
        ("no_such_module:f", "importing no_such_module failed"),
        ("planted_faults:missing", "has no 'missing'"),
        ("planted_faults:chaty", "has no 'chaty'; did you mean chatty"),
        ("numpi", "no target 'numpi'; did you mean numpy? refattn check --list shows all"),
        ("my_kernel.py", "no target 'my_kernel.py'; name a function of your module too, my_kernel.py:FUNCTION"),
        ("planted_faults:ALL", "is a tuple, not a function"),
        ("./missing.py:attention", "there is no file missing.py"),
        (":f", "must read module:function"),
    ],
)
def test_targets_that_cannot_be_called(target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that cannot be called gives one sentence on standard error, and exit code 2."""
    assert check(target) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown clauses and dtypes are usage errors that list what there is."""
    for arguments, words in (
        (("--clauses", "Z9"), "no clause or chapter 'Z9'"),
        (("--dtype", "int8"), "no dtype int8"),
    ):
        assert check("numpy", *arguments) == 2
        assert words in capsys.readouterr().err


def test_a_function_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """path.py:function is loaded from where it lies; one that takes no q, k, v is refused."""
    path = tmp_path / "my_kernel.py"
    path.write_text(
        "import numpy as np\n"
        "def attention(q, k, v):\n"
        "    s = q.astype('f8') @ np.swapaxes(k, -1, -2).astype('f8') / np.sqrt(q.shape[-1])\n"
        "    p = np.exp(s - s.max(-1, keepdims=True))\n"
        "    return (p / p.sum(-1, keepdims=True) @ v.astype('f8')).astype(q.dtype)\n"
        "def short(q): return q\n"
    )
    assert check(f"{path}:attention", "--clauses", "S1", "--dtype", "float32,float64") == 0
    assert "conforms" in capsys.readouterr().out
    assert check(f"{path}:short") == 2
    assert "first three arguments" in capsys.readouterr().err


def test_the_kernel_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example fails what the README says, in every dtype: grouped heads, sizes of zero, poison."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "kernel_of_the_readme.py").write_text(source)
    assert check(f"{tmp_path / 'kernel_of_the_readme.py'}:attend", "--json", "-") == 1
    records = json.loads(capsys.readouterr().out)["records"]
    broken = {record["case"] for record in records if record["verdict"] in ("fail", "crashed")}
    zero_sizes = {"arrays.no_width", "arrays.no_keys", "softmax.log_sum_exp_without_keys"}
    grouped = {"heads.grouped_query", *(f"long_rows.decode_over_{keys}_keys" for keys in (1023, 1024, 1025))}
    stored = {f"vectors.{vector.name}": vector.flags for vector in vectors.load()}
    assert broken - set(stored) == grouped | zero_sizes
    assert all(
        {"grouped-heads", "zero-size", "hidden-poison", "visible-non-finite"} & set(stored[name])
        for name in broken & set(stored)
    )


def test_captured_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors from a file become cases, one per group of names, that right implementations pass and wrong ones fail."""
    rng, path = np.random.default_rng(0), tmp_path / "dump.npz"
    names = [f"layer{n}.{name}" for n in (0, 1) for name in "qkv"]
    tensors: dict[str, Any] = {name: rng.standard_normal((1, 2, 5, 8)).astype("f4") for name in names}
    tensors |= {
        "layer1.mask": np.tri(5, dtype=bool),
        "layer1.scale": np.asarray(0.5),
        "layer0.causal": np.asarray(True),
    }
    np.savez(path, **tensors)
    assert [case.name for case in captured_cases(path)] == ["inputs.layer0", "inputs.layer1"]
    assert check("planted_faults:correct", "--clauses", "S5", "--inputs", str(path), "--json", "-") == 0
    judged = {record["case"] for record in json.loads(capsys.readouterr().out)["records"]}
    assert {"inputs.layer0", "inputs.layer1"} <= judged
    target = find_target("refattn.conformance.faults:scale_is_ignored")
    failed = {
        (c.name, d) for c in captured_cases(path) for d in c.dtypes if run_case(c, target, d, 0).verdict == "fail"
    }
    assert failed == {("inputs.layer1", dtype) for dtype in planted_faults.ALL}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"q": np.ones((2, 3)), "k": np.ones((2, 3))}, "lacks v"),
        ({"q": np.ones((2, 3)), "k": np.ones((2, 4)), "v": np.ones((2, 3))}, "expected q (..., H, Lq, d_k)"),
        ({"q": np.ones((2, 3), dtype="i4"), "k": np.ones((2, 3)), "v": np.ones((2, 3))}, "q must be floating"),
        ({"query": np.ones(3)}, "'query' is no known tensor"),
        ({"q": np.zeros((2, 3), dtype="V2"), "k": np.ones((2, 3)), "v": np.ones((2, 3))}, "lose bfloat16"),
        (
            {"q": np.ones((2, 3)), "k": np.ones((2, 3)), "v": np.ones((2, 3)), "mask": np.ones(2)},
            "mask must be boolean",
        ),
        (
            {"q": np.ones((2, 3)), "k": np.ones((2, 3)), "v": np.ones((2, 3)), "mask": np.ones(3, dtype=bool)},
            "broadcast",
        ),
        ({"q": np.ones((2, 3)), "k": np.ones((2, 3)), "v": np.ones((2, 3)), "scale": np.ones(2)}, "single value"),
        ({"q": np.asarray([object()])}, "cannot be read"),
        ({}, "is empty"),
    ],
)
def test_files_that_cannot_be_used(
    tensors: dict[str, Array], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that does not fit says what is wrong with it, loads no pickle, and gives exit code 2."""
    path = tmp_path / "dump.npz"
    np.savez(path, **tensors)
    with pytest.raises(TensorFileError, match=r"dump\.npz"):
        captured_cases(path)
    assert check("numpy", "--inputs", str(path)) == 2
    assert words in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path) -> None:
    """A missing file, a text and a single array are refused in one sentence."""
    (tmp_path / "text.npz").write_text("q, k, v")
    np.save(tmp_path / "one.npy", np.ones(3))
    for name in ("missing.npz", "text.npz", "one.npy"):
        with pytest.raises(TensorFileError, match=name):
            captured_cases(tmp_path / name)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose library is not installed says what to install."""
    from refattn import registry

    backend = registry.get("dask")
    monkeypatch.setattr(type(backend), "installed", lambda self: False)
    with pytest.raises(TargetError, match="pip install dask"):
        find_target("refattn-dask")


def test_a_kernel_that_exits_does_not_conform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sys.exit() is a crash of the case that calls it; at import it makes a target that cannot be called."""
    assert check("planted_faults:exits", "--quick", "--clauses", "S1", "--json", "-") == 1
    report = json.loads(capsys.readouterr().out)
    assert {record["verdict"] for record in report["records"]} == {"crashed"}
    assert report["records"][0]["message"] == "SystemExit: 0"
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(0)\n")
    assert check(f"{path}:attention") == 2
    assert "SystemExit: 0" in capsys.readouterr().err


def test_an_interrupt_leaves_a_partial_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the middle gives exit code 130, and the JSON of what had been judged, which does not conform."""
    path = tmp_path / "out.json"
    assert check(*INTERRUPTED, "--json", str(path)) == 130
    report = json.loads(path.read_text())
    assert (report["complete"], report["conforms"]) == (False, False)
    assert report["counts"]["pass"] == len(report["records"]) > 0
    assert "interrupted, no verdict" in capsys.readouterr().out


def test_interrupted_runs_keep_what_they_have() -> None:
    """An interrupt leaves a report of what was judged, and no verdict."""
    target = find_target("planted_faults:correct")
    pairs = chosen_pairs(PROBLEMS, frozenset({"S1"}), ("float32",))

    def stop(record: Record) -> None:
        raise KeyboardInterrupt

    report = run_suite(target, pairs, 0, advance=stop)
    assert (len(report.records), report.complete, report.conforms) == (1, False, False)
    assert "interrupted" in verdict_line(report)
    assert explain(report.records[0]).count("\n") > 1


def test_the_pytest_plugin(tmp_path: Path) -> None:
    """`pytest --pyargs refattn.conformance` collects the cases alone, passes on refattn, and skips with a reason."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "refattn.conformance", "-q", "-rs", "-p", "no:cacheprovider"]
    arguments = ["--refattn-target", "refattn-numpy", "-k", "scores or tracing or caches"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "traces no lengths" in done.stdout
    done = subprocess.run(
        [*command, "--refattn-target", "magic"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 4
    assert "no target 'magic'" in done.stdout + done.stderr


def test_the_plugin_is_light() -> None:
    """Loading the plugin, as every pytest run does, imports no array library."""
    code = "import refattn.conformance.plugin, sys; print([m for m in ('numpy', 'torch', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
