"""The cases as pytest tests, one per case and dtype, on the target of --refattn-target.

Run as `pytest --pyargs refattn.conformance --refattn-target NAME`; `refattn check NAME` says the same without pytest.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from refattn.conformance.plugin import pairs_of, setting
from refattn.conformance.records import DEFAULT_SEED
from refattn.conformance.reports.terminal import explain
from refattn.conformance.runner import run_case

if TYPE_CHECKING:
    import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case and dtype."""
    import pytest

    pairs = pairs_of(setting(metafunc.config, "clauses"), setting(metafunc.config, "dtypes"))
    mark = pytest.mark.refattn
    chosen = [pytest.param(case, dtype, marks=mark, id=f"{case.name}-{dtype}") for case, dtype in pairs]
    metafunc.parametrize(("case", "dtype"), chosen)


def test_case(case: Any, dtype: str, request: pytest.FixtureRequest) -> None:
    """The target gives what the case's clauses demand."""
    import pytest

    seed = setting(request.config, "seed")
    if seed and not (seed.isdecimal() and len(seed) <= 100):
        pytest.exit(
            f"refattn seed: expected a whole number, got {seed[:100]!r}", returncode=pytest.ExitCode.USAGE_ERROR
        )
    record = run_case(case, _target(request.config), dtype, int(seed or DEFAULT_SEED))
    if record.verdict in ("unsupported", "not judgeable"):
        pytest.skip(record.message)
    if record.verdict != "pass":
        pytest.fail(explain(record, "Failure"), pytrace=False)


_TARGETS: dict[tuple[str, ...], Any] = {}


def _target(config: pytest.Config) -> Any:
    """The target that is asked for, looked up once; one that cannot be called ends the run, as a usage error does."""
    import pytest

    from refattn.conformance.targets import TargetError, find_target

    asked = tuple(setting(config, name) for name in ("target", "library", "convention", "gradients"))
    if asked not in _TARGETS:
        # What a project's file names is found from where that file lies.
        from_file = config.getoption("--refattn-target") is None
        try:
            with contextlib.chdir(config.rootpath) if from_file else contextlib.nullcontext():
                target, *others = asked
                library, convention, gradients = (name or None for name in others)
                taken = "" if gradients == "autodiff" else gradients
                _TARGETS[asked] = find_target(target, library, convention, taken)
        except TargetError as fault:
            pytest.exit(str(fault), returncode=pytest.ExitCode.USAGE_ERROR)
    return _TARGETS[asked]
