"""The cases as pytest tests, one per case and dtype, on the target of --refattn-target.

Run as `pytest --pyargs refattn.conformance --refattn-target NAME`; `refattn check NAME` says the same without pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from refattn.conformance.cases import all_cases
from refattn.conformance.reports.terminal import explain
from refattn.conformance.runner import DEFAULT_SEED, chosen_pairs, run_case
from refattn.dtypes import COMPUTED

if TYPE_CHECKING:
    import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case and dtype."""
    names = metafunc.config.getoption("--refattn-dtypes")
    pairs = chosen_pairs(all_cases(), dtypes=tuple(names.split(",")) if names else COMPUTED)
    metafunc.parametrize(("case", "dtype"), pairs, ids=[f"{case.name}-{dtype}" for case, dtype in pairs])


def test_case(case: Any, dtype: str, request: pytest.FixtureRequest) -> None:
    """The target gives what the case's clauses demand."""
    import pytest

    option = request.config.getoption
    target = _target(option("--refattn-target"), option("--refattn-library"))
    seed = option("--refattn-seed")
    record = run_case(case, target, dtype, DEFAULT_SEED if seed is None else seed)
    if record.verdict in ("unsupported", "not judgeable"):
        pytest.skip(record.message)
    if record.verdict != "pass":
        pytest.fail(explain(record), pytrace=False)


_TARGETS: dict[tuple[str, str], Any] = {}


def _target(name: str, library: str) -> Any:
    """The target of that name, looked up once; one that cannot be called ends the run, as a usage error does."""
    import pytest

    from refattn.conformance.targets import TargetError, find_target

    if (name, library) not in _TARGETS:
        try:
            _TARGETS[name, library] = find_target(name, library)
        except TargetError as fault:
            pytest.exit(str(fault), returncode=pytest.ExitCode.USAGE_ERROR)
    return _TARGETS[name, library]
