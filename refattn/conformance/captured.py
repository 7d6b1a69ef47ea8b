"""Tensors captured from a model, as cases: a .npz file with q, k and v, or several problems as NAME.q, NAME.k, NAME.v.

mask (boolean, True = visible), bias, scale, sinks and causal are optional. No pickle is ever loaded.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Case, Problem
from refattn.conformance.plain import Draw, rounded
from refattn.dtypes import COMPUTED

REQUIRED = ("q", "k", "v")
OPTIONAL = ("mask", "bias", "scale", "sinks", "causal")
CLAUSES_OF_ANY_INPUT = ("S5", "N6")


class CaptureError(Exception):
    """A file of captured tensors that cannot be used; the message says why."""


def captured_cases(path: Path) -> list[Case]:
    """One case per problem in the file, in its order. Raises CaptureError."""
    try:
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
            known = ", ".join(REQUIRED + OPTIONAL)
            raise CaptureError(f"{path}: {name!r} is no known tensor; expected {known}, or NAME.q, NAME.k, ...")
        groups.setdefault(group, {})[part] = array
    if not groups:
        raise CaptureError(f"{path} is empty; expected q, k and v")
    return [_case(path, group, parts) for group, parts in groups.items()]


def _case(path: Path, group: str, parts: dict[str, Array]) -> Case:
    prefix = f"{group}." if group else ""
    if missing := [prefix + name for name in REQUIRED if name not in parts]:
        raise CaptureError(f"{path} lacks {', '.join(missing)}")
    for name, array in parts.items():
        _check_kind(path, prefix + name, name, array)
    _check_shapes(path, prefix, parts)

    def build(draw: Draw) -> Problem:
        exact = {name: rounded(parts[name], draw.dtype) for name in REQUIRED}
        options: dict[str, Any] = {
            "causal": bool(parts["causal"]) if "causal" in parts else False,
            "shown": parts.get("mask"),
            "scale": float(parts["scale"]) if "scale" in parts else None,
        }
        options |= {name: rounded(parts[name], draw.dtype) for name in ("bias", "sinks") if name in parts}
        return Problem(dtype=draw.dtype, **exact, **options)

    shape = tuple(parts["q"].shape)
    return Case(
        name=f"inputs.{group or path.stem}",
        clauses=CLAUSES_OF_ANY_INPUT,
        says=f"On captured tensors, q {shape}, the result is that of the specification within the bound.",
        # Narrowed tensors are other inputs, just as real.
        dtypes=COMPUTED,
        build=build,
    )


def _check_kind(path: Path, name: str, part: str, array: Array) -> None:
    expected = {"mask": "b", "causal": "b"}.get(part, "f")
    words = {"b": "boolean", "f": "floating"}[expected]
    if array.dtype.kind == "V":
        raise CaptureError(f"{path}: {name} is raw bytes ({array.dtype}): NumPy files lose bfloat16, so store float32")
    if array.dtype.kind != expected:
        raise CaptureError(f"{path}: {name} must be {words}, it is {array.dtype}")
    if part in ("scale", "causal") and array.size != 1:
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
