"""`refattn cases export` and `refattn compare DIR`: the closed loop for programs that Python cannot call."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exchanged
from refattn import cli
from refattn.arrays import Array
from refattn.conformance.exchange.export import FEATURES
from refattn.dtypes import COMPUTED

FORMATS = ("raw", "npz", "safetensors")
SOME = ("--clauses", "P3,G1,A3")


def export(folder: Path, *arguments: str) -> Path:
    assert cli.main(["cases", "export", str(folder), *arguments]) == 0
    return folder


def compare(folder: Path, *arguments: str) -> int:
    return cli.main(["compare", str(folder), *arguments])


def verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The records by case, of a folder in one dtype."""
    capsys.readouterr()
    assert compare(folder, "--json", "-") == 1
    return {record["case"]: record for record in json.loads(capsys.readouterr().out)["records"]}


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Four cases in float32, as raw files, with the right results beside them."""
    folder = export(tmp_path / "few", "--dtype", "float32", "--features", "none", "--limit", "4")
    assert exchanged.run_all(folder, "raw") == 4
    return folder


@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("form", FORMATS)
def test_right_results_conform(form: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What refattn makes of exported files, written beside them, conforms, in every format and dtype."""
    folder = export(tmp_path / "cases", "--format", form, "--dtype", dtype, *SOME)
    assert exchanged.run_all(folder, form) > 20
    capsys.readouterr()
    assert compare(folder, "--json", "-") == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    # Two cases ask for the weights, which this program does not write.
    assert {verdict for verdict, count in counts.items() if count} <= {"pass", "unsupported"}
    assert counts["unsupported"] <= 2


def test_exported_files_hold_inputs_alone(tmp_path: Path) -> None:
    """No file holds an expected value, and no folder of a case names it."""
    folder = export(tmp_path / "cases", "--dtype", "float32", "--clauses", "P")
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "manifest.json",
        "case.json",
        *(f"{name}.bin" for name in ("q", "k", "v", "mask", "bias", "sinks")),
    }
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    assert {"folder", "case", "clauses", "dtype", "needs", "sha256"} == {key for case in cases for key in case}
    for case in cases:
        assert case["case"] not in (folder / case["folder"] / "case.json").read_text()


def test_a_selection_is_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Features leave out cases that need more, a limit keeps the first; what does not exist is refused."""
    folder = export(tmp_path / "causal", "--features", "causal", "--dtype", "float32")
    needs = [case["needs"] for case in json.loads((folder / "manifest.json").read_text())["cases"]]
    assert {tuple(need) for need in needs} == {(), ("causal",)}
    whole = export(tmp_path / "all", "--dtype", "float32")
    found = {need for case in json.loads((whole / "manifest.json").read_text())["cases"] for need in case["needs"]}
    assert found == set(FEATURES)
    assert len(list(export(tmp_path / "three", "--limit", "3").glob("0*"))) == 3
    for arguments, words in (
        (("--features", "magic"), "no feature magic; there are causal"),
        (("--dtype", "int8"), "no dtype int8"),
        (("--limit", "0"), "must be 1 or more"),
        (("--clauses", "N4"), "no case is of these clauses"),
    ):
        assert cli.main(["cases", "export", str(tmp_path / "none"), *arguments]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["cases", "export", str(whole)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_missing_results_are_never_passed(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case without a result is listed as missing, and the folder then does not conform."""
    assert compare(few) == 0
    (few / "0003" / "output.bin").unlink()
    capsys.readouterr()
    assert compare(few) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "results are missing, so it does not conform (3 pass, 1 missing)" in out
    assert "Missing, so not judged: 0003 (scores." in out


