"""`refattn compare DIR`: what a program put beside exported inputs, judged.

What is expected is computed here, from the selection in the manifest alone, and so is the manifest itself and every
input: one that differs from what was exported is refused by name, and nothing is judged.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from refattn.clauses import CLAUSES
from refattn.conformance.captured import RESULTS
from refattn.conformance.case import Problem
from refattn.conformance.diagnosis.gradients import explain_gradients
from refattn.conformance.exchange.bits import Tensor, tensor_of
from refattn.conformance.exchange.dump import result_of
from refattn.conformance.exchange.export import (
    DESCRIPTION,
    FEATURES,
    FORMATS,
    INPUTS,
    MANIFEST,
    OUTPUTS,
    SCHEMA,
    Exported,
    Selection,
    exported,
    in_lines,
    manifest,
)
from refattn.conformance.exchange.files import TensorFileError, read_raw, read_tensors
from refattn.conformance.exchange.words import in_words
from refattn.conformance.gradients import FILED
from refattn.conformance.judge import Result, golden_of, judge
from refattn.conformance.picked import NoSuchCase, picked
from refattn.conformance.plain import rounded
from refattn.conformance.recording import gathered, problem_in_words, record_of
from refattn.conformance.records import Record, Report
from refattn.dtypes import COMPUTED
from refattn.gradients import summed_to

# What is of the dtype of q.
OF_Q = {"output", *FILED.values()}
# Bytes of a manifest, of one case's description, and, per element that is expected, of a file of results.
MOST_TEXT, SPARE, PER_ELEMENT = 64 << 20, 1 << 16, 16
LISTS = {"dtypes": COMPUTED, "clauses": tuple(clause.label for clause in CLAUSES), "features": FEATURES}


def compare_folder(
    folder: Path, names: str | None = None, advance: Callable[[Record], None] = lambda record: None
) -> Report:
    """The verdicts on what lies beside exported inputs, of the cases of these names and patterns or of all.

    Raises TensorFileError for a folder that is not as it was exported.
    """
    import refattn

    started = time.monotonic()
    selection, found = _as_exported(folder)
    for one in found:
        _check_inputs(folder, one, selection.format)
    if names is not None:
        try:
            wanted = picked(names, (one.case.name for one in found))
        except NoSuchCase as fault:
            raise TensorFileError(f"{folder}: {fault}") from fault
        found = [one for one in found if one.case.name in wanted]
    records, diagnosis = gathered((_judged(folder, one, selection) for one in found), advance)
    features = "all features" if selection.features is None else f"no features but {', '.join(selection.features)}"
    clauses = "all clauses" if selection.clauses is None else f"clauses {', '.join(selection.clauses)}"
    limit = "" if selection.limit is None else f", the first {selection.limit}"
    return Report(
        target=str(folder),
        versions={"refattn": refattn.__version__},
        seed=selection.seed,
        records=records,
        seconds=time.monotonic() - started,
        notes=(f"exported: {', '.join(selection.dtypes)}; {clauses}; {features or 'no features'}{limit}",),
        diagnosis=diagnosis,
    )


def _as_exported(folder: Path) -> tuple[Selection, list[Exported]]:
    """The selection, and its cases made anew; the manifest must be what they give."""
    path = folder / MANIFEST
    if not path.is_file():
        raise TensorFileError(f"{folder} holds no {MANIFEST}; expected a folder that `refattn cases export` made")
    try:
        given = json.loads(_text(folder, path))
    except (ValueError, RecursionError) as fault:
        raise TensorFileError(f"{path} is no JSON: {fault}") from fault
    if not isinstance(given, dict) or given.get("schema") != SCHEMA:
        raise TensorFileError(f"{path} has another schema than {SCHEMA}")
    selection = _selection(path, given.get("selection"))
    found = list(exported(selection))
    made = manifest(selection, found)
    if given != made:
        import refattn

        theirs = given.get("refattn")
        advice = "" if theirs == refattn.__version__ else f"; it was exported by refattn {theirs}: export again"
        raise TensorFileError(f"{path} was changed: {_difference(given, made)} is not what was exported{advice}")
    return selection, found


def _selection(path: Path, given: Any) -> Selection:
    """A selection whose every value is one that the command line takes."""
    known = vars(Selection())
    if not isinstance(given, dict) or set(given) != set(known):
        raise TensorFileError(f"{path}: selection must hold {', '.join(known)}")
    right = {
        "format": given["format"] in FORMATS,
        "seed": type(given["seed"]) is int and given["seed"] >= 0,
        "gradients": type(given["gradients"]) is bool,
        "limit": given["limit"] is None or (type(given["limit"]) is int and given["limit"] > 0),
    }
    for name, words in LISTS.items():
        none = given[name] is None and name != "dtypes"
        right[name] = none or (isinstance(given[name], list) and all(word in words for word in given[name]))
    if wrong := [name for name, fits in right.items() if not fits]:
        raise TensorFileError(f"{path}: {wrong[0]} of the selection is {given[wrong[0]]!r}, which was never exported")
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return Selection(**values)


def _difference(given: dict[str, Any], made: dict[str, Any]) -> str:
    """Where two manifests differ, in words."""
    for name in {**made, **given}:
        if name != "cases" and given.get(name) != made.get(name):
            return repr(name)
    cases = given.get("cases")
    if not isinstance(cases, list) or len(cases) != len(made["cases"]):
        return "the number of cases"
    return next(f"case {mine['folder']}" for theirs, mine in zip(cases, made["cases"]) if theirs != mine)


def _check_inputs(folder: Path, one: Exported, form: str) -> None:
    """Whether description and tensors are those that were exported."""
    place = folder / one.folder
    path = _inside(folder, place / DESCRIPTION)
    if not path.is_file() or _text(folder, path) != in_lines(one.description()):
        raise TensorFileError(f"{path} is not as it was exported")
    if form == "raw":
        for name, tensor in one.tensors.items():
            path = _inside(folder, place / f"{name}.bin")
            if not path.is_file():
                raise TensorFileError(f"{path} is not there any more")
            if path.stat().st_size != tensor.stored.nbytes or path.read_bytes() != tensor.data():
                raise TensorFileError(f"{path} was changed since it was exported")
        return
    path = _inside(folder, place / f"{INPUTS}.{form}")
    found = read_tensors(path, SPARE + 2 * sum(tensor.stored.nbytes for tensor in one.tensors.values()))
    for name, tensor in one.tensors.items():
        same = name in found and found[name].shape == tensor.shape and found[name].stored.dtype == tensor.stored.dtype
        if not same or found[name].digest() != tensor.digest():
            raise TensorFileError(f"{path}: {name} was changed since it was exported")
    if extra := found.keys() - one.tensors.keys():
        raise TensorFileError(f"{path} holds {', '.join(sorted(extra))}, which was not exported")


def _judged(folder: Path, one: Exported, selection: Selection) -> Record:
    """The verdict on what lies beside one case's inputs."""
    problem = one.problem
    about: dict[str, Any] = {"case": one.case.name, "clauses": one.case.clauses, "says": one.case.says}
    about |= {"dtype": problem.dtype, "needs": one.needs, "called": problem_in_words(problem, selection.seed)}
    about["plainness"] = problem.plainness
    about["called"] += f", in {folder / one.folder}"
    try:
        parts = _read_results(folder, one, selection.format)
    except _ShapeFault as fault:
        return Record(**about, verdict="fail", message=str(fault), fault="A1")
    except TensorFileError as fault:
        return Record(**about, verdict="crashed", message=str(fault))
    if problem.grad_output is not None and any(name in parts for name in FILED.values()):
        right = golden_of(problem).output  # a backward pass alone wrote none
        parts = {"output": tensor_of(rounded(right, problem.dtype), problem.dtype)} | parts
    if "output" not in parts:
        return Record(**about, verdict="missing", message=one.folder)
    asked = {f"{name} gradient": filed for name, filed in FILED.items()}
    if lacking := tuple(name for name in problem.asks if asked.get(name, name) not in parts):
        words = "no log-sum-exp" if "lse" in lacking else f"no {lacking[0]}"
        return Record(**about, verdict="unsupported", message=f"{words} lies beside the inputs", missing=lacking)
    result = _as_the_problem_has_it(problem, one, result_of(problem, parts))
    judged, of_gradient = explain_gradients(problem, result, judge(problem, result))
    return record_of({**about, "message": in_words(problem, result, judged)}, problem, result, judged, of_gradient)


