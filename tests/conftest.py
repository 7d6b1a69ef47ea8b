"""`--library NAME` chooses the array library; tests that take the `library` fixture run on that one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings

from libraries import LIBRARIES, SLOW, Library, dtypes

# Slow libraries get fewer examples, and OTHERS is for those without a number.
EXAMPLES, OTHERS = {"numpy": 300, "torch": 150, "jax": 10, "dask": 10}, 100
SWEPT = 10_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--library", choices=sorted(LIBRARIES), default="numpy", help="array library under test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "library(*names): the test belongs to these array libraries alone")
    examples = EXAMPLES.get(config.getoption("--library"), OTHERS)
    # Shrinking a failure takes these many minutes.
    slow = config.getoption("--library") in SLOW
    phases = (Phase.explicit, Phase.generate) if slow else tuple(Phase)
    profile = config.getoption("--hypothesis-profile") or "refattn"
    # `--hypothesis-profile sweep`: fresh cases instead of the same ones, and ten times as many, for every test; where
    # no call is compiled or scheduled, SWEPT of them for the tests of the whole surface.
    sweep = profile == "sweep"
    more = 10 if sweep else 1
    counts = {"sweep" if sweep else "refattn": more * examples, "few": more * max(2, examples // 10)}
    counts["surface"] = SWEPT if sweep and not slow else more * examples
    for name, count in counts.items():
        settings.register_profile(
            name, deadline=None, derandomize=not sweep, max_examples=count, database=None, phases=phases
        )
    if profile in ("refattn", "sweep"):
        settings.load_profile(profile)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A `storage_dtype` argument takes every float dtype of the library that is narrower than float64."""
    if "storage_dtype" in metafunc.fixturenames:
        names = dtypes(metafunc.config.getoption("--library"))
        metafunc.parametrize("storage_dtype", [name for name in names if name != "float64"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is about the chosen library; tests here that are about none run for NumPy alone."""
    chosen = config.getoption("--library")
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        names = [name for mark in item.iter_markers("library") for name in mark.args]
        about_it = "library" in getattr(item, "fixturenames", ()) or item.path.parent != Path(__file__).parent
        anywhere = not names and (about_it or chosen == "numpy")
        (kept if chosen in names or anywhere else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Library:
    """The array library that this run is about."""
    return LIBRARIES[request.config.getoption("--library")]()
