"""The pytest plugin in a project of somebody else's, as its guide describes it, with nothing but the package."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from refattn.conformance.plugin import pairs_of

GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "pytest.md"
RIGHT = """\
from refattn.conformance.faults import named

plain = named("plain").attention()


def attend(q, k, v, *, causal=False, scale=None, q_start=None, mask=None):
    return plain(q, k, v, causal=causal, scale=scale, q_start=q_start, mask=mask)
"""
WRONG = RIGHT + "\n\nright = attend\n\n\ndef attend(q, k, v, **options):\n    return right(q, k, v, scale=1.0)[0]\n"


def blocks(language: str) -> list[str]:
    """The code blocks of that language in the guide."""
    found = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project as the guide sets it up, with a right kernel, and few cases so that it is quick."""
    (tmp_path / "my_kernel.py").write_text(RIGHT)
    (settings,) = blocks("toml")
    few = '\nrefattn_clauses = "S1,P2"\naddopts = ["--strict-markers", "--strict-config", "-pno:cacheprovider"]\n'
    (tmp_path / "pyproject.toml").write_text(settings + few)
    (own,) = blocks("python")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_own.py").write_text(own)
    (tmp_path / "tests" / "conftest.py").write_text(
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parents[1]))\n"
    )
    return tmp_path


def run(project: Path, *command: str, folder: str = "") -> tuple[int, str]:
    """The exit code and the output of a command line in the project; `pytest` and `refattn` are this interpreter's."""
    words = [sys.executable, "-m", *command]
    done = subprocess.run(words, cwd=project / folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def passed(output: str) -> int:
    """How many tests passed."""
    (count,) = re.findall(r"(\d+) passed", output) or ["0"]
    return int(count)


def test_pytest_alone_runs_the_suite(project: Path) -> None:
    """Without paths, the project's tests and the suite's cases run, from any folder; with paths, these alone."""
    code, output = run(project, "pytest", "-q")
    assert code == 0, output
    assert passed(output) > 10
    code, counted = run(project, "pytest", "-q", folder="tests")
    assert (code, passed(counted)) == (0, passed(output))
    code, own = run(project, "pytest", "-q", "tests")
    assert (code, passed(own)) == (0, 1)


def test_a_wrong_kernel_fails_with_the_clause(project: Path) -> None:
    """The message of a failing case says what must hold; the project's own test names the most telling case."""
    (project / "my_kernel.py").write_text(WRONG)
    code, output = run(project, "pytest", "-q")
    assert code == 1
    assert "FAILED tests/test_own.py::test_scores_and_softmax" in output
    assert "my_kernel:attend does not conform" in output
    assert "S1: Default scale." in output


def test_the_commands_of_the_guide(project: Path) -> None:
    """Each documented command line runs as it stands, and gives 0 for a kernel that conforms."""
    commands = blocks("sh")[0].splitlines()
    workflow = blocks("yaml")[0]
    commands += re.findall(r"- run: (.*)", workflow)
    ours = [line for line in commands if not line.startswith("python -m pip install")]
    assert len(ours) == len(commands) - 1 == 5
    counts = {}
    for line in ours:
        words = shlex.split(line, comments=True)
        if words[0] == "refattn":
            words += ["--clauses", "S1", "--quick"]
        code, output = run(project, *words)
        assert code == 0, f"{line}: {output}"
        counts[line.partition("#")[0].strip()] = passed(output)
    assert counts['pytest -m "not refattn"'] == 1
    assert counts["pytest"] > 10
    assert counts["pytest -m refattn --refattn-clauses S,M"] > counts["pytest"]
    kept = re.search(r"path: (.*)", workflow)
    assert kept is not None
    assert {path.suffix for path in project.glob(kept[1])} == {".html", ".xml", ".json"}


def test_several_processes_share_the_cases(project: Path) -> None:
    """With pytest-xdist each case runs once."""
    code, output = run(project, "pytest", "-q", "-n", "2", "-rA")
    assert code == 0, output
    names = re.findall(r"PASSED (\S+)", output)
    assert len(names) == len(set(names)) == passed(output) > 10


def test_a_kernel_of_another_convention(project: Path) -> None:
    """refattn_convention says how the function is called; without it the same function fails."""
    (project / "mine.toml").write_text(
        'says = "tokens before heads"\nlayout = "BSHD"\nlibrary = "numpy"\nnames = { scale = "softmax_scale" }\n'
    )
    (project / "my_kernel.py").write_text(
        RIGHT.replace("def attend", "def heads_first")
        + "\n\ndef attend(q, k, v, *, softmax_scale=None):\n"
        + "    q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))\n"
        + "    return heads_first(q, k, v, scale=softmax_scale)[0].swapaxes(-2, -3)\n"
    )
    suite = ("pytest", "-q", "-m", "refattn", "--refattn-clauses", "S1")
    code, output = run(project, *suite, "--refattn-convention", "mine.toml")
    assert code == 0, output
    assert passed(output) > 10
    assert run(project, *suite)[0] == 1


def test_settings_that_make_no_sense(project: Path) -> None:
    """A name that is none ends the run with a sentence, never with a pass."""
    for clauses, dtypes, words in (("Z9", "", "no clause or chapter 'Z9'"), ("", "int8", "no dtype int8")):
        with pytest.raises(pytest.UsageError, match=words):
            pairs_of(clauses, dtypes)
    code, output = run(project, "pytest", "-q", "-m", "refattn", "--refattn-seed", "few")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "expected a whole number, got 'few'" in output
    assert passed(output) == 0


def test_projects_that_name_no_target_notice_nothing(project: Path) -> None:
    """Without the setting, plain pytest collects the project's own tests alone."""
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    code, output = run(project, "pytest", "-q")
    assert (code, passed(output)) == (0, 1)


BACKWARD = """

from refattn.conformance.faults.backward import Backward


def backward(q, k, v, gradient, *, causal=False, scale=None, q_start=None, mask=None):
    return Backward(q, k, v, gradient, causal=causal, scale=scale, q_start=q_start, mask=mask).gradients()


def halved(*arguments, **options):
    return {name: x / 2 for name, x in backward(*arguments, **options).items()}
"""
OWN = """

def test_gradients(refattn_check):
    from my_kernel import attend, backward, halved
    refattn_check(attend, gradients=backward, clauses="D2", dtypes="float32")
    try:
        refattn_check(attend, gradients=halved, clauses="D2", dtypes="float32")
    except BaseException as fault:
        assert "0.5 times the right one" in str(fault)
    else:
        raise AssertionError("it passed")
"""


def test_gradients_are_judged_where_they_are_asked_for(project: Path) -> None:
    """A backward function is named by a setting, or handed to the fixture; without either nothing is said of it."""
    (project / "my_kernel.py").write_text(RIGHT + BACKWARD)
    (project / "tests" / "test_own.py").write_text(OWN)
    asked = ("pytest", "-q", "--refattn-clauses", "D2", "--refattn-dtypes", "float32")
    code, output = run(project, *asked)
    assert code == 0, output
    without, few = passed(output), (*asked, "-m", "refattn")
    code, output = run(project, *few, "--refattn-gradients", "my_kernel:backward")
    assert code == 0 and passed(output) > without, output
    code, output = run(project, *few, "--refattn-gradients", "my_kernel:halved")
    assert code == 1 and "0.5 times the right one" in output
    code, output = run(project, *few, "--refattn-gradients", "autodiff")
    assert code == 4 and "numpy, which does not differentiate" in output
