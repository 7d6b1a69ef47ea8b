"""The pytest plugin: the suite on an implementation, by options or by the settings of a project.

    pytest --pyargs refattn.conformance --refattn-target my_kernel:attend

    [tool.pytest.ini_options]
    refattn_target = "my_kernel:attend"      # then `pytest` alone runs the suite too, beside the project's own tests

Every case has the marker `refattn`, and the fixture `refattn_check` judges a function within a test of one's own.
It is loaded in every pytest run of an environment that has refattn, so it imports nothing of it before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Name -> metavar and help, of the option --refattn-NAME and the setting refattn_NAME alike.
SETTINGS = {
    "target": ("NAME", "implementation to judge: torch, refattn-LIBRARY, module:function or path.py:function (numpy)"),
    "library": ("NAME", "array library that a module:function is called with (numpy, or what the convention says)"),
    "convention": ("NAME", "calling convention that a module:function speaks, or a file that says it (refattn's)"),
    "gradients": ("NAME", "judge gradients too: those of this module:function, or 'autodiff', what torch or jax takes"),
    "dtypes": ("float32,...", "only these dtypes (all that the target has)"),
    "clauses": ("S1,M", "only cases of these clauses or chapters (all)"),
    "seed": ("N", "seed of the cases' data"),
}
DEFAULTS = {"target": "numpy"}
MARKER = "refattn: a case of the conformance suite; -m 'not refattn' leaves them out"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Each setting as an option, and in the project's file, which the option overrides."""
    group = parser.getgroup("refattn", "refattn conformance suite (pytest --pyargs refattn.conformance)")
    for name, (metavar, words) in SETTINGS.items():
        group.addoption(f"--refattn-{name}", metavar=metavar, default=None, help=words)
        parser.addini(f"refattn_{name}", words, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Adds the suite to what is collected, if the project names a target and the command line names no tests."""
    config.addinivalue_line("markers", MARKER)
    if config.getini("refattn_target") and config.args_source != config.ArgsSource.ARGS:
        config.args.append(str(Path(__file__).with_name("test_conformance.py")))


def setting(config: pytest.Config, name: str) -> str:
    """The option, else the project's setting, else the default; "" where there is none."""
    given = config.getoption(f"--refattn-{name}")
    return str(config.getini(f"refattn_{name}") or DEFAULTS.get(name, "")) if given is None else str(given)


@pytest.fixture
def refattn_check() -> Callable[..., None]:
    """`refattn_check(function, library="numpy", clauses="S,M", dtypes="float32")` fails unless the function conforms.

    The function is called as f(q, k, v, **options), as by `refattn check`; what it cannot express is not judged.
    With gradients=backward, backward(q, k, v, grad_output, **options) is judged too.
    """
    return _check


def _check(
    function: Callable[..., Any],
    *,
    library: str = "numpy",
    gradients: Callable[..., Any] | None = None,
    clauses: str = "",
    dtypes: str = "",
    seed: int | None = None,
) -> None:
    __tracebackhide__ = True
    from refattn.conformance.headline import most_telling
    from refattn.conformance.records import DEFAULT_SEED
    from refattn.conformance.reports.terminal import explain, verdict_line
    from refattn.conformance.runner import run_suite
    from refattn.conformance.targets.function import FunctionTarget

    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    target = FunctionTarget(name, library, function, gradients)
    report = run_suite(target, pairs_of(clauses, dtypes), DEFAULT_SEED if seed is None else seed)
    if report.broken:
        pytest.fail(f"{verdict_line(report)}\n{explain(most_telling(report))}", pytrace=False)
    if not report.conforms:
        pytest.fail(verdict_line(report), pytrace=False)


def pairs_of(clauses: str, dtypes: str) -> list[tuple[Any, str]]:
    """The cases of those clauses in those dtypes, "" standing for all; a name that is none is a usage error."""
    from refattn.clauses import labels_in
    from refattn.conformance.cases import all_cases
    from refattn.conformance.runner import chosen_pairs
    from refattn.dtypes import COMPUTED, dtypes_in

    try:
        names = dtypes_in(dtypes)
    except ValueError as fault:
        raise pytest.UsageError(f"refattn dtypes: {fault}") from fault
    try:
        labels = labels_in(clauses) if clauses else None
    except ValueError as fault:
        raise pytest.UsageError(f"refattn clauses: {fault}") from fault
    return chosen_pairs(all_cases(), labels, names or COMPUTED)
