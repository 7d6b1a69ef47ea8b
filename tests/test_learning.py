"""The guide's training in NumPy: the weights end on the right event, by the gradients and by nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn.conformance.faults import named

FILE = Path(__file__).parents[1] / "docs" / "examples" / "retrieval.py"


@pytest.fixture(scope="module")
def retrieval() -> Any:
    """The programme of the guide."""
    specification = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def learned(retrieval: Any, fault: str, seed: int) -> float:
    """The weight on the right event after training with wrong gradients."""
    backward = named(fault).gradients()
    with np.errstate(all="ignore"):
        models, _ = retrieval.train(seed, vjp=lambda *call: [backward(*call)[name] for name in "qkv"])
        return float(retrieval.found(models[-1]))


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_end_on_the_right_event(retrieval: Any, seed: int) -> None:
    """From chance they come to more than 0.95 on fresh streams, and are far above chance in streams of 1000 events."""
    models, errors = retrieval.train(seed)
    assert retrieval.found(models[0]) < 0.05
    assert retrieval.found(models[-1]) > 0.95
    assert retrieval.found(models[-1], length=1000, streams=20) > 0.5
    assert errors[-1] < 1e-3 * errors[0]


def test_a_step_goes_down_the_gradient(retrieval: Any) -> None:
    """What a step takes from each projection is the derivative of the error, as small differences have it."""
    models, _ = retrieval.train(steps=1)
    streams = retrieval.draw(np.random.default_rng(2))
    model, size = models[-1], 1e-5
    moved, _ = retrieval.learn(model, streams)
    for which, (before, after) in enumerate(zip(model, moved, strict=True)):
        at = np.unravel_index(np.argmax(np.abs(before - after)), before.shape)

        def error(change: float, which: int = which, at: Any = at) -> float:
            changed = [w.copy() for w in model]
            changed[which][at] += change
            return float(retrieval.learn(retrieval.Model(*changed), streams)[1])

        slope = (error(size) - error(-size)) / (2 * size)
        assert (before - after)[at] / retrieval.RATE == pytest.approx(slope, rel=1e-6)


def test_without_the_row_sum_nothing_is_learned(retrieval: Any) -> None:
    """Gradients that lack the sum which softmax subtracts end far from the right event, or in NaN."""
    for fault in ("row sum missing", "row sum is a mean"):
        assert not learned(retrieval, fault, seed=0) > 0.5


def test_a_wrong_scale_is_learned_with_all_the_same(retrieval: Any) -> None:
    """What the guide says: training is no test of a gradient, since a wrong scale is another rate."""
    for fault in ("scale missing from dq", "scale twice in dk"):
        assert learned(retrieval, fault, seed=0) > 0.95


def test_it_takes_numpy_alone() -> None:
    """No other array library is loaded by a training."""
    code = (
        f"import sys; sys.path.insert(0, {str(FILE.parent)!r})\n"
        "import retrieval; retrieval.train(steps=2)\n"
        "print([name for name in ('torch', 'jax', 'cupy', 'dask', 'tensorflow') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
