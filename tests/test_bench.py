"""The benchmark's own arithmetic, its rows and files at tiny lengths, and the words of the GPU command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from refattn_backends import gpu
from refattn_backends.bench import curves, measures, page, ratios, report
from refattn_backends.bench.bursts import medians, peak_bytes
from refattn_backends.bench.rows import COLUMNS, VERDICTS, Row, cells
from refattn_backends.bench.sizes import SIZES, TINY

ROW: dict[str, Any] = {"work": "prefill", "unit": "ms", "limit": 1.25, "goal": 1.0}


def test_bursts_interleave_and_leave_out_each_first_call() -> None:
    """In each round every side runs once untimed and three times timed, and the median is over all rounds."""
    calls: list[str] = []
    now = 0.0
    # The untimed call of a side is very slow, the timed ones take 1, 2, 3, ... seconds.
    durations = {"a": count(1), "b": count(10)}

    def side(name: str) -> Any:
        def run() -> None:
            nonlocal now
            calls.append(name)
            first = (len([call for call in calls if call == name]) - 1) % 4 == 0
            now += 1000.0 if first else next(durations[name])

        return run

    took = medians({"a": side("a"), "b": side("b")}, rounds=2, clock=lambda: now)
    assert calls == [*"aaaa", *"bbbb", *"aaaa", *"bbbb"]
    assert took == {"a": 3.5, "b": 12.5}


@pytest.mark.parametrize(
    ("given", "ratio", "verdict"),
    [
        ({"ours": 10.0, "peer": "torch", "theirs": 10.0}, 1.0, "goal"),
        ({"ours": 12.0, "peer": "torch", "theirs": 10.0}, 1.2, "pass"),
        ({"ours": 13.0, "peer": "torch", "theirs": 10.0}, 1.3, "miss"),
        ({"ours": 13.0, "peer": "torch", "reason": "torch is not installed"}, None, "not measured"),
        ({"ours": 1.25}, None, "pass"),
        ({"ours": 1.5}, None, "miss"),
        ({"reason": "it ended with 1"}, None, "not measured"),
    ],
)
def test_a_row_is_judged_by_its_ratio_or_its_value(given: dict[str, Any], ratio: float | None, verdict: str) -> None:
    """Limit and goal belong to the ratio where there is a peer, else to the value; nothing measured is said so."""
    row = Row(**ROW, **given)
    assert row.ratio == ratio
    assert row.verdict == verdict
    assert report.row(row.as_dict()) == row


def test_the_middle_process_counts() -> None:
    """Of several processes a row is the one with the middle ratio, or the middle figure where there is no peer."""
    of = [(2.0, 1.0), (9.0, 8.0), (3.0, 1.0)]
    runs = [[Row(**ROW, ours=x, peer="torch", theirs=y).as_dict(), Row(**ROW, ours=x).as_dict()] for x, y in of]
    assert report.middle(runs) == [runs[0][0], runs[2][1]]


def test_a_line_of_the_table_shows_peer_ratio_limit_and_why() -> None:
    """Each row has one cell per column, limits of ratios end in x, and a reason stands beside the verdict."""
    row = Row(**ROW, ours=1.234, peer="torch", theirs=2.0, floor={"products": 0.3, "exponentials": 0.2})
    line = dict(zip(COLUMNS, cells(row), strict=True))
    assert (line["ours"], line["theirs"], line["ratio"]) == ("1.23 ms", "2 ms", "0.62 x")
    assert (line["limit"], line["goal"], line["floor"], line["verdict"]) == ("1.25 x", "1.00 x", "0.5 ms", "goal")
    missing = cells(Row(**ROW, peer="torch", reason="torch is not installed"))
    assert missing[-1] == "not measured: torch is not installed"


def test_every_line_of_the_table_is_measured_in_the_order_of_the_list() -> None:
    """Each measurement has one process, and the curves one per length, without dense runs beyond their limit."""
    for size, sizes in SIZES.items():
        found = report.tasks(size)
        assert [words[1] for words in found if words[0] == "rows"] == list(measures.MEASURES)
        assert [int(words[1]) for words in found if words[0] == "times"] == list(sizes.curve)
        assert all(int(words[1]) <= sizes.dense for words in found if words[0] == "memory" and words[2] == "dense")


def test_measuring_processes_choose_their_own_kernels() -> None:
    """Variables that force OpenBLAS's choice of kernels, or limit threads, do not reach them; all others do."""
    given = {"OPENBLAS_CORETYPE": "x", "OPENBLAS_L2_SIZE": "1", "OMP_NUM_THREADS": "1", "HOME": "h"}
    assert report.environment(given) == {"HOME": "h"}


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    "name", ["prefill", "gradients", "decode", "memory", "sampled golden values", "float64 golden values"]
)
def test_measurements_give_rows_with_or_without_the_peer(name: str) -> None:
    """At tiny lengths each measurement gives positive figures, and says of a missing peer that it is missing."""
    for row in measures.MEASURES[name](TINY):
        assert row.ours is not None
        assert row.ours >= 0
        assert row.verdict in VERDICTS
        assert (row.reason == "torch is not installed") == ("torch" in (row.peer or ""))


