"""Targets of public implementations: right answers pass, and a wrong one of the library is caught."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from refattn.conformance.alarms import figures_of
from refattn.conformance.cases import all_cases
from refattn.conformance.isolation.target import IsolatedTarget
from refattn.conformance.probe import PROBES
from refattn.conformance.probe.caller import Caller
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets import find_target

CHOSEN = {
    *("scores.width_of_one_head", "masks.causal", "masks_by_index.padding", "biases.bias_per_head"),
    *("heads.grouped_query", "masks.lower_triangle", "softmax.sinks", "scores.softcap"),
}
LEAKS = "NaN and infinity leak"
# Name -> where the library's function is that the target calls.
FUNCTIONS = {
    "mlx": ("mlx.core.fast", "scaled_dot_product_attention"),
    "keras-torch": ("keras.ops", "dot_product_attention"),
    "onnx-reference": ("refattn.conformance.targets.onnx_attention", "run_node"),
    "onnxruntime": ("refattn.conformance.targets.onnx_attention", "run_node"),
    "onnxruntime-mha": ("refattn.conformance.targets.onnxruntime_contrib", "run_node"),
    "onnxruntime-gqa": ("refattn.conformance.targets.onnxruntime_contrib", "run_node"),
    "transformers-sdpa": ("torch.nn.functional", "scaled_dot_product_attention"),
    "transformers-eager": ("torch.nn.functional", "softmax"),
    "transformers-gemma2": ("torch.nn.functional", "softmax"),
}


def verdicts(name: str) -> list[str]:
    cases = [case for case in all_cases() if case.name in CHOSEN]
    report = run_suite(find_target(name), chosen_pairs(cases, dtypes=("float32",)), 20)
    return [record.verdict for record in report.records if record.verdict != "unsupported"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_answers_pass_and_wrong_ones_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary cases pass; with results 1 % too large all of them fail."""
    right = verdicts(name)
    assert len(right) >= 2 and set(right) == {"pass"}
    module = importlib.import_module(FUNCTIONS[name][0])
    whole = getattr(module, FUNCTIONS[name][1])

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = whole(*arguments, **options)
        return [found[0] * np.float32(1.01), *found[1:]] if isinstance(found, list) else found * 1.01

    monkeypatch.setattr(module, FUNCTIONS[name][1], wrong)
    assert set(verdicts(name)) == {"fail"}


# Name -> lines of its card that are documented, or known, and were looked at by hand.
FACTS = {
    "jax": {"window": "left + 1 + right keys", "causal alignment": "top-left", "empty row": "mean of v"},
    "mlx": {"causal alignment": "bottom-right", "precision of float64": "float32", "hidden values": LEAKS},
    "onnx-reference": {
        "window": "left + 1 + right keys",
        "q_start": "honoured",
        "starts of each entry": "each its own",
    },
    "onnxruntime": {"window": "left + 1 + right keys", "q_start": "honoured", "empty row": "zeros"},
    "onnxruntime-mha": {"causal alignment": "other", "sizes of zero": "some crash", "mask": "not offered"},
    "onnxruntime-gqa": {
        "window": "one less on the left",
        "causal alignment": "bottom-right",
        "scale option": "zero means default",
        "query of NaN": "zeros with causal",
        "sinks": "in the denominator",
        "sizes of zero": "some crash",
    },
    "keras-torch": {"dtype of the result": "float32 for float64", "hidden biases": "not offered"},
    "transformers-sdpa": {"mask with causal": "causal ignored"},
    "transformers-eager": {
        "mask": "not offered",
        "causal": "not offered",
        "overflow in float16": "raw scores overflow",
    },
    "tinygrad": {"rank 2": "accepted", "empty row": "NaN"},
}


@pytest.mark.parametrize("name", FACTS)
def test_known_lines_of_the_cards(name: str) -> None:
    """The probes find what is known."""
    target = IsolatedTarget(name)
    try:
        caller = Caller(target)
        found = {one.name: one.ask(caller).found for one in PROBES if one.name in FACTS[name]}
    finally:
        target.close()
    assert found == FACTS[name]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "onnx-reference"])
def test_no_random_problem_accuses_them(name: str) -> None:
    """Random problems accuse none but for what is known of it."""
    figures = figures_of(name, range(40))
    assert figures["accused"] == []
    assert figures["verdicts"]["float32"]["pass"] > 0
