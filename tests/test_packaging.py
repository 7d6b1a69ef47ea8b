"""What a person gets who installs refattn: the files, the entry points, and an import that costs little."""

import ast
import contextlib
import re
import statistics
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

import refattn

CHECKOUT = Path(__file__).resolve().parents[1]
ROOTS = {"refattn": CHECKOUT / "refattn", "refattn_backends": CHECKOUT / "backends" / "refattn_backends"}
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LIBRARIES = ("array_api_strict", "cupy", "dask", "jax", "ml_dtypes", "numpy", "torch", "transformers")
HEAVY = (*LIBRARIES, "hypothesis", "rich")
# What this project writes itself; anything else, and what was made small by a tool, is somebody else's.
OURS = {".c", ".css", ".json", ".md", ".mjs", ".py", ".svg", ".toml", ".typed"}
# Licences under which something that is itself under MIT may ask for a library, as SPDX or classifiers name them.
FREE = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "PSF-2.0", "Zlib"),
    *("Apache Software License", "BSD License", "MIT License"),
}


def python(code: str) -> str:
    """Run code in a fresh interpreter like this one, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(modules: tuple[str, ...], after: str) -> str:
    """Return those of the modules that a fresh interpreter has loaded after some statements."""
    return python(f"{after}\nimport sys\nprint(*(name for name in {modules} if name in sys.modules))")


@pytest.fixture
def installed() -> Distribution:
    """The installed distribution. The nox sessions keep the checkout off the path, and so always have it."""
    if not sys.flags.safe_path:
        pytest.skip("the checkout may be on the path; with PYTHONSAFEPATH=1 the installed package is tested")
    return distribution("refattn")


def test_the_installed_package_is_tested(installed: Distribution) -> None:
    """What the tests import lies in site-packages, not in the working directory."""
    import refattn_backends

    for package in (refattn, refattn_backends):
        assert package.__file__ is not None
        assert "site-packages" in Path(package.__file__).parts
        assert Path(package.__file__) == installed.locate_file(f"{package.__name__}/__init__.py")


def test_the_wheel_holds_every_file(installed: Distribution) -> None:
    """The wheel holds both packages, data files and type markers included, and nothing else."""
    recorded = {path.as_posix() for path in installed.files or () if "__pycache__" not in path.parts}
    packaged = {path for path in recorded if path.split("/")[0] in ROOTS}
    shipped = {
        f"{name}/{path.relative_to(root).as_posix()}"
        for name, root in ROOTS.items()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == shipped
    assert {"refattn/py.typed", "refattn_backends/py.typed"} <= packaged
    scripts_and_metadata = {path.split("/")[0] for path in recorded - packaged}
    assert scripts_and_metadata == {"..", f"refattn-{installed.version}.dist-info"}


def test_entry_points(installed: Distribution) -> None:
    """Console script, pytest plugin and backends are those that pyproject declares, and all of them load."""
    declared = {(group, *item) for group, table in PROJECT["entry-points"].items() for item in table.items()}
    declared |= {("console_scripts", *item) for item in PROJECT["scripts"].items()}
    assert {(entry.group, entry.name, entry.value) for entry in installed.entry_points} == declared
    for entry in installed.entry_points:
        assert entry.load() is not None


def test_the_console_script_runs(installed: Distribution) -> None:
    """The command `refattn` stands beside the interpreter and says its version."""
    command = Path(sys.executable).with_name("refattn")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refattn", installed.version]


def test_versions_agree(installed: Distribution) -> None:
    """The package, its metadata and the changelog's newest heading name one version."""
    lines = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    newest = next(line for line in lines if line.startswith("## "))
    assert newest.startswith(f"## [{refattn.__version__}]")
    assert installed.version == refattn.__version__


