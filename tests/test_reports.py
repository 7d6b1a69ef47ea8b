"""Reports as files: JSON with its schema, JUnit XML, the HTML page, and where they are written."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from html_pages import HOSTILE, Page, hostile_report
from refattn import cli
from refattn.conformance.recording import PICTURED
from refattn.conformance.records import VERDICTS, Report
from refattn.conformance.reports.files import ReportError, check_places, json_text, write_all
from refattn.conformance.reports.junit import junit_text
from refattn.conformance.reports.page import POLICY, page_text
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets.function import FunctionTarget

SCHEMA = json.loads(files("refattn.conformance.reports").joinpath("report.schema.json").read_text(encoding="utf-8"))
FAULT = "planted_faults:causal_shows_the_next"


def check(*arguments: str) -> int:
    return cli.main(["check", *arguments])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The three reports on a kernel that lets causal queries see one key too many, and cannot do everything."""
    folder = tmp_path_factory.mktemp("reports")
    kernel = folder / "shows_the_next.py"
    kernel.write_text(
        "import planted_faults\n"
        "wrong = planted_faults.faulty('causal_shows_the_next')\n"
        "def attend(q, k, v, *, causal=False, q_start=None, mask=None):\n"
        "    if q.shape[-2] == 1:\n"
        "        raise RuntimeError('no kernel for one query')\n"
        "    return wrong(q, k, v, causal=causal, q_start=q_start, mask=mask)\n"
    )
    places = {form: folder / f"report.{form}" for form in ("json", "junit", "html")}
    options = [word for form, place in places.items() for word in (f"--{form}", str(place))]
    assert check(f"{kernel}:attend", "--clauses", "M4,M5,M19,S1,S3,E1", "--dtype", "float32,bfloat16", *options) == 1
    return {form: place.read_text(encoding="utf-8") for form, place in places.items()}


