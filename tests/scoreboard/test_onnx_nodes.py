"""ONNX's own tests of the node Attention, run on refattn through ONNX's public backend interface."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from scoreboard.onnx_backend import RefattnBackend, reason_to_skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # loading computes the expected results of every node there is
    TESTS = {one.name: one for one in load_model_tests(kind="node") if "attention" in one.name}


@pytest.mark.parametrize("name", TESTS)
def test_node(name: str) -> None:
    """The node gives what ONNX expects; what it expects of bfloat16 it has computed in that, to within 3 spacings."""
    test = TESTS[name]
    if reason := reason_to_skip(test.model):
        pytest.skip(reason)
    assert RefattnBackend.is_compatible(test.model)
    prepared = RefattnBackend.prepare(test.model)
    for inputs, expected in test.data_sets:
        found = prepared.run(inputs)
        low = any(np.asarray(x).dtype.name == "bfloat16" for x in expected)
        tolerance: dict[str, Any] = {"rtol": 3 * 2.0**-7 if low else test.rtol, "atol": test.atol}
        Runner.assert_similar_outputs(expected, found, **tolerance)


def test_enough_is_run() -> None:
    """At least 70 tests are run, and what is not run is one of three kinds."""
    reasons = Counter(reason_to_skip(test.model) for test in TESTS.values())
    assert reasons[""] >= 70
    assert len(reasons) <= 4