def test_wrong_results_are_explained(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong number fails with its clause, and --case shows one case in full."""
    (few / "0001" / "output.bin").write_bytes(bytes(24))
    record = verdicts(few, capsys)["scores.worked_example"]
    assert (record["verdict"], record["about"]) == ("fail", "S1")
    assert compare(few, "--case", "scores.worked_example") == 1
    assert "must hold: Three tokens" in capsys.readouterr().out
    assert compare(few, "--case", "scores.none") == 2
    assert "no case 'scores.none'; did you mean scores.w" in capsys.readouterr().err


def test_nan_fails(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN in the place of a number is wrong, wherever it comes from."""
    output = np.fromfile(few / "0001" / "output.bin", np.float32)
    np.full_like(output, np.nan).tofile(few / "0001" / "output.bin")
    assert "is nan, expected" in verdicts(few, capsys)["scores.worked_example"]["message"]


def test_results_of_another_size_fail(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A raw file that is too short, too long, or of another dtype says so, under the clause of shapes."""
    for size in (0, 23, 48):
        (few / "0001" / "output.bin").write_bytes(bytes(size))
        record = verdicts(few, capsys)["scores.worked_example"]
        assert (record["verdict"], record["about"]) == ("fail", "A1")
        assert f"output.bin holds {size} bytes, expected 24 for (1, 1, 3, 2) in float32" in record["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 21}, "case 0002 is not what was exported"),
        ({"limit": 3}, "number of cases"),
        ({"format": "pickle"}, "format of the selection is 'pickle', which was never exported"),
        ({"dtypes": ["float8"]}, "dtypes of the selection"),
        ({"limit": True}, "limit of the selection"),
        ({"seed": -1}, "seed of the selection"),
        ({"clauses": "M"}, "clauses of the selection"),
        ({"more": 1}, "selection must hold"),
    ],
)
def test_a_changed_selection_is_refused(
    change: dict[str, Any], words: str, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest whose selection is not the one of its cases is refused, and nothing is judged."""
    changed = json.loads((few / "manifest.json").read_text())
    changed["selection"] |= change
    (few / "manifest.json").write_text(json.dumps(changed))
    assert compare(few) == 2
    out, err = capsys.readouterr()
    assert "conform" not in out
    assert words in err


def test_a_changed_manifest_is_refused(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case that was taken out, renamed or given another sum is noticed, and an older version is named."""
    text = (few / "manifest.json").read_text()

    def drop(data: dict[str, Any]) -> None:
        del data["cases"][1]

    def rename(data: dict[str, Any]) -> None:
        data["cases"][1]["case"] = "scores.other"

    def resum(data: dict[str, Any]) -> None:
        data["cases"][2]["sha256"]["q"] = "0" * 64

    def age(data: dict[str, Any]) -> None:
        data["refattn"] = "0.0.1"

    def reschema(data: dict[str, Any]) -> None:
        data["schema"] = "refattn.cases/0"

    for change, words in (
        (drop, "the number of cases"),
        (rename, "case 0002"),
        (resum, "case 0003"),
        (age, "it was exported by refattn 0.0.1: export again"),
        (reschema, "another schema than refattn.cases/1"),
    ):
        data = json.loads(text)
        change(data)
        (few / "manifest.json").write_text(json.dumps(data))
        assert compare(few) == 2
        assert words in capsys.readouterr().err
    for junk, words in ((b"[]", "another schema"), (b"{", "is no JSON"), (b"\xff", "no text in UTF-8")):
        (few / "manifest.json").write_bytes(junk)
        assert compare(few) == 2
        assert words in capsys.readouterr().err
    (few / "manifest.json").unlink()
    assert compare(few) == 2
    assert "holds no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_changed_inputs_are_refused_by_name(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One changed number, tensor or description of one case is refused by its name, whatever the results are."""
    folder = export(tmp_path / "cases", "--format", form, "--dtype", "float32", "--features", "none", "--limit", "2")
    exchanged.run_all(folder, form)
    place = folder / "0002"
    tensors, _ = exchanged.read_case(place, form)
    kept = {path: path.read_bytes() for path in place.iterdir()}

    def refusal() -> str:
        assert compare(folder) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        for path, data in kept.items():
            path.write_bytes(data)
        return err

    tensors["k"] = tensors["k"] + np.float32(1)
    if form == "raw":
        tensors["k"].tofile(place / "k.bin")
        assert "k.bin was changed since it was exported" in refusal()
        (place / "v.bin").unlink()
        assert "v.bin is not there any more" in refusal()
    else:
        wrong = {"k": "k was changed", "extra": "holds extra, which was not exported"}
        for name, words in wrong.items():
            chosen = tensors if name == "k" else {**exchanged.read_case(place, form)[0], "extra": tensors["k"]}
            exchanged.write_results(place, form, chosen)
            (place / f"outputs.{form}").replace(place / f"inputs.{form}")
            assert words in refusal()
        (place / f"inputs.{form}").unlink()
        assert "there is no file" in refusal()
    (place / "case.json").write_text("{}")
    assert "case.json is not as it was exported" in refusal()
    assert compare(folder) == 0


def test_hostile_results_are_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bomb, a pickle, other names, texts, junk and wrong shapes fail their case by name; the others are judged."""
    folder = export(tmp_path / "cases", "--format", "npz", "--dtype", "float32", "--features", "none", "--limit", "8")
    exchanged.run_all(folder, "npz")
    results = [folder / f"000{number}" / "outputs.npz" for number in range(1, 9)]
    right = [dict(np.load(path)) for path in results]
    with zipfile.ZipFile(results[0], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("output.npy", bytes(100 << 20))
    stored: list[dict[str, Array]] = [
        {"output": np.asarray([object()])},
        {"result": right[2]["output"]},
        {"output": right[3]["output"], "scores": np.ones(3)},
        {"output": np.asarray("attention")},
        {"output": right[5]["output"][..., :1]},
    ]
    for path, tensors in zip(results[1:], stored, strict=False):
        named: Any = tensors
        np.savez(path, **named)
    results[6].write_bytes(results[6].read_bytes()[:-40])
    found = [*verdicts(folder, capsys).values()]
    expected = [
        "bytes in memory, expected",
        "'output' holds pickled objects, which are never loaded",
        "holds 'result', expected output, lse and weights",
        "holds 'scores', expected output, lse and weights",
        "output has dtype text",
        "the output has shape",
        "is not an .npz file",
    ]
    for record, words in zip(found, expected, strict=False):
        assert words in record["message"], record
        assert record["verdict"] in ("fail", "crashed")
    assert found[7]["verdict"] == "pass"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no symbolic links or pipes for everyone")
def test_nothing_outside_is_read(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that leads out of the folder is never followed, in results a failure and in inputs a refusal."""
    outside = tmp_path / "outside.bin"
    shutil.copy(few / "0001" / "output.bin", outside)
    (few / "0001" / "output.bin").unlink()
    (few / "0001" / "output.bin").symlink_to(outside)
    (few / "0002" / "output.bin").unlink()
    os.mkfifo(few / "0002" / "output.bin")
    found = [*verdicts(few, capsys).values()]
    assert [record["verdict"] for record in found] == ["crashed", "crashed", "pass", "pass"]
    assert "output.bin leads out of" in found[0]["message"]
    assert "output.bin is no file" in found[1]["message"]
    shutil.copytree(few / "0003", tmp_path / "elsewhere")
    shutil.rmtree(few / "0003")
    (few / "0003").symlink_to(tmp_path / "elsewhere")
    assert compare(few) == 2
    assert "leads out of" in capsys.readouterr().err


def test_log_sum_exps_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong log-sum-exp beside a right output fails (P4); without one the cases that ask for it are unsupported."""
    folder = export(tmp_path / "cases", "--dtype", "float32", "--clauses", "P4", "--features", "lse,causal,mask")
    exchanged.run_all(folder, "raw", lambda tensors, about: {"output": exchanged.attend(tensors, about)["output"]})
    capsys.readouterr()
    compare(folder, "--json", "-")
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts["unsupported"] > 0
    assert counts["fail"] == counts["missing"] == counts["crashed"] == 0

    def base_2(tensors: dict[str, Array], about: dict[str, Any]) -> dict[str, Array]:
        results = exchanged.attend(tensors, about)
        return results | {"lse": results["lse"] / np.float32(np.log(2))}

    exchanged.run_all(folder, "raw", base_2)
    found = [record for record in verdicts(folder, capsys).values() if record["verdict"] == "fail"]
    assert found
    assert {record["about"] for record in found} == {"P4"}
    assert "base 2" in found[0]["diagnosis"]["sentence"]


def test_options_that_are_for_files(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder says for each case how it is called, so that options for files are refused."""
    assert compare(few, "--q-start", "3") == 2
    assert "--q-start is for files" in capsys.readouterr().err
    assert compare(few / "nothing") == 2
    assert "there is no file" in capsys.readouterr().err