def test_json_follows_its_schema(written: dict[str, str]) -> None:
    """What is written, and a report with all that can go wrong in it, is what the schema describes."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for text in (written["json"], json_text(hostile_report())):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_the_schema_is_strict(written: dict[str, str]) -> None:
    """A field too many or too few, in a report or a record, and an unknown verdict are refused."""
    assert set(VERDICTS) <= set(SCHEMA["$defs"]["verdict"]["enum"])
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda report: report.update(more=1),
        lambda report: report.pop("seed"),
        lambda report: report["records"][0].update(more=1),
        lambda report: report["records"][0].pop("message"),
        lambda report: report["records"][0].update(verdict="fine"),
    ]
    for change in changes:
        report = json.loads(written["json"])
        change(report)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(report, SCHEMA)


def test_junit_says_what_json_says(written: dict[str, str]) -> None:
    """One test case for each record, with its outcome, message and reason; counts, versions and seed."""
    records = {f"{one['case']}[{one['dtype']}]": one for one in json.loads(written["json"])["records"]}
    (suite,) = ElementTree.fromstring(written["junit"])
    cases = {case.get("name", ""): case for case in suite.findall("testcase")}
    assert list(cases) == list(records)
    tags = {"pass": None, "fail": "failure", "crashed": "error", "unsupported": "skipped", "not judgeable": "skipped"}
    for name, record in records.items():
        outcome = next((one for one in cases[name] if one.tag != "system-out"), None)
        assert (None if outcome is None else outcome.tag) == tags[record["verdict"]]
        if outcome is not None:
            assert record["message"] in outcome.get("message", "")
        if record["verdict"] == "fail":
            assert outcome is not None
            assert "must hold" in (outcome.text or "")
    for plural, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        count = sum(tags[record["verdict"]] == tag for record in records.values())
        assert suite.get(plural) == str(count) != "0"
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert properties["seed"] == "20"
    assert {"version.refattn", "version.numpy"} <= set(properties)


def test_the_page_says_what_json_says(written: dict[str, str]) -> None:
    """The page has the verdict, a row for each clause, and for each failing case its sentence, call and message."""
    report, page = json.loads(written["json"]), Page(written["html"])
    text = " ".join("".join(page.text).split())
    assert f"shows_the_next.py:attend does not conform ({report['counts']['pass']} pass" in text
    rows = {attributes["href"] for attributes in page.all("a")}
    assert {f"#clause-{label}" for record in report["records"] for label in record["clauses"]} <= rows
    failing = [record for record in report["records"] if record["verdict"] in ("fail", "crashed")]
    assert len(failing) > 5
    for record in failing:
        for part in ("case", "says", "message"):
            assert " ".join(record[part].split()) in text
    # The call differs from dtype to dtype in nothing else.
    first = {record["case"]: record["called"] for record in reversed(failing)}
    assert all(called in text for called in first.values())
    headings = re.findall(r"<figcaption>([^<]*)", written["html"])
    drawn = {record["case"] for record in failing if record["called"]}
    assert headings.count("Visibility") == len(drawn)
    compared = {record["case"] for record in failing if record["verdict"] == "fail" and record["called"]}
    for heading in ("Expected", "Actual", "Error over bound"):
        assert headings.count(heading) == len(compared) > 1


@pytest.mark.parametrize("kind", ["written", "hostile"])
def test_the_page_is_whole_in_itself(kind: str, written: dict[str, str]) -> None:
    """Nothing is loaded from elsewhere, nothing runs, ids are unique, links lead somewhere, pictures have words."""
    page = Page(written["html"] if kind == "written" else page_text(hostile_report()))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "object", "embed", "img", "image", "base", "form", "foreignobject"}
    assert POLICY in [meta.get("content") for meta in page.all("meta")]
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "style")]
        assert tag == "link" or attributes.get("href", "#").startswith("#")
    styles = re.findall(r"<style>(.*?)</style>", written["html"], re.DOTALL)
    assert len(styles) == 1
    assert not re.search(r"url\(|@import|http", styles[0])
    assert "prefers-color-scheme: dark" in styles[0]
    ids = page.ids
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in page.all("a")} <= set(ids)
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert set(svg["aria-labelledby"].split()) <= set(ids)
    assert all(attributes.get("lang") == "en" for attributes in page.all("html"))
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))


def test_hostile_text_stays_text() -> None:
    """Markup, ends of sections, control characters and lone surrogates are shown, and change nothing."""
    shown = HOSTILE.translate({0: "\\x00", 0x1B: "\\x1b", 0xD800: "\\ud800", 0x202E: "\\u202e", 0xFFFE: "\\ufffe"})
    html = page_text(hostile_report())
    html.encode("utf-8")
    assert "".join(Page(html).text).count(shown) > 10
    xml = junit_text(hostile_report())
    (suite,) = ElementTree.fromstring(xml.encode("utf-8"))
    assert shown in suite.get("name", "")
    assert len(suite.findall("testcase")) == len(VERDICTS)
    assert shown in suite.find("testcase/failure").get("message", "")  # type: ignore[union-attr]  # one is there
    assert json.loads(json_text(hostile_report()))["target"] == HOSTILE


def test_each_picture_is_of_another_case() -> None:
    """Evidence is kept for one dtype of a case, for so many cases at most; nobody sees it in JSON or in repr()."""
    from refattn.conformance.cases import all_cases

    def nothing(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return q * float("nan")

    pairs = chosen_pairs([case for case in all_cases() if case.build is not None], None, ("float32", "float64"))
    report = run_suite(FunctionTarget("nothing", function=nothing), pairs[:200] + pairs[-200:], 0)
    kept = [record.case for record in report.records if record.evidence is not None]
    assert len(kept) == len(set(kept)) == PICTURED
    assert {record.case for record in report.broken} > set(kept)
    assert "evidence" not in repr(report.records[0])
    assert "evidence" not in report.records[0].as_dict()
    assert page_text(report).count("No pictures of this case were kept.") == len(
        {record.case for record in report.broken} - set(kept)
    )


def test_a_run_without_a_verdict_is_nowhere_green(tmp_path: Path) -> None:
    """Ctrl-C leaves all reports, of what had been judged; none of them says that the target conforms."""
    places = {form: tmp_path / f"out.{form}" for form in ("json", "junit", "html")}
    options = [word for form, place in places.items() for word in (f"--{form}", str(place))]
    assert (
        check("planted_faults:interrupted_at_six_queries", "--in-process", "--quick", "--clauses", "S,P", *options)
        == 130
    )
    report = json.loads(places["json"].read_text())
    assert (report["complete"], report["conforms"]) == (False, False)
    (suite,) = ElementTree.fromstring(places["junit"].read_text())
    assert len(suite.findall("testcase")) == len(report["records"]) + 1
    assert suite.get("errors") == "1"
    assert "interrupted, no verdict" in places["html"].read_text()
    nothing = Report(target="t", versions={}, seed=0, records=())
    assert "nothing could be judged" in page_text(nothing)
    assert 'errors="1"' in junit_text(nothing)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("missing/out.xml", "No such file or directory"),
        (".", "it is a folder"),
        ("file.txt/out.xml", "Not a directory"),
        ("x" * 300, "too long"),
    ],
)
def test_places_are_looked_at_first(place: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that cannot be written is one sentence and exit code 2 before anything is judged."""
    (tmp_path / "file.txt").write_text("")
    for form in ("json", "junit", "html"):
        assert check("planted_faults:never_called", f"--{form}", str(tmp_path / place)) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert f"--{form}: " in said.err
        assert words in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt"]


def test_two_reports_need_two_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file, or standard output, for two reports is a usage error."""
    for place in (str(tmp_path / "out"), "-"):
        assert check("numpy", "--json", place, "--html", place) == 2
        assert "--json and --html name one place" in capsys.readouterr().err


def test_any_report_may_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """With - for a place nothing else is printed there."""
    assert check(FAULT, "--quick", "--clauses", "M4", "--junit", "-") == 1
    assert ElementTree.fromstring(capsys.readouterr().out).tag == "testsuites"


def test_a_full_disk_keeps_the_old_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that cannot be written in the end is exit code 2; the old file stays whole, the others are written."""
    old = tmp_path / "out.html"
    old.write_text("old")
    room = [True, False]  # for the XML, which comes first, alone

    def full(descriptor: int) -> None:
        if not room.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    junit = tmp_path / "out.xml"
    assert check(FAULT, "--quick", "--clauses", "M4", "--html", str(old), "--junit", str(junit)) == 2
    said = capsys.readouterr()
    assert "does not conform" in said.out
    assert f"--html: {old} cannot be written: No space left on device" in said.err
    assert old.read_text() == "old"
    assert ElementTree.parse(junit).getroot().tag == "testsuites"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.xml"]


def test_links_and_devices_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report replaces the file that a link names, not the link, and is written through what is no file."""
    report = hostile_report()
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    places = {"--json": str(link), "--html": os.devnull}
    check_places(places)
    write_all(report, places, "")
    assert link.is_symlink()
    assert json.loads(real.read_text())["seed"] == 0
    assert Path(os.devnull).is_char_device()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ReportError, match="may not be written"):
        check_places(places)
