"""Tensors captured from a model, as cases: a file with q, k and v, or several problems as NAME.q, NAME.k, NAME.v.

mask (boolean, True = visible), bias, scale, softcap, sinks, causal, q_start and k_start are optional, and so is
grad_output, the gradient of the output. dtype names the one that q, k and v had where the file lost it. Results are for
`refattn compare`, and what else `--save-inputs` and `--save-failures` write is for the reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refattn.arguments import check_call
from refattn.arrays import Array, Shape
from refattn.conformance.case import LAYOUTS, Case, Problem
from refattn.conformance.exchange.bits import FLOATS, Tensor, tensor_of
from refattn.conformance.exchange.files import LARGEST, TensorFileError, read_tensors, write_npz
from refattn.conformance.gradients import FILED
from refattn.conformance.plain import Draw, rounded
from refattn.conformance.records import CAPTURED
from refattn.dtypes import COMPUTED, is_float8
from refattn.errors import RefattnError

REQUIRED = ("q", "k", "v")
ARRAYS, NUMBERS, STARTS = ("mask", "bias", "sinks"), ("scale", "softcap"), ("q_start", "k_start")
OPTIONAL = (*ARRAYS, *NUMBERS, "causal", *STARTS, "grad_output", "dtype")
RESULTS = ("output", "lse", "weights", *FILED.values())
ASIDE = (
    *("visible", "expected", "expected_lse", "bound", "layout", "coherent", "among_others"),
    *(f"{what}_{name}" for what in ("expected", "bound") for name in FILED.values()),
)
NAMES = ", ".join((*REQUIRED, *OPTIONAL, *RESULTS))
CLAUSES_OF_ANY_INPUT, CLAUSES_OF_GRADIENTS = ("S5", "N6"), ("D1", "D8")
# What takes its dtype from q.
OF_Q = (*REQUIRED, "bias", "sinks", "output", "grad_output", *FILED.values())
FLAGS = ("causal", "coherent", "among_others")
KINDS = dict.fromkeys(("mask", "visible", *FLAGS), "b") | dict.fromkeys(STARTS, "iu")
KINDS |= dict.fromkeys(NUMBERS, "fiu") | dict.fromkeys(("dtype", "layout"), "U")
WORDS = {"b": "boolean", "f": "floating", "iu": "an integer", "fiu": "a number", "U": "a short text"}


@dataclass(frozen=True, kw_only=True)
class CapturedCase(Case):
    """A case whose tensors were stored in a dtype of their own."""

    own_dtype: str


class Group(NamedTuple):
    """The tensors of one problem, by name, and what to call them in messages."""

    path: Path
    name: str
    parts: dict[str, Tensor]

    @property
    def dtype(self) -> str:
        """The dtype that q, k and v are computed in; those of 8 bits return float32 (A4)."""
        own = self.parts["q"].dtype
        return "float32" if is_float8(own) else own

    def called(self, part: str) -> str:
        """The full name of a tensor."""
        return f"{self.name}.{part}" if self.name else part

    def refused(self, reason: str) -> TensorFileError:
        """The error that says why the file cannot be used."""
        return TensorFileError(f"{self.path}: {reason}")


def captured_cases(path: Path, gradients: bool = False) -> list[CapturedCase]:
    """One case per problem in the file, in its order; about gradients too where asked for. Raises TensorFileError."""
    return [_case(group, gradients) for group in read_groups(path)]


def read_groups(
    path: Path, dtype: str | None = None, given: dict[str, Tensor] | None = None, largest: int = LARGEST
) -> list[Group]:
    """The problems of a file, in its order; arrays fit each other only once `check_group` has seen them.

    dtype is that of q, k and v where the file does not say, given are options for all problems.
    Raises TensorFileError.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(path, largest).items():
        group, _, part = name.rpartition(".")
        if part not in REQUIRED + OPTIONAL + RESULTS + ASIDE:
            raise TensorFileError(f"{path}: {name!r} is no known tensor; expected {NAMES}, or NAME.q, NAME.k, ...")
        groups.setdefault(group, {})[part] = tensor
    if not groups:
        raise TensorFileError(f"{path} is empty; expected q, k and v")
    return [_group(Group(path, name, parts), dtype, given or {}) for name, parts in groups.items()]