def test_a_process_hands_over_its_rows_as_json() -> None:
    """A row read back from the process that measured it is a full row."""
    (entry,) = report.measure("tiny", ("rows", "small call"))
    assert set(entry) == {field.name for field in fields(Row)} | {"ratio", "verdict"}
    assert entry["ours"] > 0


def test_a_failing_process_is_an_error_that_names_it() -> None:
    """The last line of what it wrote is in the message."""
    with pytest.raises(RuntimeError, match="rows nothing: KeyError: 'nothing'"):
        report.measure("tiny", ("rows", "nothing"))


def test_the_file_has_versions_machine_rows_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What processes measure, or fail at, is gathered as valid JSON that names neither this host nor its folders."""

    def measured(size: str, words: tuple[str, ...]) -> Any:
        if words[0] == "about":
            return {"versions": {"numpy": "2"}, "rates": {"gemm_flops": 1e9}}
        if words == ("rows", "memory"):
            raise RuntimeError("rows memory: stopped")
        if words[0] == "rows":
            return [Row(**{**ROW, "work": words[1]}, ours=1.23456789).as_dict()]
        return {"memory" if words[0] == "memory" else "prefill": {words[-1]: float(words[1])}}

    monkeypatch.setattr(report, "measure", measured)
    *_, (_, result) = report.gathered("tiny")
    text = report.as_json(result)
    found = json.loads(text)
    assert list(found) == ["failures", "sizes", "versions", "machine", "rates", "rows", "curves"]
    assert found["failures"] == ["rows memory: stopped"]
    assert [row["work"] for row in found["rows"]] == [name for name in measures.MEASURES if name != "memory"]
    assert found["rows"][0]["ours"] == 1.235
    assert found["curves"]["memory"] == {"tiled": {"16": 16.0, "32": 32.0}, "dense": {"16": 16.0, "32": 32.0}}
    assert set(found["machine"]) == {"system", "architecture", "processor", "cores"}
    assert str(Path.home()) not in text


def test_rows_have_as_many_processes_as_their_size_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is measured in several processes, and curves in one for each length."""
    asked: list[tuple[str, ...]] = []

    def measured(size: str, words: tuple[str, ...]) -> Any:
        asked.append(words)
        return [] if words[0] == "rows" else {}

    monkeypatch.setattr(report, "measure", measured)
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, processes=4))
    for _ in report.gathered("tiny"):
        pass
    assert all(asked.count(words) == (4 if words[0] == "rows" else 1) for words in report.tasks("tiny"))
    assert SIZES["full"].processes == 3


