"""`refattn check --save-failures DIR`: each failing case as NAME.npz, and NAME.py, a script that repeats it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.captured import check_group, problem_of, read_groups, tensors_of
from refattn.conformance.case import Problem
from refattn.conformance.exchange.bits import Tensor, tensor_of
from refattn.conformance.exchange.files import write_npz
from refattn.conformance.exchange.words import options_of
from refattn.conformance.gradients import FILED, golden_gradients_of
from refattn.conformance.judge import Result, golden_of, judge, widest_model
from refattn.conformance.records import BROKEN, Record
from refattn.whole_files import write_whole

OPTIONS = ("library", "convention", "gradients")
SCRIPT = """\
from refattn.conformance.exchange.replay import load
from refattn.testing import assert_attention_close

call = load(__file__)  # {name}.npz beside this script
output, lse = call.run({how})
assert_attention_close(output, call.q, call.k, call.v, lse=lse, **call.options)
"""

OF_GRADIENTS = """\
from refattn.conformance.exchange.replay import load
from refattn.testing import assert_attention_close, assert_gradients_close

call = load(__file__)  # {name}.npz beside this script
output, gradients = call.differentiate({how})
assert_attention_close(output, call.q, call.k, call.v, **call.options)
assert_gradients_close(gradients, call.q, call.k, call.v, call.problem.grad_output, **call.options)
"""


class Remembering:
    """A target that keeps its last problem and what came of it, so that a failure can be saved."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.last: tuple[Problem, Result | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def call(self, problem: Problem) -> Result:
        """One call; a crash leaves the problem alone."""
        self.last = problem, None
        result: Result = self._target.call(problem)
        self.last = problem, result
        return result

    def save(self, folder: Path, record: Record, *how: str | None) -> None:
        """Writes the last call if its record is of a failure; how: what `find_target` got.

        Raises OSError.
        """
        last, self.last = self.last, None
        if last is not None and record.verdict in BROKEN:
            save_failure(folder, f"{record.case}.{record.dtype}", *last, how)


class Call(NamedTuple):
    """A failing call: q, k and v as NumPy arrays, and what `assert_attention_close` is told beside them."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    options: dict[str, Any]

    def run(
        self, target: str, library: str | None = None, convention: str | None = None, folder: str = "."
    ) -> tuple[Array, Array | None]:
        """Output and log-sum-exp of a target, named as for `refattn check` when it is called in that folder.

        Raises AssertionError where shape, dtype or side effects are wrong.
        """
        result = self._called(folder, target, library, convention)
        return result.output, result.lse

    def differentiate(
        self,
        target: str,
        library: str | None = None,
        convention: str | None = None,
        gradients: str | None = None,
        folder: str = ".",
    ) -> tuple[Array, dict[str, Array]]:
        """Output and gradients by name, likewise; gradients is what `--gradients` named."""
        result = self._called(folder, target, library, convention, gradients)
        return result.output, result.gradients

    def _called(self, folder: str, *how: str | None) -> Result:
        from refattn.conformance.targets import find_target

        target, *others = how
        with contextlib.chdir(folder):
            result = find_target(str(target), *others).call(self.problem)
        judged = judge(self.problem, result)
        if judged.verdict == "fail" and judged.place is None:
            raise AssertionError(judged.message)
        return result


def load(path: str | Path) -> Call:
    """The call that lies in NAME.npz, or beside the script NAME.py. Raises TensorFileError."""
    (group,) = read_groups(Path(path).with_suffix(".npz"))
    check_group(group)
    problem = problem_of(group)
    claim = {"dtype": problem.dtype, "model": widest_model(problem.dtype), "coherent": problem.coherent}
    return Call(problem, problem.q, problem.k, problem.v, options_of(problem) | claim)


def save_failure(folder: Path, name: str, problem: Problem, result: Result | None, how: tuple[str | None, ...]) -> None:
    """Writes inputs, what came out, what was expected and the bound, and the script. Raises OSError."""
    name = re.sub(r"[^\w.-]", "_", name)
    exact = golden_of(problem)
    model = widest_model(problem.dtype)
    came: dict[str, Array | None] = {"expected": exact.output, "expected_lse": exact.lse}
    came["bound"] = exact.bound(problem.dtype, model, problem.coherent)
    if result is not None and result.library:
        came |= {"output": result.output, "lse": result.lse, "weights": result.weights}
    if problem.grad_output is not None:
        gradients = golden_gradients_of(problem)
        came |= {f"expected_{FILED[of]}": x for of, x in gradients.values.items()}
        bounds = gradients.bounds(problem.dtype, model, problem.coherent)
        came |= {f"bound_{FILED[of]}": x for of, x in bounds.items()}
        came |= {} if result is None else {FILED[of]: x for of, x in result.gradients.items()}
    parts: dict[str, Tensor] = tensors_of(problem)
    parts |= {part: tensor_of(np.asarray(x)) for part, x in came.items() if x is not None}
    folder.mkdir(parents=True, exist_ok=True)
    write_npz(folder / f"{name}.npz", parts)
    target, *options = how
    given = [f"{option}={value!r}" for option, value in zip(OPTIONS, options) if value is not None]
    script = (SCRIPT if problem.grad_output is None else OF_GRADIENTS).format(
        name=name, how=", ".join([repr(target), *given, f"folder={str(Path.cwd())!r}"])
    )
    write_whole(folder / f"{name}.py", script.encode())
