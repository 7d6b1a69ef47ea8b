"""Listings of the guide that need a library which is not there when the book is built."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.library("torch")
def test_the_comparison_with_torch_runs() -> None:
    """The solution of the third exercise finds a readable attention and torch's within the bound of one result."""
    assert "torch" in runpy.run_path(str(EXAMPLES / "compare_with_torch.py"))


@pytest.mark.library("torch")
def test_the_layer_in_torch_runs() -> None:
    """The listing of the guide's layer finds what it asserts, and the weight ends on the marked token."""
    assert runpy.run_path(str(EXAMPLES / "torch_layer.py"))["loss"] < 0.1