def _as_the_problem_has_it(problem: Problem, one: Exported, result: Result) -> Result:
    """With the gradient of the bias, which was exported in full, summed to the problem's own shape."""
    whole = result.gradients.get("bias")
    if whole is None or problem.bias is None or whole.shape != one.tensors["bias"].shape:
        return result
    return replace(result, gradients=result.gradients | {"bias": summed_to(np, whole, problem.bias.shape)})


class _ShapeFault(Exception):
    """A raw file that holds more or fewer elements than the result has."""


def _read_results(folder: Path, one: Exported, form: str) -> dict[str, Tensor]:
    """The results that are there, by name. Raises TensorFileError and _ShapeFault."""
    place, about = folder / one.folder, one.description()
    names = [name for name in RESULTS if about.get(name) is not None]
    if form != "raw":
        path = _inside(folder, place / f"{OUTPUTS}.{form}")
        if not path.exists():
            return {}
        found = read_tensors(path, SPARE + PER_ELEMENT * sum(math.prod(about[name]) for name in names))
        if extra := sorted(found.keys() - set(names)):
            expected = f"{', '.join(names[:-1])} and {names[-1]}"
            raise TensorFileError(f"{path} holds {extra[0]!r}, expected {expected}")
        if found and "output" not in found and one.problem.grad_output is None:
            raise TensorFileError(f"{path} holds no output, but {', '.join(sorted(found))}")
        for name in OF_Q & found.keys():
            found[name] = found[name].read_as(one.problem.dtype)
        return {name: _floating(path, name, tensor) for name, tensor in found.items()}
    wide = "float64" if one.problem.dtype == "float64" else "float32"
    found = {}
    for name in names:
        path = _inside(folder, place / f"{name}.bin")
        if path.exists():
            if not path.is_file():
                raise TensorFileError(f"{path} is no file")
            try:
                found[name] = read_raw(path, tuple(about[name]), one.problem.dtype if name in OF_Q else wide)
            except TensorFileError as fault:
                raise _ShapeFault(str(fault)) from fault
    return found


def _floating(path: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in COMPUTED:
        raise TensorFileError(f"{path}: {name} has dtype {tensor.dtype}, expected one of {', '.join(COMPUTED)}")
    return tensor


def _text(folder: Path, path: Path) -> str:
    """A text file of the folder, as long as one that was exported can be."""
    if _inside(folder, path).stat().st_size > MOST_TEXT:
        raise TensorFileError(f"{path} is longer than {MOST_TEXT:,} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise TensorFileError(f"{path} is no text in UTF-8") from fault


def _inside(folder: Path, path: Path) -> Path:
    """The path, which must not lead out of the folder. Raises TensorFileError."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TensorFileError(f"{path} leads out of {folder}")
    return path
