"""A kernel in C: right, it conforms; wrong in one place, `refattn compare` names the clause and says what it sees."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from refattn import cli

SOURCE = Path(__file__).parents[1] / "docs" / "examples" / "attention.c"
COMPILER = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
KNOWS = ("--dtype", "float32", "--features", "causal,mask,scale,q_start,k_start,gqa")
SOME = ("--clauses", "S1,M4,M6,M20,G1,P2")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here to build the kernel with")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cases in float32 that need no more than the kernel knows."""
    folder = tmp_path_factory.mktemp("c") / "cases"
    assert cli.main(["cases", "export", str(folder), *KNOWS, *SOME]) == 0
    return folder


def judged(cases: Path, tmp_path: Path, fault: int) -> tuple[int, dict[str, Any]]:
    """Compiles the kernel with one fault, or none, runs it on all cases and asks for the verdict."""
    assert COMPILER is not None
    kernel = str(tmp_path / "attention")
    flags = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", f"-DFAULT={fault}")
    subprocess.run([COMPILER, *flags, "-o", kernel, str(SOURCE), "-lm"], check=True)
    subprocess.run([kernel, *(str(path) for path in sorted(cases.iterdir()) if path.is_dir())], check=True)
    code = cli.main(["compare", str(cases), "--json", str(tmp_path / "report.json")])
    return code, json.loads((tmp_path / "report.json").read_text())


def test_the_right_kernel_conforms(cases: Path, tmp_path: Path) -> None:
    """All cases passed: the example of the page is right."""
    code, report = judged(cases, tmp_path, 0)
    assert code == 0
    assert report["counts"]["pass"] == len(report["records"]) > 80


@pytest.mark.parametrize(
    ("fault", "clause", "words"),
    [
        (1, "M6", "elements are beyond the bound of model 'fused' in float32; query rows: 3, 4, 5"),
        (2, "M5", "causal aligned top-left, q_start=0 instead of"),
        (3, "S1", 'matches "no scale" [S1]'),
        (4, "G1", "query head h reads key/value head h % Hkv"),
    ],
)
def test_wrong_kernels_are_explained(
    fault: int, clause: str, words: str, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A window one key too wide, causal top-left, no scale, h % Hkv: each fails, with its clause and a sentence."""
    code, report = judged(cases, tmp_path, fault)
    assert code == 1
    failed = [record for record in report["records"] if record["verdict"] == "fail"]
    assert any(
        clause in record["clauses"] and words in f"{record['message']}; {record['diagnosis']['sentence']}"
        for record in failed
    )
    assert f"{clause}: " in capsys.readouterr().out