def check_group(group: Group) -> None:
    """Whether shapes and options go together. Raises TensorFileError."""
    parts = group.parts
    q, k, v = (parts[name].shape for name in REQUIRED)
    if not _fit(q, k, v):
        expected = "expected q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k), v (..., Hkv, Lk, d_v)"
        turned = [(*shape[:-3], *shape[-3:-1][::-1], *shape[-1:]) for shape in (q, k, v)]
        hint = "; tokens before heads are read by refattn compare --layout BSHD" if _fit(*turned) else ""
        raise group.refused(f"{expected}; {group.called('q')} {q}, k {k}, v {v}{hint}")
    batch = np.broadcast_shapes(*(shape[:-3] for shape in (q, k, v))) if len(q) > 2 else ()
    output = (*batch, *q[-3 if len(q) > 2 else -2 : -1], v[-1])
    if "grad_output" in parts and parts["grad_output"].shape != output:
        got = parts["grad_output"].shape
        raise group.refused(f"{group.called('grad_output')} has shape {got}, expected that of the output, {output}")
    _check_options(group)


def _fit(q: Shape, k: Shape, v: Shape) -> bool:
    fit = len(q) == len(k) == len(v) >= 2 and q[-1] == k[-1] and k[-2] == v[-2]
    return fit and (len(q) == 2 or (k[-3] == v[-3] and bool(k[-3]) and q[-3] % k[-3] == 0))


def problem_of(group: Group, dtype: str | None = None) -> Problem:
    """The call, in the group's dtype or in another, which q, k, v, bias and sinks are then rounded to."""
    parts = group.parts
    values = {name: parts[name].values() for name in (*REQUIRED, *ARRAYS, "grad_output") if name in parts}
    if dtype is not None:
        values |= {name: rounded(values[name], dtype) for name in values if name != "mask"}
    options = _numbers_of(parts)
    options |= {name: bool(parts[name].stored.reshape(())) for name in FLAGS if name in parts}
    if "layout" in parts:
        options["layout"] = str(parts["layout"].stored)
    return Problem(dtype=dtype or group.dtype, shown=values.pop("mask", None), **values, **options)


def tensors_of(problem: Problem) -> dict[str, Tensor]:
    """What `read_groups` reads back: exactly the problem, bfloat16 in float32, which .npz files keep."""
    wide = "float32" if problem.dtype == "bfloat16" else problem.dtype
    floats = {name: getattr(problem, name) for name in (*REQUIRED, "bias", "sinks", "grad_output")}
    parts = {name: tensor_of(x, wide) for name, x in floats.items() if x is not None}
    others: dict[str, Any] = {name: getattr(problem, name) for name in (*NUMBERS, "q_start")}
    others |= {"mask": problem.shown, **{name: getattr(problem, name) or None for name in FLAGS}}
    others["k_start"] = problem.k_start if "k_start" in problem.needs else None
    others["layout"] = problem.layout if problem.layout != LAYOUTS[0] else None
    others["dtype"] = problem.dtype if wide != problem.dtype else None
    return parts | {name: tensor_of(np.asarray(x)) for name, x in others.items() if x is not None}


def save_inputs(path: Path, problems: Iterable[tuple[str, Problem]]) -> None:
    """Writes problems, each under its name, with the pairs that are visible."""
    stored: dict[str, Tensor] = {}
    for name, problem in problems:
        parts = tensors_of(problem) | {"visible": tensor_of(problem.visible)}
        stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    write_npz(path, stored)


