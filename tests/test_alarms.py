"""Judging random problems accuses a wrong implementation, and keeps the figures of others."""

from __future__ import annotations

import json
from pathlib import Path

from refattn.conformance.alarms import main

WRONG, RIGHT = "refattn.conformance.faults:no_scale", "refattn.conformance.faults:plain"


def test_wrong_ones_are_accused_and_right_ones_are_not(tmp_path: Path) -> None:
    """The exit code says so, the file keeps both, and the page has a row for each."""
    where = ["--problems", "4", "--seed", "1", "--json", str(tmp_path / "a.json"), "--page", str(tmp_path / "a.md")]
    assert main([WRONG, *where]) == 1
    assert main([RIGHT, *where]) == 0
    figures = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert figures[WRONG]["accused"] and figures[RIGHT]["accused"] == []
    assert figures[RIGHT]["verdicts"]["float32"]["pass"] == 4
    page = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert f"| {WRONG} |" in page and f"| {RIGHT} |" in page
