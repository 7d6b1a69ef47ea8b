"""Tensors captured from a model, as cases: a .npz file with q, k and v, or several problems as NAME.q, NAME.k, NAME.v.

mask (boolean, True = visible), bias, scale, softcap, sinks, causal, q_start and k_start are optional; what else
`--save-inputs` writes (visible) is for the reader. No pickle is ever loaded.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refattn.arguments import check_call
from refattn.arrays import Array
from refattn.conformance.case import Case, Problem
from refattn.conformance.plain import Draw, rounded
from refattn.dtypes import COMPUTED, dtype_name
from refattn.errors import RefattnError

REQUIRED = ("q", "k", "v")
OPTIONAL = ("mask", "bias", "scale", "softcap", "sinks", "causal", "q_start", "k_start", "visible")
NAMES = ", ".join(REQUIRED + OPTIONAL[:-1])
PREFIX = "inputs."
CLAUSES_OF_ANY_INPUT = ("S5", "N6")


class CaptureError(Exception):
    """A file of captured tensors that cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class CapturedCase(Case):
    """A case whose tensors were stored in a dtype of their own."""

    own_dtype: str


def captured_cases(path: Path) -> list[CapturedCase]:
    """One case per problem in the file, in its order. Raises CaptureError."""
    try:
        with path.open("rb") as file:
            one_array = file.read(6) == b"\x93NUMPY"
        if not one_array and not zipfile.is_zipfile(path):
            raise CaptureError(f"{path} is not an .npz file; expected one with q, k and v, as numpy.savez writes it")
        stored = np.load(path, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise CaptureError(f"{path} holds one array; expected a .npz file with q, k and v")
        with stored:
            arrays = {name: stored[name] for name in stored.files}
    except FileNotFoundError as fault:
        raise CaptureError(f"there is no file {path}") from fault
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as fault:
        raise CaptureError(f"{path} cannot be read as .npz: {fault}") from fault
    groups: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        group, _, part = name.rpartition(".")
        if part not in REQUIRED + OPTIONAL:
            raise CaptureError(f"{path}: {name!r} is no known tensor; expected {NAMES}, or NAME.q, NAME.k, ...")
        groups.setdefault(group, {})[part] = array
    if not groups:
        raise CaptureError(f"{path} is empty; expected q, k and v")
    return [_case(path, group, parts) for group, parts in groups.items()]


def save_inputs(path: Path, problems: Iterable[tuple[str, Problem]]) -> None:
    """Writes problems, each under its name, as captured_cases reads them, with the pairs that are visible.

    Floats are in the problem's dtype; bfloat16, which .npz files lose, is in float32, exactly.
    """
    stored: dict[str, Array] = {}
    for name, problem in problems:
        parts: dict[str, Any] = {part: getattr(problem, part) for part in (*REQUIRED, "bias", "sinks")}
        dtype = "float32" if problem.dtype == "bfloat16" else problem.dtype
        parts = {part: None if x is None else np.asarray(x).astype(dtype) for part, x in parts.items()}
        parts |= {"mask": problem.shown, "scale": problem.scale, "softcap": problem.softcap}
        parts |= {"q_start": problem.q_start, "visible": problem.visible}
        parts |= {"causal": problem.causal or None, "k_start": problem.k_start if "k_start" in problem.needs else None}
        stored |= {f"{name}.{part}": np.asarray(x) for part, x in parts.items() if x is not None}
    np.savez(path, **stored)


def _case(path: Path, group: str, parts: dict[str, Array]) -> CapturedCase:
    prefix = f"{group}." if group else ""
    if missing := [prefix + name for name in REQUIRED if name not in parts]:
        raise CaptureError(f"{path} lacks {', '.join(missing)}")
    for name, array in parts.items():
        _check_kind(path, prefix + name, name, array)
    _check_shapes(path, prefix, parts)
    _check_options(path, prefix, parts)

    def build(draw: Draw) -> Problem:
        exact = {name: rounded(parts[name], draw.dtype) for name in REQUIRED}
        options: dict[str, Any] = {
            "causal": bool(parts["causal"]) if "causal" in parts else False,
            "shown": parts.get("mask"),
            "k_start": _start(parts["k_start"]) if "k_start" in parts else 0,
            "q_start": _start(parts["q_start"]) if "q_start" in parts else None,
        }
        options |= {name: float(parts[name].reshape(())) for name in ("scale", "softcap") if name in parts}
        options |= {name: rounded(parts[name], draw.dtype) for name in ("bias", "sinks") if name in parts}
        return Problem(dtype=draw.dtype, **exact, **options)

    shape = tuple(parts["q"].shape)
    return CapturedCase(
        name=f"{PREFIX}{group or path.stem}",
        clauses=CLAUSES_OF_ANY_INPUT,
        says=f"On captured tensors, q {shape}, the result is that of the specification within the bound.",
        # Narrowed tensors are other inputs, just as real.
        dtypes=COMPUTED,
        build=build,
        own_dtype=dtype_name(parts["q"].dtype),
    )


def _start(values: Array) -> Any:
    return int(values) if values.ndim == 0 else values


def _check_kind(path: Path, name: str, part: str, array: Array) -> None:
    expected = {"mask": "b", "visible": "b", "causal": "b", "q_start": "iu", "k_start": "iu"}.get(part, "f")
    expected += "iu" if part in ("scale", "softcap") else ""
    words = {"b": "boolean", "f": "floating", "iu": "an integer", "fiu": "a number"}[expected]
    if array.dtype.kind == "V":
        raise CaptureError(f"{path}: {name} is raw bytes ({array.dtype}): NumPy files lose bfloat16, so store float32")
    if array.dtype.kind not in expected:
        raise CaptureError(f"{path}: {name} must be {words}, it is {array.dtype}")
    if part in ("scale", "softcap", "causal") and array.size != 1:
        raise CaptureError(f"{path}: {name} must be a single value, its shape is {array.shape}")


def _check_shapes(path: Path, prefix: str, parts: dict[str, Array]) -> None:
    q, k, v = (parts[name] for name in REQUIRED)
    shapes = f"{prefix}q {q.shape}, k {k.shape}, v {v.shape}"
    fits = q.ndim == k.ndim == v.ndim >= 2 and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if fits and q.ndim > 2:
        fits = k.shape[-3] == v.shape[-3] and bool(k.shape[-3]) and q.shape[-3] % k.shape[-3] == 0
    if not fits:
        raise CaptureError(
            f"{path}: expected q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k), v (..., Hkv, Lk, d_v); {shapes}"
        )
    pairs = (*np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]), *q.shape[-3:-1], k.shape[-2])
    for name in ("mask", "bias"):
        if name in parts:
            try:
                fitting = np.broadcast_shapes(parts[name].shape, pairs) == pairs
            except ValueError:
                fitting = False
            if not fitting:
                raise CaptureError(f"{path}: {prefix}{name} {parts[name].shape} does not broadcast to {pairs}")


def _check_options(path: Path, prefix: str, parts: dict[str, Array]) -> None:
    """The specification's own refusals, in its words: dtypes that differ, causal without q_start (M5), sinks, ..."""
    options: dict[str, Any] = {name: parts[name] for name in ("mask", "bias", "sinks") if name in parts}
    options |= {name: _start(parts[name]) for name in ("q_start", "k_start") if name in parts}
    options |= {name: float(parts[name].reshape(())) for name in ("scale", "softcap") if name in parts}
    causal = "causal" in parts and bool(parts["causal"].reshape(()))
    try:
        check_call(*(parts[name] for name in REQUIRED), causal=causal, **options)
    except RefattnError as fault:
        raise CaptureError(f"{path}: {prefix}{fault}") from fault
