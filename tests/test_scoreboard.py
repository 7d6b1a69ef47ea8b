"""The scoreboard: what it keeps of a report, what it draws, and that departures need a reproduction that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refattn.conformance.reproductions import failures, read_all
from refattn.conformance.scoreboard import figures_of, main, uncovered
from refattn.conformance.scoreboard_page import page_of

FOLDER = Path(__file__).parents[1] / "docs" / "scoreboard"


def record(case: str, verdict: str, dtype: str = "float32", **others: Any) -> dict[str, Any]:
    plain = {"clauses": ["P2"], "about": "P2", "message": "", "error_over_bound": None}
    return {"case": case, "verdict": verdict, "dtype": dtype, **plain, **others}


def figures(*records: dict[str, Any]) -> dict[str, Any]:
    plain = {"versions": {"torch": "1.0"}, "notes": [], "seed": 20, "models": {}}
    return figures_of({**plain, "counts": {"pass": 1}, "records": list(records)})


def test_failures_are_counted_by_what_they_are_about() -> None:
    """A float64 computed in float32, and a wrong dtype, are no failures of the case's own clause; slow is none."""
    found = figures(
        record("a", "pass"),
        record("b", "fail", message="wrong"),
        record("b", "crashed", "float64", message="wrong"),
        record("c", "fail", about="A4", message="dtype"),
        record("d", "fail", "float64", message="so float64 seems to be computed in float32 [N1]", error_over_bound=9.0),
        record("e", "fail", message="so float64 seems to be computed in float32 [N1]", error_over_bound="inf"),
        record("f", "timed out"),
    )
    assert found["clauses"] == {"P2": {"pass": 1, "fail": 3, "timed out": 1}, "A4": {"fail": 1}, "N1": {"fail": 1}}
    assert [(row["case"], row["clause"], list(row["dtypes"])) for row in found["failing"]] == [
        ("b", "P2", ["float32", "float64"]),
        ("c", "A4", ["float32"]),
        ("d", "N1", ["float64"]),
        ("e", "P2", ["float32"]),
    ]


def test_a_case_that_is_wrong_in_two_ways_has_two_rows() -> None:
    """What a case breaks in one dtype does not stand under what it breaks in another."""
    found = figures(record("a", "fail", message="wrong"), record("a", "fail", "float16", about="A4", message="dtype"))
    rows = [(row["clause"], row["message"], list(row["dtypes"])) for row in found["failing"]]
    assert rows == [("P2", "wrong", ["float32"]), ("A4", "dtype", ["float16"])]


def test_notes_on_a_run_are_left_out() -> None:
    """What was printed at import, and whether refattn is behind it, is no note on what was judged."""
    notes = ["while it was imported: hello", "called by name", "built on refattn (it runs f): no second opinion"]
    report = {"versions": {"refattn": "1", "torch": "1"}, "notes": notes, "seed": 20, "models": {}}
    found = figures_of({**report, "counts": {"pass": 1, "fail": 0}, "records": []})
    assert found["notes"] == ["called by name"]
    assert (found["versions"], found["counts"]) == ({"torch": "1"}, {"pass": 1})


def test_the_exit_code_says_whether_a_reproduction_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kept report is read instead of judging again, results of others stay, and what nothing shows gives 1."""
    report: dict[str, Any] = {"versions": {"torch": "1"}, "notes": [], "seed": 20, "models": {}, "counts": {"pass": 1}}
    (tmp_path / "scoreboard.json").write_text(json.dumps({"jax": figures(record("a", "pass"))}))
    for records, code in (([record("b", "pass")], 0), ([record("b", "fail")], 1)):
        (tmp_path / "torch.json").write_text(json.dumps({**report, "records": records}))
        assert main(["torch", "--folder", str(tmp_path), "--reports", str(tmp_path)]) == code
        assert set(json.loads((tmp_path / "scoreboard.json").read_text())) == {"torch", "jax"}
        assert ("torch: no reproduction shows P2 (b)" in capsys.readouterr().out) == bool(code)
        assert "## torch" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_what_was_judged_outlives_what_stops_the_run(tmp_path: Path) -> None:
    """Results are written after each implementation: a report that cannot be read costs none judged before it."""
    report: dict[str, Any] = {"versions": {"torch": "1"}, "notes": [], "seed": 20, "models": {}, "counts": {"pass": 1}}
    (tmp_path / "torch.json").write_text(json.dumps({**report, "records": [record("a", "pass")]}))
    (tmp_path / "jax.json").write_text("{")
    with pytest.raises(json.JSONDecodeError):
        main(["torch", "jax", "--folder", str(tmp_path), "--reports", str(tmp_path)])
    assert set(json.loads((tmp_path / "scoreboard.json").read_text())) == {"torch"}


def test_departures_without_a_reproduction_are_named(tmp_path: Path) -> None:
    """A reproduction stands behind the implementations and clauses that it names, and no others."""
    (tmp_path / "a.py").write_text(
        'def f():\n    """It is so.\n\n    Clauses: P2, A4. Implementations: torch.\n    """\n'
    )
    (one,) = found = read_all(tmp_path)
    assert (one.says, one.clauses, one.names) == ("It is so.", ("P2", "A4"), ("torch",))
    board = {
        "torch": figures(record("b", "fail"), record("c", "fail", about="N1")),
        "jax": figures(record("b", "fail")),
    }
    lacking = uncovered(board, found)
    assert [line.split(" (")[0] for line in lacking] == [
        "torch: no reproduction shows N1",
        "jax: no reproduction shows P2",
    ]
    page = page_of(board, found)
    assert "| P2 Empty row | **1**/1 | **1**/1 |" in page
    assert "It is so. [f](reproductions/a.py): P2, 1 case, first `b`" in page


def test_reproductions_are_run(tmp_path: Path) -> None:
    """One that asserts what is no longer so fails, as does one that should have ended the process, and did not."""
    about = '    """It is so.\n\n    Clauses: P2. Implementations: torch.\n    """\n'
    names = {"holds": "assert True", "gone": "assert False", "ends_the_process": "", "dies": "import os; os.abort()"}
    text = "\n\n".join(f"def {name}():\n{about}    {body or 'pass'}\n" for name, body in names.items())
    (tmp_path / "b.py").write_text(
        text.replace("def ends", "def it_ends").replace("def dies", "def dies_ends_the_process")
    )
    wrong = failures(read_all(tmp_path))
    assert [line.split()[1] for line in wrong] == ["gone", "it_ends_the_process"]


def test_a_reproduction_says_what_it_shows(tmp_path: Path) -> None:
    """One without clauses and implementations is refused by its name."""
    (tmp_path / "c.py").write_text('def f():\n    """It is so."""\n')
    with pytest.raises(ValueError, match=r"c.py: f does not say"):
        read_all(tmp_path)


def test_names_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is a usage error."""
    with pytest.raises(SystemExit, match="2"):
        main(["magic"])
    assert "no implementation magic" in capsys.readouterr().err


def test_every_departure_on_the_page_has_its_reproduction() -> None:
    """The results that are kept name no clause without one, and the page is what they draw."""
    board, found = json.loads((FOLDER / "scoreboard.json").read_bytes()), read_all(FOLDER / "reproductions")
    assert uncovered(board, found) == []
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == page_of(board, found)