def test_the_plot_is_the_same_file_each_time(tmp_path: Path) -> None:
    """The SVG has a line per curve and depends on the figures alone."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; the bench session installs it")
    lines = {"tiled NumPy": {"16": 1.0, "32": 4.0}}
    for name in ("a.svg", "b.svg"):
        curves.draw(dict.fromkeys(curves.PLOTS, lines), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").read_text().count("tiled NumPy") >= len(curves.PLOTS)


def test_the_page_says_what_bounds_a_row_and_how_time_grows() -> None:
    """The page has the table, the floor of each row that has one, and the growth over the last doubling."""
    row = Row(**ROW, ours=1.0, peer="torch", theirs=2.0, floor={"products": 0.3, "exponentials": 0.2})
    times = {"prefill": {"tiled NumPy": {"16": 1.0, "32": 4.1}}, "window": {"8 keys": {"16": 1.0, "32": 2.0}}}
    result = {"rows": [row.as_dict()], "curves": times, "failures": ["x"], "versions": {}, "machine": {}, "rates": {}}
    text = page.page(result)
    assert "| prefill | 1 ms | torch | 2 ms | 0.50 x | 1.25 x | 1.00 x | 0.5 ms | goal |" in text
    assert "- prefill: 2.0 times its floor of 0.5 ms (products 0.3 ms, exponentials 0.2 ms)." in text
    assert "- tiled NumPy, prefill: 4.1 times as long." in text
    assert "- 8 keys, window: 2.0 times as long." in text
    assert "- not measured: x" in text


def test_peak_memory_sees_an_allocation() -> None:
    """The peak grows by what a larger array than any before takes."""
    before = peak_bytes()
    block = bytearray(before + 2**24)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_bytes() >= before + 2**24


def test_the_gpu_command_says_why_it_skips(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence per library that cannot run, and no failure."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "cupy: skipped, because CuPy is not installed.",
        "torch: skipped, because torch is not installed.",
    ]


def test_the_gpu_command_reads_the_verdict_of_a_check() -> None:
    """The suite runs in a process of its own, and its verdict comes back in words; so does its failure."""
    line, conforms = gpu.checked("numpy", dict(os.environ), "--clauses", "S1")
    assert conforms
    assert line.startswith("conforms (")
    line, conforms = gpu.checked("nothing", dict(os.environ))
    assert not conforms
    assert "the check failed: " in line


def test_a_checkout_that_is_not_installed_lends_its_entry_points(tmp_path: Path) -> None:
    """What is written of a pyproject.toml is a distribution with the plugins' entry points."""
    text = '[project]\nname = "some"\nversion = "1.2"\n[project.entry-points."refattn.backends"]\na = "b:C"\n'
    (tmp_path / "pyproject.toml").write_text(text + '[project.entry-points."refattn.paths"]\ntiled = "d:e"\n')
    folder = tmp_path / "site"
    folder.mkdir()
    gpu.write_metadata(tmp_path / "pyproject.toml", folder)
    (found,) = distributions(path=[str(folder)])
    assert (found.name, found.version) == ("some", "1.2")
    assert {(entry.group, entry.name, entry.value) for entry in found.entry_points} == {
        ("refattn.backends", "a", "b:C"),
        ("refattn.paths", "tiled", "d:e"),
    }


def test_the_gpu_command_runs_as_a_module() -> None:
    """`python -m refattn_backends.gpu` ends well wherever no device answers."""
    if not (gpu.without_torch() and gpu.without_cupy()):
        pytest.skip("a device answers, so the command would take minutes; nox -s gpu runs it")
    run = subprocess.run([sys.executable, "-m", "refattn_backends.gpu"], capture_output=True, check=False, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_ratios_at_tiny_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ratios' command writes JSON, picture and table, the same twice, and the specification keeps its bound."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ratios -->\nold\n<!-- end of ratios -->\nafter\n", encoding="utf-8")
    files = {name: tmp_path / f"new/ratios.{name}" for name in ("json", "svg")}
    found = []
    for _ in range(2):
        words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
        assert ratios.main([*words, "--page", str(page), "--lengths", "4"]) == 0
        found.append([path.read_bytes() for path in (*files.values(), page)])
    assert found[0] == found[1]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- ratios -->\n\n| implementation |") and text.endswith("after\n")
    assert "old" not in text and capsys.readouterr().out.startswith("| implementation |")
    for row in json.loads(files["json"].read_text(encoding="utf-8"))["rows"]:
        assert sum(row["counts"]) == row["elements"]
        if row["implementation"].startswith("refattn"):
            assert row["meets"] == "fused" and row["largest"] <= 1


def test_the_page_on_bounds_shows_the_figures_that_are_stored() -> None:
    """The table on the page is that of the JSON beside it."""
    docs = Path(__file__).parents[1] / "docs"
    stored = json.loads((docs / "bounds/ratios.json").read_text(encoding="utf-8"))
    page = (docs / "bounds.md").read_text(encoding="utf-8")
    assert ratios.with_table(page, stored["rows"]) == page
