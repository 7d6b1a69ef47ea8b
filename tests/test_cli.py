"""The command line: what each subcommand prints, in-process and as a process, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import refattn
from refattn import cli, cost, registry, vectors
from refattn.clauses import CHAPTERS, CLAUSES
from refattn.commands import output
from refattn.commands.clauses import markdown
from refattn.conformance import targets
from refattn.errors import BackendError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nobody_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is captured here, whatever the surroundings wish for terminals."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a successful command line prints; its stderr must stay empty."""
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m refattn` as a process of its own."""
    command = [sys.executable, "-m", "refattn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8", **options)


def stage(text: str, name: str) -> list[list[str]]:
    """The rows of numbers printed under a stage's name."""
    block = re.search(rf"^{name} \(.*?\)\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert block is not None, text
    tokens = ("voltage", "spike", "alarm")
    return [line.split()[1:] for line in block[1].splitlines() if line.split()[0] in tokens]


def test_example_prints_the_worked_calculation(capsys: pytest.CaptureFixture[str]) -> None:
    """Three tokens give the weights 0.401 0.198 0.401 and the output 6.017 3.983 in the first row (S5)."""
    text = run(capsys, "example")
    assert stage(text, "scores")[0] == ["1.000", "0.000", "1.000"]
    assert stage(text, "scaled")[0] == ["0.707", "0.000", "0.707"]
    assert stage(text, "weights")[0] == ["0.401", "0.198", "0.401"]
    assert stage(text, "output")[0] == ["6.017", "3.983"]
    assert stage(text, "visible") == [["yes"] * 3] * 3


def test_causal_example_hides_the_future(capsys: pytest.CaptureFixture[str]) -> None:
    """With --causal the second row of weights is 0.330 0.670 0, and the first sees itself alone (M4)."""
    text = run(capsys, "example", "--causal")
    assert stage(text, "visible") == [["yes", ".", "."], ["yes", "yes", "."], ["yes", "yes", "yes"]]
    assert stage(text, "logits")[1] == ["0.000", "0.707", "-inf"]
    assert stage(text, "weights")[:2] == [["1.000", "0.000", "0.000"], ["0.330", "0.670", "0.000"]]


def test_example_shows_every_stage_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage of attention_stages is printed, in the order of the pipeline, with its shape (S5)."""
    text = run(capsys, "example")
    printed = re.findall(r"^(\w+) \([\d, ]+\)$", text, re.MULTILINE)
    assert printed == ["q", "k", "v", *refattn.Stages._fields]


def test_example_as_json_has_full_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """--json holds the stages at full precision, and an infinity as a string, for JSON has none."""
    data = json.loads(run(capsys, "example", "--causal", "--json"))
    assert list(data["stages"]) == list(refattn.Stages._fields)
    assert data["stages"]["logits"]["values"][0][1:] == ["-inf", "-inf"]
    assert data["stages"]["weights"]["shape"] == [3, 3]
    weights = data["stages"]["weights"]["values"][1]
    assert sum(weights) == pytest.approx(1, abs=1e-15)
    assert weights[0] == pytest.approx(1 / (1 + 2.718281828459045 ** (2**-0.5)), abs=1e-15)
    assert {stage["clause"] for stage in data["stages"].values()} <= {clause.label for clause in CLAUSES}


def test_clauses_prints_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Every clause appears with label, level, title and its whole text, in the order of the specification."""
    text = " ".join(run(capsys, "clauses").split())
    places = [text.index(f"{clause.label} {clause.level} {clause.title} {clause.text}") for clause in CLAUSES]
    assert places == sorted(places)


@pytest.mark.parametrize(("names", "expected"), [(["m3", "P2"], {"M3", "P2"}), (["X"], {"X1", "X2"})])
def test_clauses_can_be_chosen(capsys: pytest.CaptureFixture[str], names: list[str], expected: set[str]) -> None:
    """Labels and chapters, in capitals or not, choose what is printed; --json gives every field."""
    data = json.loads(run(capsys, "clauses", "--json", *names))
    assert {clause["label"] for clause in data} == expected
    assert set(data[0]) >= {"label", "level", "title", "text", "note", "chapter"}
    assert all(clause["chapter"] in CHAPTERS for clause in data)


def test_a_clause_leads_to_its_code_and_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """Named by its label, a clause is followed by where it leads; a chapter is printed without."""
    (clause,) = json.loads(run(capsys, "clauses", "--json", "M4"))
    assert "masks.causal" in clause["cases"]
    assert "causal is ignored" in clause["faults"]
    assert any(place.startswith("pipeline.attention (refattn/pipeline.py:") for place in clause["code"])
    text = " ".join(run(capsys, "clauses", "M4").split())
    assert "errors: CausalError" in text
    assert "errors:" not in run(capsys, "clauses", "M")
    assert "errors:" not in run(capsys, "clauses")


@pytest.mark.parametrize(("name", "advice"), [("Z9", "the chapters are"), ("M99", "chapter M has M1, M2")])
def test_an_unknown_clause_is_a_usage_error(capsys: pytest.CaptureFixture[str], name: str, advice: str) -> None:
    """A label that does not exist gives exit code 2 and the labels that do."""
    assert cli.main(["clauses", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert name in err
    assert advice in err


def test_the_clause_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/clauses.md is what `refattn clauses --markdown` prints."""
    text = run(capsys, "clauses", "--markdown")
    assert text == markdown()
    page = (ROOT / "docs" / "clauses.md").read_text(encoding="utf-8")
    assert text == page, "write it anew: refattn clauses --markdown > docs/clauses.md"


def test_markdown_escapes_what_markdown_would_read(capsys: pytest.CaptureFixture[str]) -> None:
    """A clause with marks of Markdown in it, such as 2 * B * S, reaches the reader as it was written."""
    text = run(capsys, "clauses", "--markdown", "C3")
    assert "2 \\* B \\* S \\* Hkv \\* d\\_h" in text


def test_cost_prints_the_known_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """4096 x 4096 are 16,777,216 weights, 32 MiB a head, 1 GiB for 32 heads; caches are 8:2:1 (C1, C3)."""
    lines = [line.split() for line in run(capsys, "cost").splitlines()]
    assert ["weights", "of", "one", "head", "16,777,216", "32", "MiB"] in lines
    assert ["weights", "of", "all", "heads", "536,870,912", "1", "GiB"] in lines
    caches = [line for line in lines if line[:1] in (["MHA"], ["GQA"], ["MQA"]) and line[1] == "8"]
    assert [(line[0], line[2], line[6]) for line in caches] == [
        ("MHA", "8", "8"),
        ("GQA", "2", "2"),
        ("MQA", "1", "1"),
    ]
    assert ["full", "attention", "2", "n^2", "d", "1", "1", "2", "n", "d"] in lines


def test_cost_as_json_takes_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """--json holds the whole record, computed from the options given (C1, C2, C3, C4)."""
    sizes = ["--q-len", "3", "--k-len", "5", "--heads", "4", "--kv-heads", "2", "--d-k", "8", "--d-v", "6"]
    data = json.loads(run(capsys, "cost", "--json", *sizes, "--batch", "2", "--dtype", "float64", "--window", "2"))
    expected = cost.attention_cost(3, 5, heads=4, kv_heads=2, d_k=8, d_v=6, batch=2, dtype="float64")
    assert data["attention"] == expected.as_dict()
    assert (data["prefill"]["q_len"], data["decode"]["q_len"]) == (5, 1)
    shared = [(row["heads"], row["kv_heads"], row["kind"]) for row in data["kv_cache"]]
    assert shared == [
        (4, 4, "MHA"),
        (4, 2, "GQA"),
        (4, 1, "MQA"),
        (8, 8, "MHA"),
        (8, 2, "GQA"),
        (8, 1, "MQA"),
    ]
    assert data["alternatives"][3]["path"] == 4


def test_groups_that_do_not_divide_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Two heads have no grouped form between one each and one for both, so none is listed (C3, G1)."""
    data = json.loads(run(capsys, "cost", "--json", "--heads", "2"))
    assert [row["kv_heads"] for row in data["kv_cache"] if row["heads"] == 2] == [2, 1]


def test_a_path_that_never_arrives_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """A window of one key has no path between distant tokens: "never" (C4)."""
    assert "never" in run(capsys, "cost", "--window", "1")


def test_a_bad_size_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that refattn refuses give exit code 2, one line on stderr and nothing on stdout (E2)."""
    assert cli.main(["cost", "--heads", "8", "--kv-heads", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"refattn: kv_heads: expected .* got 3 \[refattn C1\]\n", err)


def some_records(*statuses: str) -> tuple[registry.BackendRecord, ...]:
    return tuple(
        registry.BackendRecord(f"plugin{index}", "somewhere", None, (), ("float32",), status)
        for index, status in enumerate(statuses)
    )


def test_backends_lists_what_the_registry_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table and the JSON show every record of the registry, with its status."""
    found = some_records("verified", "not verified here", "not installed")
    monkeypatch.setattr(registry, "backends", lambda: found)
    text = run(capsys, "backends")
    for record in found:
        (line,) = (line for line in text.splitlines() if line.startswith(record.name))
        assert record.status in line
        assert "float32" in line
    data = json.loads(run(capsys, "backends", "--json"))
    assert [line["status"] for line in data] == [record.status for record in found]


def test_a_broken_plugin_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`refattn backends` finds something wrong, and says so by its exit code, when a plugin is broken."""
    monkeypatch.setattr(registry, "backends", lambda: some_records("verified", "broken: no [bold]luck[/bold]"))
    assert cli.main(["backends"]) == 1
    assert "broken: no [bold]luck[/bold]" in capsys.readouterr().out


def test_check_hands_over_to_the_suite(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`refattn check` gives the target to the conformance suite; a target that is none is exit code 2."""
    seen = []

    def find_target(name: str, library: str, convention: str, gradients: str | None) -> Any:
        seen.append((name, library, convention, gradients))
        raise targets.TargetError("not here")

    monkeypatch.setattr(targets, "find_target", find_target)
    assert cli.main(["check", "mine:attend", "--library", "torch", "--convention", "jax", "--in-process"]) == 2
    assert seen == [("mine:attend", "torch", "jax", None)]
    assert capsys.readouterr() == ("", "refattn check: not here\n")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a subcommand the help goes to stderr, with exit code 2."""
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Start here" in err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_help_teaches_by_examples(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Every subcommand's help describes it and shows command lines to try."""
    text = run(capsys, name, "--help")
    assert text.count(f"  refattn {name}") >= 2


@pytest.mark.parametrize("arguments", [["juggle"], ["example", "--backwards"], ["cost", "--heads", "many"]])
def test_usage_errors_are_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """A command line that cannot be understood gives exit code 2 and a usage line on stderr."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: refattn")


def test_an_unknown_option_shows_the_options_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage that comes with the error is that of the subcommand, which lists what it takes."""
    assert cli.main(["compare", "x.npz", "--htlm", "x"]) == 2
    err = capsys.readouterr().err
    assert "usage: refattn compare" in err and "[--html FILE]" in err
    assert "refattn compare: error: unrecognized arguments: --htlm x" in err
    assert cli.main(["--nothing"]) == 2
    assert "refattn: error: unrecognized arguments: --nothing" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version of the package."""
    assert run(capsys, "--version") == f"refattn {refattn.__version__}\n"


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command with one line and the exit code that shells give it."""

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "backends", interrupted)
    assert cli.main(["backends"]) == 130
    assert capsys.readouterr().err == "refattn: interrupted\n"


def test_a_refusal_anywhere_is_exit_code_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rule refuses, its message is the one line on stderr (E2)."""

    def refused() -> Any:
        raise BackendError("backend", "a plugin", "nothing")

    monkeypatch.setattr(registry, "backends", refused)
    assert cli.main(["backends"]) == 2
    assert capsys.readouterr().err == "refattn: backend: expected a plugin; got nothing [refattn E4]\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE and reports a closed pipe in another way")
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    """`refattn clauses | head -1` ends quietly, with the exit code that shells give a broken pipe."""
    command = [sys.executable, "-m", "refattn", "clauses"]
    reader, writer = os.pipe()
    os.close(reader)  # nobody will ever read
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_vectors_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """--clause takes labels and chapters, --dtype what holds the inputs; --json gives names, clauses and flags."""
    found = json.loads(run(capsys, "vectors", "list", "--clause", "p7", "G2", "--dtype", "float16", "--json"))
    assert found
    for vector in found:
        assert {"P7", "G2"} & set(vector["clauses"])
        assert "float16" in vector["dtypes"]
        assert set(vector) == {"name", "clauses", "dtypes", "flags", "says"}
    lines = run(capsys, "vectors", "list", "--clause", "P7").splitlines()
    assert [line.split()[:2] for line in lines[2:-1]] == [[f"P7.plus_infinity.base-{n}", "P7"] for n in (1, 2)]
    assert lines[-1] == "2 vectors"


def test_vectors_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A clause that no values can show gives exit code 2 and the reason, an unknown one or no action a usage error."""
    for arguments, words in (
        (["list", "--clause", "T4"], "T4: Memory is no value."),
        (["export", str(tmp_path), "--clause", "P7", "--dtype", "float32", "--clause", "T4"], "T4"),
        (["list", "--clause", "Z9"], "the chapters are"),
        (["list", "--dtype", "int8"], "float16"),
        ([], "ACTION"),
    ):
        assert cli.main(["vectors", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert words in err
    assert list(tmp_path.iterdir()) == []


def test_exported_vectors_are_vectors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As JSON each vector is a file of its own, of the form of the shipped ones, with the schema beside it."""
    folder = tmp_path / "new" / "folder"
    assert f"2 vectors written to {folder}" in run(capsys, "vectors", "export", str(folder), "--clause", "P7")
    names = [f"P7.plus_infinity.base-{n}" for n in (1, 2)]
    assert {path.name for path in folder.iterdir()} == {"schema.json", *(f"{name}.json" for name in names)}
    shipped = {vector.name: vector.raw for vector in vectors.load(chapters="P")}
    for name in names:
        data = json.loads((folder / f"{name}.json").read_bytes())
        assert data == {"chapter": "P", "format": 1, "vectors": [shipped[name]]}


def test_exported_arrays_can_be_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As NumPy files the inputs are what `refattn check --inputs` reads, and the results stand beside them."""
    run(capsys, "vectors", "export", str(tmp_path), "--clause", "S5", "--format", "npz")
    names = [vector.name for vector in vectors.load(chapters="S") if "S5" in vector.clauses]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}{end}" for n in names for end in (".npz", ".expected.npz")
    }
    for name in names:
        inputs = str(tmp_path / f"{name}.npz")
        assert cli.main(["check", "numpy", "--only-inputs", "--inputs", inputs]) == 0
    assert cli.main(["vectors", "export", inputs]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_altered_vector_file_stops_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is not the one that was made is named, and the exit code is 2 (E5)."""
    monkeypatch.setattr(vectors.load, "__defaults__", (tmp_path, None))
    assert cli.main(["vectors", "list"]) == 2
    assert "manifest.json" in capsys.readouterr().err


def test_processes_print_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m refattn` prints what main() prints, without escape codes where there is no terminal."""
    for arguments in (["example"], ["clauses", "M"], ["cost"]):
        done = process(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert done.stdout == run(capsys, *arguments)


def test_backends_as_a_process() -> None:
    """`python -m refattn backends --json` lists our six plugins, each verified or with the reason why not."""
    done = process("backends", "--json")
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    ours = {line["name"]: line for line in json.loads(done.stdout) if line["distribution"] == "refattn"}
    assert set(ours) == {"cupy", "dask", "jax", "numpy", "strict", "torch"}
    assert ours["numpy"]["status"] == "verified"
    for line in ours.values():
        expected = "verified" if line["devices"] else "not verified here" if line["version"] else "not installed"
        assert line["status"] == expected


def test_check_as_a_process() -> None:
    """`python -m refattn check --help` works as a process and explains its target."""
    done = process("check", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "TARGET" in done.stdout


def test_a_narrow_encoding_is_no_traceback() -> None:
    """Where the output cannot show a character, a stand-in is printed and the command succeeds."""
    done = process("cost", env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "16,777,216" in done.stdout


def test_help_is_light() -> None:
    """The help of every subcommand but check loads no array library, so that it answers at once."""
    program = (
        "import sys; from refattn import cli\n"
        "names = 'example', 'clauses', 'backends', 'cost', 'vectors', 'cases', 'compare'\n"
        "assert all(cli.main([name, '--help']) == 0 for name in names)\n"
        "assert cli.main(['clauses', 'M']) == 0\n"
        "heavy = {'numpy', 'torch', 'jax', 'dask', 'rich', 'refattn.conformance.case'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (32 * 2**20, "32 MiB"),
        (2**60, "1,024 PiB"),
        (1536, "1.5 KiB"),
    ],
)
def test_sizes_are_in_binary_units(number: int, text: str) -> None:
    """A number of bytes is printed in the largest unit that keeps it at least 1."""
    assert output.size(number) == text


def test_json_is_valid_for_any_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Infinities and NaN become strings, and everything else stays what it was."""
    output.print_json({"a": [float("inf"), float("nan"), (1, None, True, "x")], "b": -0.5})
    assert json.loads(capsys.readouterr().out) == {"a": ["inf", "nan", [1, None, True, "x"]], "b": -0.5}