def test_the_changelog_names_clauses_that_exist() -> None:
    """Each label in the changelog is one of the specification."""
    labels = re.findall(r"\b[A-Z]\d+\b", (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert labels
    assert set(labels) <= {clause.label for clause in refattn.CLAUSES}


def test_the_pythons_that_are_named_are_tested(installed: Distribution) -> None:
    """The metadata name the Pythons from the lowest that is admitted to the last one, each of which a session takes."""
    text = (CHECKOUT / "noxfile.py").read_text(encoding="utf-8")
    tested = re.findall(r"3\.\d+", " ".join(re.findall(r"python=(.*)\)", text)))
    classifiers = installed.metadata.get_all("Classifier", [])
    assert [name.rpartition(" ")[2] for name in classifiers if ":: 3." in name] == tested
    assert installed.metadata["Requires-Python"] == f">={tested[0]}"


def test_the_licence_is_shipped(installed: Distribution) -> None:
    """The metadata name the licence as SPDX does, and its text lies among them."""
    assert installed.metadata["License-Expression"] == "MIT"
    assert installed.read_text("licenses/LICENSE") == (CHECKOUT / "LICENSE").read_text(encoding="utf-8")


def test_what_others_made_lies_beside_its_licence() -> None:
    """All that the packages hold was written here; a folder with fonts or styles of others has their licence too."""
    theirs = {
        path
        for folder in (*ROOTS.values(), CHECKOUT / "docs", CHECKOUT / "tests")
        for path in folder.rglob("*.*")
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.parts[len(folder.parts) :])
        if path.suffix not in OURS or ".min." in path.name
    }
    assert {path.parent.name for path in theirs} == {"katex", "fonts"}
    assert [path for path in theirs if not (path.parent / "LICENSE").is_file()] == []


def test_what_is_installed_with_it_is_free(installed: Distribution) -> None:
    """All that refattn asks for without an extra, and what that asks for in turn, has a permissive licence."""
    found = {"refattn": installed}
    todo = [installed]
    for one in todo:
        for requirement in one.requires or ():
            name = re.split(r"[^\w.-]", requirement)[0]
            if name not in found and "extra ==" not in requirement:
                # What a marker leaves out is not there.
                with contextlib.suppress(PackageNotFoundError):
                    todo.append(found.setdefault(name, distribution(name)))
    assert {"numpy", "rich", "markdown-it-py"} <= found.keys()
    refused = {name: licences(one) - FREE for name, one in found.items()}
    assert {name: rest for name, rest in refused.items() if rest} == {}


def licences(one: Distribution) -> set[str]:
    """The names of a distribution's licences: of its expression, else of its classifiers, else what it says freely."""
    said = {field: one.metadata.get_all(field, []) for field in ("License-Expression", "Classifier", "License")}
    classified = [name.rpartition(":: ")[2] for name in said["Classifier"] if name.startswith("License ::")]
    expression = " AND ".join(said["License-Expression"] or classified or said["License"]) or "none that is named"
    return set(re.split(" (?:AND|OR) ", re.sub("[()]", "", expression)))


@pytest.mark.parametrize("module", ["refattn", "refattn.testing", "refattn.cli", "refattn.conformance.plugin"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    """Package, help for tests, command line and pytest plugin load no array library, nor Rich or Hypothesis."""
    assert loaded(HEAVY, after=f"import {module}") == ""


def test_backends_load_without_their_libraries(installed: Distribution) -> None:
    """Loading every backend imports no array library: that waits until one is asked for."""
    modules = [entry.module for entry in installed.entry_points if entry.group == "refattn.backends"]
    assert loaded(LIBRARIES, after=f"import {', '.join(modules)}") == ""


def test_import_time() -> None:
    """`import refattn` costs less than 0.15 s of processor time, whatever else the machine is doing."""
    timed = "import time; start = time.process_time(); import refattn; print(time.process_time() - start)"
    assert statistics.median(float(python(timed)) for _ in range(5)) < 0.15


def test_the_whole_run_has_one_budget() -> None:
    """The budgets of the sessions that `nox` runs everywhere sum to less than the 20 minutes that the pages promise."""
    sessions = (CHECKOUT / "noxfile.py").read_text(encoding="utf-8").split("@nox.session")[1:]
    budgets = {}
    for text in sessions:
        name, amount, unit = re.search(r"def (\w+).*?\((\d+) (minute|second)s?\)\.\"\"\"", text, re.DOTALL).groups()  # type: ignore[union-attr]  # every session has them
        head = text.partition("\n")[0]
        # What is kept is made for others, and no device answers everywhere.
        if ("default=False" not in head or "reuse_venv=True" in head) and name != "cupy":
            budgets[name] = int(amount) * (60 if unit == "minute" else 1)
    assert {"wheel", "lint", "numpy", "torch_env"} < budgets.keys()
    assert sum(budgets.values()) < 20 * 60, "a session that does not fit is `default=False`, or saves time elsewhere"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "below 20 minutes on two cores" in (CHECKOUT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((CHECKOUT / "tests").rglob("test_*.py")), ids=lambda path: path.stem)
def test_every_test_says_what_must_hold(path: Path) -> None:
    """Every test function has a docstring."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    assert tests
    assert [test.name for test in tests if not ast.get_docstring(test)] == []
