"""Listings of the guide that need a library which is not there when the book is built; and the library of its own."""

import importlib
import runpy
from pathlib import Path

import numpy as np
import pytest

from refattn import attention, cli

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.library("torch")
def test_the_comparison_with_torch_runs() -> None:
    """The solution of the third exercise finds a readable attention and torch's within the bound of one result."""
    assert "torch" in runpy.run_path(str(EXAMPLES / "compare_with_torch.py"))


@pytest.mark.library("torch")
def test_the_layer_in_torch_runs() -> None:
    """The listing of the guide's layer finds what it asserts, and the weight ends on the marked token."""
    assert runpy.run_path(str(EXAMPLES / "torch_layer.py"))["loss"] < 0.1


@pytest.mark.library("jax")
def test_the_decode_step_of_jax_runs() -> None:
    """The listing of a compiled decode step gives what one pass gives."""
    assert runpy.run_path(str(EXAMPLES / "jax_decode.py"))["apart"] < 1e-5


@pytest.mark.library("torch")
@pytest.mark.parametrize("fault", ["", "row_sum"])
def test_the_autograd_function_is_judged(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Function of the page on gradients passes what it can express, and without the row's sum it is told so."""
    text = (EXAMPLES / "function.py").read_text(encoding="utf-8")
    if fault:
        assert text.count(" - row_sum)") == 1
        text = text.replace(" - row_sum)", ")")
    (tmp_path / "function.py").write_text(text, encoding="utf-8")
    command = ["check", f"{tmp_path / 'function.py'}:attend", "--library", "torch", "--gradients", "--clauses", "D"]
    assert cli.main([*command, "--quick"]) == bool(fault)
    assert ('match "row sum missing" [D1]' in " ".join(capsys.readouterr().out.split())) == bool(fault)


def test_a_library_above_numpy_warns_of_nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseen products that overflow inside a library which nobody knows raise no warning, and change no bit (N5)."""
    monkeypatch.syspath_prepend(EXAMPLES / "tiny")
    tiny = importlib.import_module("tiny")
    x, mask = np.full((3, 4), 2.0, dtype=np.float32), np.asarray([[True, True, False]])
    huge = x.copy()
    huge[2] = 3e38
    seen, got = (attention(*map(tiny.Array, (x, y, y)), mask=tiny.Array(mask)).inner for y in (x, huge))
    assert np.array_equal(got, seen)
