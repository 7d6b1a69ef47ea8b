"""The pytest plugin: `pytest --pyargs refattn.conformance --refattn-target NAME`.

It is loaded in every pytest run of an environment that has refattn, so it only adds an option and imports nothing.
"""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """The target, as `refattn check` takes it."""
    group = parser.getgroup("refattn", "refattn conformance suite (pytest --pyargs refattn.conformance)")
    group.addoption(
        "--refattn-target",
        metavar="NAME",
        default="numpy",
        help="implementation that refattn.conformance judges: torch, refattn-LIBRARY, or module:function (numpy)",
    )
    group.addoption(
        "--refattn-library",
        metavar="NAME",
        default="numpy",
        help="array library that a module:function is called with (numpy)",
    )
    group.addoption(
        "--refattn-dtypes", metavar="float32,...", default=None, help="only these dtypes (all that the target has)"
    )
    group.addoption("--refattn-seed", metavar="N", type=int, default=None, help="seed of the cases' data")