def _group(group: Group, dtype: str | None, given: dict[str, Tensor]) -> Group:
    """With the options that were given, and floats in the dtype that is claimed for them."""
    parts = group.parts
    if missing := [group.called(name) for name in REQUIRED if name not in parts]:
        raise TensorFileError(f"{group.path} lacks {', '.join(missing)}")
    if twice := [name for name in given if name in parts]:
        raise group.refused(f"{group.called(twice[0])} is in the file, and was given beside it")
    parts = parts | given
    if "dtype" in parts:
        _check_kind(group, "dtype", parts["dtype"])
        stored = str(parts["dtype"].stored)
        if dtype not in (None, stored) or stored not in FLOATS:
            expected = dtype or f"one of {', '.join(FLOATS)}"
            raise group.refused(f"{group.called('dtype')} is {stored!r}, expected {expected}")
        dtype = stored
    if dtype is not None:
        parts = parts | {name: parts[name].read_as(dtype) for name in OF_Q if name in parts}
        for name in REQUIRED:
            _check_kind(group, name, parts[name])
            if parts[name].dtype != dtype:
                stored = parts[name].dtype
                raise group.refused(f"{group.called(name)} is {stored} and holds what is no number of {dtype}")
    for name, tensor in parts.items():
        _check_kind(group, name, tensor)
    return group._replace(parts=parts)


def _case(group: Group, gradients: bool) -> CapturedCase:
    check_group(group)
    if not gradients:
        group = group._replace(parts={name: part for name, part in group.parts.items() if name != "grad_output"})
    of_gradients = CLAUSES_OF_GRADIENTS if "grad_output" in group.parts else ()
    shape = group.parts["q"].shape

    def build(draw: Draw) -> Problem:
        return replace(problem_of(group, draw.dtype), layout=LAYOUTS[0])

    return CapturedCase(
        name=f"{CAPTURED}{group.name or group.path.stem}",
        clauses=(*CLAUSES_OF_ANY_INPUT, *of_gradients),
        says=f"On captured tensors, q {shape}, the result is that of the specification within the bound.",
        # Narrowed tensors are other inputs, just as real.
        dtypes=COMPUTED,
        build=build,
        own_dtype=group.dtype,
    )


def _numbers_of(parts: dict[str, Tensor]) -> dict[str, Any]:
    """Scale, soft cap and starts, the last two as ints or one number per batch entry."""
    found: dict[str, Any] = {name: float(parts[name].stored.reshape(())) for name in NUMBERS if name in parts}
    starts = {name: parts[name].stored for name in STARTS if name in parts}
    return found | {name: int(values) if values.ndim == 0 else values for name, values in starts.items()}


def _check_kind(group: Group, part: str, tensor: Tensor) -> None:
    expected, name = KINDS.get(part, "f"), group.called(part)
    if tensor.stored.dtype.kind == "V":
        advice = "name it with --dtype bfloat16, in an entry dtype, or store float32"
        raise group.refused(f"{name} is raw bytes ({tensor.dtype}): NumPy files lose bfloat16, so {advice}")
    kind = "f" if tensor.dtype in FLOATS else tensor.stored.dtype.kind
    if kind not in expected:
        raise group.refused(f"{name} must be {WORDS[expected]}, it is {tensor.dtype}")
    if part in (*NUMBERS, *FLAGS) and tensor.stored.size != 1:
        raise group.refused(f"{name} must be a single value, its shape is {tensor.shape}")
    if part == "layout" and str(tensor.stored) not in LAYOUTS:
        raise group.refused(f"{name} must be one of {', '.join(LAYOUTS)}, it is {str(tensor.stored)!r}")


def _check_options(group: Group) -> None:
    """The specification's own refusals, in its words: dtypes that differ, causal without q_start (M5), sinks, ..."""
    parts = group.parts
    for name in REQUIRED[1:]:
        if parts[name].dtype != parts["q"].dtype:
            expected = f"the dtype of q, {parts['q'].dtype}"
            raise group.refused(f"{group.called(name)}: expected {expected}; got {parts[name].dtype} [refattn A4]")
    # Neither mask nor bias has values that matter here, nor have q, k and v: shapes do, which cost no memory.
    options: dict[str, Any] = {name: _blank(parts[name]) for name in (*ARRAYS, *REQUIRED) if name in parts}
    options |= _numbers_of(parts)
    try:
        check_call(causal="causal" in parts and bool(parts["causal"].stored.reshape(())), **options)
    except RefattnError as fault:
        raise group.refused(group.called(str(fault))) from fault


def _blank(tensor: Tensor) -> Array:
    dtype = np.bool_ if tensor.dtype == "bool" else np.float32
    return np.broadcast_to(np.zeros((), dtype=dtype), tensor.shape)
