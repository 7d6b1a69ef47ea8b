"""The options of `refattn check`: which cases are run, captured tensors, and how wide the report is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import cli
from refattn.conformance.cases import all_cases
from refattn.conformance.judge import Place
from refattn.conformance.plugin import pairs_of
from refattn.conformance.records import Record, Report
from refattn.conformance.reports.terminal import verdict_line
from refattn.conformance.runner import chosen_pairs
from refattn.conformance.table import print_table
from refattn.dtypes import ALIASES, COMPUTED, dtype_in, dtypes_in


def check(*arguments: str) -> int:
    return cli.main(["check", *arguments])


def dump(path: Path, dtype: str = "float32", q_len: int = 5, **options: Any) -> str:
    """A file with one problem, layer0, of five keys."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 2, q_len, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)}
    tensors: dict[str, Any] = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tensors |= {name: np.asarray(value) for name, value in options.items()}
    np.savez(path, **{f"layer0.{name}": value for name, value in tensors.items()})
    return str(path)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "q_start": 2},
        {"causal": True, "q_start": np.asarray([0, 2])},
        {"causal": True, "q_start": 5, "k_start": 3},
        {"softcap": 2.0},
        {"softcap": 2, "scale": 1},
    ],
)
def test_options_of_captured_tensors(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positions and the soft cap are read; a dump that passes has a line, and runs whatever --clauses says."""
    path = dump(tmp_path / "dump.npz", q_len=3, **options)
    assert check("numpy", "--inputs", path, "--clauses", "C1") == 0
    out = capsys.readouterr().out
    assert "\ninputs.layer0: pass (float32)\n" in out
    assert out.count("inputs.layer0") == 1


def test_the_dtypes_of_captured_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors are judged in the dtype that they were stored in, and in those that --dtype adds."""
    path = dump(tmp_path / "dump.npz", "float16")
    assert check("numpy", "--inputs", path, "--only-inputs") == 0
    assert re.findall(r"layer0: pass \((\w+)\)", capsys.readouterr().out) == ["float16"]
    assert check("numpy", "--inputs", path, "--only-inputs", "--dtype", "float64") == 0
    assert re.findall(r"layer0: pass \((\w+)\)", capsys.readouterr().out) == ["float16", "float64"]
    assert check("numpy", "--only-inputs") == 2
    assert "--only-inputs needs --inputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_len": 3, "causal": True}, ("layer0.q_start", "0 aligns top-left", "bottom-right", "M5")),
        ({"softcap": -1.0}, ("softcap", "> 0")),
        ({"sinks": np.ones(3, dtype="f4")}, ("sinks", "P3")),
        ({"q_start": 1.5}, ("q_start must be an integer",)),
    ],
)
def test_captured_options_that_are_refused(
    options: dict[str, Any], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the specification refuses is refused in its words, with exit code 2."""
    assert check("numpy", "--inputs", dump(tmp_path / "dump.npz", **options)) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_a_file_that_is_no_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Junk is said to be no .npz file, without advice to load it unsafely."""
    (tmp_path / "junk.npz").write_bytes(b"\x80\x04junk")
    assert check("numpy", "--inputs", str(tmp_path / "junk.npz")) == 2
    err = capsys.readouterr().err
    assert "junk.npz is not an .npz file" in err
    assert "pickle" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("numpy", "--clauses", "m4,s6"),
        ("numpy", "--clauses", "M4", "s6"),
        ("numpy", "--clauses", "M4, S6"),
        ("--clauses", "M4", "s6", "numpy"),
        ("--clauses", "M4,S6", "--quick", "numpy"),
    ],
)
def test_clauses_are_read_as_written(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Labels stand in any case, with commas or spaces, before or after the target; only their rows are shown."""
    assert check(*arguments, *(() if "--quick" in arguments else ("--quick",))) == 0
    rows = re.findall(r"^([A-Z]\d+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert rows == ["S6", "M4"]


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown labels list their chapter's, --quick and --dtype exclude each other, and a target is asked for."""
    for arguments, words in (
        (("numpy", "--clauses", "s77"), "no clause or chapter 's77'; chapter S has S1, S2"),
        (("numpy", "--quick", "--dtype", "float64"), "not allowed with argument"),
        ((), "name a TARGET"),
        (("--clauses", "M4"), "name a TARGET"),
    ):
        assert check(*arguments) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["clauses", "m3,p2"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^  ([A-Z]\d+) ", out, flags=re.MULTILINE) == ["M3", "P2"]


def test_cases_are_chosen_by_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    """--case takes * for any letters, --dtype the names that other libraries use, each once."""
    patterns = "masks.window_bo*,masks.window_of_i*,scores.wide_heads"
    assert check("numpy", "--case", patterns, "--dtype", "bf16,half,fp16") == 0
    out = capsys.readouterr().out
    for case in ("masks.window_both_ways", "masks.window_both_ways_far_end", "masks.window_of_itself"):
        assert out.count(f"{case} in bfloat16 passed") == out.count(f"{case} in float16 passed") == 1
    assert "refattn-numpy conforms (8 pass)" in out


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("masks", "no case 'masks'; did you mean masks.*? refattn cases list shows all"),
        ("masks.casual", "did you mean masks.causal or"),
        ("per_batch", "did you mean masks.window_per_batch_entry or"),
        ("qqqq*", "no case 'qqqq*'; refattn cases list shows all"),
    ],
)
def test_patterns_that_no_case_has(pattern: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is none gives those that contain it or are spelt alike, and exit code 2, wherever it is asked."""
    for arguments in (("check", "numpy", "--case", pattern), ("cases", "list", pattern)):
        assert cli.main([*arguments]) == 2
        assert words in capsys.readouterr().err


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`refattn cases list` shows names, clauses and what must hold, of all cases or of those that were asked for."""
    assert cli.main(["cases", "list", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [case.name for case in all_cases()]
    assert cli.main(["cases", "list", "masks.*", "scores.*", "--clauses", "M6,S3"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    expected = [case.name for case in all_cases() if {"M6", "S3"} & set(case.clauses)]
    expected = [name for name in expected if name.partition(".")[0] in ("masks", "scores")]
    assert [line.split()[0] for line in lines] == expected
    assert any("window(0, 0) shows the query's own key alone." in line for line in lines)


def test_dtypes_by_other_names() -> None:
    """Aliases name dtypes in any case, whoever reads them; a float8 is one where it may be."""
    assert dtypes_in("BF16, fp32 double") == ("bfloat16", "float32", "float64")
    assert dtype_in("half") == "float16"
    for text in ("float16,float32", "", "float8_e5m2"):
        with pytest.raises(ValueError, match="dtype"):
            dtype_in(text)
    assert set(ALIASES.values()) == set(COMPUTED)
    assert pairs_of("S1", "bf16") == chosen_pairs(all_cases(), frozenset({"S1"}), ("bfloat16",))


def record(verdict: str, label: str = "L1", **more: Any) -> Record:
    return Record(case="x.y", clauses=(label,), says="So.", dtype="float32", verdict=verdict, **more)


def report(*records: Record, **more: Any) -> Report:
    return Report(target="mine", versions={}, seed=20, records=records, **more)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """All columns fit the width, nothing ends in blanks, and what has no verdict takes one line of its chapter."""
    verdicts = ("pass", "fail", "crashed", "not judgeable")
    found = [record(verdict, label) for verdict in verdicts for label in ("A5", "M9")]
    lacking = [record("unsupported", label) for label in ("L1", "L2", "M7", "M12")]
    print_table(report(*found, *lacking), None, width)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert "L     The layer: all 1 unsupported" in lines
    assert "      unsupported: M7, M12" in lines
    assert not any(line.startswith(("L1", "M7")) for line in lines)


def test_what_is_said_of_the_storage_type() -> None:
    """Rounding to the storage type explains a dtype only if every result of it is within that model's bound."""
    low = record("pass", model="unfused", error_over_bound=0.5)
    assert "rounded to the storage type in float32" in verdict_line(report(low))
    assert report(low).models == {"float32": "unfused"}
    assert report(low, record("fail", error_over_bound=9.0)).models == {}


def test_words_for_special_cases() -> None:
    """An exact zero is not given as a multiple of a tiny bound; an interrupt before any verdict says so."""
    assert str(Place("weight", (0, 1), 2.81, 0.0, 2.0**-126)) == "weight[0, 1] is 2.81, expected exactly 0 (hidden key)"
    seen_zero = "output[0] is 1, expected exactly 0 (only hidden keys hold anything else)"
    assert str(Place("output", (0,), 1.0, 0.0, 0.0)) == seen_zero
    assert "interrupted before any case was judged, no verdict" in verdict_line(report(complete=False))
